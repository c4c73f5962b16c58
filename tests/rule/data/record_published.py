"""Records what the published Mechanic tuners do, as golden files that tests/rule/test_reference.py replays.

Run it in a throwaway environment; none of what it imports is needed by the tests:

    pip install optax jax chex torch numpy mechanic-pytorch
    python record_published.py optax              # optax.contrib.mechanize
    python record_published.py experiments FILE   # mechanic/optax/mechanic.py of google-research/google-research
    python record_published.py mechanic_pytorch   # the authors' PyTorch package, delta stored
"""

import importlib.util
import json
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np

STEPS, DIM = 40, 8
CURVATURE = np.logspace(-2, 0, DIM)
START = np.linspace(-1.0, 1.0, DIM)
S_INIT, EPS, TINY_EPS = 1e-2, 1e-8, 1e-30
PROBLEM = (
    f"{STEPS} noisy steps on a quadratic of {DIM} weights whose minimum jumps to the other side half way, base SGD "
    f"with lr 1, s_init {S_INIT}, eps {EPS}, all else default, float64"
)


def gradient(x, step, noise):
    minimum = 3.0 if step < STEPS // 2 else -3.0
    return CURVATURE * (x - minimum) + 0.3 * noise


def record_jax(module, owner, name):
    """Two runs: what the tuner did with each h, and, with an eps that vanishes, where the weights went.

    optax keeps Delta with its sign turned, so its h is minus the paper's; the file has the paper's sign. It recovers
    Delta as (x - x_ref) / (S + eps), which is Delta itself only where eps vanishes.
    """
    import jax

    jax.config.update("jax_enable_x64", True)
    seen = []
    original = getattr(owner, name)
    setattr(owner, name, lambda a, b: seen.append(original(a, b)) or seen[-1])
    states, _, _ = run_jax(module.mechanize, EPS)
    rows = [row(0.0, states[0]), *(row(-float(h), state) for h, state in zip(seen, states[1:], strict=True))]
    _, weights, gradients = run_jax(module.mechanize, TINY_EPS)
    return {"rows": rows, "weights": weights, "gradients": gradients, "eps_of_weights": TINY_EPS}


def run_jax(mechanize, eps):
    import jax
    import optax

    transform = mechanize(optax.sgd(1.0), s_init=S_INIT, eps=eps)
    x = jax.numpy.asarray(START)
    states, weights, gradients = [transform.init(x)], [START.tolist()], []
    rng = np.random.default_rng(0)
    for step in range(STEPS):
        g = gradient(np.asarray(x), step, rng.normal(size=DIM))
        updates, state = transform.update(jax.numpy.asarray(g), states[-1], x)
        x = optax.apply_updates(x, updates)
        states.append(state)
        weights.append(x.tolist())
        gradients.append(g.tolist())
    return states, weights, gradients


def row(h, state):
    vectors = {name: np.asarray(getattr(state, name), dtype=np.float64).tolist() for name in "srmv"}
    return {"h": h, **vectors}


def record_optax():
    from optax.contrib import _mechanic

    return {
        "made_with": f"optax {version('optax')}, jax {version('jax')}, python {platform.python_version()}",
        "made_by": f"optax.contrib.mechanize, its inner product recorded: {PROBLEM}",
        "betas": [1.0 - 0.1**i for i in range(1, 7)],
        **record_jax(_mechanic, _mechanic.optax.tree, "vdot"),
    }


def record_experiments(path):
    double = Path(path).with_name("mechanic_float64.py")
    double.write_text(Path(path).read_text().replace("float32", "float64"))
    spec = importlib.util.spec_from_file_location("mechanic_float64", double)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {
        "made_with": f"google-research (a copy of 2024), jax {version('jax')}, python {platform.python_version()}",
        "made_by": "mechanic/optax/mechanic.py of google-research/google-research, its float32 replaced by float64, "
        f"its inner product recorded: {PROBLEM}",
        "betas": [0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999],
        **record_jax(module, module, "tree_vdot"),
    }


def record_mechanic_pytorch():
    import torch
    from mechanic_pytorch import mechanize

    torch.set_default_dtype(torch.float64)
    seen = []
    square = torch.square
    torch.square = lambda h: seen.append(float(h)) or square(h)
    x = torch.tensor(START, requires_grad=True)
    optimizer = mechanize(torch.optim.SGD, s_init=S_INIT, eps=EPS, store_delta=True)([x], lr=1.0)
    rows, rng = [], np.random.default_rng(0)
    for step in range(STEPS):
        x.grad = torch.tensor(gradient(x.detach().numpy(), step, rng.normal(size=DIM)))
        optimizer.step()
        state = optimizer.state["_mechanic"]
        names = {"s": "s", "r": "reward", "m": "max_product", "v": "sum_squared_products"}
        rows.append({"h": seen[step], **{letter: state[name].tolist() for letter, name in names.items()}})
    assert len(seen) == STEPS
    return {
        "made_with": f"mechanic-pytorch {version('mechanic-pytorch')}, torch {torch.__version__}",
        "made_by": f"mechanic_pytorch.mechanize with store_delta=True, its inner product recorded: {PROBLEM}",
        "betas": [0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999],
        "rows": rows,
    }


def one_entry_a_line(value):
    if not isinstance(value, list) or isinstance(value[0], float):
        return json.dumps(value)
    return "[\n" + ",\n".join(json.dumps(entry) for entry in value) + "\n]"


RECORDERS = {"optax": record_optax, "experiments": record_experiments, "mechanic_pytorch": record_mechanic_pytorch}

if __name__ == "__main__":
    which, arguments = sys.argv[1], sys.argv[2:]
    golden = {**RECORDERS[which](*arguments), "s_init": S_INIT, "eps": EPS}
    lines = [f"{json.dumps(key)}: {one_entry_a_line(value)}" for key, value in golden.items()]
    name = which if which == "mechanic_pytorch" else f"{which}_mechanic"
    Path(__file__).with_name(f"{name}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
