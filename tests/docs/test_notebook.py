"""examples/first_run.ipynb runs from top to bottom and shows what its headings say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sklearn")
matplotlib = pytest.importorskip("matplotlib")

NOTEBOOK = json.loads((Path(__file__).parents[2] / "examples" / "first_run.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_it_is_saved_without_outputs() -> None:
    """Saved outputs would go out of date."""
    assert NOTEBOOK["nbformat"] == 4
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CODE)


@pytest.mark.slow
def test_it_runs() -> None:
    matplotlib.use("agg")
    threads = torch.get_num_threads()
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(CODE):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    matplotlib.pyplot.close("all")
    torch.set_num_threads(threads)
    loss, sweep = names["last"](names["losses"]), names["sweep"]
    assert loss < 1.5 * min(sweep.values()) < max(sweep.values())
    assert list(names["elsewhere"].values()) == pytest.approx([names["learned"]] * 2, rel=1e-3)
    assert isinstance(names["plain"], torch.optim.AdamW)
    assert names["plain"].param_groups[0]["lr"] == names["learned"]
    assert names["at_the_learned_rate"] < 1.5 * min(sweep.values())
