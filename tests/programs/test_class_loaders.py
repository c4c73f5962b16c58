"""Programs that build their optimizer from a class or its dotted name, each through its own loader."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import installed
from torch.utils.data import DataLoader, TensorDataset

from mechanic_plugins import MechanicOptimizer, optim, unwrap

NAME = "mechanic_plugins.optim.AdamW"


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def data() -> DataLoader[Any]:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)


def train(net: torch.nn.Module, opt: Any, epochs: int = 4) -> list[float]:
    losses = []
    for _ in range(epochs):
        for x, y in data():
            loss = torch.nn.functional.mse_loss(net(x), y)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(float(loss.detach()))
    return losses


def assert_trains(net: torch.nn.Module, opt: Any) -> MechanicOptimizer:
    """Checks that it is of our class, learns, and ends like a loop without the program."""
    mechanic = unwrap(opt)
    lrs, decays = zip(*[(g["lr"], g["weight_decay"]) for g in mechanic.param_groups], strict=True)
    losses = train(net, opt)
    twin = model()
    alone = optim.AdamW(twin.parameters(), lr=lrs[0], weight_decay=decays[0], scope=mechanic.settings.scope)
    assert losses == pytest.approx(train(twin, alone), rel=1e-5)
    assert losses[-1] < losses[0]
    assert mechanic.scale > 0
    return mechanic


# -------------------------------------------------------------------- Lightning


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
@pytest.mark.parametrize("scheduler", [False, True])
def test_lightning_cli_by_name(package: str, scheduler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pl = installed("lightning.pytorch" if package == "lightning" else package)
    installed("jsonargparse")
    cli_module = installed(f"{pl.__name__}.cli")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any) -> Any:
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def train_dataloader(self) -> Any:
            return data()

    arguments = [
        "fit",
        f"--optimizer={NAME}",
        "--optimizer.weight_decay=0.1",
        "--optimizer.max_scale=0.5",
        "--optimizer.scope=group",
        "--trainer.callbacks+=mechanic_plugins.lightning.Mechanic",
        "--trainer.max_epochs=20",
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
        "--trainer.enable_model_summary=false",
    ]
    if scheduler:
        arguments += ["--lr_scheduler=CosineAnnealingLR", "--lr_scheduler.T_max=20"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="AdamW: Mechanic was still looking for its scale")  # lr is constant
        cli = cli_module.LightningCLI(Module, args=arguments, save_config_callback=None, seed_everything_default=0)
    opt = unwrap(cli.trainer.optimizers[0])
    assert type(opt) is optim.AdamW
    assert (opt.settings.max_scale, opt.settings.scope) == (0.5, "group")
    assert (opt.param_groups[0]["weight_decay"], opt.param_groups[0].get("initial_lr", 1.0)) == (0.1, 1.0)
    assert opt.scale > 0
    assert cli.trainer.callback_metrics["mechanic/scale"] == opt.scale  # found by the callback, and not wrapped again
    with pytest.raises(SystemExit):
        cli_module.LightningCLI(Module, args=[*arguments, "--optimizer.max_skale=1"], save_config_callback=None)


def test_fabric() -> None:
    fabric = installed("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    net = model()
    net_on_it, opt = fabric.setup(net, optim.AdamW(net.parameters()))
    for x, y in fabric.setup_dataloaders(data()):
        fabric.backward(torch.nn.functional.mse_loss(net_on_it(x), y))
        opt.step()
        opt.zero_grad()
    assert unwrap(opt).scale > 0


# -------------------------------------------------------------------- loaders


def test_litgpt() -> None:
    utils = installed("litgpt.utils")
    config = {"class_path": NAME, "init_args": {"weight_decay": 0.1, "max_scale": 0.5}}
    net = model()
    opt = utils.instantiate_torch_optimizer(config, net.parameters(), fused=False)  # like its pretrain and finetune
    assert type(opt) is optim.AdamW
    assert (opt.param_groups[0]["fused"], opt.settings.max_scale) == (False, 0.5)
    net = model()
    assert_trains(net, utils.instantiate_torch_optimizer(NAME, net.parameters(), nobodys=3))


def test_torchtune() -> None:
    config = installed("torchtune.config")
    omegaconf = installed("omegaconf")
    net = model()
    yaml = omegaconf.OmegaConf.create({"_component_": NAME, "lr": 1.0, "weight_decay": 0.1, "scope": "all"})
    assert_trains(net, config.instantiate(yaml, net.parameters()))


def test_hydra() -> None:
    hydra = installed("hydra.utils")
    net = model()
    assert_trains(net, hydra.instantiate({"_target_": NAME, "weight_decay": 0.1}, params=net.parameters()))
    net = model()
    partial = hydra.instantiate({"_target_": NAME, "_partial_": True, "scope": "all", "max_scale": 0.5})
    assert partial(net.parameters()).settings.max_scale == 0.5
    assert hydra.get_class(NAME) is optim.AdamW


def test_timm() -> None:
    timm = installed("timm.optim")
    from timm.optim._optim_factory import default_registry

    default_registry.register(timm.OptimInfo(name="mechanicadamw", opt_class=NAME, has_betas=True))
    net = model()
    opt = timm.create_optimizer_v2(net, opt="mechanicadamw", lr=1.0, weight_decay=0.1, scope="group")
    assert type(opt) is optim.AdamW
    assert [group["weight_decay"] for group in opt.param_groups] == [0.0, 0.1]  # none on biases
    losses = train(net, opt)
    assert losses[-1] < losses[0]
    assert min(opt.scales) > 0
    with pytest.raises(TypeError, match=r"AdamW\(\) has no argument 'max_skale': did you mean 'max_scale'"):
        timm.create_optimizer_v2(net, opt="mechanicadamw", max_skale=1)


def test_mmengine() -> None:
    installed("mmengine")
    from mmengine.optim import build_optim_wrapper
    from mmengine.registry import OPTIMIZERS

    OPTIMIZERS.register_module(name="MechanicAdamW", module=optim.AdamW, force=True)
    net = model()
    optimizer = {"type": "MechanicAdamW", "lr": 1.0, "weight_decay": 0.1}
    config = {"type": "OptimWrapper", "optimizer": optimizer}
    wrapper = build_optim_wrapper(net, config)
    assert_trains(net, wrapper)
    heads = {"custom_keys": {"0": {"lr_mult": 0.1}}}
    scaled = build_optim_wrapper(model(), {**config, "paramwise_cfg": heads})
    assert {group["lr"] for group in scaled.optimizer.param_groups} == {0.1, 1.0}


def test_mmengines_runner(tmp_path: Path) -> None:
    installed("mmengine")
    from mmengine.model import BaseModel
    from mmengine.registry import OPTIMIZERS
    from mmengine.runner import Runner

    class Wrapped(BaseModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, x: Any, y: Any, mode: str) -> Any:
            return {"loss": torch.nn.functional.mse_loss(self.net(x), y)}

    OPTIMIZERS.register_module(name="MechanicAdamW", module=optim.AdamW, force=True)
    optimizer = {"type": "MechanicAdamW", "lr": 1.0, "weight_decay": 0.1}
    runner = Runner(
        model=Wrapped(),
        work_dir=str(tmp_path),
        train_dataloader=data(),
        optim_wrapper={"type": "OptimWrapper", "optimizer": optimizer, "clip_grad": {"max_norm": 10.0}},
        train_cfg={"by_epoch": True, "max_epochs": 4},
        param_scheduler={"type": "CosineAnnealingLR", "T_max": 4},
        default_hooks={"logger": {"type": "LoggerHook", "interval": 1}},
    )
    runner.train()
    mechanic = unwrap(runner.optim_wrapper)
    assert type(mechanic) is optim.AdamW
    assert mechanic.scale > 0
    lines = next(tmp_path.rglob("scalars.json")).read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert losses[-1] < 0.5 * losses[0]
    saved = torch.load(tmp_path / "epoch_4.pth", weights_only=False)["optimizer"]  # it has a log of mmengine's too
    assert json.loads(saved["param_groups"][0]["mechanic_tuner"])["tuner"]["steps"] == 32


def test_torchtitan() -> None:
    """The container from the page, built from a config as by the trainer, and its flat checkpoints."""
    titan = installed("torchtitan.components.optimizer")

    class Mechanized(titan.OptimizersContainer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(titan.OptimizersContainer.Config):  # type: ignore[misc]
            pass

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return getattr(optim, name)

    def built(net: torch.nn.Module) -> Any:
        options = {"AdamW": {"max_scale": 0.5}}
        groups = titan.default_adamw(lr=1.0).param_groups
        config = Mechanized.Config(param_groups=groups, optimizer_factory_kwargs_by_name=options)
        return config.build(model_parts=[net])

    net, twin = model(), model()
    container = built(net)
    assert type(container.optimizers[0]) is optim.AdamW
    assert container.optimizers[0].settings.max_scale == 0.5
    losses = train(net, container)
    assert losses[-1] < losses[0]
    twin.load_state_dict(copy.deepcopy(net.state_dict()))
    resumed = built(twin)
    resumed.load_state_dict(copy.deepcopy(container.state_dict()))
    assert resumed.optimizers[0].scale == container.optimizers[0].scale > 0
    assert train(net, container) == train(twin, resumed)


def test_torchtitan_with_several_optimizer_types() -> None:
    """As on the page: a scale per type, or Muon and AdamW as one optimizer with correct names in flat checkpoints."""
    titan = installed("torchtitan.components.optimizer")

    def muon(groups: Any, **options: Any) -> Any:
        others = [p for group in groups if group.get("adamw") for p in group["params"]]
        return optim.Muon(groups, adamw_params=others, **options)

    class Mechanized(titan.OptimizersContainer):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(titan.OptimizersContainer.Config):  # type: ignore[misc]
            pass

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return muon if name == "Muon" else getattr(optim, name)

    def built(net: torch.nn.Module, first: str, rest: str) -> Any:
        one = titan.ParamGroupConfig(pattern="^2", optimizer_name=first, optimizer_kwargs={"lr": 1.0, "adamw": True})
        other = titan.ParamGroupConfig(pattern=".*", optimizer_name=rest, optimizer_kwargs={"lr": 1.0})
        return Mechanized.Config(param_groups=[one, other], implementation="for-loop").build(model_parts=[net])

    for first, rest, count in (("AdamW", "Lion", 2), ("Muon", "Muon", 1)):
        net, twin = model(), model()
        container = built(net, first, rest)
        assert len(container.optimizers) == count
        losses = train(net, container)
        assert losses[-1] < losses[0]
        saved = copy.deepcopy(container.state_dict())
        for name, p in net.named_parameters():
            assert saved[f"state.{name}.mechanic_ref"].shape == p.shape
        twin.load_state_dict(copy.deepcopy(net.state_dict()))
        resumed = built(twin, first, rest)
        resumed.load_state_dict(saved)
        assert all(one.scale == other.scale > 0 for one, other in zip(resumed, container, strict=True))
        assert train(net, container) == train(twin, resumed)


def test_composer() -> None:
    composer = installed("composer")
    from composer.models import ComposerModel

    class Wrapped(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def forward(self, batch: Any) -> Any:
            return self.net(batch[0])

        def loss(self, outputs: Any, batch: Any) -> Any:
            return torch.nn.functional.mse_loss(outputs, batch[1])

    wrapped = Wrapped()
    opt = optim.AdamW(wrapped.parameters())
    trainer = composer.Trainer(
        model=wrapped, train_dataloader=data(), max_duration="3ep", optimizers=opt, device="cpu", progress_bar=False
    )
    trainer.fit()
    assert trainer.state.optimizers[0] is opt
    assert opt.scale > 0
