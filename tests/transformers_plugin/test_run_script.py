from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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


def started(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), str(folder)])}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=folder, env=env, timeout=120
    )


@pytest.mark.parametrize("what", [[], ["fail"], ["exit"], ["interrupt"], ["--help"]])
def test_a_script_sees_no_difference(folder: Path, what: list[str]) -> None:
    direct = started(folder, "scripts/facts.py", *what)
    ours = started(folder, "-m", "mechanic_plugins.run", "scripts/facts.py", *what)
    assert ours.stdout == direct.stdout
    assert ours.stderr == direct.stderr
    assert ours.returncode == direct.returncode
    assert direct.returncode == {"fail": 1, "exit": 7, "interrupt": -signal.SIGINT}.get("".join(what), 0)
    assert ("KeyError" in direct.stderr) is (what == ["fail"])


@pytest.mark.parametrize("what", [[], ["exit"]])
def test_a_module_sees_no_difference(folder: Path, what: list[str]) -> None:
    direct = started(folder, "-m", "scripts.facts", *what)
    ours = started(folder, "-m", "mechanic_plugins.run", "-m", "scripts.facts", *what)
    facts, expected = (json.loads(done.stdout.splitlines()[0]) for done in (ours, direct))
    assert facts == expected
    assert (ours.returncode, ours.stderr) == (direct.returncode, direct.stderr)


def test_deepspeeds_local_rank_comes_behind_the_script(folder: Path) -> None:
    done = started(folder, "-m", "mechanic_plugins.run", "--local_rank=3", "scripts/facts.py", "hello")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[0])
    assert facts["argv"] == ["scripts/facts.py", "--local_rank=3", "hello"]
    assert facts["rank"] == "3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which script?"),
        (["-m"], "which module?"),
        (["--optim", "x"], "expected a script or -m before the script's own arguments, got --optim"),
        (["nowhere.py"], "can't open file 'nowhere.py': [Errno 2] No such file or directory"),
    ],
)
def test_what_cannot_be_run(folder: Path, arguments: list[str], message: str) -> None:
    done = started(folder, "-m", "mechanic_plugins.run", *arguments)
    assert done.returncode == 2
    assert message in done.stderr


def test_its_own_help(folder: Path) -> None:
    done = started(folder, "-m", "mechanic_plugins.run", "--help")
    assert done.returncode == 0
    assert "torchrun ... -m mechanic_plugins.run script.py" in done.stdout
