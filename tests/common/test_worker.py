"""One process for several requests: which changes of the environment start another."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantizer.utils.worker import Worker

MODULE = """
import os

from quantizer.utils.worker import serve

serve(lambda name: [os.getpid(), os.environ.get(name)], ())
"""


@pytest.mark.parametrize(
    ("name", "restarts"), [("TORCHINDUCTOR_CACHE_DIR", False), ("OMP_NUM_THREADS", True)], ids=["torch's", "the user's"]
)
def test_what_torch_sets_at_its_first_use_starts_no_other_process(
    name: str, restarts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tells_its_number.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(name, "1")
    with Worker("tells_its_number") as worker:
        first, seen = worker.ask(name, doing="a test", timeout_s=60)
        assert seen == "1"
        monkeypatch.setenv(name, "2")
        second, _ = worker.ask(name, doing="a test", timeout_s=60)
    assert (second != first) is restarts
