"""What a type checker knows in a user's script: checked by `make lint`, never run.

No public function gives `Any` away, except where torch's own does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

from mechanic_plugins import MechanicOptimizer, Mechanized, Settings, demechanize, mechanize, unwrap
from mechanic_plugins.lightning import Mechanic
from mechanic_plugins.optimizer.readings import TunerState
from mechanic_plugins.summary import ScaleHistory, remarks, report
from mechanic_plugins.transformers import MechanicCallback

model = nn.Linear(2, 2)
base = torch.optim.AdamW(model.parameters())
opt = mechanize(base, rule="paper", scope="group", max_scale=3.0, max_grad_norm=1.0, tuner_betas=(0.9, 0.99))
assert_type(opt, MechanicOptimizer)
assert_type(mechanize(torch.optim.AdamW), type[Mechanized])
assert_type(unwrap(opt), MechanicOptimizer)
assert_type(demechanize(opt), torch.optim.Optimizer)
assert_type(opt.base, torch.optim.Optimizer)
assert_type(opt.settings, Settings)
assert_type(opt.param_groups, list[dict[str, Any]])
assert_type(opt.state_dict(), dict[str, Any])
assert_type(opt.scale, Tensor)
assert_type(opt.scales, Tensor)
assert_type(opt.grad_norm, Tensor)
assert_type(opt.moved, Tensor)
assert_type(opt.tuner, TunerState)
assert_type(opt.lrs, list[float | Tensor])
assert_type(opt.learned_lr, float)
assert_type(opt.learned_lrs, list[float])
assert_type(opt.effective_lrs, list[float])
assert_type(opt.metrics(), dict[str, float])
assert_type(opt.max_grad_norm, float | None)
history = ScaleHistory()
history.record(opt)
assert_type(report(opt), str)
assert_type(remarks(opt, history), list[str])
assert_type(history.lrs(), list[list[float]])
callback = MechanicCallback()
plugin = Mechanic(scope="group")
assert_type(plugin.optimizers, list[MechanicOptimizer])
scheduler = torch.optim.lr_scheduler.StepLR(opt, 10)
opt.step()
misspelled = opt.lerned_lr  # type: ignore[attr-defined]
opt.freeze(release=True)
mechanize(base, scale=1.0)  # type: ignore[call-overload]
mechanize(3)  # type: ignore[call-overload]
opt.freeze(True)  # type: ignore[call-arg]
