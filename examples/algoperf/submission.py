"""AlgoPerf, self-tuning ruleset, PyTorch: NAdamW whose learning rate Mechanic learns.

    python submission_runner.py --framework=pytorch --workload=mnist --tuning_ruleset=self \
        --submission_path=path/to/examples/algoperf/submission.py --experiment_dir=runs --experiment_name=mechanic

Weight decay, betas, dropout, warm-up and cosine are those of the benchmark's own NAdamW baseline, without its learning
rate. There is nothing to tune: one run per workload. Mechanic's kernels are not used, since the rules forbid them.
"""

import torch
import torch.distributed as dist
import torch.distributed.nn as dist_nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from algoperf import spec
from mechanic_plugins import mechanize

BETAS = (1 - 0.0673, 0.9955)
WEIGHT_DECAY = 0.0812
DROPOUT = 0.1
WARMUP = 0.02

BATCH_SIZES = {
    "criteo1tb": 262_144,
    "fastmri": 32,
    "imagenet_resnet": 1024,
    "imagenet_resnet_gelu": 512,
    "imagenet_resnet_silu": 512,
    "imagenet_vit": 1024,
    "librispeech_conformer": 256,
    "librispeech_deepspeech": 256,
    "mnist": 16,
    "ogbg": 512,
    "wmt": 128,
}


def get_batch_size(workload_name):
    if workload_name not in BATCH_SIZES:
        raise ValueError(f"Unsupported workload name: {workload_name}.")
    return BATCH_SIZES[workload_name]


def init_optimizer_state(workload, model_params, model_state, hyperparameters, rng):
    base = torch.optim.NAdam(
        model_params.parameters(), betas=BETAS, weight_decay=WEIGHT_DECAY, decoupled_weight_decay=True
    )
    optimizer = mechanize(base, backend="foreach")
    warmup = max(1, int(WARMUP * workload.step_hint))
    stages = [
        LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup),
        CosineAnnealingLR(optimizer, T_max=max(1, workload.step_hint - warmup)),
    ]
    return {"optimizer": optimizer, "scheduler": SequentialLR(optimizer, stages, milestones=[warmup])}


def update_params(
    workload,
    current_param_container,
    current_params_types,
    model_state,
    hyperparameters,
    batch,
    loss_type,
    optimizer_state,
    eval_results,
    global_step,
    rng,
    train_state=None,
):
    current_param_container.train()
    optimizer = optimizer_state["optimizer"]
    optimizer.zero_grad()
    logits, model_state = workload.model_fn(
        params=current_param_container,
        augmented_and_preprocessed_input_batch=batch,
        model_state=model_state,
        mode=spec.ForwardPassMode.TRAIN,
        rng=rng,
        update_batch_norm=True,
        dropout_rate=DROPOUT,
    )
    losses = workload.loss_fn(label_batch=batch["targets"], logits_batch=logits, mask_batch=batch.get("weights"))
    total, count = losses["summed"], losses["n_valid_examples"]
    if dist.is_initialized():
        total, count = dist_nn.all_reduce(total), dist_nn.all_reduce(count)
    loss = total / count
    loss.backward()
    optimizer.step()
    optimizer_state["scheduler"].step()
    if workload.metrics_logger is not None and (global_step <= 100 or global_step % 500 == 0):
        workload.metrics_logger.append_scalar_metrics({"loss": loss.item(), **optimizer.metrics()}, global_step)
    return optimizer_state, current_param_container, model_state


def prepare_for_eval(
    workload,
    current_param_container,
    current_params_types,
    model_state,
    hyperparameters,
    loss_type,
    optimizer_state,
    eval_results,
    global_step,
    rng,
):
    return optimizer_state, current_param_container, model_state


def data_selection(
    workload,
    input_queue,
    optimizer_state,
    current_param_container,
    model_state,
    hyperparameters,
    global_step,
    rng,
):
    return next(input_queue)
