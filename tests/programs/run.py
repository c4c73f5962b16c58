"""The programs of docs/programs.md, each installed by pip and tested: `make test-programs`.

Into .programs/, one environment for those that go together. It needs the network and some 10 GB, and is no part of CI:
what of it is in the development set runs in `make test`, and what is not is skipped there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
HOME = REPO / ".programs"

GROUPS = {
    "small": ["datasets", "hydra-core", "mmengine", "peft", "sentence-transformers", "timm", "trl"],
    "litgpt": ["litgpt"],
    "torchtune": ["torchtune", "torchao<0.10"],  # its releases end with 0.6
    "torchtitan": ["torchtitan"],
    "composer": ["mosaicml"],
    "llama-factory": ["llamafactory"],
}
"""Programs that can be installed together."""

NEEDED = ["pytest", "pytest-timeout", "pytest-xdist", "accelerate", "lightning", "jsonargparse[signatures]"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=GROUPS, help="one environment")
    args, pytest_args = parser.parse_known_args()
    names = [args.only] if args.only else list(GROUPS)
    failed = [name for name in names if not run(name, pytest_args)]
    print(f"\nfailed: {', '.join(failed)}" if failed else "\nall passed")
    return bool(failed)


def run(name: str, pytest_args: list[str]) -> bool:
    """Whether its programs could be installed and their tests passed."""
    print(f"\n== {name}", flush=True)
    python = HOME / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", HOME / name], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--editable", REPO, *GROUPS[name], *NEEDED]
    tests = [python, "-m", "pytest", "-q", "tests/programs", *pytest_args]
    return all(subprocess.run(command, cwd=REPO).returncode == 0 for command in (install, tests))


if __name__ == "__main__":
    sys.exit(main())
