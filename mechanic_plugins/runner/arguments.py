"""The command line: the runner's own options, the target, and the arguments that are the target's."""

from __future__ import annotations

import difflib
import sys
from typing import NamedTuple

from mechanic_plugins.runner.console import stop
from mechanic_plugins.runner.plan import Plan, Replacement

__all__ = ["Command", "parse"]

_OPTIONS = ("--replace", "--options", "--probe")

_TORCHS_OWN = "ASGD Adadelta Adafactor Adagrad Adam AdamW Adamax Muon NAdam RAdam RMSprop Rprop SGD"
_BY_DEFAULT = tuple(Replacement(f"torch.optim.{name}") for name in _TORCHS_OWN.split())
"""What a probe replaces unless told otherwise."""


class Command(NamedTuple):
    """What to run, as what, with what behind it."""

    plan: Plan
    target: str
    arguments: list[str]


def parse(words: list[str], usage: str) -> Command:
    """Reads `[options] target [its arguments]`. Bad ones are refused before anything is started."""
    options, ranks, rest = _own_options(words)
    if not rest:
        stop(f"no script given.\n\n{usage}")
    if rest[0] in ("-h", "--help"):
        sys.stdout.write(f"{usage}\n")
        sys.exit(0)
    plan = _plan(options)
    target, arguments = rest[0], rest[1:]
    if target == "-m":
        if not arguments:
            stop("-m needs a module: mechanic-run -m module [its arguments]")
        return Command(plan, target, [arguments[0], *ranks, *arguments[1:]])
    if target.startswith("-"):
        similar = difflib.get_close_matches(target.partition("=")[0], _OPTIONS, n=1)
        hint = f": did you mean {similar[0]}?" if similar else "."
        stop(f"expected a script or -m before the script's own arguments, got {target}{hint}")
    return Command(plan, target, [*ranks, *arguments])


def _own_options(words: list[str]) -> tuple[list[tuple[str, str]], list[str], list[str]]:
    """DeepSpeed's launcher puts its --local_rank before the script; it is moved behind, where the script expects it."""
    options, ranks, rest = [], [], list(words)
    while rest and (rest[0].startswith("--local_rank") or rest[0].partition("=")[0] in _OPTIONS):
        word = rest.pop(0)
        if word.startswith("--local_rank"):
            ranks.append(word)
            continue
        name, equals, value = word.partition("=")
        if not equals:
            if not rest:
                stop(f"{name} needs a value: {_EXAMPLES[name]}")
            value = rest.pop(0)
        options.append((name, value))
    return options, ranks, rest


_EXAMPLES = {
    "--replace": "--replace torch.optim.AdamW",
    "--options": "--options scope=group,max_grad_norm=1",
    "--probe": "--probe 200",
}


def _plan(options: list[tuple[str, str]]) -> Plan:
    replace = tuple(_replacement(value) for name, value in options if name == "--replace")
    probes = [_steps(value) for name, value in options if name == "--probe"]
    texts = [value for name, value in options if name == "--options"]
    if texts and not (replace or probes):
        stop("--options is for --replace: add --replace torch.optim.AdamW, or leave it out.")
    old = [each.old for each in replace]
    for name in old:
        if old.count(name) > 1:
            stop(f"--replace {name} is given more than once: keep one.")
    return Plan(
        replace or (_BY_DEFAULT if probes else ()),
        options=",".join(texts),
        probe=probes[-1] if probes else 0,
        is_default=not replace,
    )


def _replacement(text: str) -> Replacement:
    old, equals, new = text.partition("=")
    for name in (old, new) if equals else (old,):
        parts = name.split(".")
        if len(parts) < 2 or not all(part.isidentifier() for part in parts):
            stop(
                f"--replace needs a class's dotted name, as torch.optim.AdamW, or two, as "
                f"prodigyopt.Prodigy=torch.optim.AdamW; got {text!r}."
            )
    return Replacement(old, new)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 16:
        stop(f"--probe needs at least 16 optimizer steps, got {text!r}. Try 200.")
    return int(text)
