"""python -m pytest -q tests/test_bench.py. What a speed may count on: a result that was checked."""
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import bench  # noqa: E402


def test_a_speed_counts_only_after_its_own_result(monkeypatch):
    """A candidate that writes nothing must not pass with what another one left in the memory."""
    expected, memory = torch.randn(4, 4).double(), torch.empty(4, 4)
    monkeypatch.setattr(bench, "microseconds", lambda run: 1.0)

    def right():
        return memory.copy_(expected)

    def broken():
        raise RuntimeError("too little shared memory")

    assert bench.fastest("x", {"broken": broken, "right": right}, expected, 1e-6) == (1.0, "right")
    for wrong in (lambda: memory, lambda: memory.copy_(expected).mul_(1.01)):
        with pytest.raises(AssertionError, match="wrong: relative error"):
            bench.fastest("x", {"right": right, "wrong": wrong}, expected, 1e-3)
