from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import build_ops
import pytest
import torch
from warm import Runner

TRAIN = """
import sys, torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 1e-2}]
{build}
for step in range({steps}):
    x = torch.randn(32, 4)
    optimizer.zero_grad()
    ((model(x) - x.sum(1, keepdim=True)) ** 2).mean().backward()
    optimizer.step()
print("ended")
"""


def write(folder: Path, build: str, steps: int = 400) -> None:
    (folder / "train.py").write_text(TRAIN.replace("{build}", build).replace("{steps}", str(steps)))


def test_a_loop_is_stopped_after_so_many_steps(run: Runner, tmp_path: Path) -> None:
    write(tmp_path, "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)")
    done = run("--probe", "40", "train.py")
    assert done.returncode == 0, done.stderr
    title, _, code = done.stdout.splitlines()[:3]
    lr, rule = title.removeprefix("Mechanic around AdamW, 40 steps: learned lr ").split(" ", 1)
    assert 0 < float(lr) < 1
    assert rule == '(rule="relative")'
    assert "another run" not in done.stdout
    assert code == f"  torch.optim.AdamW(model.parameters(), lr={lr})  # your other arguments"
    assert "ended" not in done.stdout


def test_a_probe_by_the_papers_rule_says_what_its_number_is_not(run_warm: Runner, tmp_path: Path) -> None:
    """AdamW at that number was told to be the same run, and learned at twice the rate."""
    write(tmp_path, "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)")
    done = run_warm("--options", "rule=paper", "--probe", "40", "train.py")
    assert done.returncode == 0, done.stderr
    title, *_, last = done.stdout.splitlines()
    assert title.endswith(' (rule="paper")')
    assert last.startswith('rule="paper" also rescales the updates that were made before')


UNMOVED = """
model.bias.requires_grad_(False)
groups = [{"params": [model.bias]}, {"params": [], "name": "empty"}, {"params": [model.weight]}]
optimizer = torch.optim.SGD(groups, lr=1e-3)
"""


def test_groups_that_never_moved_and_a_program_that_ends_first(run_warm: Runner, tmp_path: Path) -> None:
    """They would be given an lr of 0, and keep it when unfrozen."""
    write(tmp_path, UNMOVED, steps=30)
    done = run_warm("--options", "scope=group", "--probe", "40", "train.py")
    assert done.returncode == 0, done.stderr
    ended, title, _, code, *_ = done.stdout.splitlines()
    assert ended == "ended"
    lr, _ = title.removeprefix("Mechanic around SGD, 30 of 40 steps, then the program ended: learned lr ").split(" ", 1)
    assert float(lr) > 0
    assert code == f"  torch.optim.SGD(model.parameters(), lr={lr})  # your other arguments"


HELD = """
groups = [{"params": [model.bias], "lr": 0.0}, {"params": [model.weight], "lr": 1e-3}]
optimizer = torch.optim.AdamW(groups)
"""
NEVER = """
model.bias.requires_grad_(False)
groups = [{"params": [model.bias], "lr": 1e-2}, {"params": [model.weight], "lr": 1e-3}]
optimizer = torch.optim.AdamW(groups)
"""


@pytest.mark.parametrize(("build", "share"), [(HELD, 0), (NEVER, 10)])
def test_a_probe_names_the_lrs_that_demechanize_would_set(
    run_warm: Runner, tmp_path: Path, build: str, share: float
) -> None:
    """A group held at 0 used to be advised the other's lr, and one that learned nothing the other's times its own."""
    write(tmp_path, build)
    done = run_warm("--options", "scope=group", "--probe", "40", "train.py")
    assert done.returncode == 0, done.stderr
    first, second = map(float, done.stdout.partition("optimizer.param_groups, [")[2].partition("]")[0].split(","))
    assert first == pytest.approx(share * second, rel=0.01)
    assert second > 0


def test_a_probe_of_something_else_fails_after_as_many_steps(run_warm: Runner, tmp_path: Path) -> None:
    write(tmp_path, "from mechanic_plugins.lion import Lion; optimizer = Lion(model.parameters(), lr=1e-3)")
    done = run_warm("--probe", "20", "train.py")
    assert done.returncode == 4
    assert "20 steps were made by mechanic_plugins.lion.Lion, without Mechanic: add --replace" in done.stderr
    assert "ended" not in done.stdout


def test_a_program_without_training_fails(run_warm: Runner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch")
    done = run_warm("--probe", "20", "train.py")
    assert done.returncode == 4
    assert "--probe 20: no mechanized optimizer made a step (optimizers built: none)." in done.stderr


GAN = """
optimizer, other = torch.optim.AdamW([model.weight]), torch.optim.SGD([model.bias], lr=0.1)
optimizer.register_step_post_hook(lambda *_: other.step())
"""


def test_two_optimizers_are_both_probed(run_warm: Runner, tmp_path: Path) -> None:
    write(tmp_path, GAN)
    done = run_warm("--probe", "20", "train.py")
    assert done.returncode == 0, done.stderr
    assert "Mechanic around AdamW, 20 steps:" in done.stdout
    assert "Mechanic around SGD, 20 steps:" in done.stdout


HF = Path(__file__).parents[1] / "hf"


SHARED = """
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters())
"""


@pytest.mark.slow
def test_a_probe_stops_all_of_torchruns_ranks(run: Runner, tmp_path: Path) -> None:
    """The ranks are runners too, with their own exit statuses. DeepSpeed's launcher starts a plain script."""
    write(tmp_path, SHARED)
    words = ["torchrun", "--standalone", "--nproc-per-node=2", "-m", "mechanic_plugins.run", "--probe", "25"]
    done = run("--probe", "25", *words, "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is mechanized.") == 1
    assert done.stdout.count("Mechanic around AdamW, 25 steps:") == 1
    assert "ended" not in done.stdout


@pytest.mark.slow
def test_the_trainer_stops_with_whole_checkpoints(run_warm: Runner, tmp_path: Path) -> None:
    options = "--max_steps 100 --per_device_train_batch_size 4 --save_steps 10 --logging_steps 5 --use_cpu True"
    options += " --report_to none --disable_tqdm True --output_dir out --learning_rate 2e-5 --result result"
    done = run_warm("--probe", "25", str(HF / "hf_script.py"), *options.split(), HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Mechanic around AdamW, 25 steps:") == 1
    lr = next(line for line in done.stdout.splitlines() if line.startswith("or for the Trainer: --learning_rate "))
    assert 0 < float(lr.split()[-1]) < 1
    assert not list(tmp_path.glob("result*"))  # the code after training did not run
    saved = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert saved == ["checkpoint-10", "checkpoint-20"]
    state = json.loads((tmp_path / "out" / "checkpoint-20" / "trainer_state.json").read_text())
    assert state["global_step"] == 20
    states = torch.load(tmp_path / "out" / "checkpoint-20" / "optimizer.pt", weights_only=True)["state"].values()
    assert all("mechanic_ref" in entries for entries in states)
    assert all("mechanic/effective_lr" in entry for entry in state["log_history"])


LIGHTNING = """
import lean; lean.hide("matplotlib", "scipy", "transformers")
import sys, torch, lightning.pytorch as pl

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        loss = ((self.layer(batch) - batch.sum(1, keepdim=True)) ** 2).mean()
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

if __name__ == "__main__":
    torch.manual_seed(0)
    checkpoints = pl.callbacks.ModelCheckpoint(dirpath="saved", every_n_train_steps=10, save_top_k=-1)
    trainer = pl.Trainer(
        max_steps=60, logger=pl.loggers.CSVLogger("logs"), log_every_n_steps=5, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", devices=int(sys.argv[1]), strategy=sys.argv[2],
        callbacks=[checkpoints],
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(320, 4), batch_size=4))
    print("ended", sorted(key for key in trainer.callback_metrics if key.startswith("mechanic")))
"""


@pytest.mark.slow
def test_lightning_stops_on_all_ranks_with_whole_checkpoints(run: Runner, tmp_path: Path) -> None:
    """ddp_spawn's parent would wait forever for a result if its children exited with success."""
    (tmp_path / "light.py").write_text(LIGHTNING)
    done = run("--probe", "25", "light.py", "2", "ddp_spawn")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Mechanic around AdamW, 25 steps:") == 1
    assert "ended" not in done.stdout
    saved = sorted((tmp_path / "saved").iterdir())
    assert [path.stem.rpartition("=")[2] for path in saved] == ["10", "20"]
    for path in saved:
        assert torch.load(path, weights_only=True)["global_step"] == int(path.stem.rpartition("=")[2])


@pytest.mark.slow
def test_lightning_logs_what_a_replaced_optimizer_learns(run_warm: Runner, tmp_path: Path) -> None:
    (tmp_path / "light.py").write_text(LIGHTNING)
    done = run_warm("--replace", "torch.optim.AdamW", "light.py", "1", "auto")
    assert done.returncode == 0, done.stderr
    assert "ended ['mechanic/effective_lr', 'mechanic/scale']" in done.stdout
    header = next((tmp_path / "logs").rglob("metrics.csv")).read_text().splitlines()[0]
    assert "mechanic/effective_lr" in header


SCHEDULED = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
optimizer.register_step_post_hook(lambda *_: scheduler.step())
import atexit; atexit.register(lambda: print("in the end", format(optimizer.learned_lr, ".3g")))
"""


def test_the_probe_and_the_optimizer_name_one_learning_rate(run_warm: Runner, tmp_path: Path) -> None:
    """A third number used to be reported: the last scale times the schedule's peak."""
    write(tmp_path, SCHEDULED, steps=60)
    done = run_warm("--probe", "60", "train.py")
    assert done.returncode == 0, done.stderr
    lr = done.stdout.partition("learned lr ")[2].split()[0]
    assert f"in the end {lr}" in done.stdout


# -------------------------------------------------------------------- trained without Mechanic

REPLACED_STEP = """
import types
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
def step_by_hand(self, closure=None):
    with torch.no_grad():
        for p in model.parameters(): p -= 1e-3 * p.grad
optimizer.step = types.MethodType(step_by_hand, optimizer)
"""
REPLACED_LATE = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
def change_step(*_):
    optimizer.step = lambda closure=None: None
optimizer.register_step_post_hook(change_step)
"""
WRAPPED_STEP = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
def timed(closure=None, *, step=optimizer.step):
    return step(closure)
optimizer.step = timed
"""
NEVER_STEPPED = """
torch.optim.AdamW(model.parameters())
class optimizer:
    zero_grad = step = staticmethod(lambda: None)
"""
ANOTHER = """
unused = torch.optim.AdamW([torch.ones(1, requires_grad=True)])
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
"""
TWO_BUILT = "unused, optimizer = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(model.parameters())"
OWN_NEW = """
class Own(torch.optim.AdamW):
    def __new__(cls, *args, **kwargs):
        return super().__new__(cls)
other = torch.optim.AdamW([torch.ones(1, requires_grad=True)])
optimizer = Own(model.parameters())
"""


OTHER_WEIGHTS = "optimizer = torch.optim.AdamW([p.detach().clone().requires_grad_() for p in model.parameters()])"
STEPS_LATER = """
optimizer = torch.optim.AdamW(model.parameters())
class lazy:
    zero_grad = optimizer.zero_grad
    calls = 0
    def step():
        lazy.calls += 1
        if lazy.calls <= 5:
            optimizer.zero_grad()
        optimizer_.step()
optimizer_, optimizer = optimizer, lazy
"""


@pytest.mark.parametrize(
    ("build", "status", "said"),
    [
        (OTHER_WEIGHTS, 6, "Mechanic made no step in AdamW: its step() was called, but none of its weights had a"),
        (REPLACED_STEP, 6, "Mechanic made no step in AdamW (the program replaced its step() by __main__.step_by_hand)"),
        (REPLACED_LATE, 6, "Mechanic made no step in AdamW after step 1 (the program replaced its step() by "),
        (WRAPPED_STEP, 0, "AdamW: Mechanic learned a learning rate of"),
        (NEVER_STEPPED, 6, "(gradients were computed, but its step() was never called)"),
        (ANOTHER, 6, "Mechanic made no step: torch.optim.sgd.SGD trained without it."),
        (TWO_BUILT, 0, "AdamW: Mechanic learned a learning rate of"),
        (OWN_NEW, 3, "__main__.Own trained without Mechanic: its __new__ does not pass its arguments on."),
    ],
    ids=[
        "other weights",
        "step replaced",
        "replaced late",
        "step wrapped",
        "never stepped",
        "another",
        "one of two",
        "own __new__",
    ],
)
def test_training_without_mechanic_is_told(
    run_warm: Runner, tmp_path: Path, build: str, status: int, said: str
) -> None:
    """It used to say "is mechanized" and exit with status 0."""
    write(tmp_path, build, steps=5)
    done = run_warm("--replace", "torch.optim.AdamW", "train.py")
    assert done.stdout == "ended\n"
    assert said in done.stderr
    assert done.returncode == status


def test_a_probe_without_gradients_has_seen_no_step(run_warm: Runner, tmp_path: Path) -> None:
    """It used to say "1 of 20 steps" and to exit with status 0."""
    write(tmp_path, OTHER_WEIGHTS, steps=5)
    done = run_warm("--probe", "20", "train.py")
    assert done.returncode == 4, done.stderr
    assert done.stdout == "ended\n"
    assert "--probe 20: no mechanized optimizer made a step (step() was called, but no weight had a grad" in done.stderr


def test_steps_without_gradients_are_not_counted(run_warm: Runner, tmp_path: Path) -> None:
    write(tmp_path, STEPS_LATER, steps=12)
    done = run_warm("--probe", "20", "train.py")
    assert done.returncode == 0, done.stderr
    assert "Mechanic around AdamW, 7 of 20 steps, then the program ended: learned lr" in done.stdout


def test_a_run_without_gradients_is_told_why(run_warm: Runner, tmp_path: Path) -> None:
    """It used to be told that its step() was replaced or never called."""
    write(tmp_path, OTHER_WEIGHTS, steps=5)
    done = run_warm("--replace", "torch.optim.AdamW", "train.py")
    assert "AdamW: Mechanic learned no learning rate" in done.stderr
    assert "Mechanic made no step: optimizer.step() was called, but none of its weights had a gradient" in done.stderr
    assert "replaced or never called" not in done.stderr


RISING = """
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 2.0**step)
optimizer.register_step_post_hook(lambda *_: rise.step())
optimizer.param_groups[0]["max_lr"] = 1.0
"""


def test_short_runs_that_still_rise_say_so_once(run_warm: Runner, tmp_path: Path) -> None:
    """Runs below 16 steps used not to. The rise stays below the announced peak, above which it is cancelled."""
    write(tmp_path, RISING, steps=10)
    done = run_warm("--replace", "torch.optim.AdamW", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("still looking for its scale when the run ended") == 1


END = """
def end(*_):
    if optimizer.tuner.steps == 9:
        {how}
optimizer.register_step_post_hook(end)
"""


@pytest.mark.parametrize("how", ["raise RuntimeError('out of memory')", "raise KeyboardInterrupt", "sys.exit(3)"])
def test_a_run_that_failed_is_not_told_to_train_longer(run_warm: Runner, tmp_path: Path, how: str) -> None:
    write(tmp_path, RISING + END.format(how=how), steps=20)
    done = run_warm("--replace", "torch.optim.AdamW", "train.py")
    assert done.returncode != 0
    assert "AdamW: Mechanic learned a learning rate of" in done.stderr
    assert "still looking for its scale" not in done.stderr


def test_a_run_that_stops_by_itself_is(run_warm: Runner, tmp_path: Path) -> None:
    write(tmp_path, RISING + END.format(how="sys.exit()"), steps=20)
    done = run_warm("--replace", "torch.optim.AdamW", "train.py")
    assert done.returncode == 0, done.stderr
    assert "still looking for its scale" in done.stderr


def test_the_lr_in_force_is_said_where_nothing_else_logs_it(run_warm: Runner, tmp_path: Path) -> None:
    write(tmp_path, "optimizer = torch.optim.AdamW(model.parameters())", steps=10)
    done = run_warm("--replace", "torch.optim.AdamW", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("AdamW: learning rate in force at step 10: 0.0") == 1


# -------------------------------------------------------------------- launchers and engines

ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.optim import AdamW
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.DataLoader(torch.randn(800, 4), batch_size=4)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1000)
model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
assert isinstance(optimizer.optimizer, AdamW)
for x in data:
    accelerator.backward(((model(x) - x.sum(1, keepdim=True)) ** 2).mean())
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
print("ended")
"""


def test_accelerate_prepares_a_replaced_optimizer(run_warm: Runner, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ACCELERATE)
    done = run_warm("--probe", "30", "train.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Mechanic around AdamW, 30 steps:") == 1


DEEPSPEED = """
import deepspeed, sys, torch
torch.manual_seed(0)
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
config = {"train_micro_batch_size_per_gpu": 8, "zero_optimization": {"stage": int(sys.argv[-1])}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for _ in range(100):
    x = torch.randn(8, 4)
    engine.backward(((engine(x) - x.sum(1, keepdim=True)) ** 2).mean())
    engine.step()
print("ended")
"""


@pytest.mark.slow
def test_deepspeeds_engines(run_warm: Runner, tmp_path: Path, compiled: None) -> None:
    """Uses stage 3, whose engine steps part by part; the launcher's test uses stage 2."""
    (tmp_path / "train.py").write_text(DEEPSPEED)
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", **build_ops.environment()}
    assert_probed(run_warm("--probe", "30", "train.py", "3", **alone))


@pytest.mark.slow
def test_deepspeeds_launcher(run: Runner, tmp_path: Path, compiled: None) -> None:
    """Needs the compiled operators: it would otherwise build them first, or wait for a killed build.

    Uses one rank; the tests of torchrun and Lightning above cover several that stop together.
    """
    rendezvous = 'deepspeed.init_distributed("gloo")\n'
    lines = DEEPSPEED.splitlines(keepends=True)
    (tmp_path / "train.py").write_text("".join(rendezvous if "HashStore" in line else line for line in lines))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"--probe 30 deepspeed --num_gpus 1 --master_port {port} train.py 2"
    assert_probed(run(*words.split(), **build_ops.environment()))


def assert_probed(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("is mechanized.") == 1
    assert done.stdout.count("Mechanic around AdamW, 30 steps:") == 1
    assert done.stdout.count('or, if the DeepSpeed config builds it: "optimizer": {"params": {"lr": ') == 1
    assert "ended" not in done.stdout
