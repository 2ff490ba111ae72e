"""What needs no torch does not import it: it takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TORCH_FREE = (
    "quantizer",
    "quantizer.cli.main",
    "quantizer.config",
    "quantizer.config.schema",
    "quantizer.check",
    "quantizer.report",
    "quantizer.plan.targets",
)
LOOK = "import sys; assert not {'torch', 'transformers', 'onnx'} & set(sys.modules), 'a heavy library was imported'"


def _run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize("module", TORCH_FREE)
def test_an_import_without_torch(module: str) -> None:
    done = _run(f"import {module}\n{LOOK}")
    assert done.returncode == 0, done.stderr


def test_the_facade_knows_no_report() -> None:
    code = (
        "import sys, quantizer.quantizer\nassert not {'quantizer.report', 'quantizer.engines', 'rich'} & {*sys.modules}"
    )
    assert _run(code).returncode == 0


def test_help_and_a_wrong_file_without_torch(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("quantizer: {backend: opnvino, dtype: int3}\n", encoding="utf-8")
    code = f"from quantizer.cli.main import main\ncode = main()\n{LOOK}\nsys.exit(code)"
    assert _run(code, "--help").returncode == 0
    done = _run(code, "validate", str(wrong))
    assert done.returncode == 1, done.stderr
    assert "quantizer.backend" in done.stderr
    # What the schema takes and the target does not.
    wrong.write_text("model: {source: a, task: b}\nquantizer: {backend: openvino, dtype: fp8}\n", encoding="utf-8")
    assert _run(code, "validate", str(wrong)).returncode == 1


def test_the_public_names_are_imported_when_they_are_asked_for() -> None:
    code = (
        "import quantizer\n"
        "assert {*quantizer.__all__} <= {*dir(quantizer)}\n"
        "from quantizer import *\n"
        "from quantizer import Quantizer, functional\n"
        "assert Quantizer is quantizer.Quantizer and QuantizerConfig is quantizer.QuantizerConfig\n"
        "try:\n"
        "    quantizer.Quantiser\n"
        "except AttributeError as error:\n"
        "    assert 'Quantiser' in str(error)\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
    )
    done = _run(code)
    assert done.returncode == 0, done.stderr
