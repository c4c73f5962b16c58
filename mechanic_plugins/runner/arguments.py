"""The command line: the runner's own options, the target, and the target's arguments."""

from __future__ import annotations

import argparse
import sys

from mechanic_plugins.runner.console import stop
from mechanic_plugins.runner.plan import Plan, Replacement

__all__ = ["parse"]

_TORCHS_OWN = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD"
_BY_DEFAULT = tuple(Replacement(f"torch.optim.{name}") for name in _TORCHS_OWN.split())
"""The classes that a probe replaces by default."""


def parse(words: list[str], usage: str) -> tuple[Plan, str, list[str]]:
    """Reads `[options] target [its arguments]`; the target is "-m" for a module. Refuses bad options."""
    form = "%(prog)s [--replace CLASS] [--options K=V,...] [--probe STEPS] (script.py | -m module | command) ..."
    parser = argparse.ArgumentParser(prog="mechanic-run", usage=form, add_help=False, allow_abbrev=False)
    parser.add_argument("--replace", type=_replacement, action="append", default=[])
    parser.add_argument("--options", action="append", default=[])
    parser.add_argument("--probe", type=_steps, default=0)
    # DeepSpeed's launcher puts it before the script, which expects it among its own arguments
    parser.add_argument("--local_rank")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("target", nargs=argparse.REMAINDER)
    args = parser.parse_args(words)
    if args.help:
        sys.stdout.write(f"{usage}\n")
        sys.exit(0)
    if not (args.target or args.module):
        stop("-m needs a module: mechanic-run -m module" if args.module == [] else f"no script given.\n\n{usage}")
    if args.target and args.target[0].startswith("-"):
        parser.error(f"unrecognized arguments: {args.target[0]}")
    if args.options and not (args.replace or args.probe):
        parser.error("--options is for --replace: add --replace torch.optim.AdamW, or leave it out.")
    names = [each.old for each in args.replace]
    if twice := [name for name in names if names.count(name) > 1]:
        parser.error(f"--replace {twice[0]} is given more than once: keep one.")
    replace = tuple(args.replace) or (_BY_DEFAULT if args.probe else ())
    plan = Plan(replace, options=",".join(args.options), probe=args.probe, is_default=not args.replace)
    ranks = [] if args.local_rank is None else [f"--local_rank={args.local_rank}"]
    if args.module:
        return plan, "-m", [args.module[0], *ranks, *args.module[1:]]
    return plan, args.target[0], [*ranks, *args.target[1:]]


def _replacement(text: str) -> Replacement:
    old, equals, new = text.partition("=")
    for name in (old, new) if equals else (old,):
        parts = name.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            raise argparse.ArgumentTypeError(
                f"needs a class's dotted name, as torch.optim.AdamW, or two, as "
                f"prodigyopt.Prodigy=torch.optim.AdamW; got {text!r}."
            )
    return Replacement(old, new)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 16:
        raise argparse.ArgumentTypeError(f"needs at least 16 optimizer steps, got {text!r}. Try 200.")
    return int(text)
