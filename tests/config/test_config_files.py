"""Every file in configs/ is right, and its first comment lines hold the command that runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantizer.config import load_run

CONFIGS = Path(__file__).parents[2] / "configs"
FILES = sorted(CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_config_file(path: Path) -> None:
    run = load_run(path)
    assert run.output == f"runs/{path.stem}"
    header = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any(f"quantizer run configs/{path.name}" in line for line in header)
