"""What an older version has saved goes on as it would have gone on there."""

from __future__ import annotations

import golden
import pytest
import torch


@pytest.mark.parametrize("name", golden.CASES)
@pytest.mark.parametrize("version", ["0.1.0"])
def test_an_older_versions_checkpoint_goes_on_as_it_did_there(version: str, name: str) -> None:
    case = golden.CASES[name]
    model, opt = golden.build(case)
    saved = torch.load(golden.FOLDER / version / f"{name}.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    golden.train(model, opt, case, golden.SAVED, golden.LAST)
    golden.assert_continues(golden.result(model, opt), version, name, case.dtype)
