"""Quick starts of pip-installable programs, each with its own default learning rate, run by `quality.py`.

`python tests/programs/quick_starts.py NAME 0.1:0 1:0` prints a line of JSON for each factor and seed. The factor
multiplies the rate of the quick start; under `mechanic-run --replace ...` it makes no difference. Models and rates are
from each program's own documentation. The data are generated or part of a package, so nothing is fetched.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader, TensorDataset

HIGHER, LOWER = "higher", "lower"


class QuickStart(NamedTuple):
    """A program with its default learning rate and its measure."""

    train: Callable[[float], float]
    """Trains with this learning rate and returns the measure."""
    measure: str
    better: str
    lr: float
    optimizer: str
    seeds: int


QUICK_STARTS: dict[str, QuickStart] = {}


def quick_start(name: str, measure: str, better: str, lr: float, optimizer: str = "Adam", seeds: int = 2) -> Any:
    def enter(train: Callable[[float], float]) -> Callable[[float], float]:
        QUICK_STARTS[name] = QuickStart(train, measure, better, lr, optimizer, seeds)
        return train

    return enter


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pictures of 8 x 8 with values from 0 to 1 and their classes, for training and then for validation."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    x, y = load_digits(return_X_y=True)
    x, valid_x, y, valid_y = train_test_split(x.astype("float32") / 16, y, test_size=0.2, random_state=0, stratify=y)
    return torch.tensor(x), torch.tensor(y), torch.tensor(valid_x), torch.tensor(valid_y)


def reward(model: Any) -> float:
    from stable_baselines3.common.evaluation import evaluate_policy

    env = model.get_env()
    env.seed(1000)
    return float(evaluate_policy(model, env, n_eval_episodes=20)[0])


@quick_start("SB3 PPO, CartPole", "reward", HIGHER, 3e-4, seeds=3)
def ppo(lr: float) -> float:
    from stable_baselines3 import PPO

    model = PPO("MlpPolicy", "CartPole-v1", learning_rate=lr, seed=torch.initial_seed(), device="cpu")
    return reward(model.learn(total_timesteps=25_000))


@quick_start("SB3 SAC, Pendulum", "reward", HIGHER, 3e-4, seeds=3)
def sac(lr: float) -> float:
    from stable_baselines3 import SAC

    model = SAC("MlpPolicy", "Pendulum-v1", learning_rate=lr, seed=torch.initial_seed(), device="cpu")
    return reward(model.learn(total_timesteps=3_000))


@quick_start("SB3 A2C, CartPole", "reward", HIGHER, 7e-4, optimizer="RMSprop", seeds=3)
def a2c(lr: float) -> float:
    from stable_baselines3 import A2C

    model = A2C("MlpPolicy", "CartPole-v1", learning_rate=lr, seed=torch.initial_seed(), device="cpu")
    return reward(model.learn(total_timesteps=25_000))


def tabular(lr: float, epochs: int) -> float:
    import pandas as pd
    from fastai.optimizer import OptimWrapper
    from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, accuracy, tabular_learner

    x, y, valid_x, valid_y = digits()
    table = pd.DataFrame(torch.cat([x, valid_x]).numpy()).add_prefix("x")
    names = list(table.columns)
    table["y"] = torch.cat([y, valid_y]).numpy().astype(str)
    data = TabularDataLoaders.from_df(
        table,
        procs=[Categorify, Normalize],
        cont_names=names,
        y_names="y",
        valid_idx=list(range(len(x), len(table))),
        bs=56,
    )
    adam = functools.partial(OptimWrapper, opt=torch.optim.Adam)
    learner = tabular_learner(data, metrics=accuracy, lr=lr, opt_func=adam)
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(epochs)
    return float(learner.validate()[1])


@quick_start("fastai tabular, 75 steps", "accuracy", HIGHER, 1e-3, seeds=5)
def fastai_short(lr: float) -> float:
    return tabular(lr, epochs=3)


@quick_start("fastai tabular, 375 steps", "accuracy", HIGHER, 1e-3, seeds=3)
def fastai_long(lr: float) -> float:
    return tabular(lr, epochs=15)


@quick_start("skorch", "accuracy", HIGHER, 0.1, optimizer="SGD", seeds=10)
def skorch(lr: float) -> float:
    from sklearn.datasets import make_classification
    from skorch import NeuralNetClassifier

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(20, 10), nn.ReLU(), nn.Dropout(0.5), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 2)
            )

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).softmax(-1)

    x, y = make_classification(1000, 20, n_informative=10, random_state=0)
    net = NeuralNetClassifier(Module, max_epochs=10, lr=lr, iterator_train__shuffle=True, verbose=0)
    net.fit(x.astype(np.float32), y.astype(np.int64))
    return float(net.history[-1]["valid_acc"])


def gaussian_process(lr: float, steps: int) -> float:
    import gpytorch

    class Model(gpytorch.models.ExactGP):
        def __init__(self, x: Tensor, y: Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    def noisy(x: Tensor) -> Tensor:
        return torch.sin(x * 2 * torch.pi) + 0.2 * torch.randn(x.shape)

    x, new = torch.linspace(0, 1, 100), torch.rand(500)
    y, new_y = noisy(x), noisy(new)
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Model(x, y, likelihood)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -marginal(model(x), y)
        loss.backward()
        optimizer.step()
    model.eval()
    likelihood.eval()
    with torch.no_grad():
        predicted = likelihood(model(new))
        return float(gpytorch.metrics.negative_log_predictive_density(predicted, new_y))


@quick_start("gpytorch, 50 steps", "negative log density", LOWER, 0.1, seeds=5)
def gpytorch_short(lr: float) -> float:
    return gaussian_process(lr, 50)


@quick_start("gpytorch, 300 steps", "negative log density", LOWER, 0.1, seeds=5)
def gpytorch_long(lr: float) -> float:
    return gaussian_process(lr, 300)


@quick_start("PyG GCN", "accuracy", HIGHER, 0.01)
def graph(lr: float) -> float:
    """Seven classes of papers as in Cora, with four links each, mostly within the class, and 18 of 1,433 words each."""
    from torch_geometric.nn import GCNConv
    from torch_geometric.utils import stochastic_blockmodel_graph

    class GCN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1, self.conv2 = GCNConv(1433, 16), GCNConv(16, 7)

        def forward(self, x: Tensor, links: Tensor) -> Tensor:
            x = nn.functional.relu(self.conv1(x, links))
            x = nn.functional.dropout(x, training=self.training)
            return self.conv2(x, links).log_softmax(1)

    size, inside, across = 387, 3.2 / 387, 0.8 / (6 * 387)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        links = stochastic_blockmodel_graph([size] * 7, torch.eye(7) * (inside - across) + across)
        y = torch.arange(7).repeat_interleave(size)
        topics = torch.distributions.Dirichlet(torch.full((7, 1433), 0.1)).sample()
        mixed = 0.25 * topics[y] + 0.75 / 1433
        x = torch.zeros(7 * size, 1433).scatter_(1, mixed.multinomial(18), 1 / 18)
        order = torch.randperm(7 * size)
    train = torch.cat([order[y[order] == label][:20] for label in range(7)])
    test = order[~torch.isin(order, train)][:1000]
    model = GCN()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, weight_decay=5e-4)
    model.train()
    for _ in range(200):
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(x, links)[train], y[train])
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return float((model(x, links).argmax(1)[test] == y[test]).float().mean())


@quick_start("pytorch-tabnet", "accuracy", HIGHER, 0.02)
def tabnet(lr: float) -> float:
    from pytorch_tabnet.tab_model import TabNetClassifier
    from sklearn.datasets import make_classification

    x, y = make_classification(6000, 20, n_informative=10, n_classes=4, random_state=0)
    model = TabNetClassifier(optimizer_params={"lr": lr}, seed=torch.initial_seed(), verbose=0, device_name="cpu")
    model.fit(x[:5000], y[:5000], eval_set=[(x[5000:], y[5000:])], max_epochs=50)
    return float(model.best_cost)


@quick_start("darts N-BEATS", "MAPE", LOWER, 1e-3)
def darts(lr: float) -> float:
    from darts.metrics import mape
    from darts.models import NBEATSModel
    from darts.utils import timeseries_generation as generated

    with numpy_seed(0):
        months = {"length": 144, "freq": "MS"}
        series = (
            generated.linear_timeseries(start_value=0.2, end_value=0.8, **months)
            + generated.sine_timeseries(value_frequency=1 / 12, value_amplitude=0.1, **months)
            + generated.gaussian_timeseries(std=0.02, **months)
        ).astype(np.float32)
    past, future = series[:-36], series[-36:]
    model = NBEATSModel(
        input_chunk_length=24,
        output_chunk_length=12,
        optimizer_kwargs={"lr": lr},
        random_state=torch.initial_seed(),
        pl_trainer_kwargs={**QUIET, "accelerator": "cpu"},
    )
    model.fit(past, epochs=50)
    return float(mape(future, model.predict(36)))


QUIET = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}


@contextlib.contextmanager
def numpy_seed(seed: int) -> Any:
    state = np.random.get_state()  # noqa: NPY002
    np.random.seed(seed)  # noqa: NPY002
    yield
    np.random.set_state(state)  # noqa: NPY002


@quick_start("scvi-tools", "validation ELBO", HIGHER, 1e-3)
def scvi(lr: float) -> float:
    import scvi

    with numpy_seed(0):
        cells = scvi.data.synthetic_iid()
    scvi.settings.seed = torch.initial_seed()
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells)
    quiet = {key: value for key, value in QUIET.items() if key != "enable_progress_bar"}
    model.train(100, accelerator="cpu", plan_kwargs={"lr": lr}, enable_progress_bar=False, **quiet)
    return float(model.get_elbo(indices=model.validation_indices))


@quick_start("pyro SVI, regression", "ELBO loss", LOWER, 0.03)
def pyro_regression(lr: float) -> float:
    """Pyro's own optimizer has one of torch's for each parameter."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoDiagonalNormal
    from pyro.nn import PyroModule, PyroSample
    from sklearn.datasets import load_diabetes

    class Regression(PyroModule):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = PyroModule[nn.Linear](width, 1)
            self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, width]).to_event(2))
            self.linear.bias = PyroSample(dist.Normal(0.0, 10.0).expand([1]).to_event(1))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            sigma = pyro.sample("sigma", dist.Uniform(0.0, 10.0))
            mean = self.linear(x).squeeze(-1)
            with pyro.plate("data", len(x)):
                pyro.sample("obs", dist.Normal(mean, sigma), obs=y)
            return mean

    table, target = (torch.tensor(each, dtype=torch.float32) for each in load_diabetes(return_X_y=True))
    x, y = (table - table.mean(0)) / table.std(0), (target - target.mean()) / target.std()
    pyro.clear_param_store()
    model = Regression(10)
    guide = AutoDiagonalNormal(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": lr}), loss=Trace_ELBO())
    for _ in range(1500):
        svi.step(x, y)
    torch.manual_seed(0)
    return float(Trace_ELBO(num_particles=200).loss(model, guide, x, y)) / len(x)


@quick_start("pyro VAE, digits", "ELBO loss", LOWER, 1e-3)
def pyro_vae(lr: float) -> float:
    """Uses torch's optimizer, as in Pyro's documentation."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import Trace_ELBO

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.mean, self.scale = nn.Linear(64, 400), nn.Linear(400, 20), nn.Linear(400, 20)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = nn.functional.softplus(self.hidden(x))
            return self.mean(hidden), self.scale(hidden).exp()

    class VAE(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()
            self.decoder = nn.Sequential(nn.Linear(20, 400), nn.Softplus(), nn.Linear(400, 64), nn.Sigmoid())

        def model(self, x: Tensor) -> None:
            pyro.module("decoder", self.decoder)
            with pyro.plate("data", len(x)):
                z = pyro.sample("latent", dist.Normal(torch.zeros(len(x), 20), 1.0).to_event(1))
                pyro.sample("obs", dist.Bernoulli(self.decoder(z), validate_args=False).to_event(1), obs=x)

        def guide(self, x: Tensor) -> None:
            pyro.module("encoder", self.encoder)
            with pyro.plate("data", len(x)):
                mean, scale = self.encoder(x)
                pyro.sample("latent", dist.Normal(mean, scale).to_event(1))

    pyro.clear_param_store()
    x, _, valid, _ = digits()
    vae = VAE()
    loss = Trace_ELBO()(vae.model, vae.guide)
    optimizer = torch.optim.Adam(vae.parameters(), lr=lr)
    for _ in range(30):
        for (batch,) in DataLoader(TensorDataset(x), batch_size=64, shuffle=True):
            optimizer.zero_grad()
            loss(batch).div(len(batch)).backward()
            optimizer.step()
    with torch.no_grad():
        return float(loss(valid)) / len(valid)


@quick_start("Lightning autoencoder", "validation loss", LOWER, 1e-3, seeds=3)
def autoencoder(lr: float) -> float:
    import lightning

    class LitAutoEncoder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
            self.decoder = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 64))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return nn.functional.mse_loss(self.decoder(self.encoder(batch[0])), batch[0])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=lr)

    x, _, valid, _ = digits()
    model = LitAutoEncoder()
    trainer = lightning.Trainer(max_epochs=20, accelerator="cpu", **QUIET)
    trainer.fit(model, DataLoader(TensorDataset(x), batch_size=32, shuffle=True))
    with torch.no_grad():
        return float(model.training_step([valid], 0))


@quick_start("sbi NPE", "validation loss", LOWER, 5e-4)
def posterior(lr: float) -> float:
    from sbi.inference import NPE
    from sbi.utils import BoxUniform

    prior = BoxUniform(-2 * torch.ones(3), 2 * torch.ones(3))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theta = prior.sample((2000,))
        x = theta + 1 + 0.1 * torch.randn_like(theta)
    inference = NPE(prior, show_progress_bars=False)
    inference.append_simulations(theta, x).train(learning_rate=lr, max_num_epochs=100)
    return float(inference.summary["best_validation_loss"][-1])


@quick_start("deepxde, Poisson", "relative error", LOWER, 1e-3, seeds=4)
def physics(lr: float) -> float:
    import deepxde

    def solution(x: Any) -> Any:
        return np.sin(np.pi * x)

    def equation(x: Tensor, y: Tensor) -> Tensor:
        return -deepxde.grad.hessian(y, x) - torch.pi**2 * torch.sin(torch.pi * x)

    deepxde.config.set_random_seed(torch.initial_seed())
    line = deepxde.geometry.Interval(-1, 1)
    border = deepxde.icbc.DirichletBC(line, solution, lambda _, on_boundary: on_boundary)
    data = deepxde.data.PDE(line, equation, border, 16, 2, solution=solution, num_test=100)
    model = deepxde.Model(data, deepxde.nn.FNN([1, 50, 50, 50, 1], "tanh", "Glorot uniform"))
    model.compile("adam", lr=lr, metrics=["l2 relative error"], verbose=0)
    model.train(iterations=3000, verbose=0, display_every=3000)
    points = np.linspace(-1, 1, 200)[:, None]
    return float(deepxde.metrics.l2_relative_error(solution(points), model.predict(points)))


@quick_start("neuralforecast N-HiTS", "MAPE", LOWER, 1e-3)
def passengers(lr: float) -> float:
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS
    from neuralforecast.utils import AirPassengersDF

    model = NHITS(
        h=12,
        input_size=24,
        max_steps=100,
        learning_rate=lr,
        random_seed=torch.initial_seed(),
        accelerator="cpu",
        **QUIET,
    )
    forecast = NeuralForecast(models=[model], freq="ME")
    forecast.fit(AirPassengersDF[:-12])
    real = AirPassengersDF["y"].to_numpy()[-12:]
    return 100 * float(np.mean(np.abs(forecast.predict()["NHITS"].to_numpy() / real - 1)))


@quick_start("PyKEEN TransE, Nations", "mean reciprocal rank", HIGHER, 1e-3)
def knowledge(lr: float) -> float:
    from pykeen.pipeline import pipeline

    result = pipeline(
        dataset="nations",
        model="transe",
        optimizer_kwargs={"lr": lr},
        training_kwargs={"num_epochs": 100, "use_tqdm": False, "use_tqdm_batch": False},
        evaluation_kwargs={"use_tqdm": False},
        random_seed=torch.initial_seed(),
        device="cpu",
    )
    return float(result.get_metric("mean_reciprocal_rank"))


@quick_start("MONAI UNet, segmentation", "Dice loss", LOWER, 1e-3)
def segmentation(lr: float) -> float:
    from monai.data import create_test_image_2d
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    pairs = [create_test_image_2d(64, 64, num_seg_classes=1, random_state=np.random.RandomState(i)) for i in range(60)]
    x, y = (torch.tensor(np.stack(each), dtype=torch.float32)[:, None] for each in zip(*pairs, strict=True))
    model, loss = UNet(2, 1, 1, (8, 16, 32, 64), (2, 2, 2), num_res_units=2), DiceLoss(sigmoid=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(150):
        rows = torch.randint(48, (4,))
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return float(loss(model(x[48:]), y[48:]))


@quick_start("diffusers UNet2D, digits", "denoising loss", LOWER, 1e-4, optimizer="AdamW")
def diffusion(lr: float) -> float:
    """The unconditional example of diffusers, smaller, without its schedule."""
    from diffusers import DDPMScheduler, UNet2DModel

    train, _, valid, _ = digits()
    blocks = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    model = UNet2DModel(8, 1, 1, layers_per_block=1, block_out_channels=(32, 64), norm_num_groups=8, **blocks)
    noises = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def loss(flat: Tensor) -> Tensor:
        x = flat.view(-1, 1, 8, 8) * 2 - 1
        noise, times = torch.randn(x.shape), torch.randint(0, 1000, (len(x),))
        return nn.functional.mse_loss(model(noises.add_noise(x, noise, times), times).sample, noise)

    for _ in range(300):
        optimizer.zero_grad()
        loss(train[torch.randint(len(train), (32,))]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    torch.manual_seed(0)
    with torch.no_grad():
        return float(sum(loss(valid) for _ in range(5))) / 5


@quick_start("ignite, digits", "validation loss", LOWER, 0.01, optimizer="SGD")
def ignite(lr: float) -> float:
    """Ignite's MNIST example on smaller pictures: its convolutions, dropout and SGD."""
    from ignite.engine import create_supervised_trainer

    x, y, valid_x, valid_y = digits()
    layers = nn.Conv2d(1, 10, 3), nn.ReLU(), nn.Conv2d(10, 20, 3), nn.ReLU(), nn.Flatten()
    model = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), *layers, nn.Linear(320, 50), nn.ReLU(), nn.Dropout(), nn.Linear(50, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    loss = nn.CrossEntropyLoss()
    loader = DataLoader(TensorDataset(x, y), batch_size=64, shuffle=True)
    create_supervised_trainer(model, optimizer, loss).run(loader, max_epochs=10)
    model.eval()
    with torch.no_grad():
        return float(loss(model(valid_x), valid_y))


class Watch:
    """Records what the optimizers of a run did: those that Mechanic wraps, or otherwise all."""

    def __init__(self) -> None:
        self.steps: dict[Any, int] = {}
        self.lrs: dict[Any, dict[int, float]] = {}

    def __call__(self, optimizer: Any, *_: Any) -> None:
        step = self.steps[optimizer] = self.steps.get(optimizer, 0) + 1
        if hasattr(optimizer, "effective_lrs") and str(step).rstrip("0") in ("1", "2", "5"):
            self.lrs.setdefault(optimizer, {})[step] = digits_of(optimizer.effective_lrs[0])

    def record(self) -> dict[str, Any]:
        mechanics = [each for each in self.steps if hasattr(each, "learned_lr")]
        return {
            "steps": max(self.steps[each] for each in mechanics or self.steps),
            "mechanic": bool(mechanics),
            "learned_lrs": [digits_of(each.learned_lr) for each in mechanics],
            "effective_lrs": [self.lrs[each] for each in mechanics],
        }


def digits_of(number: float) -> float:
    return float(f"{number:.4g}")


def run(name: str, seed: int, factor: float) -> dict[str, Any]:
    program, watch = QUICK_STARTS[name], Watch()
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002
    torch.manual_seed(seed)
    handle = register_optimizer_step_post_hook(watch)
    start = time.perf_counter()
    try:
        value = program.train(program.lr * factor)
    except (ValueError, RuntimeError, ArithmeticError) as error:  # from a rate far too high
        if not watch.steps:
            raise
        print(f"{name}, seed {seed}, rate x {factor}: {error!r}", file=sys.stderr)
        value = float("nan")
    handle.remove()
    seconds = round(time.perf_counter() - start, 1)
    return {
        "program": name,
        "seed": seed,
        "factor": factor,
        "value": digits_of(value),
        "seconds": seconds,
        **watch.record(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=QUICK_STARTS)
    parser.add_argument("runs", nargs="*", default=["1:0"], metavar="FACTOR:SEED")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    printed, sys.stdout = sys.stdout, sys.stderr  # the programs print a lot
    os.chdir(tempfile.mkdtemp())  # some write files
    for each in args.runs:
        factor, _, seed = each.partition(":")
        print(json.dumps(run(args.name, int(seed), float(factor))), file=printed, flush=True)


if __name__ == "__main__":
    main()
