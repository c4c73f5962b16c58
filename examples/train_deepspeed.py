"""Train under DeepSpeed without choosing a learning rate.

    torchrun --nproc-per-node 2 examples/train_deepspeed.py --config examples/deepspeed_config.json

The config's "optimizer" is "MechanicAdamW"; the import of mechanic_plugins.deepspeed is all that this script adds to a
plain DeepSpeed one. To build the optimizer here instead, remove "optimizer" from the config and pass
`optimizer=mechanize(torch.optim.AdamW(model.parameters()))` to `deepspeed.initialize`.
"""

import argparse

import deepspeed
import torch
from torch import nn

import mechanic_plugins.deepspeed
from mechanic_plugins import MechanicOptimizer


def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in the plane, with the spiral arm that each lies on as its label."""
    arm = torch.randint(0, 3, (size,), generator=generator)
    radius = torch.rand(size, generator=generator)
    angle = 4 * radius + 2.1 * arm + 0.1 * torch.randn(size, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1), arm


def train(config: str, steps: int) -> tuple[MechanicOptimizer, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    mechanic = mechanic_plugins.deepspeed.mechanic_of(engine)
    assert mechanic is not None
    generator = torch.Generator().manual_seed(engine.global_rank)
    for step in range(1, steps + 1):
        x, arm = (t.to(engine.device) for t in batch(engine.train_micro_batch_size_per_gpu(), generator))
        loss = nn.functional.cross_entropy(engine(x), arm)
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0 and step % 50 == 0:
            print(f"step {step:4d}  loss {loss.item():.3f}  effective lr {mechanic.effective_lrs[0]:.2e}", flush=True)
    return mechanic, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/deepspeed_config.json")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--local_rank", type=int, help="what the deepspeed launcher passes")
    args = parser.parse_args()
    mechanic, loss = train(args.config, args.steps)
    if torch.distributed.get_rank() == 0:
        print(f"loss {loss:.4f}, learned learning rate {mechanic.learned_lr:.3e}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
