"""Installs the programs of docs/programs.md by pip and tests them: `make test-programs`.

Programs that go together share an environment in .programs/, which is removed when its tests pass, unless `--keep` is
given. Each runs only its own programs' tests, as it may contain other programs in versions that do not work there.

The last environment, "quick-starts", is for `quality.py`: Mechanic against the default learning rates of others.

Not part of CI, as it needs the network. `make test` runs only the tests of programs in the development set.

An environment has the torch of constraints.txt unless its programs need an older one. Whether it is a CPU or a CUDA
build depends on pip's configuration; the tests need no GPU.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

REPO = Path(__file__).resolve().parents[2]
HOME = REPO / ".programs"
TORCH = re.search(r"^torch==\S+", (REPO / "constraints.txt").read_text(), flags=re.MULTILINE)

WITH_TORCHVISION = "torch==2.10.0"
"""The last version whose torchvision from the index also loads with a CPU build of torch on ARM."""


class Programs(NamedTuple):
    """Programs that can be installed together, and their tests: files and a pattern for the names."""

    packages: list[str]
    files: list[str]
    tests: str


QUICK_STARTS = "quick-starts"
"""A benchmark instead of tests: `--only quick-starts` can be followed by its options."""

LOADERS = ["tests/programs/test_class_loaders.py"]

GROUPS = {
    "small": Programs(
        ["datasets", "hydra-core", "mmengine", "peft", "prodigyopt", "sentence-transformers", "trl"],
        [
            *LOADERS,
            "tests/programs/test_conventions.py",
            "tests/programs/test_hf_programs.py",
            "tests/runner/test_replace.py",
        ],
        "trl or loraplus or sentence_transformers or hydra or nemo or mmengine or prodigy",
    ),
    "timm": Programs(["timm", WITH_TORCHVISION], LOADERS, "timm"),
    # its command imports requests, which is not a dependency
    "litgpt": Programs(["litgpt", "requests"], [*LOADERS, "tests/programs/test_litgpt.py"], "litgpt"),
    # 0.6 is its last release
    "torchtune": Programs(["torchtune", "torchao<0.10", WITH_TORCHVISION], LOADERS, "torchtune"),
    "torchtitan": Programs(["torchtitan>=0.3"], LOADERS, "torchtitan"),
    "composer": Programs(["mosaicml", "torch<2.7.1"], LOADERS, "composer"),
    "llama-factory": Programs(
        ["llamafactory", "torchaudio==2.10.0", WITH_TORCHVISION],
        ["tests/programs/test_llama_factory.py"],
        "llama_factory",
    ),
    "axolotl": Programs(["axolotl"], ["tests/programs/test_axolotl.py"], "axolotl"),
    "ms-swift": Programs(["ms-swift"], ["tests/programs/test_ms_swift.py"], "ms_swift"),
    "megatron": Programs(["megatron-core", "psutil"], ["tests/megatron_plugin/test_megatron.py"], ""),
    "ray": Programs(["ray[train]", "scikit-learn"], ["tests/programs/test_ray.py"], ""),
    "torchao": Programs(["torchao"], ["tests/programs/test_low_bit.py"], ""),
    QUICK_STARTS: Programs(
        [
            *("deepxde", "diffusers", "fastai", "gpytorch", "lightning", "monai", "neuralforecast", "pykeen"),
            *("pyro-ppl", "pytorch-ignite", "pytorch-tabnet", "sbi", "scikit-learn", "scvi-tools", "skorch"),
            *("stable-baselines3", "torch_geometric", "transformers", "u8darts[torch]"),  # diffusers needs transformers
            WITH_TORCHVISION,  # fastai installs torchvision, and torchmetrics then loads it
        ],
        ["tests/programs/quality.py"],
        "",
    ),
}

NEEDED = ["numpy", "pytest", "pytest-timeout", "pytest-xdist"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=GROUPS, help="one environment")
    parser.add_argument("--keep", action="store_true", help="keep the environments, some 2 GB each")
    args, further = parser.parse_known_args()
    names = [args.only] if args.only else list(GROUPS)
    failed = [name for name in names if not run(name, args.keep, further)]
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall passed")
    return bool(failed)


def run(name: str, keep: bool, further: list[str]) -> bool:
    """Whether its programs could be installed and all their tests passed; skipped tests count as failed."""
    print(f"\n== {name}", flush=True)
    python, report = HOME / name / "bin" / "python", HOME / f"{name}.xml"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", HOME / name], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--editable", REPO, *requirements(name)]
    _, files, names = GROUPS[name]
    if name == QUICK_STARTS:
        tests = [python, *files, *(further or ["--methods", "mechanic"])]
    else:
        # anyio's plugin, a dependency of axolotl, imports something that the newest pytest warns about
        options = ["-q", "-p", "no:anyio", f"--junitxml={report}", *further]
        tests = [python, "-m", "pytest", *files, "-k", names, *options]
    passed = all(subprocess.run(command, cwd=REPO).returncode == 0 for command in (install, tests))
    suites = ElementTree.parse(report).iter("testsuite") if passed and name != QUICK_STARTS else []
    if any(int(suite.get("skipped", 0)) for suite in suites):
        print(f"{name}: skipped tests count as failed here")
        passed = False
    if passed and not keep:
        shutil.rmtree(HOME / name)
    return passed


def requirements(name: str) -> list[str]:
    """Its programs, the tests' dependencies, and torch."""
    programs = GROUPS[name].packages
    if TORCH is None or any(re.match("torch[<=]", each) for each in programs):
        return [*programs, *NEEDED]
    return [*programs, *NEEDED, TORCH[0]]


if __name__ == "__main__":
    sys.exit(main())
