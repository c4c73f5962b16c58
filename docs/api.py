"""Writes api.md from signatures and docstrings.

python docs/api.py           # what `make docs` runs
python docs/api.py --check   # fails where the page is out of date
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parent / "api.md"
PUBLIC = {
    "mechanic_plugins": ("mechanize", "demechanize", "unwrap", "MechanicOptimizer", "Mechanized", "Settings"),
    "mechanic_plugins.optim": ("wrap",),
    "mechanic_plugins.summary": ("report", "remarks", "is_still_rising", "ScaleHistory"),
    "mechanic_plugins.lightning": ("Mechanic", "demechanize_checkpoint"),
    "mechanic_plugins.transformers": ("register", "demechanize_checkpoint", "MechanicCallback"),
    "mechanic_plugins.deepspeed": ("mechanic_of",),
}
HOOKS = re.compile(r"on_|setup$|teardown$")
"""What a framework calls, and no user."""
HEAD = """# API

Every public name. The classes of `mechanic_plugins.optim` (`AdamW`, `Adam`, `SGD`, `Adagrad`, `RMSprop`, `NAdam`,
`Adafactor`, `Lion`, `Muon`, `AdamW8bit`) take the arguments of the optimizer they are named after and the
[options](options.md) of `mechanize`. `mechanic_plugins.accelerate.mechanize` is `mechanize`; its import prepares
accelerate for DeepSpeed.

<!-- written by docs/api.py -->
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(line for module in PUBLIC for line in section(module))])


def section(module: str) -> Iterator[str]:
    """What a module offers."""
    yield f"## {module}\n"
    for name in PUBLIC[module]:
        thing = getattr(importlib.import_module(module), name)
        yield f"### {name}\n\n{text_of(thing)}\n"
        if inspect.isclass(thing):
            yield from members(thing)


def members(cls: type) -> Iterator[str]:
    """The public ones that this package describes; torch's and the frameworks' keep their own meaning."""
    found: dict[str, Any] = {}
    for parent in cls.__mro__:
        if parent.__module__.startswith("mechanic_plugins"):
            found = {**vars(parent), **found}
    if cls.__name__ == "Mechanized":  # as MechanicOptimizer, which stands before it
        return
    yield "**Members**\n"
    for name, value in sorted(found.items()):
        if name.startswith("_") or HOOKS.match(name) or not _is_ours(value):
            continue
        yield f"- `{name}{'' if isinstance(value, property) else arguments(value)}`: {in_one_line(value)}"
    yield ""


def _is_ours(value: Any) -> bool:
    function = value.fget if isinstance(value, property) else value
    return inspect.isfunction(function) and bool(function.__doc__) and ":class:" not in str(function.__doc__)


def arguments(function: Any) -> str:
    """Names and defaults; types are in the code."""
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    return str(inspect.Signature([p for p in parameters if p.name != "self"]))


def in_one_line(thing: Any) -> str:
    """The first paragraph."""
    return " ".join((inspect.getdoc(thing) or "").split("\n\n")[0].split())


def text_of(thing: Any) -> str:
    """The docstring as Markdown: its lists of arguments become lists."""
    lines = []
    for line in (inspect.getdoc(thing) or "").splitlines():
        if entry := re.match(r" {4}(\w+): (.*)", line):
            lines.append(f"- `{entry[1]}`: {entry[2]}")
        elif lines and line.startswith("        ") and lines[-1].startswith(("- ", "  ")):
            lines.append(f"  {line.strip()}")
        elif line in ("Args:", "Raises:"):
            lines += [f"**{line[:-1]}**", ""]
        else:
            lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Rewrites the page, or says that it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif page() != PAGE.read_text():
        sys.exit(f"{PAGE} is out of date: run python docs/api.py")


if __name__ == "__main__":
    main()
