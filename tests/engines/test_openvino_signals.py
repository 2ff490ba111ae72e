"""Ctrl-C after engines were loaded and let go: OpenVINO takes the signal stack of the thread, and gives it back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quantizer.engines import BuildOptions, build_engine

pytest.importorskip("openvino", reason="OpenVINO is not installed: pip install 'enginequant[openvino]'")

LET_GO_AND_INTERRUPTED = """
import gc, os, signal, sys
from quantizer.engines import inspect_engine, load_engine

first = load_engine("openvino", sys.argv[1])
second = load_engine("openvino", sys.argv[1])
# In the order in which they were made.
del first
gc.collect()
del second
gc.collect()
inspect_engine("openvino", sys.argv[1])
try:
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):
        pass
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_after_engines_were_let_go(qdq: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.engine"
    build_engine("openvino", qdq.path, path, BuildOptions())
    command = [sys.executable, "-c", LET_GO_AND_INTERRUPTED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
