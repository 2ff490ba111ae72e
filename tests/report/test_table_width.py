"""The width of tables in Python: that of a terminal with room for the names, and no cell is cut for it."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import nn

from quantizer import Quantizer


@pytest.fixture(scope="module")
def quantizer() -> Quantizer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    made = Quantizer(backend="openvino")
    made.calibrate(model, torch.rand(16, 3, 8, 8), progress=False)
    return made


@pytest.mark.parametrize(("columns", "widest"), [(80, 80), (100, 100), (300, 120)])
def test_tables_are_as_wide_as_the_terminal(
    quantizer: Quantizer, columns: int, widest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    for view in (quantizer.coverage, quantizer.layers):
        lines = repr(view).splitlines()
        assert max(map(len, lines)) <= widest
        assert not any("…" in line for line in lines)
    assert "not smoothed" not in repr(quantizer.ranges) or ": the output" not in repr(quantizer.ranges)


def test_what_has_no_room_is_not_cut(quantizer: Quantizer, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = repr(quantizer.ranges)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((30, 20)))
    monkeypatch.delenv("COLUMNS", raising=False)
    assert repr(quantizer.ranges) == wide
    assert max(map(len, wide.splitlines())) <= 120
