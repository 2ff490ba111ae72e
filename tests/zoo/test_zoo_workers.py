"""The processes of `make zoo`: what hangs, exhausts memory or dies is a row with its reason, and the others go on."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "zoo"))

from page import changes
from workers import Limits, rows_of


def work(key: str, tell: Callable[[str, Any], None]) -> None:
    """What a subject does, by its key."""
    tell("stage", "built")
    if key == "hangs":
        time.sleep(600)
    elif key == "eats":
        tell("size", len(bytearray(64 * 2**30)))
    elif key == "dies":
        os._exit(7)
    tell("built", "ok")


@pytest.mark.nightly
def test_each_subject_becomes_a_row() -> None:
    limits = Limits(seconds=8, gib=24, at_once=2)
    rows = dict(rows_of(["fine", "hangs", "dies", "eats", "fine too"], work, limits))
    assert rows["fine"]["built"] == rows["fine too"]["built"] == "ok"
    assert rows["hangs"]["ended"] == "not done after 8 s"
    assert rows["hangs"]["stage"] == "built"
    assert rows["dies"]["ended"] == "its process ended with 7"
    assert rows["eats"]["ended"] == "its process ended with 1"


def test_changes_are_told() -> None:
    before = [
        {"library": "transformers", "name": name, "stage": "saved", "saved": "ok", "share": 0.5, "sqnr_db": 30.0}
        for name in ("bert", "gone", "same")
    ]
    after = [
        {"library": "transformers", "name": "bert", "stage": "off", "off": "differs", "share": 1.0, "sqnr_db": 29.0},
        before[2],
        {"library": "timm", "name": "vit", "stage": "saved", "saved": "ok"},
    ]
    assert changes(before, after) == [
        "timm vit: new",
        "transformers bert: 50.0 -> 100.0% of multiply-adds",
        "transformers bert: ok -> off: differs",
        "transformers gone: gone",
    ]
