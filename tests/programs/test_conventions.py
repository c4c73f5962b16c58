"""Programs that are not run here: what each does with an optimizer's name or class, copied from its source."""

from __future__ import annotations

import ast
import importlib
import inspect
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
from test_class_loaders import assert_trains, data, model
from tiny import installed

from mechanic_plugins import optim, unwrap


def test_sd_scripts() -> None:
    """Like `get_optimizer` in library/train_util.py; kohya_ss and musubi-tuner do the same."""
    optimizer_type = "mechanic_plugins.optim.AdamW"
    optimizer_args = ["weight_decay=0.1", "scope='group'", "max_scale=0.5"]
    pairs = (argument.split("=") for argument in optimizer_args)
    kwargs = {key: ast.literal_eval(value) for key, value in pairs}
    module, _, name = optimizer_type.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    unet, text_encoder = model(), model()
    groups = [{"params": text_encoder.parameters(), "lr": 0.5}, {"params": unet.parameters(), "lr": 1.0}]
    opt = cls(groups, lr=1.0, **kwargs)
    assert f"{cls.__module__}.{cls.__name__}" == optimizer_type  # it writes this to the model's metadata
    assert not hasattr(opt, "train")  # it would be taken for a schedule-free one
    scheduler = torch.optim.lr_scheduler.ConstantLR(opt, factor=1.0)
    for x, y in data():
        (torch.nn.functional.mse_loss(unet(x), y) + torch.nn.functional.mse_loss(text_encoder(x), 3 * y)).backward()
        opt.step()
        scheduler.step()
        opt.zero_grad(set_to_none=True)
    assert min(opt.effective_lrs) > 0


def test_simpletuner_passes_what_the_signature_has() -> None:
    """helpers/training/optimizer_param.py keeps the arguments that `__init__` names."""
    wanted = {"betas": (0.9, 0.95), "weight_decay": 0.1, "max_scale": 0.5, "d_coef": 1.0}
    names = {name for name in inspect.signature(optim.AdamW.__init__).parameters if name != "self"}
    opt = optim.AdamW(model().parameters(), **{key: value for key, value in wanted.items() if key in names})
    assert (opt.param_groups[0]["betas"], opt.settings.max_scale) == ((0.9, 0.95), 0.5)


def test_llm_foundry() -> None:
    """Its registry reads these entry points, requires subclasses of Optimizer, and passes `params` by name."""
    tomllib = pytest.importorskip("tomllib")
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    for name, value in settings["project"]["entry-points"]["llmfoundry_optimizers"].items():
        cls = EntryPoint(name, value, "llmfoundry_optimizers").load()
        assert f"mechanic_{cls.__name__.lower()}" == name
        assert issubclass(cls, torch.optim.Optimizer)
    net = model()
    assert_trains(net, optim.AdamW(params=net.parameters(), lr=1.0, weight_decay=0.1))


def test_verl() -> None:
    """Like `build_optimizer` in workers/config/optimizer.py: module, name, and betas for names with "adam" in them."""
    impl, name = "mechanic_plugins.optim", "AdamW"
    kwargs = {"lr": 1.0, "weight_decay": 0.1, "betas": (0.9, 0.999), "scope": "all"}
    net = model()
    opt = getattr(importlib.import_module(impl), name)(net.parameters(), **kwargs)
    assert_trains(net, opt)


def test_nemo() -> None:
    """Like `setup_optimization` in core/classes/modelPT.py: the class by hydra's `_target_`, with groups and lr."""
    instantiate = installed("hydra.utils").instantiate
    net = model()
    opt = instantiate({"_target_": "mechanic_plugins.optim.AdamW"}, [{"params": net.parameters()}], lr=1.0)
    assert type(opt) is optim.AdamW
    assert_trains(net, opt)


def test_composer_convention() -> None:
    """Trainer(optimizers=...) requires an Optimizer and copies its settings to the logs."""
    net = model()
    opt = optim.AdamW(net.parameters())
    assert isinstance(opt, torch.optim.Optimizer)
    assert_trains(net, opt)


def test_diffusers_scripts() -> None:
    """They build `torch.optim.AdamW` in one place and pass it to accelerate."""
    accelerate = installed("accelerate")
    net = model()
    optimizer_cls = optim.AdamW
    opt = optimizer_cls(net.parameters(), lr=1.0, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)
    prepared, prepared_opt = accelerate.Accelerator(cpu=True).prepare(net, opt)
    assert unwrap(prepared_opt) is opt
    assert_trains(prepared, prepared_opt)


def test_nanogpt() -> None:
    """Like `configure_optimizers` in model.py: two groups, with the lr set by hand in every iteration."""
    net = model()
    decay = [p for p in net.parameters() if p.dim() >= 2]
    others = [p for p in net.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    opt = optim.AdamW(groups, lr=6e-4, betas=(0.9, 0.95))
    losses = []
    for step, (x, y) in enumerate([*data()] * 4):
        for group in opt.param_groups:
            group["lr"] = 6e-4 * min(1.0, (step + 1) / 8)
        loss = torch.nn.functional.mse_loss(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
