"""Param groups: their names, and a scale per network."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from problems import perceptron, train

from mechanic_plugins import demechanize, optim
from mechanic_plugins.optimizer.readings import names_of


def two_groups(**options: Any) -> tuple[torch.nn.Sequential, Any]:
    model = perceptron()
    groups = [{"params": model[0].parameters(), "name": "body"}, {"params": model[2].parameters(), "name": "head"}]
    return model, optim.AdamW(groups, scope="group", **options)


# -------------------------------------------------------------------- names


def test_groups_go_by_their_names() -> None:
    model, opt = two_groups()
    train(model, opt, 5)
    metrics = opt.metrics()
    assert metrics["mechanic/scale/body"] == opt.scales[0].item()
    assert metrics["mechanic/effective_lr/head"] == opt.effective_lrs[1]


def test_a_name_that_two_have_tells_nobody_which() -> None:
    assert names_of([{"name": "a"}, {"name": "b"}, {}, {"name": "a"}]) == ["pg1", "b", "pg3", "pg4"]


# -------------------------------------------------------------------- a scale per network


def backbone_and_head() -> tuple[torch.nn.Sequential, list[dict[str, Any]]]:
    model = perceptron()
    groups = [
        {"params": model[0].parameters(), "name": "backbone"},
        {"params": [], "name": "adapter"},
        {"params": model[2].parameters(), "name": "head"},
    ]
    return model, groups


@pytest.mark.slow
def test_a_frozen_network_learns_when_it_is_thawed() -> None:
    model, groups = backbone_and_head()
    model[0].requires_grad_(False)
    opt = optim.AdamW(groups, scope="group")
    before = model[0].weight.clone()
    losses = train(model, opt, 60)
    backbone, adapter, head = opt.scales.tolist()
    assert head > 0
    assert (backbone, adapter) == (0.0, 0.0)
    assert torch.equal(model[0].weight, before)
    model[0].requires_grad_(True)
    losses += train(model, opt, 300, first=60)
    assert opt.scales[0] > 0
    assert opt.scales[1] == 0
    assert not torch.equal(model[0].weight, before)
    assert sum(losses[-40:]) < sum(losses[20:60])  # averages, as the batches are small


@pytest.mark.parametrize("first", [20, 40])
def test_a_network_thawed_between_two_measurements_moves_at_once(first: int) -> None:
    """Its first updates are measured whenever they come. It used to stand still until the next power of two."""
    model, groups = backbone_and_head()
    model[0].requires_grad_(False)
    opt = optim.AdamW(groups, scope="group")
    train(model, opt, first)
    model[0].requires_grad_(True)
    before = model[0].weight.clone()
    assert not opt.is_step_measured
    train(model, opt, 1, first=first)
    assert opt.is_step_measured
    train(model, opt, 2, first=first + 1)
    assert opt.scales[0] > 0
    assert not torch.equal(model[0].weight, before)
    assert not opt.is_step_measured


def test_leaving_with_groups_that_never_moved() -> None:
    model, groups = backbone_and_head()
    model[0].requires_grad_(False)
    opt = optim.AdamW(groups, scope="group", lr=0.5)
    train(model, opt, 30)
    head = opt.learned_lrs[2]
    plain = demechanize(opt)
    assert [group["lr"] for group in plain.param_groups] == pytest.approx([head] * 3)  # the smallest learned one
    assert [group["name"] for group in plain.param_groups] == ["backbone", "adapter", "head"]
    model[0].requires_grad_(True)
    assert train(model, plain, 20, first=30)[-1] < 1.1


def test_a_frozen_networks_scale_does_not_touch_the_others() -> None:
    """The head trains as if it were the only network."""
    models = perceptron(), perceptron()
    for model in models:
        model[0].requires_grad_(False)
    opt = optim.AdamW([{"params": m.parameters()} for m in (models[0][0], models[0][2])], scope="group")
    alone = optim.AdamW(models[1][2].parameters())
    train(models[0], opt, 20)
    train(models[1], alone, 20)
    assert opt.scales[1] == alone.scale
    assert torch.equal(models[0][2].weight, models[1][2].weight)


@pytest.mark.slow
def test_lightning_with_groups_that_never_moved() -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from mechanic_plugins.lightning import Mechanic

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.groups = backbone_and_head()
            self.net[0].requires_grad_(False)

        def training_step(self, batch: Any, index: int) -> Any:
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(index))
            return torch.nn.functional.cross_entropy(self.net(x), (x[:, :3]).argmax(1))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.groups)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(range(100))

    module, callback = Module(), Mechanic(scope="group")
    options = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, callbacks=callback, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # for Lightning's, about workers
        trainer.fit(module)
    logged = trainer.callback_metrics
    assert logged["mechanic/scale/head"] > 0
    assert logged["mechanic/scale/backbone"] == logged["mechanic/scale/adapter"] == 0
    plain = demechanize(callback.optimizers[0])
    assert min(group["lr"] for group in plain.param_groups) > 0


def diffusion() -> tuple[Any, Any, Any]:
    """A text encoder, a denoiser conditioned on it, and the loss of a batch."""
    torch.manual_seed(0)
    text_encoder = torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Linear(16, 16))
    unet = torch.nn.Sequential(torch.nn.Linear(16 + 4, 64), torch.nn.SiLU(), torch.nn.Linear(64, 4))
    pictures = torch.randn(8, 4)

    def loss(step: int) -> Any:
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(8, (64,), generator=generator)
        noise, share = torch.randn(64, 4, generator=generator), torch.rand(64, 1, generator=generator)
        noisy = share * noise + (1 - share) * pictures[words]
        return torch.nn.functional.mse_loss(unet(torch.cat([noisy, text_encoder(words)], 1)), noise)

    return text_encoder, unet, loss


@pytest.mark.slow
def test_a_text_encoder_and_a_unet() -> None:
    """Grouped as in sd-scripts, including `stop_text_encoder_training`."""
    text_encoder, unet, loss = diffusion()
    groups = [{"params": part.parameters(), "lr": lr} for part, lr in ((text_encoder, 0.5), (unet, 1.0))]
    opt = optim.AdamW(groups, lr=1.0, scope="group")
    losses = []

    def steps(first: int, last: int) -> None:
        for step in range(first, last):
            opt.zero_grad()
            found = loss(step)
            found.backward()
            opt.step()
            losses.append(float(found.detach()))

    steps(0, 250)
    scales = opt.scales.tolist()
    assert 0 < scales[0] != scales[1] > 0
    assert sum(losses[-10:]) < 0.6 * sum(losses[:10])
    text_encoder.requires_grad_(False)
    stopped = copy.deepcopy(text_encoder.state_dict())
    steps(250, 400)
    assert all(torch.equal(stopped[name], weight) for name, weight in text_encoder.state_dict().items())
    kept, moving = opt.scales.tolist()
    assert kept == pytest.approx(scales[0], rel=0.2)  # it only settles: averages catch up, short memories fade
    assert moving != scales[1]
    assert sum(losses[350:]) < sum(losses[200:250])
    steps(400, 410)
    assert opt.scales[0] == pytest.approx(kept, rel=1e-2)
    learned = opt.learned_lrs
    assert [group["lr"] for group in demechanize(opt).param_groups] == pytest.approx(learned)


# -------------------------------------------------------------------- against a sweep of pairs


@functools.cache
def pretrained() -> tuple[Any, Any, Any]:
    """The five other digits, a body pretrained on the first five, and the random state after that."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = (torch.tensor(part) for part in datasets.load_digits(return_X_y=True))
    x = x / 16  # in float64, as roundings part long runs
    torch.manual_seed(0)
    body = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU())
    body.double()
    optimized(
        body, torch.nn.Linear(64, 5).double(), x[y < 5], y[y < 5], lambda *parts: plain_pair(*parts, 1e-3, 1e-3), 100
    )
    return (x[y >= 5], y[y >= 5] - 5), body, torch.get_rng_state()


def fine_tuned(build: Any, steps: int = 800) -> tuple[float, Any]:
    """Fine-tunes the body and a new head on the five other digits. Returns the training loss and the optimizer."""
    digits, body, random = pretrained()
    torch.set_rng_state(random)
    return optimized(copy.deepcopy(body), torch.nn.Linear(64, 5).double(), *digits, build, steps)


def optimized(body: Any, head: Any, x: Any, y: Any, build: Any, steps: int) -> tuple[float, Any]:
    opt, model = build(body, head), torch.nn.Sequential(body, head)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    for _ in range(steps):
        rows = torch.randint(len(x), (32,))
        opt.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        opt.step()
        scheduler.step()
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(x), y)), opt


def pair(body: Any, head: Any, *lrs: float) -> list[dict[str, Any]]:
    return [{"params": part.parameters(), "lr": lr} for part, lr in zip((body, head), lrs, strict=True)]


def plain_pair(body: Any, head: Any, *lrs: float) -> Any:
    return torch.optim.AdamW(pair(body, head, *lrs))


@pytest.mark.slow
def test_a_scale_for_each_network_is_as_good_as_the_best_pair() -> None:
    """In runs of that length: one of 200 steps is over before the scales have grown. The given pair does not matter."""
    best, _ = fine_tuned(lambda body, head: plain_pair(body, head, 1e-2, 1e-1))  # of every pair of decades
    found = []
    for lrs in ((1.0, 1.0), (1.0, 10.0), (0.1, 1e-3)):
        loss, opt = fine_tuned(lambda body, head, lrs=lrs: optim.AdamW(pair(body, head, *lrs), scope="group"))
        assert loss < 1.5 * best
        found.append((loss, *(s * lr for s, lr in zip(opt.scales.tolist(), lrs, strict=True))))
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert found[2] == pytest.approx(found[0], rel=1e-6)
