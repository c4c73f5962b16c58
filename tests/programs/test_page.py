"""The names in docs/programs.md exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "programs.md").read_text()


def test_every_dotted_name_leads_somewhere() -> None:
    names = set(re.findall(r"mechanic_plugins\.(\w+)\.([A-Z]\w+)", PAGE))
    assert ("optim", "AdamW") in names
    for module, name in names - {("optim", "AdamW8bit")}:
        assert isinstance(getattr(import_module(f"mechanic_plugins.{module}"), name), type)


def test_every_program_of_the_table_has_a_section() -> None:
    anchors = re.findall(r"\]\(#([\w-]+)\)", PAGE)
    titles = re.findall(r"^## (.+)$", PAGE, flags=re.MULTILINE)
    sections = {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    assert len(anchors) > 15
    assert [anchor for anchor in anchors if anchor not in sections] == []
