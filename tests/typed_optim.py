"""What a type checker knows of `mechanic_plugins.optim`: read by `make lint`, never run.

An error that is expected has its `type: ignore`, and mypy reports one that it does not need.
"""

from __future__ import annotations

import torch
from typing_extensions import assert_type

from mechanic_plugins import MechanicOptimizer, mechanize
from mechanic_plugins.optim import SGD, Adafactor, AdamW, AdamW8bit, Lion, Muon, wrap

model = torch.nn.Linear(2, 2)
opt = AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), mechanic_betas=[0.9, 0.99], s_decay=0.0, scope="group")
base: torch.optim.Optimizer = opt
ours: MechanicOptimizer = SGD(model.named_parameters(), momentum=0.9, betas=(0.9,), eps=1e-8)
others = [Muon([{"params": []}], adamw_params=[], rule="paper"), Lion(model.parameters(), mechanic_betas=(0.9,))]
lrs: list[float] = AdamW8bit(model.parameters()).effective_lrs
made = wrap(torch.optim.RAdam, s_init="auto")(model.parameters(), lr=1.0, anything="goes")
assert_type(made.scale, torch.Tensor)
AdamW(model.parameters(), s_dekay=0.0)  # type: ignore[call-arg]
AdamW(model.parameters(), scope="groups")  # type: ignore[arg-type]
AdamW(model.parameters(), lr="fast")  # type: ignore[arg-type]
Adafactor(model.parameters(), momentum=0.9)  # type: ignore[call-arg]
mechanize(opt, s_dekay=0.0)  # type: ignore[call-overload]
