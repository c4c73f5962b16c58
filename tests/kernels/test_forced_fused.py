from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import nn

from mechanic_plugins import mechanize
from mechanic_plugins.rule.settings import Rule


@pytest.mark.parametrize("rule", get_args(Rule))
def test_a_cpu_without_triton_is_refused_by_every_rule(rule: Any) -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = mechanize(torch.optim.AdamW([p]), rule=rule, backend="fused")
    p.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"backend='fused' cannot step AdamW .*on a GPU with Triton"):
        optimizer.step()
    assert torch.equal(p, torch.ones(3))
