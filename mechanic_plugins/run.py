"""Runs a program unchanged, with Mechanic in it.

    mechanic-run script.py --optim mechanic_adamw ...         for transformers' Trainer
    mechanic-run --replace torch.optim.AdamW script.py ...    for any program
    mechanic-run --probe 200 script.py ...                    learn a learning rate, then stop

Options, before the script:
    --replace CLASS    mechanize every optimizer of this class that the program builds
    --replace OLD=NEW  the same, around another class: prodigyopt.Prodigy=torch.optim.AdamW
    --options K=V,...  options of mechanize() for them: scope=group,max_grad_norm=1; rule=paper for the paper's rule
    --probe STEPS      train this many steps, print the learned lr, exit with status 0

`mechanic-run` is `python -m mechanic_plugins.run`. The target is a script, `-m package.module`, or a command (torchrun,
accelerate, deepspeed, ./train.sh); Python processes that it starts get Mechanic too. A launcher may also start the
runner:

    torchrun ... -m mechanic_plugins.run script.py --optim mechanic_adamw ...
    accelerate launch ... -m mechanic_plugins.run script.py --optim mechanic_adamw ...
    deepspeed ... --module mechanic_plugins.run script.py --optim mechanic_adamw ...

The exit status is the program's, unless that is 0 and Mechanic did not do what was asked: 3 if an optimizer trained
without Mechanic, 4 if --replace replaced nothing or --probe saw no step, 6 if a mechanized optimizer made no step, or a
program computed gradients and built no torch optimizer. It is 2 for a bad command line.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from mechanic_plugins import hook
from mechanic_plugins.runner import active, command
from mechanic_plugins.runner.arguments import parse
from mechanic_plugins.runner.console import IDLE, LOST, NOTHING, say, stop
from mechanic_plugins.runner.plan import Events, Plan

__all__ = ["main", "refuse_unknown"]

_BY_HAND = (
    "The program computed gradients all the same: let a torch.optim.SGD, or another torch optimizer, make its steps."
)

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], None]


def main() -> None:
    """Entry point of the command line."""
    plan, target, arguments = parse(sys.argv[1:], str(__doc__))
    if not plan.replace and importlib.util.find_spec("transformers") is None:
        stop(
            "transformers, whose --optim would get Mechanic's names, is not installed: "
            "pip install 'mechanic-plugins[transformers]', or name an optimizer to --replace."
        )
    refuse_unknown(plan, [target, *arguments])
    started_by = getattr(sys.modules["__main__"], "__file__", __file__)  # the file of the `mechanic-run` command
    ours = {__file__, runpy.__file__, "<frozen runpy>", hook.__file__, active.__file__, started_by}
    sys.excepthook = _without_our_frames(ours)
    with active.told_to_children(plan) as (plan, events), _checked(plan, events, arguments):
        if target == "-m":
            _run_module(arguments)
        elif command.is_command(target):
            sys.exit(command.run([target, *arguments]))
        else:
            _run_script(target, arguments)


def refuse_unknown(plan: Plan, words: list[str]) -> None:
    """Fails before training if a package to replace is missing. Nothing is imported."""
    scripts = [str(Path(word).resolve().parent) for word in words if word.endswith(".py")]
    for name in (name for each in plan.replace if not plan.is_default for name in (each.old, each.new) if name):
        package = name.partition(".")[0]
        if importlib.util.find_spec(package) is None and not PathFinder.find_spec(package, [*scripts, str(Path.cwd())]):
            stop(f"--replace {name}: no package {package!r} found. Is the name right, and {package} installed?")


@contextlib.contextmanager
def _checked(plan: Plan, events: Events, arguments: list[str]) -> Iterator[None]:
    """Activates the plan, and checks afterwards that a successful program did what was asked."""
    watch = active.activate(plan)
    try:
        yield
    except SystemExit as end:
        if end.code and not events.of("probed"):
            watch.was_cut_short = True
            raise
        watch.finish()
        _check(plan, events, arguments)
        sys.exit(0)
    except Exception:
        if not events.of("probed"):  # processes stopped by a probe may raise
            raise
    watch.finish()
    _check(plan, events, arguments)


def _check(plan: Plan, events: Events, arguments: list[str]) -> None:
    """Checks what all processes did."""
    others = ", ".join(sorted(events.of("built"))) or "none"
    if {"-h", "--help"} & set(arguments):
        return
    bare = set() if events.of("stepped") else events.of("bare")
    if plan.probe and not events.of("probed"):
        why = "step() was called, but no weight had a gradient" if bare else f"optimizers built: {others}"
        stop(f"--probe {plan.probe}: no mechanized optimizer made a step ({why}).", NOTHING)
    if plan.replace and not plan.is_default:
        _check_replaced(plan, events, others)
    elif not events.of("mechanic"):
        _check_names(events, arguments, others)
    if missed := events.of("missed"):
        stop(
            f"{', '.join(sorted(missed))} trained without Mechanic: its __new__ does not pass its arguments on. Let it "
            "call super().__new__(cls, *args, **kwargs), or mechanize() it in the program.",
            LOST,
        )
    if idle := events.of("idle") or (set() if events.of("stepped") else events.of("unused")):
        stop(f"warning: Mechanic made no step in {'; '.join(sorted(idle))}: it trained without Mechanic.", IDLE)
    if bare:
        stop(
            f"warning: Mechanic made no step in {', '.join(sorted(bare))}: its step() was called, but none of its "
            "weights had a gradient.",
            IDLE,
        )
    if events.of("mechanic") and not events.of("stepped"):
        if plain := events.of("plain"):
            stop(f"warning: Mechanic made no step: {', '.join(sorted(plain))} trained without it.", IDLE)
        if events.of("gradients"):
            stop("warning: a mechanized optimizer was built and gradients were computed, but it made no step.", IDLE)
        say("warning: a mechanized optimizer was built, but made no step.")


def _check_replaced(plan: Plan, events: Events, others: str) -> None:
    replaced = events.of("replaced")
    missing = [each.old for each in plan.replace if each.old not in replaced]
    if not replaced:
        trains_by_hand = others == "none" and events.of("gradients")
        remedy = _BY_HAND if trains_by_hand else "Name the class that the program builds."
        stop(
            f"--replace {' --replace '.join(missing)} replaced nothing (optimizers built: {others}). {remedy}", NOTHING
        )
    if missing:
        say(f"warning: the program built no {' and no '.join(missing)}.")


def _check_names(events: Events, arguments: list[str], others: str) -> None:
    """Checks a successful program in which nothing was mechanized."""
    asked = [value for value in (arg.rpartition("=")[2] for arg in arguments) if re.fullmatch(r"mechanic_\w+", value)]
    if asked and others != "none":
        stop(
            f"{asked[0]} was asked for, but the program trained with {others}, without Mechanic: it does not take its "
            "optimizer from transformers' --optim. Run it with --replace and the class that it builds.",
            LOST,
        )
    if others == "none" and events.of("gradients"):
        stop(f"warning: nothing was mechanized (optimizers built: none). {_BY_HAND}", IDLE)
    if others != "none" or events.of("torch"):
        hint = ": name their class, as --replace torch.optim.AdamW." if others != "none" else "."
        say(f"warning: nothing was mechanized (optimizers built: {others}){hint}")


def _run_module(arguments: list[str]) -> None:
    """Does what `python -m module` does. runpy.run_module would restore our `__main__` at the end."""
    sys.argv = arguments
    _lead_the_path(Path.cwd())
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
    except SystemExit as end:
        said, refusal = str(end.code), f"{sys.executable}: "  # how runpy says that there is no such module
        if said.startswith(refusal):
            stop(f"-m {arguments[0]} cannot be run: {said.removeprefix(refusal)}")
        raise


def _run_script(script: str, arguments: list[str]) -> None:
    """Does what `python script.py` does. runpy.run_path would restore our `__main__` before exit handlers run."""
    sys.argv = [script, *arguments]
    _lead_the_path(Path(script).resolve().parent)
    if Path(script).is_dir() or script.endswith((".zip", ".pyz")):
        runpy.run_path(script, run_name="__main__")
        return
    module: Any = ModuleType("__main__")
    module.__file__, module.__builtins__ = str(Path(script).absolute()), __builtins__
    module.__annotations__ = {}
    sys.modules["__main__"] = module
    exec(_compiled(script), module.__dict__)


def _lead_the_path(folder: Path) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = str(folder)


def _compiled(script: str) -> Any:
    try:
        with io.open_code(str(Path(script).absolute())) as file:
            return compile(file.read(), str(Path(script).absolute()), "exec", dont_inherit=True)
    except OSError as error:
        also = "" if os.sep in script or script.endswith(".py") else ", and no command of that name is on the PATH"
        stop(f"can't open file {script!r}: [Errno {error.errno}] {error.strerror}{also}")


def _without_our_frames(ours: set[str]) -> ExceptHook:
    """An excepthook that starts a script's traceback in the script."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
            trace = trace.tb_next
        sys.__excepthook__(kind, error.with_traceback(trace), trace)

    return excepthook


if __name__ == "__main__":
    main()
