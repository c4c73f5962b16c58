from __future__ import annotations

import contextlib

import pytest
import torch

from mechanic_plugins.kernels import cuda


def test_another_gpu_is_made_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: asked.append(device) or contextlib.nullcontext())
    for name in ("cpu", "cuda:0", "cuda"):
        with cuda.on(torch.device(name)):
            assert not asked
    with cuda.on(torch.device("cuda:1")):
        assert asked == [torch.device("cuda:1")]
