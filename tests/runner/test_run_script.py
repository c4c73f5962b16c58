from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import build_ops
import pytest
from warm import Warm

from mechanic_plugins import hook
from mechanic_plugins.run import main

RUN = (sys.executable, "-m", "mechanic_plugins.run")

FACTS = """
'''A script that says how it was started.'''
import argparse, atexit, json, os, sys
def fail():
    raise KeyError("no such thing")
class Local: pass
if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", default=None)
    parser.add_argument("do", nargs="*")
    args = parser.parse_args()
    main = sys.modules["__main__"]
    facts = dict(argv=sys.argv, path=sys.path[0], file=__file__, doc=__doc__, package=__package__, rank=args.local_rank)
    facts.update(same=main.Local is Local, spec=__spec__ and __spec__.name, loaded="transformers" in sys.modules)
    print(json.dumps(facts), flush=True)
    atexit.register(lambda: print("left by", sys.modules["__main__"].Local.__name__))
    if args.do == ["fail"]:
        fail()
    if args.do == ["exit"]:
        sys.exit(7)
    if args.do == ["interrupt"]:
        raise KeyboardInterrupt
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "facts.py").write_text(FACTS)
    return tmp_path


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(folder)])}


def start(folder: Path, *command: str, **more: str) -> subprocess.Popen[str]:
    env = {**environment(folder), **more}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, cwd=folder, env=env, **pipes)


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_a_script_sees_no_difference(folder: Path) -> None:
    codes = {"": 0, "fail": 1, "exit": 7, "interrupt": -signal.SIGINT, "--help": 0}
    direct = [start(folder, sys.executable, "scripts/facts.py", *what.split()) for what in codes]
    ours = [start(folder, *RUN, "scripts/facts.py", *what.split()) for what in codes]
    for what, one, other in zip(codes, direct, ours, strict=True):
        expected = ended(one)
        assert ended(other) == expected
        assert expected[0] == codes[what]
        assert ("KeyError" in expected[2]) is (what == "fail")


def test_a_module_sees_no_difference(folder: Path) -> None:
    direct = [start(folder, sys.executable, "-m", "scripts.facts", *what) for what in ([], ["exit"])]
    ours = [start(folder, *RUN, "-m", "scripts.facts", *what) for what in ([], ["exit"])]
    for one, other in zip(direct, ours, strict=True):
        assert ended(other) == ended(one)


def test_the_command_is_the_module(folder: Path) -> None:
    """Its own file must not be first in the traceback, nor its folder first in sys.path."""
    command = str(Path(sys.executable).with_name("mechanic-run"))
    targets = (["scripts/facts.py", "fail"], ["-m", "scripts.facts", "exit"])
    direct = [start(folder, sys.executable, *target) for target in targets]
    ours = [start(folder, command, *target) for target in targets]
    for one, other in zip(direct, ours, strict=True):
        assert ended(other) == ended(one)


def test_deepspeeds_local_rank_comes_behind_the_script(folder: Path) -> None:
    code, out, err = ended(start(folder, *RUN, "--local_rank=3", "scripts/facts.py", "hello"))
    assert code == 0, err
    facts = json.loads(out.splitlines()[0])
    assert facts["argv"] == ["scripts/facts.py", "--local_rank=3", "hello"]
    assert facts["rank"] == "3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no script given."),
        (["-m"], "-m needs a module"),
        (["--optim", "x"], "unrecognized arguments: --optim"),
    ],
)
def test_what_cannot_be_run(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_script_that_is_not_there(folder: Path) -> None:
    code, _, err = ended(start(folder, *RUN, "nowhere.py"))
    assert code == 2
    assert "can't open file 'nowhere.py': [Errno 2] No such file or directory\n" in err
    code, _, err = ended(start(folder, *RUN, "nowhere", "sft"))
    assert code == 2
    assert "file 'nowhere': [Errno 2] No such file or directory, and no command of that name is on the PATH" in err


@pytest.mark.parametrize("module", ["nowhere", "nowhere.inside", "package"])
def test_a_module_that_is_not_there(folder: Path, module: str) -> None:
    """It used to end with status 1, as a program that fails does."""
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").touch()
    code, _, err = ended(start(folder, *RUN, "-m", module))
    assert code == 2, err
    assert err.startswith(f"mechanic_plugins.run: -m {module} cannot be run: ")
    assert "No module named" in err


def test_its_own_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "--help"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    assert "torchrun ... -m mechanic_plugins.run script.py" in capsys.readouterr().out


# -------------------------------------------------------------------- what the runner loads, and when


def test_a_script_may_set_torch_up_before_it_imports_it(folder: Path) -> None:
    """The runner used to import torch before the script's first line, with as many threads as cores."""
    program = """
import os, sys
assert "torch" not in sys.modules
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
import torch
print(torch.get_num_threads())
"""
    (folder / "threads.py").write_text(program)
    code, out, err = ended(start(folder, *RUN, "threads.py", OMP_NUM_THREADS="2", MKL_NUM_THREADS="2"))
    assert (code, out.split()) == (0, ["1"]), err


def test_a_foreign_finder_of_the_same_name_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = type("_Finder", (), {"find_spec": lambda self, *args: None})()
    monkeypatch.setattr(sys, "meta_path", [foreign, *(f for f in sys.meta_path if not isinstance(f, hook._Finder))])
    hook.install()
    hook.install()
    assert [isinstance(finder, hook._Finder) for finder in sys.meta_path].count(True) == 1
    assert isinstance(sys.meta_path[0], hook._Finder)


ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


def test_deepspeeds_configs_know_the_names(folder: Path, warm: Warm, compiled: None) -> None:
    program = """
import deepspeed, torch
model = torch.nn.Linear(4, 1)
config = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "MechanicAdamW", "params": {"lr": 1.0, "weight_decay": 0.01}},
}
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
print("built", type(engine.optimizer).__name__)
"""
    (folder / "zero.py").write_text(program)
    done = warm(("zero.py",), folder, {**environment(folder), **build_ops.environment(), **ALONE})
    assert "built MechanicAdamW" in done.stdout, done.stderr
    assert done.returncode == 0, done.stderr


# -------------------------------------------------------------------- a script that ignores Mechanic

TRAINS = """
import sys, torch
p = torch.ones(2, requires_grad=True)
{build}
if {steps}:
    p.grad = torch.ones(2)
    opt.step()
"""
PLAIN = "opt = torch.optim.AdamW([p])"
MECHANIC = "from mechanic_plugins import mechanize; opt = mechanize(torch.optim.AdamW([p]))"
LOST = "mechanic_plugins.run: mechanic_adamw was asked for, but the program trained with AdamW, without Mechanic"
IDLE = "mechanic_plugins.run: warning: a mechanized optimizer was built, but made no step."
WARNED = "mechanic_plugins.run: warning: nothing was mechanized (optimizers built: {})"


@pytest.mark.parametrize(
    ("build", "argument", "code", "says"),
    [
        (PLAIN, "--opt=mechanic_adamw", 3, LOST),
        (PLAIN + "; sys.exit()", "mechanic_adamw", 3, LOST),
        (PLAIN, "--opt=adamw", 0, WARNED.format("AdamW")),
        (PLAIN, "--output_dir=runs/mechanic_adamw", 0, WARNED.format("AdamW")),
        (PLAIN + "; sys.exit(5)", "mechanic_adamw", 5, ""),
        (PLAIN, "--help mechanic_adamw", 0, ""),
        ("opt = None", "mechanic_adamw", 0, WARNED.format("none")),
        (MECHANIC, "mechanic_adamw", 0, ""),
        (
            MECHANIC + "; del opt, mechanize; import gc; gc.collect(); gc.collect(); opt = None",
            "mechanic_adamw",
            0,
            IDLE,
        ),
    ],
)
def test_training_without_mechanic_where_it_was_asked_for_fails(
    folder: Path, warm: Warm, build: str, argument: str, code: int, says: str
) -> None:
    """timm reads `--opt mechanic_adamw` as adamw, and used to train plain AdamW silently."""
    (folder / "trains.py").write_text(TRAINS.format(build=build, steps="opt is not None"))
    done = warm(("trains.py", *argument.split()), folder, environment(folder))
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(says) if says else done.stderr == ""


BY_HAND = """
import torch
def main():
    model = torch.nn.Linear(2, 1)
    {build}
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(4, 2)).square().mean().backward()
        for p in model.parameters():
            p.data -= 0.1 * p.grad
    model.zero_grad()
main()
"""
CHILD = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, 'by_hand.py']).returncode)"


@pytest.mark.parametrize(
    ("build", "words", "code", "says"),
    [
        ("", ["by_hand.py"], 6, WARNED.format("none") + ". The program computed gradients all the same: let a torch"),
        ("", ["by_hand.py", "--optim", "mechanic_adamw"], 6, WARNED.format("none") + ". The program computed"),
        ("", ["child.py"], 6, WARNED.format("none") + ". The program computed"),
        ("", ["--replace", "torch.optim.SGD", "by_hand.py"], 4, "(optimizers built: none). The program computed"),
        (PLAIN.replace("[p]", "model.parameters()"), ["by_hand.py"], 0, WARNED.format("AdamW")),
        (
            MECHANIC.replace("[p]", "model.parameters()"),
            ["by_hand.py"],
            6,
            "gradients were computed, but it made no step",
        ),
    ],
)
def test_a_program_that_trains_by_hand(
    folder: Path, warm: Warm, build: str, words: list[str], code: int, says: str
) -> None:
    """Without an optimizer it used to exit with status 0, and silently if a child trained."""
    (folder / "by_hand.py").write_text(BY_HAND.format(build=build))
    (folder / "child.py").write_text(CHILD)
    done = warm(words, folder, environment(folder))
    assert done.returncode == code, done.stderr
    assert says in done.stderr


LAST_WORDS = """
import torch, warnings
warnings.simplefilter("ignore")
p = torch.nn.Parameter(torch.ones(8))
opt = torch.optim.AdamW([p])
for step in range(20):
    p.grad = {gradient} * torch.ones(8)
    opt.step()
"""


@pytest.mark.parametrize(
    ("gradient", "says"),
    [
        (
            "(float('nan') if step == 5 else p.detach() - 0.5)",
            "Mechanic skipped 1 of 20 steps, whose gradients were not",
        ),
        (
            "0",
            "Mechanic moved the weights by 0 of their size in 20 steps, so hardly anything was trained: the gradients",
        ),
        ("-1", "Mechanic was still looking for its scale when the run ended"),
    ],
)
def test_what_looks_wrong_is_said_at_the_end(folder: Path, warm: Warm, gradient: str, says: str) -> None:
    (folder / "train.py").write_text(LAST_WORDS.format(gradient=gradient))
    done = warm(("--replace", "torch.optim.AdamW", "train.py"), folder, environment(folder))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(f"mechanic_plugins.run: {says}") == 1, done.stderr
