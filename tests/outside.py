"""What a guide's page adds to the package, from outside of it: its code as it stands there, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["run_outside", "write_guide_module"]

GUIDE = Path(__file__).parents[1] / "docs" / "guide"


def write_guide_module(folder: Path, page: str, name: str) -> None:
    """Write the one block of Python of a page as a module."""
    (block,) = re.findall(r"^```python\n(.*?)^```$", (GUIDE / page).read_text(encoding="utf-8"), flags=re.M | re.S)
    (folder / f"{name}.py").write_text(block, encoding="utf-8")


def run_outside(folder: Path, text: str) -> str:
    """Return what a script printed that runs in a folder and can import the modules there."""
    search = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
