"""Writes the checkpoints of tests/data/golden/VERSION with the package as it is now, and what its next steps gave.

To be run once for a version that is released, with the torch that constraints.txt pins, never again to make a failing
test pass: those files are what people have on their disks.

    PYTHONPATH=. python tests/data/record_golden.py
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "distributed"), str(TESTS / "deepspeed_plugin")]

import build_ops  # noqa: E402
import golden  # noqa: E402
import golden_engines  # noqa: E402
import golden_ranks  # noqa: E402
import torch  # noqa: E402
from ranks import Ranks  # noqa: E402

import mechanic_plugins  # noqa: E402


def record_plain(folder: Path, name: str) -> dict[str, Any]:
    case = golden.CASES[name]
    model, opt = golden.build(case)
    golden.train(model, opt, case, 0, golden.SAVED)
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, folder / f"{name}.pt")
    golden.train(model, opt, case, golden.SAVED, golden.LAST)
    return golden.result(model, opt)


def record_sharded(folder: Path) -> dict[str, Any]:
    """On two ranks, whose weights are the same bits."""
    with tempfile.TemporaryDirectory() as store:
        ranks = Ranks(Path(store), 2)
        saved = Path(store) / "saved"
        first = ranks(golden_ranks.record, str(saved))[0]
        ranks.stop()
        for form in golden.SHARDED:  # each number is a file of its own in there: packed it is a tenth
            shutil.make_archive(str(folder / f"fsdp2-{form}"), "xztar", saved / f"fsdp2-{form}")
    return {f"fsdp2-{form}": first for form in golden.SHARDED}


def record_deepspeed(folder: Path) -> dict[str, Any]:
    os.environ.update(build_ops.environment())
    with tempfile.TemporaryDirectory() as store:
        ranks = Ranks(Path(store), 2)
        found = {f"zero{n}": ranks(golden_engines.record, str(folder), n)[0] for n in golden.ZERO_STAGES}
        ranks.stop()
    for script in folder.glob("zero_to_*.py"):  # DeepSpeed's own, which it leaves beside every checkpoint
        script.unlink()
    return found


def main() -> None:
    folder = golden.FOLDER / mechanic_plugins.__version__
    folder.mkdir(parents=True)
    multiprocessing.set_start_method("spawn")
    cases = {name: record_plain(folder, name) for name in golden.CASES}
    cases |= record_sharded(folder) | record_deepspeed(folder)
    recorded = {"made_with": golden.made_with(), "cases": cases}
    (folder / "expected.json").write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
