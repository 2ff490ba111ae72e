"""What needs no torch does not import it: it takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


# Each module is the first that its process imports of the package.
EACH_ALONE = f"""
import os
import sys

import numpy, pydantic, rich.console, yaml

for module in sys.argv[1:]:
    if (process := os.fork()) == 0:
        __import__(module)
        {LOOK.partition("; ")[2]}
        os._exit(0)
    if os.waitpid(process, 0)[1] != 0:
        sys.exit(f"{{module}}: see above")
"""


def test_an_import_without_torch() -> None:
    done = _run(EACH_ALONE, *TORCH_FREE)
    assert done.returncode == 0, done.stderr


def test_the_facade_knows_no_report() -> None:
    code = (
        "import sys, quantizer.quantizer\nassert not {'quantizer.report', 'quantizer.engines', 'rich'} & {*sys.modules}"
    )
    assert _run(code).returncode == 0


def test_help_and_a_wrong_file_without_torch(tmp_path: Path) -> None:
    wrong, unfit = tmp_path / "wrong.yaml", tmp_path / "unfit.yaml"
    wrong.write_text("quantizer: {backend: opnvino, dtype: int3}\n", encoding="utf-8")
    # What the schema takes and the target does not.
    unfit.write_text("model: {source: a, task: b}\nquantizer: {backend: openvino, dtype: fp8}\n", encoding="utf-8")
    # Without --file-only, what the run needs is checked, too, which torch knows.
    code = (
        "import sys\nfrom quantizer.cli.main import main\n"
        "codes = [main(['--help']), *(main(['validate', '--file-only', file]) for file in sys.argv[1:])]\n"
        f"{LOOK}\nassert codes == [0, 1, 1], codes"
    )
    done = _run(code, str(wrong), str(unfit))
    assert done.returncode == 0, done.stderr
    assert "quantizer.backend" in done.stderr
    assert "unfit.yaml" in done.stderr


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
