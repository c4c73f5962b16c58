"""Compares the plain results of two runs."""

from __future__ import annotations

from typing import Any

import torch


def assert_all_close(results: list[dict[str, Any]], expected: dict[str, Any], *, tolerance: float) -> None:
    """Checks that the ranks agree bit for bit, and with the expected result within the tolerance."""
    assert_same_on_all_ranks(results)
    assert_close(results[0], expected, tolerance=tolerance)


def assert_close(a: dict[str, Any], b: dict[str, Any], *, tolerance: float) -> None:
    """Checks weights, tuner and h within the tolerance, each relative to its largest value."""
    assert a["weights"].keys() == b["weights"].keys()
    for name in a["weights"]:
        assert distance(a["weights"][name], b["weights"][name]) <= tolerance, name
    for name in ("s", "r", "m", "v"):
        assert distance(a["tuner"][name], b["tuner"][name]) <= 10 * tolerance, name
    assert a["tuner"]["steps"] == b["tuner"]["steps"]
    assert distance(a["h"], b["h"]) <= 10 * tolerance, "h"


def distance(a: Any, b: Any) -> float:
    """The largest difference, relative to the largest value."""
    a, b = torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    assert a.shape == b.shape
    return 0.0 if a.numel() == 0 else ((a - b).abs().max() / b.abs().max().clamp(min=1e-300)).item()


def assert_same_on_all_ranks(results: list[dict[str, Any]]) -> None:
    """Checks equality bit for bit, by comparing Python floats."""
    for other in results[1:]:
        assert other["tuner"] == results[0]["tuner"]
        assert other["h"] == results[0]["h"]
