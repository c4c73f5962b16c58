"""A small GPT on bytes of text, its weights sharded over processes by FSDP2, with Mechanic.

    torchrun --standalone --nproc-per-node=2 examples/train_fsdp2.py        # on one machine
    torchrun --nnodes=2 --nproc-per-node=8 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 \
        examples/train_fsdp2.py --parallel hsdp --replicas 2                # on each of two, HOST being one of them

Mechanic is the one line with `mechanize` in it and needs no knowledge of the sharding. When started again, the run
resumes from its last checkpoint, even on another number of processes or with another `--parallel`. `--out` must be on
a disk that all machines share. Without a GPU it runs on the CPU.

`torchrun --max-restarts=3` restarts it when a process dies. Then also set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1:
otherwise the new processes look for the dead ones (https://github.com/pytorch/pytorch/issues/135712).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.optim.lr_scheduler import LambdaLR

from mechanic_plugins import MechanicOptimizer, mechanize

# ---------------------------------------------------------------- the model


class Block(nn.Module):
    """Attention followed by an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)  # head by head, so that tensor parallelism can split it
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (-1, 3, self.head_width)).transpose(1, 2)
        q, k, v = heads.unbind(-2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self, *, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, batch: Tensor) -> Tensor:
        """The mean loss of predicting each byte from those before it."""
        inputs, targets = batch[:, :-1], batch[:, 1:]
        x = self.tokens(inputs) + self.positions(torch.arange(inputs.shape[1], device=batch.device)[None])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


# ---------------------------------------------------------------- sharding over the processes


def spread(model: GPT, args: argparse.Namespace, device: torch.device) -> None:
    """Shards the model in place: every parameter becomes a DTensor."""
    world = dist.get_world_size()
    if args.parallel == "tp":  # neighbours share each layer's work; the groups of neighbours share the batch
        mesh = init_device_mesh(device.type, (world // args.tp, args.tp), mesh_dim_names=("data", "tensor"))
        cut_layers(model, mesh["tensor"])
        mesh = mesh["data"]
    elif args.parallel == "hsdp":  # sharded among neighbours, replicated across the groups of them
        shape = (args.replicas, world // args.replicas)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("data",))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if args.bf16 else MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def cut_layers(model: GPT, mesh: DeviceMesh) -> None:
    """Applies tensor parallelism; between layers, each process holds a part of the sequence (dimension 1)."""
    gather, scatter = ColwiseParallel(input_layouts=Shard(1)), RowwiseParallel(output_layouts=Shard(1))
    layers = {"norm1": SequenceParallel(), "qkv": gather, "out": scatter}
    layers |= {"norm2": SequenceParallel(), "up": gather, "down": scatter}
    for block in model.blocks:
        parallelize_module(block, mesh, layers)
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    ends = {"tokens": embedding, "positions": embedding, "norm": SequenceParallel(), "head": head}
    parallelize_module(model, mesh, ends)


# ---------------------------------------------------------------- the data


def read_text(path: Path | None) -> Tensor:
    """The file's bytes, or the source of Python's standard library by default."""
    files = [path] if path else sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batch_of(step: int, text: Tensor, args: argparse.Namespace) -> Tensor:
    """This process's part of a step's batch.

    The batch depends only on step and seed: neither a restart nor another number of processes changes it.
    """
    generator = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
    starts = torch.randint(len(text) - args.context, (args.batch,), generator=generator)
    part, parts = dist.get_rank() // args.tp, dist.get_world_size() // args.tp
    return torch.stack([text[i : i + args.context + 1] for i in starts.chunk(parts)[part].tolist()]).long()


# ---------------------------------------------------------------- checkpoints


class Checkpoints:
    """Keeps the last two folders `step-00000100`. A folder gets that name only once it is complete."""

    def __init__(self, folder: Path, model: nn.Module, optimizer: MechanicOptimizer, scheduler: LambdaLR) -> None:
        self.folder, self.model, self.optimizer, self.scheduler = folder, model, optimizer, scheduler

    def save(self, step: int) -> None:
        """Writes under another name, then renames: a run killed in between keeps its last checkpoint."""
        partial = self.folder / f"partial-{step:08}"
        dcp.save(self._state(), checkpoint_id=partial)  # returns when every process has written its shards
        if dist.get_rank() == 0:
            partial.rename(self.folder / f"step-{step:08}")
            for old in self._finished()[:-2]:
                shutil.rmtree(old)

    def resume(self) -> int:
        """Loads the last complete checkpoint, if any. Returns the number of completed steps."""
        latest = [self._tidied()[-1:] if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(latest)
        if not latest[0]:
            return 0
        state, folder = self._state(), latest[0][0]
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        return int(folder.name.removeprefix("step-"))

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def _finished(self) -> list[Path]:
        return sorted(self.folder.glob("step-*"))

    def _tidied(self) -> list[Path]:
        """Removes what an interrupted save left, and returns the complete checkpoints."""
        for partial in self.folder.glob("partial-*"):
            shutil.rmtree(partial)
        return self._finished()


# ---------------------------------------------------------------- training


def factor(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, then a cosine to 0."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    return 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / max(1, args.steps - args.warmup)))


def train_step(model: nn.Module, optimizer: MechanicOptimizer, batch: Tensor, args: argparse.Namespace) -> Tensor:
    loss = model(batch)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), args.clip)
    optimizer.step()
    return loss.detach()


def open_log(path: Path, step: int) -> TextIO:
    """Opens the log without the lines that a killed run wrote after its last checkpoint: those steps are repeated."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    path.write_text("".join(line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step))
    return path.open("a")


def report(step: int, loss: Tensor, optimizer: MechanicOptimizer, log: TextIO | None) -> None:
    dist.all_reduce(loss)
    entry = {
        "step": step,
        "loss": loss.item() / dist.get_world_size(),
        "scale": optimizer.scale.item(),
        "effective_lr": optimizer.effective_lrs[0],
    }
    if log:
        shown = "step {step:6}  loss {loss:.4f}  scale {scale:.2e}  effective lr {effective_lr:.2e}"
        print(shown.format(**entry), flush=True)
        print(json.dumps(entry), file=log, flush=True)


def train(args: argparse.Namespace, device: torch.device) -> None:
    check(args)
    args.out.mkdir(parents=True, exist_ok=True)
    text = read_text(args.text)
    torch.manual_seed(args.seed)  # same weights on every process before sharding
    model = GPT(layers=args.layers, width=args.width, heads=args.heads, context=args.context).to(device)
    spread(model, args, device)

    base = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer = mechanize(base)

    scheduler = LambdaLR(optimizer, lambda step: factor(step, args))
    checkpoints = Checkpoints(args.out / "checkpoints", model, optimizer, scheduler)
    done = checkpoints.resume()
    log = open_log(args.out / "log.jsonl", done) if dist.get_rank() == 0 else None
    if log and done:
        print(f"resumed after step {done}", flush=True)

    for step in range(done + 1, args.steps + 1):
        loss = train_step(model, optimizer, batch_of(step, text, args).to(device), args)
        scheduler.step()
        if step % args.log_every == 0 or step == args.steps:
            report(step, loss, optimizer, log)
        if step % args.save_every == 0 or step == args.steps:
            checkpoints.save(step)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a GPT over many processes without choosing a learning rate.")
    parser.add_argument("--text", type=Path, help="the same on all machines; default: python's standard library")
    parser.add_argument("--out", type=Path, default=Path("fsdp2_output"), help="for the log and the checkpoints")
    parser.add_argument("--parallel", choices=["fsdp", "hsdp", "tp"], default="fsdp")
    parser.add_argument("--replicas", type=int, default=2, help="of the sharded model, with --parallel hsdp")
    parser.add_argument("--tp", type=int, default=2, help="processes that share a layer, with --parallel tp")
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16; weights and optimizer stay float32")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32, help="sequences a step, over all processes")
    parser.add_argument("--clip", type=float, default=1.0, help="the gradient's largest norm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=128, help="bytes in a sequence")
    args = parser.parse_args(argv)
    args.tp = args.tp if args.parallel == "tp" else 1
    args.replicas = args.replicas if args.parallel == "hsdp" else 1
    return args


def check(args: argparse.Namespace) -> None:
    world, together = dist.get_world_size(), args.replicas * args.tp
    if world % together or args.batch % (world // args.tp):
        raise SystemExit(
            f"{world} processes, --replicas {args.replicas}, --tp {args.tp} and --batch {args.batch} do not fit: the "
            "processes must be a multiple of replicas and of tp, and the batch a multiple of processes / tp."
        )


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if "WORLD_SIZE" not in os.environ:
        raise SystemExit("start me with torchrun: torchrun --standalone --nproc-per-node=2 examples/train_fsdp2.py")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(args, device)
    dist.barrier()  # a process that exits early breaks the others' connections
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
