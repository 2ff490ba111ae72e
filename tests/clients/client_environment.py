"""The environment with other clients that ``make clients`` installs, and code that runs in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

CLIENTS = Path(os.environ.get("QUANTIZER_CLIENTS", Path(__file__).parents[2] / ".clients"))


def client_prints(package: str, code: str, folder: Path) -> str:
    """Return what Python code with a client prints in a folder; skip the test if the client is not installed."""
    if not any(CLIENTS.glob(f"lib/python*/site-packages/{package}")):
        pytest.skip(f"{package} is not installed in {CLIENTS}: run make clients")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(CLIENTS / "bin" / "python"), "-c", code],
        cwd=folder,
        env={**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
