"""Writes api.md from signatures and docstrings. Fails on a public member without a docstring.

python docs/api.py           # what `make docs` runs
python docs/api.py --check   # fails if the page is out of date
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import textwrap
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
    "mechanic_plugins.lion": ("Lion",),
    "mechanic_plugins.muon": ("MuonWithAdamW",),
}
ATTRIBUTES = {
    "MechanicOptimizer": {
        "base": "The wrapped optimizer. `param_groups`, `state` and `defaults` are its own.",
        "settings": "The `Settings` in force.",
        "max_grad_norm": "As the option; may be set at any time.",
        "kept_dtype": "As the option.",
        "group": "As the option.",
        "sync_replicas": "As the option.",
        "backend": "As the option.",
        "shares_by_engine": "How an engine that has cut the parameters up counts its pieces.",
        "layout_by_engine": "Where the whole parameters lie in those pieces.",
    },
    "Mechanic": {
        "optimizers": "The mechanized optimizers of the last `fit`.",
        "options": "The options of `mechanize` that the callback was given.",
    },
    "MechanicCallback": {"history": "The `ScaleHistory` of the present run."},
}
"""Attributes set in constructors, which have no docstring."""
ENGINES = (
    *("applying", "decide", "is_step_measured", "layout_by_engine", "learned", "local_sums", "lrs", "note_changes"),
    *("reread_groups", "shares_by_engine", "tuner"),
)
"""Members for plugin authors."""
HOOKS = re.compile(r"on_|setup$|teardown$")
"""Methods called by frameworks, not by users."""
HEAD = """# API

Every public name. The classes of `mechanic_plugins.optim` (`AdamW`, `Adam`, `SGD`, `Adagrad`, `RMSprop`, `NAdam`,
`Adafactor`, `Lion`, `Muon`, `AdamW8bit`) take the arguments of the optimizer they are named after and the
[options](options.md) of `mechanize`. `mechanic_plugins.accelerate.mechanize` is `mechanize`; its import prepares
accelerate for DeepSpeed.

<!-- written by docs/api.py -->
"""


def page() -> str:
    """Renders the whole page."""
    return "\n".join([HEAD, *(line for module in PUBLIC for line in section(module))])


def section(module: str) -> Iterator[str]:
    """Renders the section of one module."""
    yield f"## {module}\n"
    for name in PUBLIC[module]:
        thing = getattr(importlib.import_module(module), name)
        yield f"### {name}\n"
        if name not in ("MechanicOptimizer", "Mechanized"):  # built by `mechanize`
            yield f"```text\n{in_lines(name + arguments(thing))}\n```\n"
        yield f"{text_of(thing)}\n"
        if inspect.isclass(thing) and name != "Mechanized":  # same members as MechanicOptimizer above
            yield from members(thing)


def members(cls: type) -> Iterator[str]:
    """Lists the public members that this package adds, not those inherited from torch or a framework."""
    found: dict[str, Any] = {}
    for parent in cls.__mro__:
        if parent.__module__.startswith("mechanic_plugins"):
            found = {**vars(parent), **found}
    entries = {name: f"- `{name}`: {text}" for name, text in ATTRIBUTES.get(cls.__name__, {}).items()}
    for name, value in found.items():
        if not name.startswith("_") and not HOOKS.match(name) and _is_ours(cls, name, value):
            entries[name] = described(name, value)
    own = [entries[name] for name in sorted(entries) if name not in ENGINES or cls.__name__ != "MechanicOptimizer"]
    if own:
        yield "\n".join(["**Members**\n", *own, ""])
    if rest := [entries[name] for name in sorted(entries) if entries[name] not in own]:
        yield "\n".join(["**For plugins and engines**\n", *rest, ""])


def _is_ours(cls: type, name: str, value: Any) -> bool:
    """Whether it is our function or property and not a mere override, which would have torch's docstring."""
    function = value.fget if isinstance(value, property) else value
    if not inspect.isfunction(function) or name in ("param_groups", "state", "defaults"):  # set by torch
        return False
    if not function.__doc__ and not any(hasattr(parent, name) for parent in _others(cls)):
        sys.exit(f"{cls.__name__}.{name} is public and has no docstring: write one, or begin its name with _")
    return bool(function.__doc__) and ":class:" not in str(function.__doc__)


def _others(cls: type) -> list[type]:
    return [parent for parent in cls.__mro__ if not parent.__module__.startswith("mechanic_plugins")]


def described(name: str, value: Any) -> str:
    """A line for the member and one for each of its arguments and errors."""
    paragraphs = (inspect.getdoc(value) or "").split("\n\n")
    lists = ("Args:", "Raises:", "Returns:")
    told = " ".join(" ".join(each.split()) for each in paragraphs if not each.startswith((*lists, "    ")))
    entries = [each for each in paragraphs if each.startswith(lists[:2])]
    more = [f"    {line}" for each in entries for line in text_of_list(each)]
    return "\n".join([f"- `{name}{'' if isinstance(value, property) else arguments(value)}`: {told}", *more])


def text_of_list(paragraph: str) -> list[str]:
    """`Args:` or `Raises:` as Markdown, each entry in one line."""
    whole = re.sub(r"\n {8,}", " ", paragraph)
    return [f"- `{found[1]}`: {found[2]}" for found in re.finditer(r"^ {4}(\w+): (.*)$", whole, flags=re.MULTILINE)]


def arguments(thing: Any) -> str:
    """Names and defaults, without types."""
    function = thing.__init__ if inspect.isclass(thing) else thing
    parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
    return str(inspect.Signature([p for p in parameters if p.name != "self"]))


def in_lines(call: str) -> str:
    """Wraps a call to the width of the page's column."""
    return textwrap.fill(call, 100, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def text_of(thing: Any) -> str:
    """The docstring as Markdown, with arguments and errors as lists."""
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
    """Rewrites the page, or reports that it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif page() != PAGE.read_text():
        sys.exit(f"{PAGE} is out of date: run python docs/api.py")


if __name__ == "__main__":
    main()
