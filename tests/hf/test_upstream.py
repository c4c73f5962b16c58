"""Runs examples/upstream/apply.py on the installed transformers, which is its source without tests and docs."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest
import transformers

UPSTREAM = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "upstream" / "apply.py"))
INSTALLED = Path(transformers.__file__).parent


def test_every_line_of_the_source_is_found_once_and_the_result_is_python() -> None:
    texts: dict[str, str] = {}
    for addition in UPSTREAM["TRANSFORMERS"]:
        if addition.path.startswith(UPSTREAM["SOURCE"]):
            before = (
                texts.get(addition.path) or (INSTALLED / addition.path.removeprefix(UPSTREAM["SOURCE"])).read_text()
            )
            texts[addition.path] = after = UPSTREAM["added"](before, addition)
            assert len(after) == len(before) + len(addition.text)
            assert UPSTREAM["added"](after, addition) == after
    assert len(texts) == 5
    for text in texts.values():
        assert "mechanic" in ast.unparse(ast.parse(text)).lower()


def test_a_line_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"training_args\.py has 0 lines that start with '    GROKADAMW"):
        UPSTREAM["added"]("nothing", UPSTREAM["TRANSFORMERS"][0])
