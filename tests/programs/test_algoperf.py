"""examples/algoperf on a small workload, called as AlgoPerf's runner calls a submission.

Uses the benchmark's own `algoperf.spec` if a checkout of it is on the path, and then compares its signatures too.
Otherwise a stub has the few parts that a submission uses.
"""

from __future__ import annotations

import enum
import importlib.util
import inspect
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

SUBMISSION = Path(__file__).parents[2] / "examples" / "algoperf" / "submission.py"
FUNCTIONS = ["init_optimizer_state", "update_params", "prepare_for_eval", "data_selection", "get_batch_size"]

try:
    from algoperf import spec

    HAS_ALGOPERF = True
except ImportError:
    HAS_ALGOPERF = False
    spec = types.ModuleType("algoperf.spec")
    spec.Workload = object  # type: ignore[attr-defined]
    spec.ForwardPassMode = enum.Enum("ForwardPassMode", ["TRAIN", "EVAL"])  # type: ignore[attr-defined]
    spec.LossType = enum.Enum("LossType", ["SOFTMAX_CROSS_ENTROPY"])  # type: ignore[attr-defined]


class Digits(spec.Workload):  # type: ignore[misc]
    """A workload of scikit-learn's digits, with the specified members that the runner and a submission use."""

    target_metric_name = "accuracy"
    validation_target_value = test_target_value = 0.87
    """A plain NAdam reached 0.84 at the benchmark's own rate (0.0017) and 0.89 at 0.01, averaged over three seeds."""
    loss_type = spec.LossType.SOFTMAX_CROSS_ENTROPY
    num_train_examples, num_eval_train_examples, num_validation_examples, num_test_examples = 1500, 297, 297, None
    eval_batch_size, train_mean, train_stddev = 297, 0.0, 1.0
    max_allowed_runtime_sec, eval_period_time_sec, step_hint = 60, 1, 400
    metrics_logger = None

    def __init__(self) -> None:
        super().__init__()
        images, labels = load_digits(return_X_y=True)
        self.images, self.labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)

    def has_reached_validation_target(self, eval_result: dict[str, float]) -> bool:
        return eval_result["accuracy"] > self.validation_target_value

    def has_reached_test_target(self, eval_result: dict[str, float]) -> bool:
        return self.has_reached_validation_target(eval_result)

    def is_output_params(self, param_key: str) -> bool:
        return param_key.startswith("3.")

    def _build_input_queue(
        self, data_rng: int, split: str, data_dir: str, global_batch_size: int, **_: Any
    ) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(data_rng)
        while True:
            rows = torch.randint(self.num_train_examples, (global_batch_size,), generator=generator)
            yield {"inputs": self.images[rows], "targets": self.labels[rows]}

    def init_model_fn(self, rng: int) -> tuple[nn.Module, None]:
        torch.manual_seed(rng)
        self._param_types: dict[str, Any] = {}
        return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 10)), None

    def model_fn(
        self,
        params: Any,
        augmented_and_preprocessed_input_batch: dict[str, Tensor],
        model_state: Any,
        mode: Any,
        rng: int,
        update_batch_norm: bool,
        dropout_rate: float,
    ) -> tuple[Tensor, Any]:
        params[2].p = dropout_rate
        params.train(mode is spec.ForwardPassMode.TRAIN)
        return params(augmented_and_preprocessed_input_batch["inputs"]), model_state

    def loss_fn(
        self, label_batch: Tensor, logits_batch: Tensor, mask_batch: Tensor | None = None, label_smoothing: float = 0.0
    ) -> dict[str, Tensor]:
        losses = nn.functional.cross_entropy(
            logits_batch, label_batch, reduction="none", label_smoothing=label_smoothing
        )
        return {"summed": losses.sum(), "n_valid_examples": torch.tensor(len(losses)), "per_example": losses}

    def _eval_model_on_split(self, *_: Any, params: Any, **__: Any) -> dict[str, float]:
        params.eval()
        with torch.no_grad():
            right = params(self.images[1500:]).argmax(1) == self.labels[1500:]
        return {"accuracy": right.float().mean().item()}


@pytest.fixture
def submission(monkeypatch: pytest.MonkeyPatch) -> Any:
    if not HAS_ALGOPERF:
        package = types.ModuleType("algoperf")
        package.spec = spec  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "algoperf", package)
    module_spec = importlib.util.spec_from_file_location("submission", SUBMISSION)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def test_it_reaches_the_target_within_the_hinted_steps(submission: Any) -> None:
    workload = Digits()
    queue = workload._build_input_queue(0, "train", "", global_batch_size=submission.get_batch_size("mnist"))
    model, model_state = workload.init_model_fn(0)
    state = submission.init_optimizer_state(workload, model, model_state, None, 0)
    for step in range(workload.step_hint):
        batch = submission.data_selection(workload, queue, state, model, model_state, None, step, 0)
        state, model, model_state = submission.update_params(
            workload=workload,
            current_param_container=model,
            current_params_types={},
            model_state=model_state,
            hyperparameters=None,
            batch=batch,
            loss_type=workload.loss_type,
            optimizer_state=state,
            eval_results=[],
            global_step=step,
            rng=step,
            train_state=types.MappingProxyType({}),
        )
    result = (workload, model, {}, model_state, None, workload.loss_type, state, [], workload.step_hint, 0)
    state, model, model_state = submission.prepare_for_eval(*result)
    assert workload.has_reached_validation_target(workload._eval_model_on_split("validation", params=model))
    assert state["optimizer"].metrics()["mechanic/steps"] == workload.step_hint
    assert 1e-4 < state["optimizer"].learned_lr < 1


def test_unknown_workloads_are_refused(submission: Any) -> None:
    with pytest.raises(ValueError, match="nonesuch"):
        submission.get_batch_size("nonesuch")


@pytest.mark.skipif(not HAS_ALGOPERF, reason="needs a checkout of mlcommons/algorithmic-efficiency on the path")
def test_the_signatures_are_those_of_the_benchmark(submission: Any) -> None:
    names = {
        name: [list(inspect.signature(getattr(m, name)).parameters) for m in (submission, spec)] for name in FUNCTIONS
    }
    assert {name: ours for name, (ours, _) in names.items()} == {name: theirs for name, (_, theirs) in names.items()}
