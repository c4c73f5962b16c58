"""The code blocks of README and docs: what the tests of several folders share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"(?:^<!-- not run: ([^>]+) -->\n)?^```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
_PLUGIN = re.compile(r"mechanic_plugins\.(lightning|transformers|accelerate|deepspeed)\b")
_KIND_OF_PAGE = {
    "lightning.md": "lightning",
    "huggingface.md": "transformers",
    "accelerate.md": "accelerate",
    "deepspeed.md": "deepspeed",
    "sharding.md": "sharding",
}


@dataclass(frozen=True)
class Block:
    """A fenced block. `kind` says what has to be there for it to run, `reason` why it is not run."""

    page: Path
    language: str
    text: str
    reason: str | None

    @property
    def kind(self) -> str:
        plugin = _PLUGIN.search(self.text)
        return _KIND_OF_PAGE.get(self.page.name) or (plugin[1] if plugin else "plain")


def blocks(language: str) -> list[Block]:
    """All blocks in this language, of all pages, in order."""
    found = [Block(page, match[2], match[3], match[1]) for page in PAGES for match in _BLOCK.finditer(page.read_text())]
    return [block for block in found if block.language == language]


def python_blocks(kind: str, page: str | None = None) -> list[Block]:
    """Those that run with the names of one kind; on one page, in order, each may use what the earlier ones made."""
    return [b for b in blocks("python") if b.kind == kind and not b.reason and page in (None, b.page.name)]


def execute(found: Sequence[Block], names: dict[str, Any]) -> dict[str, Any]:
    """Runs blocks one after the other in one namespace. A failure names the page."""
    assert found
    for block in found:
        exec(compile(block.text, f"{block.page.name}, {block.kind} block", "exec"), names)
    return names


class Model(nn.Module):
    """What the pages call `model`: it has blocks, to be sharded one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def train(model: Any, optimizer: Any, *, steps: int = 10, backward: Any = Tensor.backward) -> None:
    """What the pages call `train`."""
    for step in range(steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        backward((model(x) - x.sum(dim=1, keepdim=True)).square().mean())
        optimizer.step()
