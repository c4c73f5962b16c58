"""The ranks' part of the tests of how Mechanic gets into an engine."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from engines import Case, base_class, config_of, engine_of, model, param_groups, quiet, start, train
from torch import nn


def run_from_json(rank: int, case: Case) -> dict[str, Any]:
    from mechanic_plugins.summary import report

    start(rank)
    engine, opt = engine_of(case)
    seen = train(engine, opt, case, range(case.steps))
    group = opt.param_groups[0]
    own = {"base": type(opt.base).__name__, "base_group": (list(group["betas"]), group["eps"])}
    return {**seen, **own, "settings": repr(opt.settings), "report": report(opt)}


def run_given(rank: int, case: Case, what: str) -> dict[str, Any]:
    """Passes a mechanized class, or a function that builds one, in place of an optimizer."""
    from mechanic_plugins import mechanize

    start(rank)
    mechanized = mechanize(torch.optim.AdamW, **case.options)
    given = functools.partial(mechanized, **case.base_options)
    engine, opt = engine_of(case, optimizer=mechanized if what == "class" else given)
    assert opt is not None
    return train(engine, opt, case, range(case.steps))


def run_with_scheduler(rank: int, case: Case) -> dict[str, Any]:
    """Uses a scheduler built on the mechanized optimizer before the engine, and one built by the engine."""
    import deepspeed

    import mechanic_plugins.deepspeed as plugin
    from mechanic_plugins import mechanize

    start(rank)
    plugin.install()
    network = model(case.seed)
    opt = mechanize(torch.optim.AdamW(network.parameters(), **case.base_options))
    scheduler = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: max(0.0, 1 - step / 20))
    with quiet():
        engine, _, _, built = deepspeed.initialize(
            model=network, optimizer=opt, lr_scheduler=scheduler, config=config_of(case, dist.get_world_size())
        )
    train(engine, opt, case, range(4))
    return {
        "lr": opt.param_groups[0]["lr"],
        "optimizer_is_ours": built.optimizer is opt,
    }


def attach_twice(rank: int, case: Case) -> dict[str, Any]:
    import deepspeed.runtime.engine

    import mechanic_plugins.deepspeed as plugin

    start(rank)
    hook = deepspeed.runtime.engine.DeepSpeedEngine._configure_optimizer
    plugin.install()
    engine, opt = engine_of(case)
    step = engine.optimizer.step
    plain, _ = engine_without_mechanic(case)
    return {
        "hooked_once": hook is deepspeed.runtime.engine.DeepSpeedEngine._configure_optimizer,
        "same_optimizer": plugin.attach(engine) is opt,
        "same_step": engine.optimizer.step == step,
        "of_plain": plugin.mechanic_of(plain) is None,
        "attach_plain": message(TypeError, lambda: plugin.attach(plain)),
    }


def engine_without_mechanic(case: Case) -> tuple[Any, Any]:
    network = model(case.seed)
    return engine_of(case, network=network, optimizer=torch.optim.AdamW(network.parameters()))


def message(kind: type[Exception], action: Callable[[], object]) -> str:
    try:
        action()
    except kind as error:
        return str(error)
    return "nothing was raised"


def refusal(rank: int, case: Case) -> str:
    start(rank)
    return message(ValueError, lambda: engine_of(case))


def refusal_of_params(rank: int, case: Case) -> str:
    start(rank)
    return message(TypeError, lambda: engine_of(case))


def refusal_of_muon(rank: int, case: Case) -> str:
    from mechanic_plugins import mechanize

    start(rank)
    network = nn.Linear(4, 4, bias=False)
    opt = mechanize(torch.optim.Muon(network.parameters()))
    return message(ValueError, lambda: engine_of(case, network=network, optimizer=opt))


def refusal_of_pipelines(rank: int, case: Case) -> str:
    from deepspeed.pipe import PipelineModule
    from deepspeed.utils import groups

    from mechanic_plugins import mechanize

    start(rank)
    with quiet():
        network = PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=dist.get_world_size())
    opt = mechanize(torch.optim.AdamW(network.parameters()))
    try:
        return message(ValueError, lambda: engine_of(case, network=network, optimizer=opt))
    finally:
        groups.mpu = None  # DeepSpeed keeps the pipeline for all later engines


def refusal_of_groups(rank: int, case: Case) -> str:
    start(rank)
    return message(ValueError, lambda: engine_of(case.but(options={"group": dist.group.WORLD})))


def refusal_of_clipping(rank: int, case: Case) -> str:
    start(rank)
    return message(ValueError, lambda: engine_of(case.but(options={"max_grad_norm": 1.0})))


@contextlib.contextmanager
def plugin_not_imported() -> Iterator[None]:
    """Restores DeepSpeed's own methods, so that an engine built here knows nothing of Mechanic."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    import mechanic_plugins.deepspeed  # noqa: F401

    names = ("_configure_optimizer", "_configure_basic_optimizer")
    hooked = {name: getattr(DeepSpeedEngine, name) for name in names}
    for name, method in hooked.items():
        setattr(DeepSpeedEngine, name, method.__wrapped__)
    try:
        yield
    finally:
        for name, method in hooked.items():
            setattr(DeepSpeedEngine, name, method)


def train_unattached(rank: int, case: Case) -> str:
    start(rank)

    def training() -> None:
        with plugin_not_imported():
            engine, opt = engine_of(case)
        train(engine, opt, case, range(2))

    return message(RuntimeError, training)


def attach_late(rank: int, case: Case) -> dict[str, Any]:
    """Builds an engine without the plugin and attaches it before the first step."""
    import mechanic_plugins.deepspeed as plugin

    start(rank)
    with plugin_not_imported():
        engine, opt = engine_of(case)
    plugin.attach(engine)
    return train(engine, opt, case, range(case.steps))


def step_past_the_engine(rank: int, case: Case) -> str:
    """Calls the optimizer's step() instead of the engine's."""
    start(rank)
    engine, opt = engine_of(case)
    train(engine, opt, case, range(1))
    if case.stage == 3:
        engine.optimizer._set_fp32_optimizer_param_groups()
    return message(RuntimeError, opt.step)


def peak_of_a_step(rank: int, case: Case, hidden: int) -> dict[str, float]:
    """The elements of the largest temporary tensor of a step, and of this rank's largest piece."""
    from torch.utils._python_dispatch import TorchDispatchMode

    start(rank)
    network = nn.Sequential(nn.Linear(5, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 3))
    base = base_class(case.base)(param_groups(network, case), **case.base_options)
    from mechanic_plugins import mechanize

    engine, opt = engine_of(case, network=network, optimizer=mechanize(base, **case.options))
    train(engine, opt, case, range(2))
    sizes: list[tuple[torch.dtype, int]] = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                (t.dtype, t.numel())
                for t in (out if isinstance(out, (list, tuple)) else [out])
                if isinstance(t, torch.Tensor)
            )
            return out

    conductor_step = opt.step

    def step(*args: Any) -> Any:
        with Watching():
            return conductor_step(*args)

    opt.step = step
    train(engine, opt, case, range(2, 3))
    pieces = [p.numel() for p in opt.state]
    doubles = [n for dtype, n in sizes if dtype == torch.float64]
    return {
        "largest_piece": max(pieces),
        "pieces": len(pieces),
        "largest": max((n for _, n in sizes), default=0),
        "largest_double": max(doubles, default=0),
        "all": sum(pieces),
        "deltas": [str(s["mechanic_ref"].dtype) for s in opt.state.values()] == ["torch.float32"] * len(pieces),
    }
