"""Runs a program as it is, with Mechanic in it.

    mechanic-run script.py --optim mechanic_adamw ...
    mechanic-run --replace torch.optim.AdamW script.py ...
    mechanic-run --probe 200 script.py ...

The first line is for transformers' Trainer: `--optim` knows Mechanic's names, and DeepSpeed's configs know
"MechanicAdamW" and its like. The others need no name; they are for any program:

    --replace CLASS    mechanize every optimizer of this class that the program builds
    --replace OLD=NEW  the same, around another class: prodigyopt.Prodigy=torch.optim.AdamW
    --options K=V,...  keywords of mechanize() for them: scope=group,s_decay=0.01
    --probe STEPS      train so many steps, print the learned lr, stop with status 0

`mechanic-run` is short for `python -m mechanic_plugins.run`. The target is a script, `-m package.module`, or a command
(torchrun, accelerate, deepspeed, ./train.sh): python processes that the program starts have Mechanic too. A launcher
may also start the runner:

    torchrun ... -m mechanic_plugins.run script.py --optim mechanic_adamw ...
    accelerate launch ... -m mechanic_plugins.run script.py --optim mechanic_adamw ...
    deepspeed ... --module mechanic_plugins.run script.py --optim mechanic_adamw ...

The exit status is the program's, but where that is 0: 3 if the command line has a mechanic_ name and the program has
trained without Mechanic; 4 if --replace replaced nothing, or --probe saw no step. It is 2 for a bad command line.
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
from mechanic_plugins.runner.console import LOST, NOTHING, say, stop
from mechanic_plugins.runner.events import Events
from mechanic_plugins.runner.plan import Plan

__all__ = ["main", "refuse_unknown"]

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], None]


def main() -> None:
    """Takes the target and its arguments from the command line."""
    plan, target, arguments = parse(sys.argv[1:], str(__doc__))
    if not plan.replace and importlib.util.find_spec("transformers") is None:
        stop(
            "there is no transformers whose --optim could learn Mechanic's names: "
            "pip install 'mechanic-plugins[transformers]', or say which optimizer to --replace."
        )
    refuse_unknown(plan, [target, *arguments])
    ours = {__file__, runpy.__file__, "<frozen runpy>", hook.__file__, active.__file__, *_started_by()}
    sys.excepthook = _without_our_frames(ours)
    with active.told_to_children(plan) as (plan, events), _checked(plan, events, arguments):
        if target == "-m":
            _run_module(arguments)
        elif command.is_command(target):
            sys.exit(command.run([target, *arguments]))
        else:
            _run_script(target, arguments)


def refuse_unknown(plan: Plan, words: list[str]) -> None:
    """A package that is not there cannot be replaced: known before hours of training. Nothing is imported."""
    scripts = [str(Path(word).resolve().parent) for word in words if word.endswith(".py")]
    for name in (name for each in plan.replace if not plan.is_default for name in (each.old, each.new) if name):
        package = name.partition(".")[0]
        if importlib.util.find_spec(package) is None and not PathFinder.find_spec(package, [*scripts, str(Path.cwd())]):
            stop(f"--replace {name}: there is no package {package!r} here. Is the name right, and {package} installed?")


@contextlib.contextmanager
def _checked(plan: Plan, events: Events, arguments: list[str]) -> Iterator[None]:
    """Within, the plan is at work. A program that has ended well must have done what was asked for."""
    watch = active.activate(plan)
    try:
        yield
    except SystemExit as end:
        if end.code and not events.of("probed"):
            raise
        watch.finish()
        _check(plan, events, arguments)
        sys.exit(0)
    except Exception:
        if not events.of("probed"):  # after that it is but the echo of processes that were stopped
            raise
    watch.finish()
    _check(plan, events, arguments)


def _check(plan: Plan, events: Events, arguments: list[str]) -> None:
    """Over all processes."""
    others = ", ".join(sorted(events.of("built")))
    if {"-h", "--help"} & set(arguments):
        return
    if plan.probe and not events.of("probed"):
        stop(
            f"--probe {plan.probe}: no mechanized optimizer made a step (optimizers built: {others or 'none'}).",
            NOTHING,
        )
    if plan.replace and not plan.is_default:
        _check_replaced(plan, events, others)
    elif not events.of("mechanic"):
        _check_names(arguments, others)


def _check_replaced(plan: Plan, events: Events, others: str) -> None:
    replaced = events.of("replaced")
    missing = [each.old for each in plan.replace if each.old not in replaced]
    if not replaced:
        stop(
            f"--replace {' --replace '.join(missing)} replaced nothing (optimizers built: {others or 'none'}). Name "
            "the class that the program builds.",
            NOTHING,
        )
    if missing:
        say(f"warning: the program built no {' and no '.join(missing)}.")


def _check_names(arguments: list[str], others: str) -> None:
    """Says so where a program has ended well and nothing was mechanized."""
    asked = [value for value in (arg.rpartition("=")[2] for arg in arguments) if re.fullmatch(r"mechanic_\w+", value)]
    if asked and others:
        stop(
            f"{asked[0]} was asked for, but the program trained with {others}, without Mechanic: it does not take its "
            f"optimizer from transformers' --optim. Run it with --replace and the class that it builds.",
            LOST,
        )
    if others or "torch" in sys.modules:
        hint = ": name their class, as --replace torch.optim.AdamW." if others else "."
        say(f"warning: nothing was mechanized (optimizers built: {others or 'none'}){hint}")


def _run_module(arguments: list[str]) -> None:
    """What `python -m module` does, by python's own means: run_module would put our `__main__` back at the end."""
    sys.argv = arguments
    _lead_the_path(Path.cwd())
    sys.modules["__main__"] = ModuleType("__main__")
    runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]


def _run_script(script: str, arguments: list[str]) -> None:
    """What `python script.py` does. runpy.run_path would put our own `__main__` back before exit handlers ran."""
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


def _started_by() -> list[str]:
    """The file of the `mechanic-run` command, where that is how we were started."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return [file] if file else []


def _without_our_frames(ours: set[str]) -> ExceptHook:
    """A script's traceback begins in the script."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in ours:
            trace = trace.tb_next
        sys.__excepthook__(kind, error.with_traceback(trace), trace)

    return excepthook


if __name__ == "__main__":
    main()
