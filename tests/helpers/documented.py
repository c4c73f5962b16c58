"""The code blocks of README and docs, for tests in several folders."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"(?:^<!-- not run: ([^>]+) -->\n)?^```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
_ON_RANKS = ("deepspeed.md", "sharding.md")


@dataclass(frozen=True)
class Block:
    """A fenced block. `reason` is why it is not run."""

    page: Path
    line: int
    language: str
    text: str
    reason: str | None

    @property
    def place(self) -> str:
        """Its page and line."""
        return f"{self.page.name}:{self.line}"

    @property
    def needs_ranks(self) -> bool:
        return self.page.name in _ON_RANKS


def blocks(language: str) -> list[Block]:
    """All blocks in this language, in the order of the pages."""
    return [block for page in PAGES for block in _blocks_of(page) if block.language == language]


def _blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    found = _BLOCK.finditer(text)
    return [Block(page, 1 + text[: match.start(2)].count("\n"), match[2], match[3], match[1]) for match in found]


def execute(block: Block) -> dict[str, Any]:
    """Runs the literal text, as if it were pasted into an empty file. A failure names the page and the line."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("\n" * block.line + block.text, block.place, "exec"), names)
    return names
