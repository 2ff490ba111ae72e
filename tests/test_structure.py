"""The package's folders import each other in one direction, and work begins near the user's call."""

from __future__ import annotations

import pytest
from structure import figures


def test_no_rooms_import_each_other() -> None:
    assert not figures().rooms_in_a_cycle


@pytest.mark.nightly
def test_work_begins_near_the_call() -> None:
    pytest.importorskip("onnxruntime", reason="install enginequant[onnxruntime]")
    import frames

    calibrating, building, files = frames.traced()
    assert len(calibrating) <= 12, calibrating
    assert len(building) <= 10, building
    assert len(files) <= 20, sorted(files)
