"""`mechanic-run` around programs that start other Python processes, and `--replace` on the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import lean
import pytest
from warm import Runner

import mechanic_plugins

TRAIN = """
import importlib, os, sys
assert "torch" not in sys.modules and "numpy" not in sys.modules
import lean; lean.leave_compiler_out()
from torch.optim import AdamW
import torch
module = importlib.import_module("torch.optim.adamw")
from mechanic_plugins import MechanicOptimizer

def is_mechanic(build, **kwargs):
    return isinstance(build([torch.ones(2, requires_grad=True)], **kwargs), MechanicOptimizer)

class Mine(torch.optim.AdamW):
    pass

p = torch.tensor([3.0, -2.0], requires_grad=True)
opt = AdamW([p], lr=1e-3)
for _ in range(20):
    p.grad = 2 * p.detach()
    opt.step()
asked = {name: is_mechanic(cls) for name, cls in {
    "from": AdamW, "module": module.AdamW, "getattr": getattr(torch.optim, "AdamW"), "subclass": Mine,
    "Adam": torch.optim.Adam,
}.items()}
print(type(opt).__name__, isinstance(opt, torch.optim.AdamW), p.tolist(), asked)
"""


def expected_weights() -> list[float]:
    import torch

    p = torch.tensor([3.0, -2.0], requires_grad=True)
    opt = mechanic_plugins.mechanize(torch.optim.AdamW([p], lr=1e-3))
    for _ in range(20):
        p.grad = 2 * p.detach()
        opt.step()
    weights: list[float] = p.tolist()
    return weights


REPLACED = {"from": True, "module": True, "getattr": True, "subclass": True, "Adam": False}


@pytest.fixture
def train(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path / "train.py"


def test_every_way_to_the_class_is_replaced(run: Runner, train: Path) -> None:
    """Also, nothing heavy is imported before the program's first line."""
    done = run("--replace", "torch.optim.AdamW", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"AdamW True {expected_weights()} {REPLACED}"
    said = done.stderr.splitlines()
    assert f"mechanic_plugins.run: torch.optim.adamw.AdamW built at {train}:17 is mechanized." in said
    assert any("train.Mine" in line or "__main__.Mine" in line for line in said)
    assert any("AdamW: Mechanic learned a learning rate of" in line for line in said)


def test_nothing_replaced_fails(run_warm: Runner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "p = torch.ones(2, requires_grad=True)\n"
        "p.grad = torch.ones(2)\n"
        "torch.optim.AdamW([p]).step()\n"
        "torch.optim.Adam([p])\n"
    )
    done = run_warm("--replace", "torch.optim.SGD", "train.py")
    assert done.returncode == 4
    assert "warning: torch.optim.adamw.AdamW makes steps without Mechanic, and no torch.optim.SGD was" in done.stderr
    assert "--replace torch.optim.SGD replaced nothing (optimizers built: Adam, AdamW)." in done.stderr


def test_a_failing_program_keeps_its_status(run: Runner, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(7)")
    assert run("--replace", "torch.optim.SGD", "fails.py").returncode == 7


WRAPPER = """
import os, subprocess, sys
sys.exit(subprocess.run([sys.executable, "train.py"], env={**os.environ, "MORE": "1"}).returncode)
"""
SITE = """
import sys
import json  # what comes here before or after the runner's must not matter
sys.their_own = True
"""


def test_a_wrapper_that_starts_the_program_and_a_sitecustomize_that_was_there(
    run: Runner, train: Path, tmp_path: Path
) -> None:
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    train.write_text(
        TRAIN
        + "import sitecustomize\n"
        + "assert sys.their_own and sitecustomize.__file__.startswith(os.getcwd())\n"
        + "assert not any('mechanic_plugins/runner' in folder for folder in sys.path)\n"
    )
    path = f"{Path(mechanic_plugins.__file__).parents[1]}:{Path(lean.__file__).parent}:{tmp_path / 'site'}"
    done = run("--replace", "torch.optim.AdamW", "wrapper.py", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == f"AdamW True {expected_weights()} {REPLACED}"


CHILDREN = """
import multiprocessing, sys, torch

def train(fails=False):
    p = torch.tensor([3.0, -2.0], requires_grad=True)
    opt = torch.optim.AdamW([p])
    for step in range(40 if not fails else 12):  # after 12 steps the rule's own warm-up is not over yet
        p.grad = 2 * p.detach() if not fails else -torch.ones(2)
        opt.step()
    if fails:
        raise RuntimeError("out of memory")

if __name__ == "__main__":
    train()
    loader = torch.utils.data.DataLoader(torch.zeros(8), num_workers=1, multiprocessing_context=sys.argv[1])
    for _ in loader:
        pass
    for fails in (False, True):
        child = multiprocessing.get_context(sys.argv[1]).Process(target=train, args=(fails,))
        child.start()
        child.join()
        print(child.exitcode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn"])
def test_children_of_multiprocessing_report_what_they_learned(run: Runner, tmp_path: Path, how: str) -> None:
    """Those made by fork used not to. A loader's workers must not repeat their parent's report.

    Those made by spawn used to report after their error was forgotten, and told its user to train for more steps.
    """
    (tmp_path / "train.py").write_text(CHILDREN)
    done = run("--replace", "torch.optim.AdamW", "train.py", how)
    assert done.stdout.split() == ["0", "1"], done.stderr
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("AdamW: Mechanic learned a learning rate of") == 3
    assert "still looking for its scale" not in done.stderr  # by the one that failed


def test_a_shell_script_is_a_program_too(run: Runner, train: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(f"#!/bin/sh\n{sys.executable} train.py\nexit $?\n")
    script.chmod(0o755)
    done = run("--replace", "torch.optim.AdamW", "train.sh")
    assert done.returncode == 0, done.stderr
    assert str(REPLACED) in done.stdout


def test_a_child_that_builds_nothing_of_that_name_fails_the_run(run: Runner, train: Path, tmp_path: Path) -> None:
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    done = run("--replace", "torch.optim.SGD", "wrapper.py")
    assert done.returncode == 4
    assert "replaced nothing (optimizers built: Adam, AdamW, Mine)" in done.stderr


def test_a_name_that_a_child_ignores_fails_the_run(run: Runner, train: Path, tmp_path: Path) -> None:
    """Only the children train; the parent has no torch."""
    (tmp_path / "wrapper.py").write_text(WRAPPER)
    done = run("wrapper.py", "--optim", "mechanic_adamw")
    assert done.returncode == 3
    assert "mechanic_adamw was asked for, but the program trained with Adam, AdamW, Mine" in done.stderr


def test_the_environment_of_another_python_is_left_alone(run: Runner, tmp_path: Path) -> None:
    """A child in another environment inherits the variable and the path, but must not get the package.

    The same environment under another path does get it, as its scripts name the path at which they were installed.
    """
    (tmp_path / "linked").symlink_to(sys.prefix)
    program = """
import os, subprocess, sys, json
plan = json.loads(os.environ["PYTHON_MECHANIC_RUN"])
def told(prefix):
    return {**os.environ, "PYTHON_MECHANIC_RUN": json.dumps({**plan, "prefix": prefix})}
child = "import sys; print('mechanic_plugins' in sys.modules)"
for variables in (os.environ, told(os.path.abspath('linked')), told('/elsewhere')):
    print(subprocess.run([sys.executable, "-c", child], env=variables, capture_output=True, text=True).stdout.strip())
"""
    (tmp_path / "parent.py").write_text(program)
    assert run("parent.py").stdout.split() == ["True", "True", "False"]
