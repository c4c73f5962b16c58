"""What a type checker knows about `mechanic_plugins.optim`: checked by `make lint`, never run.

Each expected error has a `type: ignore`, and mypy reports unneeded ones.
"""

from __future__ import annotations

import torch
from typing_extensions import assert_type

from mechanic_plugins import MechanicOptimizer, Settings, mechanize
from mechanic_plugins.optim import SGD, AdamW, wrap

model = torch.nn.Linear(2, 2)
opt = AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), scope="group")
base: torch.optim.Optimizer = opt
ours: MechanicOptimizer = SGD(model.named_parameters(), momentum=0.9)
lrs: list[float] = opt.effective_lrs
made = wrap(torch.optim.RAdam, scope="group")(model.parameters(), lr=1.0, anything="goes")
assert_type(made.scale, torch.Tensor)
assert_type(mechanize(base, settings=Settings()), MechanicOptimizer)
AdamW(3.0)  # type: ignore[arg-type]
wrap(torch.optim.RAdam, scope="groups")  # type: ignore[arg-type]
mechanize(opt, s_dekay=0.0)  # type: ignore[call-overload]
