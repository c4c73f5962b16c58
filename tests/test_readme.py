"""What the README shows runs, and what it names is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(heading: str) -> list[str]:
    section = README.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)


def test_use() -> None:
    model = torch.nn.Linear(3, 1)
    names: dict[str, Any] = {"torch": torch, "model": model}
    build, read = blocks("Use")
    exec(build, names)
    for _ in range(5):
        names["opt"].zero_grad()
        model(torch.randn(8, 3)).square().mean().backward()
        names["opt"].step()
    exec(read, names)
    assert names["plain"] is names["opt"].base
    assert "mechanic_s" not in names["plain"].param_groups[0]


def test_keywords_are_all_named() -> None:
    from mechanic_plugins.api import Options

    assert [name for name in Options.__annotations__ if f"`{name}" not in README] == []


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)\)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_commands_exist() -> None:
    modules = set(re.findall(r"-m (mechanic_plugins\.\w+)", README))
    assert modules
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    scripts = set(re.findall(r"(?<![\w/.-])((?:examples|tests)/[\w/]+\.\w+)", README))
    assert [script for script in scripts if not (ROOT / script).exists()] == []
    targets = set(re.findall(r"^make (\w+)", README, flags=re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert targets == {"demo", "test"}
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)


def test_the_table_of_ranks_is_what_the_model_says() -> None:
    from mechanic_plugins.bench.costs import ranks_table

    assert ranks_table() in README
