"""Runs public projects' test suites with Mechanic around their optimizers: `make test-outside`.

pytorch_optimizer's suite and its table of optimizers are installed by pip into .outside/. torch, Lightning and
transformers do not publish their tests: give the path of a checkout, ideally of the installed version. What is expected
to fail, and why, is in expected.toml; see mechanized.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
OUTSIDE = REPO / ".outside"
SITE = OUTSIDE / "site"
"""Packages that the suites import and the development set lacks."""

PYTORCH_OPTIMIZER = "pytorch_optimizer==4.1.0"
"""expected.toml is for this version's tests."""


class Suite(NamedTuple):
    """The tests of one project, as paths in its repository."""

    root: str
    tests: list[str]
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


SUITES = {
    # Of the 1,454 tests, those that train again with foreach=True are left out; test_tensor_lr covers that.
    "pytorch_optimizer": Suite(".", ["tests/test_optimizers.py"], ("-k", "not (test_training and True])")),
    "torch": Suite("test", ["test_optim.py"]),  # imports test/optim
    "lightning": Suite(
        "tests",
        [
            "tests_pytorch/core/test_lightning_optimizer.py",
            "tests_pytorch/trainer/optimization",
            "tests_pytorch/callbacks/test_lr_monitor.py",
            "tests_pytorch/callbacks/test_stochastic_weight_avg.py",
        ],
    ),
    "transformers": Suite(
        ".", ["tests/optimization", "tests/trainer/test_trainer_optimizers.py"], needs=("parameterized",)
    ),
}
CHECKOUTS = ("torch", "lightning", "transformers")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in CHECKOUTS:
        parser.add_argument(f"--{name}", metavar="PATH", help="a checkout; left out without it")
    parser.add_argument("--only", choices=["tables", "pytorch_optimizer", "compare", *CHECKOUTS], help="one part")
    parser.add_argument("--plain", action="store_true", help="the suites without Mechanic: what fails alone")
    args, pytest_args = parser.parse_known_args()
    checkouts = {name: Path(path).resolve() for name in CHECKOUTS if (path := getattr(args, name))}
    parts = [args.only] if args.only else ["tables", "pytorch_optimizer", *CHECKOUTS, "compare"]
    results = {part: run_part(part, checkouts, args.plain, pytest_args) for part in parts}
    print("\n" + "\n".join(f"{part:20}{result}" for part, result in results.items()))
    return any(result.startswith("FAILED") for result in results.values())


def run_part(part: str, checkouts: dict[str, Path], plain: bool, pytest_args: list[str]) -> str:
    """Runs a part and returns its outcome in words, with "FAILED" first on failure."""
    if part in CHECKOUTS and part not in checkouts:
        return f"not run: wants {part.upper()}=/path/to/a/checkout"
    print(f"\n== {part}", flush=True)
    if part == "tables":  # torch's own, from its wheel; also in the default suite
        status = call(sys.executable, "-m", "pytest", "-q", "tests/optimizer/test_torch_tables.py")
    elif part == "compare":
        status = call(sys.executable, HERE / "compare.py", sdist(PYTORCH_OPTIMIZER))
    else:
        root = checkouts[part] if part in CHECKOUTS else sdist(PYTORCH_OPTIMIZER)
        status = run_suite(part, root, [*(["--plain"] if plain else []), *pytest_args])
    return "as expected" if status == 0 else f"FAILED, status {status}: see above"


def run_suite(name: str, checkout: Path, pytest_args: list[str]) -> int:
    suite = SUITES[name]
    root = checkout / suite.root
    missing = [path for path in suite.tests if not (root / path).exists()]
    if missing:
        sys.exit(f"{root} has no {', '.join(missing)}: {name.upper()} must be the root of a checkout of {name}.")
    for package in suite.needs:
        install(package)
    options = ["-c", HERE / "pytest.ini", "--rootdir", root, "-p", "mechanized", "--suite", name, *suite.options]
    return call(sys.executable, "-m", "pytest", *options, *pytest_args, *suite.tests, cwd=root)


def sdist(requirement: str) -> Path:
    """The unpacked source distribution with the package and its tests, fetched once."""
    folder = OUTSIDE / requirement.replace("==", "-")
    if not folder.exists():
        pip("download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest", OUTSIDE, requirement)
        with tarfile.open(folder.with_name(folder.name + ".tar.gz")) as archive:
            archive.extractall(OUTSIDE, filter="data")
    return folder


def install(package: str) -> None:
    if not (SITE / package).exists():
        pip("install", "--quiet", "--no-deps", "--target", SITE, package)


def pip(*args: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "pip", *map(str, args)], check=True)


def call(*command: str | Path, cwd: Path = REPO) -> int:
    """Runs a command offline, as tests that ask for the Hub's models then skip or fail at once instead of waiting."""
    path = os.pathsep.join(map(str, [REPO, HERE, SITE]))
    env = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(list(map(str, command)), cwd=cwd, env=env).returncode


if __name__ == "__main__":
    sys.exit(main())
