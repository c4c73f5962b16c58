"""Runs a script as it is, with Mechanic's names known to `--optim`.

    python -m mechanic_plugins.run script.py --optim mechanic_adamw ...
    torchrun ... -m mechanic_plugins.run script.py --optim mechanic_adamw ...
    accelerate launch ... -m mechanic_plugins.run script.py --optim mechanic_adamw ...
    deepspeed ... --module mechanic_plugins.run script.py --optim mechanic_adamw ...

`-m package.module` in the script's place runs a module, as python does. `mechanic-run` is short for
`python -m mechanic_plugins.run`. DeepSpeed's configs know "MechanicAdamW" and its like.

A script that does not ask transformers for its optimizer may train without Mechanic and without a word. So where the
command line has a mechanic_ name and the script has built other optimizers only, the exit status is 3.
"""

from __future__ import annotations

import importlib.util
import io
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from mechanic_plugins import hook

__all__ = ["main"]

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], None]


def main() -> None:
    """Takes the target and its arguments from the command line."""
    target, arguments = _split(sys.argv[1:])
    if importlib.util.find_spec("transformers") is None:
        _stop("there is no transformers to register with: pip install 'mechanic-plugins[transformers]'")
    hook.install()
    sys.excepthook = _without_our_frames({__file__, runpy.__file__, "<frozen runpy>", hook.__file__, *_started_by()})
    try:
        if target == "-m":
            _run_module(arguments)
        else:
            _run_script(target, arguments)
    except SystemExit as end:
        if not end.code:
            _check_mechanized(arguments)
        raise
    _check_mechanized(arguments)


def _split(arguments: list[str]) -> tuple[str, list[str]]:
    """DeepSpeed's launcher puts its --local_rank before the script's name: behind it, the script sees it as usual."""
    count = 0
    while count < len(arguments) and arguments[count].startswith("--local_rank"):
        count += 1
    if count == len(arguments):
        _stop("which script? Usage: python -m mechanic_plugins.run [script.py | -m module] [its arguments]")
    if arguments[count] in ("-h", "--help"):
        sys.stdout.write(f"{__doc__}\n")
        sys.exit(0)
    target, rest = arguments[count], arguments[count + 1 :]
    if target == "-m":
        if not rest:
            _stop("which module? Usage: python -m mechanic_plugins.run -m module [its arguments]")
        return target, [rest[0], *arguments[:count], *rest[1:]]
    if target.startswith("-"):
        _stop(f"expected a script or -m before the script's own arguments, got {target}")
    return target, [*arguments[:count], *rest]


def _stop(message: str) -> NoReturn:
    _say(message)
    sys.exit(2)


def _say(message: str) -> None:
    sys.stderr.write(f"mechanic_plugins.run: {message}\n")


def _check_mechanized(arguments: list[str]) -> None:
    """Says so where a script has ended well and nothing was mechanized in this process."""
    if "torch" not in sys.modules or {"-h", "--help"} & set(arguments):
        return
    core: Any = sys.modules.get("mechanic_plugins.optimizer")
    if core is not None and core.MechanicOptimizer.was_built:
        return
    others = ", ".join(sorted(_optimizers_built()))
    asked = [value for value in (arg.rpartition("=")[2] for arg in arguments) if re.fullmatch(r"mechanic_\w+", value)]
    if asked and others:
        _say(
            f"{asked[0]} was asked for, but the script trained with {others}, without Mechanic: it does not take its "
            "optimizer from transformers' --optim. Wrap it in the script: optimizer = mechanize(optimizer)."
        )
        sys.exit(3)
    _say(f"warning: nothing was mechanized in this process (optimizers built: {others or 'none'}).")


def _optimizers_built() -> set[str]:
    """By name: a class has its `step` hooked by torch when its first instance is made."""
    classes, found = [sys.modules["torch"].optim.Optimizer], set()
    while classes:
        cls = classes.pop()
        classes += cls.__subclasses__()
        if getattr(vars(cls).get("step"), "hooked", False):
            found.add(cls.__name__)
    return found


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
        _stop(f"can't open file {script!r}: [Errno {error.errno}] {error.strerror}")


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
