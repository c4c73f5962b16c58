"""Checks what Lightning does only on a GPU: FSDP, fp16 with a fused base, no waiting for the device. For both rules.

    python tests/gpu/check_lightning.py

By hand, on one CUDA GPU; needs torch, Lightning and this repository. A line per check; exits with 1 if one fails.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from mechanic_plugins import Settings, mechanize
from mechanic_plugins.lightning import Mechanic, installed
from mechanic_plugins.rule.default import is_due

pl = installed()[0]
DEVICE = torch.device("cuda", 0)
BATCH, BATCHES, EPOCHS = 64, 10, 4
RULES: dict[str, dict[str, Any]] = {"default": {}, "paper": {"settings": Settings(rule="paper", s_init=0.01)}}
OPTIONS: dict[str, Any] = {}
"""Those of the rule that is being checked."""


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 16))


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(BATCH * BATCHES, 32, generator=generator)
    return x, torch.tanh(x @ torch.randn(32, 16, generator=generator) / 4)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


class Regression(pl.LightningModule):  # type: ignore[name-defined, misc]
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self.net)

    def train_dataloader(self) -> Any:
        x, y = data()
        return DataLoader(TensorDataset(x.to(DEVICE), y.to(DEVICE)), batch_size=BATCH)


class Sharded(Regression):
    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        for layer in (self.net[0], self.net[2], self.net):
            fully_shard(layer, mesh=self.device_mesh["data_parallel"])


def trainer(*callbacks: Any, epochs: int = EPOCHS, **kwargs: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return pl.Trainer(
        **{"accelerator": "gpu", "devices": 1, "enable_model_summary": False, **quiet, **kwargs},
        max_epochs=epochs,
        callbacks=list(callbacks),
    )


def weights(model: nn.Module) -> list[Tensor]:
    return [getattr(p, "full_tensor", lambda p=p: p)().detach().float().cpu().clone() for p in model.parameters()]


def plain(
    dtype: torch.dtype = torch.float32, autocast: torch.dtype | None = None, clip: float | None = None
) -> tuple[list[Tensor], Any]:
    """The same training in a hand-written loop."""
    model = net().to(DEVICE, dtype)
    optimizer = mechanize(adamw(model), **OPTIONS)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, enabled=autocast == torch.half)
    x, y = (t.to(DEVICE, dtype) for t in data())
    for _ in range(EPOCHS):
        for a, b in zip(x.split(BATCH), y.split(BATCH), strict=True):
            with torch.autocast("cuda", autocast, cache_enabled=False) if autocast else nullcontext():
                loss = F.mse_loss(model(a), b)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
    return weights(model), optimizer


def distance(left: list[Tensor], right: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(left, right, strict=True))


# -------------------------------------------------------------------- the checks


def precision(name: str, expected: tuple[list[Tensor], Any], **kwargs: Any) -> str:
    model, callback = Regression(), Mechanic(**OPTIONS)
    trainer(callback, **kwargs).fit(model)
    off = distance(weights(model), expected[0])
    scale, steps = callback.optimizers[0].scale.item(), int(callback.optimizers[0].tuner.steps)
    assert off == 0, f"{name}: off the plain loop by {off}"
    assert scale == expected[1].scale.item() > 0
    return f"equal to a plain loop bit for bit, scale {scale:.6f}, {steps} of {EPOCHS * BATCHES} steps made"


def check_32() -> str:
    return precision("32-true", plain())


def check_16_mixed_fused_clipped() -> str:
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40)
    plugin = pl.plugins.MixedPrecision("16-mixed", "cuda", scaler=scaler)
    return precision("16-mixed", plain(autocast=torch.half, clip=0.5), plugins=[plugin], gradient_clip_val=0.5)


def check_bf16_mixed() -> str:
    return precision("bf16-mixed", plain(autocast=torch.bfloat16), precision="bf16-mixed")


def check_bf16_true() -> str:
    return precision("bf16-true", plain(dtype=torch.bfloat16), precision="bf16-true")


def sharded(make: Callable[[], Any], module: type[Regression], **kwargs: Any) -> str:
    """Compares it with a plain loop, and with itself interrupted and resumed."""
    path = Path(tempfile.mkdtemp()) / "half.ckpt"

    def fit(epochs: int, ckpt_path: Path | None = None) -> tuple[list[Tensor], Any]:
        model, callback = module(), Mechanic(**OPTIONS)
        fitted = trainer(callback, epochs=epochs, strategy=make(), use_distributed_sampler=False, **kwargs)
        fitted.fit(model, ckpt_path=ckpt_path)
        if epochs < EPOCHS:
            fitted.save_checkpoint(path)
        return weights(model), callback.optimizers[0]

    whole, optimizer = fit(EPOCHS)
    dtype = torch.bfloat16 if kwargs.get("precision") == "bf16-true" else torch.float32
    off = distance([w.flatten() for w in whole], [w.flatten() for w in plain(dtype=dtype)[0]])
    fit(EPOCHS // 2)
    resumed, _ = fit(EPOCHS, path)
    again = distance(resumed, whole)
    assert off <= 1e-6, f"off the plain loop by {off}"
    assert again == 0, f"resumed run off by {again}"
    return f"off a plain loop by {off:.1e}, resumed exactly, scale {optimizer.scale.item():.6f}"


def fsdp(kind: str) -> Any:
    return pl.strategies.FSDPStrategy(state_dict_type=kind, auto_wrap_policy={nn.Linear})


def check_fsdp_sharded() -> str:
    return sharded(lambda: fsdp("sharded"), Regression)


def check_fsdp_full() -> str:
    return sharded(lambda: fsdp("full"), Regression)


def check_fsdp_bf16_true() -> str:
    return sharded(lambda: fsdp("full"), Regression, precision="bf16-true")


def check_fsdp2() -> str:
    return sharded(lambda: pl.strategies.ModelParallelStrategy(1, 1), Sharded)


def check_fsdp2_bf16_true() -> str:
    return sharded(lambda: pl.strategies.ModelParallelStrategy(1, 1), Sharded, precision="bf16-true")


@contextmanager
def synchronisations() -> Iterator[list[str]]:
    """Collects torch's warnings that the host waited for the device."""
    found: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield found
    found += [str(w.message) for w in caught if "synchroniz" in str(w.message)]


def watched(step: int) -> bool:
    """The first steps allocate and copy constants to the device, and steps that are measured wait for it."""
    return step >= 3 and not is_due(step + 1)


class Watch(pl.Callback):  # type: ignore[name-defined, misc]
    """Turns on torch's warnings at `watched` steps."""

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("warn" if watched(trainer.global_step) else "default")

    def on_train_end(self, *args: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def check_no_waiting() -> str:
    counts = []
    for callbacks in ([Watch()], [Watch(), Mechanic(**OPTIONS)], [Watch()]):
        with synchronisations() as found:
            trainer(*callbacks, log_every_n_steps=1000).fit(Regression())
        counts.append(len(found))
    _, ours, theirs = counts
    steps = sum(map(watched, range(EPOCHS * BATCHES)))
    assert ours <= theirs, f"{ours - theirs} synchronisations more in {steps} steps"
    return f"{ours} synchronisations with Mechanic and {theirs} without in {steps} steps that no logger sees"


def seconds_a_step(*callbacks: Any, steps: int = 300) -> float:
    trainer(*callbacks, epochs=2).fit(Regression())
    torch.cuda.synchronize()
    start = time.perf_counter()
    trainer(*callbacks, epochs=-1, max_steps=steps).fit(Regression())
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def check_host_cost() -> str:
    bare, unlogged = seconds_a_step(), seconds_a_step(Mechanic(log=False, **OPTIONS))
    logged = seconds_a_step(Mechanic(**OPTIONS))
    return (
        f"{bare * 1e3:.2f} ms a step without, {unlogged * 1e3:.2f} with Mechanic, {logged * 1e3:.2f} with its logging"
    )


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: this script checks what cannot be checked without one")
        return 1
    print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}, {pl.__name__} {pl.__version__}")
    failed = 0
    for rule, check in itertools.product(RULES, CHECKS):
        OPTIONS.clear()
        OPTIONS.update(RULES[rule])
        name = f"{rule}, {check.__name__.removeprefix('check_')}"
        try:
            print(f"ok    {name}: {check()}", flush=True)
        except Exception as error:
            failed += 1
            print(f"FAIL  {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            traceback.print_exc()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
