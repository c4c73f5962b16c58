"""Writes the tables of options.md from the code: the docstring of `mechanize`, and the settings of each rule.

python docs/options.py           # what `make docs` runs
python docs/options.py --check   # fails where the page is out of date
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from pathlib import Path
from typing import Any

import torch

from mechanic_plugins import MechanicOptimizer, mechanize

PAGE = Path(__file__).parent / "options.md"
CONSTANTS = ("s_init", "first_move", "s_decay", "eps", "smoothing", "hindsight", "own_warmup")
CHOICES: list[dict[str, Any]] = [
    {},
    *({"rule": rule} for rule in ("paper", "experiments", "optax", "theory")),
    *({"preset": preset} for preset in ("paper", "0.1")),
]


def arguments() -> dict[str, str]:
    """What the docstring says of each option."""
    section = inspect.getdoc(mechanize).split("Args:\n")[1].split("\n\nRaises:")[0]  # type: ignore[union-attr]
    entries = re.split(r"^ {4}(\w+): ", section, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}


def options_table() -> str:
    """One row for each keyword of `mechanize`."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    meanings, built = arguments(), _mechanized().settings
    for name, parameter in inspect.signature(mechanize).parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        default = getattr(built, name, parameter.default) if parameter.default is None else parameter.default
        meaning = re.sub(r" \[([^\]]*)\](?=\.$)", _explained, meanings[name])
        lines.append(f"| `{name}` | `{_shown(default)}` | {meaning} |")
    return "\n".join(lines)


def constants_table() -> str:
    """What each rule and preset sets."""
    lines = [f"| | {' | '.join(f'`{name}`' for name in CONSTANTS)} |", "|---" * (1 + len(CONSTANTS)) + "|"]
    for choice in CHOICES:
        settings = _mechanized(**choice).settings
        cells = [_shown(getattr(settings, name)) for name in CONSTANTS]
        if settings.s_init != "auto":
            cells[CONSTANTS.index("first_move")] = "-"
        label = ", ".join(f"`{key}={_shown(value)}`" for key, value in choice.items()) or "default"
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _mechanized(**options: Any) -> MechanicOptimizer:
    return mechanize(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0), **options)


def _explained(bracket: re.Match[str]) -> str:
    """The docstring's default, which has a column of its own, unless more is said of it."""
    return f" ({bracket[1]})" if ": " in bracket[1] else ""


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def updated(page: str) -> str:
    """The page with the tables as the code has them now."""
    for name, table in (("options", options_table()), ("constants", constants_table())):
        marks = f"<!-- begin {name}: written by docs/options.py -->", f"<!-- end {name} -->"
        pattern = f"({re.escape(marks[0])}\n).*?({re.escape(marks[1])})"
        page, found = re.subn(pattern, lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page, flags=re.DOTALL)  # noqa: B023
        assert found == 1, f"{PAGE} needs the lines {marks}"
    return page


def main() -> None:
    """Rewrites the page, or says that it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    page = PAGE.read_text()
    if check and updated(page) != page:
        sys.exit(f"{PAGE} is out of date: run python docs/options.py")
    if not check:
        PAGE.write_text(updated(page))


if __name__ == "__main__":
    main()
