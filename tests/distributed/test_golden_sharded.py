from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import golden
import golden_ranks
import pytest
from ranks import Ranks


@pytest.mark.parametrize("form", golden.SHARDED)
@pytest.mark.parametrize("version", ["0.1.0"])
def test_an_older_versions_sharded_checkpoint_goes_on_as_it_did_there(
    ranks: Callable[[int], Ranks], tmp_path: Path, version: str, form: str
) -> None:
    """torch.distributed.checkpoint refuses a checkpoint that lacks a key which the optimizer has."""
    name = f"fsdp2-{form}"
    shutil.unpack_archive(golden.FOLDER / version / f"{name}.tar.xz", tmp_path, filter="data")
    for found in ranks(2)(golden_ranks.resume, str(tmp_path), form):
        golden.assert_continues(found, version, name, golden_ranks.CASE.dtype)
