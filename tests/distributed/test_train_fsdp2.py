"""The FSDP2 example, started by torchrun's agents and on existing ranks."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import train_on_a_failing_machine
import train_on_two_machines
from problems import differences
from ranks import Ranks
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_fsdp2.py"

STEPS, SAVE_EVERY = 36, 12
TINY = ["--layers", "2", "--width", "32", "--heads", "4", "--context", "32", "--batch", "8"]
TINY += ["--warmup", "5"]
LONG = [*TINY, "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--log-every", "6"]


def started(out: Path, launch: Callable[..., None], *words: str) -> str:
    """Runs agents to a successful end and returns all output. They are forked, like the ranks of other tests."""
    agent = multiprocessing.get_context("forkserver").Process(target=become, args=(out, launch, words))
    agent.start()
    try:
        agent.join(timeout=240)
    finally:
        agent.terminate()  # which also ends its workers
    output = (out / "agent.txt").read_text()
    assert agent.exitcode == 0, output + "".join(path.read_text() for path in out.glob("machine*.txt"))
    return output


def become(out: Path, launch: Callable[..., None], words: tuple[str, ...]) -> None:
    """Turns this process into a torchrun agent with the example's options on its command line."""
    with (out / "agent.txt").open("wb") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    os.environ.update(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    torch.set_num_threads(1)
    sys.argv = [str(SCRIPT), *LONG, "--out", str(out)]
    launch(*words)


def log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def assert_same_end(a: Path, b: Path) -> None:
    """Checks that logs and last checkpoints, with moments, references and tuner, are equal bit for bit."""
    assert log(a) == log(b)
    ends = [last_checkpoint(out) for out in (a, b)]
    assert ends[0].keys() == {"model", "optimizer", "scheduler"}
    assert not differences(*ends)


def last_checkpoint(out: Path) -> dict[str, Any]:
    folder = out / "checkpoints" / f"step-{STEPS:08}"
    dcp_to_torch_save(folder, out / "whole.pt")
    return torch.load(out / "whole.pt", weights_only=True)


@pytest.fixture(scope="module")
def undisturbed(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run, on existing ranks; the other runs start their own."""
    out = tmp_path_factory.mktemp("undisturbed")
    ranks(2)(train_here, LONG, str(out))
    return out


def test_the_log(undisturbed: Path) -> None:
    entries = log(undisturbed)
    assert [entry["step"] for entry in entries] == list(range(6, STEPS + 1, 6))
    assert entries[0]["loss"] > 5.0  # log(256) = 5.55 at the start
    assert entries[-1]["scale"] > 1e-4
    assert 0 < entries[-1]["effective_lr"] < entries[-1]["scale"]  # near the cosine's end


def test_the_loss_falls(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    """A step changes a layer by 2%, so these small random weights take longer than the runs above to become large."""
    ranks(2)(train_here, [*TINY, "--steps", "200", "--save-every", "200"], str(tmp_path))
    losses = [entry["loss"] for entry in log(tmp_path)]
    assert losses[0] > 5.0
    assert losses[-1] < 4.0


@pytest.mark.slow
def test_two_machines_train_as_one(undisturbed: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    started(tmp_path, train_on_two_machines.launch, endpoint)
    outputs = [(tmp_path / f"machine{number}.txt").read_text() for number in range(2)]
    silent, shown = sorted([line for line in o.splitlines() if line.startswith("step ")] for o in outputs)
    assert not silent  # one process per machine, and only rank 0 prints
    assert len(shown) == len(log(tmp_path))
    assert f"loss {log(tmp_path)[-1]['loss']:.4f}" in shown[-1]
    assert_same_end(tmp_path, undisturbed)


@pytest.mark.slow
def test_a_run_killed_in_a_step_and_in_a_save_ends_as_if_undisturbed(undisturbed: Path, tmp_path: Path) -> None:
    output = started(tmp_path, train_on_a_failing_machine.launch)
    assert "start 0 finds []" in output
    assert "start 1 finds ['step-00000012']" in output
    assert "start 2 finds ['partial-00000024', 'step-00000012']" in output
    assert output.count("resumed after step 12") == 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000024", "step-00000036"]
    assert_same_end(tmp_path, undisturbed)


SHORT = [*TINY, "--steps", "8", "--save-every", "8", "--log-every", "1"]


def example() -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module("train_fsdp2")


def train_here(rank: int, options: list[str], out: str, *arguments: str) -> None:
    example().train(example().parse([*options, "--out", out, *arguments]), torch.device("cpu"))


WAYS: list[tuple[int, list[str]]] = [
    (4, ["--parallel", "hsdp", "--replicas", "2"]),
    (2, ["--parallel", "tp", "--tp", "2"]),
    (4, ["--parallel", "tp", "--tp", "2"]),
]


def assert_close(entries: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [entry["step"] for entry in entries] == list(range(1, 9))
    for entry, other in zip(entries, expected, strict=True):
        assert entry == pytest.approx(other, rel=1e-3)
        assert entry["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.fixture(scope="module")
def by_fsdp(ranks: Callable[[int], Ranks], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    out = tmp_path_factory.mktemp("fsdp")
    ranks(2)(train_here, SHORT, str(out))
    return log(out)


# Tensor parallelism on two ranks is part of the run on four, and is also in the test of resharding below.
@pytest.mark.parametrize(
    ("world", "arguments"), [WAYS[0], WAYS[2]], ids=lambda v: str(v) if isinstance(v, int) else v[1]
)
def test_every_way_of_spreading_it_trains_the_same(
    ranks: Callable[[int], Ranks],
    by_fsdp: list[dict[str, Any]],
    tmp_path: Path,
    world: int,
    arguments: list[str],
) -> None:
    ranks(world)(train_here, SHORT, str(tmp_path), *arguments)
    assert_close(log(tmp_path), by_fsdp)


def test_bfloat16_on_another_text(ranks: Callable[[int], Ranks], by_fsdp: list[dict[str, Any]], tmp_path: Path) -> None:
    losses = []
    for name, arguments in (("float32", []), ("bfloat16", ["--bf16"])):
        ranks(2)(train_here, SHORT, str(tmp_path / name), "--text", str(SCRIPT), *arguments)
        losses.append([entry["loss"] for entry in log(tmp_path / name)])
    assert losses[0] != [entry["loss"] for entry in by_fsdp]
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def refusal(rank: int, out: str, *arguments: str) -> str:
    try:
        train_here(rank, SHORT, out, *arguments)
    except SystemExit as error:
        return str(error)
    return ""


@pytest.mark.parametrize("arguments", [["--parallel", "tp", "--tp", "3"], ["--batch", "7"]], ids=["tp", "batch"])
def test_what_does_not_fit_is_refused(ranks: Callable[[int], Ranks], tmp_path: Path, arguments: list[str]) -> None:
    for message in ranks(2)(refusal, str(tmp_path), *arguments):
        assert "do not fit" in message
        assert " ".join(arguments[-2:]) in message


def test_started_without_torchrun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with pytest.raises(SystemExit, match="start me with torchrun"):
        example().main(["--out", str(tmp_path / "out")])
    assert not list(tmp_path.iterdir())


def test_another_number_of_ranks_and_another_way_go_on_from_a_checkpoint(
    ranks: Callable[[int], Ranks], by_fsdp: list[dict[str, Any]], tmp_path: Path
) -> None:
    written = set()
    for world, arguments in [(2, ["--parallel", "fsdp"]), *WAYS]:
        ranks(world)(train_here, SHORT, str(tmp_path), "--save-every", "2", *arguments)
        sixth, last = sorted((tmp_path / "checkpoints").iterdir())
        assert [sixth.name, last.name] == ["step-00000006", "step-00000008"]
        assert_close(log(tmp_path), by_fsdp)
        written.add((sixth / ".metadata").stat().st_mtime_ns)
        shutil.rmtree(last)
    assert len(written) == 1  # written by the first leg, where the others resumed
