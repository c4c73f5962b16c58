"""Imports between the package's layers go only one way."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import mechanic_plugins
from mechanic_plugins import MechanicOptimizer

PACKAGE = Path(mechanic_plugins.__file__).parent
sys.path.insert(0, str(PACKAGE.parent / "docs"))
layers = importlib.import_module("layers")

LEVEL_OF = {name: level for level, names in enumerate(layers.LAYERS.values()) for name in names}
FILES = {".".join(path.relative_to(PACKAGE).with_suffix("").parts): path for path in PACKAGE.rglob("*.py")}
FILES = {module.removesuffix(".__init__"): path for module, path in FILES.items()}
MODULES = sorted(FILES)

FRAMEWORKS = [
    "accelerate",
    "datasets",
    "deepspeed",
    "lightning",
    "matplotlib",
    "megatron",
    "numpy.testing",
    "peft",
    "pytorch_lightning",
    "scipy",
    "sklearn",
    "tqdm",
    "transformers",
    "triton",
]


def level_of(module: str) -> int:
    return LEVEL_OF[module.partition(".")[0]]


def imported_by(module: str) -> set[str]:
    """The package's own modules that this one imports."""
    names = layers.imports_of(FILES[module])
    return {name if name in MODULES else name.rpartition(".")[0] or "__init__" for name in names}


def test_every_module_has_a_layer() -> None:
    assert [module for module in MODULES if module.partition(".")[0] not in LEVEL_OF] == []


def test_imports_point_to_lower_layers() -> None:
    arrows = [(module, name) for module in MODULES for name in imported_by(module)]
    assert [(module, name) for module, name in arrows if level_of(name) > level_of(module)] == []


def test_the_drawing_is_that_of_today() -> None:
    page = layers.PAGE.read_text()
    assert layers.with_drawing(page) == page, "python docs/layers.py"


def test_imports_within_a_layer_do_not_go_in_circles() -> None:
    graph = {
        module: {name for name in imported_by(module) if level_of(name) == level_of(module)} - {module}
        for module in MODULES
    }
    graphlib.TopologicalSorter(graph).prepare()


def test_no_relative_imports_hide_from_the_tests_above() -> None:
    relative = [
        module
        for module in MODULES
        for node in ast.walk(ast.parse(FILES[module].read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


def test_kernels_have_no_chained_booleans() -> None:
    """The Triton of torch 2.6 and 2.7, which the tests do not run with, cannot compile `a or b or c`."""
    chained = [
        f"{module}:{node.lineno}"
        for module in MODULES
        for function in ast.walk(ast.parse(FILES[module].read_text()))
        if isinstance(function, ast.FunctionDef) and "triton.jit" in map(ast.unparse, function.decorator_list)
        for node in ast.walk(function)
        if isinstance(node, ast.BoolOp) and len(node.values) > 2
    ]
    assert not chained


def test_the_maths_knows_no_optimizer_and_no_distribution() -> None:
    for module in (name for name in MODULES if name.startswith("rule")):
        tree = ast.parse(FILES[module].read_text())
        names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        names |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        assert not [name for name in names if str(name).startswith(("torch.distributed", "torch.optim"))]


@pytest.mark.slow
def test_importing_and_training_load_no_framework() -> None:
    """Each would take a second of start-up, and a broken one must not break users who do not need it."""
    program = """
import json, sys
import torch

p = torch.ones(3, requires_grad=True)

def train(opt):
    for _ in range(3):
        p.grad = p.detach().clone()
        opt.step()
    opt.load_state_dict(opt.state_dict())

train(torch.optim.AdamW([p]))  # torch loads triton by itself in the first step
before = set(sys.modules)
import mechanic_plugins
train(mechanic_plugins.mechanize(torch.optim.AdamW([p])))
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    run = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=120)
    loaded = json.loads(run.stdout)
    assert "mechanic_plugins.optimizer" in loaded
    assert not [name for name in loaded if name in FRAMEWORKS or name.split(".")[0] in FRAMEWORKS]


OVERRIDES = ["step", "state_dict", "load_state_dict", "add_param_group", "zero_grad"]


@pytest.mark.parametrize("name", OVERRIDES)
def test_overrides_keep_torchs_parameter_names(name: str) -> None:
    """torch.distributed.checkpoint calls load_state_dict(state_dict=...), where another name is a TypeError."""
    torchs = inspect.signature(getattr(torch.optim.Optimizer, name)).parameters
    ours = inspect.signature(getattr(MechanicOptimizer, name)).parameters
    assert [(p.name, p.kind, p.default) for p in torchs.values()] == [
        (p.name, p.kind, p.default) for p in ours.values()
    ]


def test_torch_has_no_method_that_reaches_past_the_wrapper() -> None:
    """Methods that we do not override must work with delegated groups and state, so new ones in torch need a review."""
    known = {"OptimizerPreHook", "OptimizerPostHook", "profile_hook_step"} | {
        f"register_{what}_hook"
        for what in (
            "step_pre",
            "step_post",
            "state_dict_pre",
            "state_dict_post",
            "load_state_dict_pre",
            "load_state_dict_post",
        )
    }
    public = {name for name in vars(torch.optim.Optimizer) if not name.startswith("_")}
    assert public - known == set(OVERRIDES)


def test_the_base_is_never_an_attribute_called_optimizer() -> None:
    """Lightning's LearningRateMonitor unwraps that name."""
    opt = mechanic_plugins.mechanize(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    assert not hasattr(opt, "optimizer")


@pytest.mark.slow
def test_the_package_loads_torch_with_the_first_name_that_needs_it() -> None:
    """A script under `mechanic-run` may set up threads or devices before it imports torch."""
    program = """
import sys
import mechanic_plugins, mechanic_plugins.run
assert "torch" not in sys.modules
names = ["MechanicOptimizer", "Mechanized", "Settings", "demechanize", "mechanize", "unwrap"]
assert mechanic_plugins.__all__ == names and set(names) <= set(dir(mechanic_plugins))
assert "torch" not in sys.modules
from mechanic_plugins import *
assert "torch" in sys.modules and mechanic_plugins.mechanize is mechanize
assert issubclass(mechanic_plugins.Mechanized, mechanic_plugins.MechanicOptimizer)
try:
    mechanic_plugins.mechanise
except AttributeError as error:
    assert "'mechanic_plugins' has no attribute 'mechanise'" in str(error)
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
