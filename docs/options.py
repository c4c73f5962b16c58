"""Writes the tables of options.md from the code: the docstring of `mechanize`, and the constants of each rule.

python docs/options.py           # what `make docs` runs
python docs/options.py --check   # fails if the page is out of date
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from mechanic_plugins import mechanize
from mechanic_plugins.options import parameters
from mechanic_plugins.rule.settings import PUBLISHED

PAGE = Path(__file__).parent / "options.md"
CONSTANTS = {"s_init": "s_init", "s_decay": "s_decay", "tuner_eps": "eps"}
"""The options, and the names of their constants in `Settings`."""


def arguments() -> dict[str, str]:
    """Each option's description in the docstring."""
    section = inspect.getdoc(mechanize).split("Args:\n")[1].split("\n\nRaises:")[0]  # type: ignore[union-attr]
    entries = re.split(r"^ {4}(\w+): ", section, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}


def options_table() -> str:
    """One row for each keyword of `mechanize`."""
    lines = ["| option | default | meaning |", "|---|---|---|"]
    meanings = arguments()
    for option in parameters():
        meaning = re.sub(r" \[([^\]]*)\](?=\.$)", _explained, meanings[option.name])
        lines.append(f"| `{option.name}` | `{_shown(option.default)}` | {meaning} |")
    return "\n".join(lines)


def constants_table() -> str:
    """The constants of each published rule."""
    lines = [f"| `rule` | {' | '.join(f'`{name}`' for name in CONSTANTS)} |", "|---" * (1 + len(CONSTANTS)) + "|"]
    for rule, constants in PUBLISHED.items():
        lines.append(f"| `{_shown(rule)}` | {' | '.join(_shown(constants[name]) for name in CONSTANTS.values())} |")
    return "\n".join(lines)


def _explained(bracket: re.Match[str]) -> str:
    """Formats the docstring's description of a computed default."""
    return f" (default: {bracket[1]})"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def updated(page: str) -> str:
    """The page with up-to-date tables."""
    for name, table in (("options", options_table()), ("constants", constants_table())):
        marks = f"<!-- begin {name}: written by docs/options.py -->", f"<!-- end {name} -->"
        pattern = f"({re.escape(marks[0])}\n).*?({re.escape(marks[1])})"
        page, found = re.subn(pattern, lambda match: f"{match[1]}\n{table}\n\n{match[2]}", page, flags=re.DOTALL)  # noqa: B023
        assert found == 1, f"{PAGE} needs the lines {marks}"
    return page


def main() -> None:
    """Rewrites the page, or reports that it is out of date."""
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
