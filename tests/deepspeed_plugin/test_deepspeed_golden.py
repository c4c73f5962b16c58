from __future__ import annotations

from collections.abc import Callable

import golden
import golden_engines
import pytest
from ranks import Ranks


@pytest.mark.parametrize("stage", golden.ZERO_STAGES)
@pytest.mark.parametrize("version", ["0.1.0"])
def test_an_older_versions_zero_checkpoint_goes_on_as_it_did_there(
    engines: Callable[[int], Ranks], version: str, stage: int
) -> None:
    for found in engines(2)(golden_engines.resume, str(golden.FOLDER / version), stage):
        golden.assert_continues(found, version, f"zero{stage}", golden_engines.CASE.dtype)
