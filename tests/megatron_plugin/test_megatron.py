"""mechanic_plugins.megatron: sharded equals unsharded in Megatron-Core's own code on two CPU ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks

pytest.importorskip("megatron.core")

from megatron_on_cpu import CLIP, DECAY, LR, Plain, batch, laid_out, on_cpu, refused, resumed, trained
from wholes import assert_same, put_together

from mechanic_plugins import mechanize

STEPS = 60
SETUPS = {
    "replicas": {"split": False, "sharded": False, "experts": False},
    "distributed optimizer": {"split": False, "sharded": True, "experts": False},
    "tensor parallel": {"split": True, "sharded": False, "experts": False},
    "tensor parallel, distributed optimizer": {"split": True, "sharded": True, "experts": False},
    "experts, distributed optimizer": {"split": False, "sharded": True, "experts": True},
    "experts": {"split": False, "sharded": False, "experts": True},
}


@pytest.fixture(scope="module")
def megatrons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Separate ranks, as Megatron keeps its groups in a module and CUDA's names are patched."""
    both = Ranks(tmp_path_factory.mktemp("megatron"), 2)
    yield both
    both.stop()


def unsharded(start: dict[str, Any], experts: int, rule: Any) -> tuple[list[float], Plain]:
    weights = {name: torch.tensor(value) for name, value in start.items() if "expert" not in name}
    model = Plain(weights, experts)
    opt, scales = mechanize(torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY), rule=rule), []
    for step in range(STEPS):
        opt.zero_grad()
        x = batch(step)
        (model(x) - x.flip(-1)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        opt.step()
        scales.append(float(opt.scale))
    return scales, model


@pytest.fixture(scope="module")
def start(megatrons: Ranks) -> dict[str, Any]:
    """The full weights at the start."""
    return megatrons(on_cpu, trained, 0, **SETUPS["replicas"])[0]["start"]


@pytest.mark.parametrize("rule", [None, "paper"])
@pytest.mark.parametrize("name", SETUPS)
def test_sharded_equals_unsharded(megatrons: Ranks, start: dict[str, Any], name: str, rule: Any) -> None:
    setup = SETUPS[name]
    first, second = megatrons(on_cpu, trained, STEPS, **setup, rule=rule)
    scales, model = unsharded(start, 2 if setup["experts"] else 0, rule)
    assert first["scales"] == second["scales"]
    assert set(first["ends"]) == {first["scales"][-1]}  # dense weights and experts
    assert first["scales"] == pytest.approx(scales, rel=1e-4)
    parts = [torch.tensor(each["weights"]["up.weight"]) for each in (first, second)]
    whole = torch.cat(parts) if setup["split"] else parts[0]
    torch.testing.assert_close(whole, model.up.weight.detach(), rtol=1e-4, atol=1e-5)
    for index, each in enumerate((first, second) if setup["experts"] else ()):
        expert = torch.tensor(each["weights"]["expert.weight"])
        torch.testing.assert_close(expert, model.experts[index].weight.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", [None, "paper"])
@pytest.mark.parametrize("name", ["tensor parallel", "tensor parallel, distributed optimizer"])
def test_a_resumed_run_equals_the_uninterrupted_one(megatrons: Ranks, tmp_path: Path, name: str, rule: Any) -> None:
    for whole, second in megatrons(on_cpu, resumed, str(tmp_path), **SETUPS[name], rule=rule):
        assert second["scales"] == whole["scales"][20:]
        assert second["weights"] == whole["weights"]


@pytest.mark.parametrize("name", SETUPS)
def test_blocks_make_up_the_parameters(megatrons: Ranks, name: str) -> None:
    setup = SETUPS[name]
    both = megatrons(on_cpu, laid_out, **setup)
    first, second = (each["weights"] for each in both)
    dense = {key: value for key, value in first.items() if "expert" not in key}
    if setup["split"]:
        for key, dim in {"up.weight": 0, "up.bias": 0, "down.weight": 1}.items():
            dense[key] = torch.cat([torch.tensor(first[key]), torch.tensor(second[key])], dim).tolist()
    experts = [value for weights in (first, second) for key, value in weights.items() if "expert" in key]
    for index, named in enumerate([list(dense.values()), experts][: len(both[0]["members"])]):
        members = [each["members"][index] for each in both]
        for member in members:
            wholes, times = put_together([members[rank] for rank in member["ranks"]])
            assert set(times) == {1}
            assert_same(wholes, named)


def test_what_cannot_work_is_refused(megatrons: Ranks) -> None:
    said = ["dp_reshardable", "this rank's shards", r"\['scope'\]", "use neither offload"]
    for messages in megatrons(on_cpu, refused):
        for message, pattern in zip(messages, said, strict=True):
            assert re.search(pattern, message), message
