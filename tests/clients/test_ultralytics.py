"""The layout ``ultralytics``, loaded by ``YOLO`` in an environment of its own: ``make clients``.

The detector is the YOLO11n of ``benchmarks/detectors``, trained on synthetic scenes. It is quantized in that
environment, because its classes are those of ultralytics.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from client_code import LIMITS, Row, keep
from client_environment import CLIENTS
from client_models import BACKENDS, ROOT
from client_page import DETECTOR, YOLO

pytestmark = pytest.mark.nightly

ENVIRONMENT = Path(os.environ.get("QUANTIZER_ULTRALYTICS", CLIENTS / "ultralytics"))
WEIGHTS = Path(os.environ.get("QUANTIZER_YOLO_WEIGHTS", ROOT / "benchmarks" / "detectors" / "weights" / "yolo11n.pt"))
PROGRAM = Path(__file__).with_name("yolo_program.py")


@pytest.mark.parametrize("backend", BACKENDS)
def test_boxes_of_yolo_are_those_of_our_engine(backend: str, tmp_path: Path) -> None:
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip(f"ultralytics is not installed in {ENVIRONMENT}: run make clients, or set QUANTIZER_ULTRALYTICS")
    if not WEIGHTS.exists():
        pytest.skip(f"there are no trained weights at {WEIGHTS}: run python benchmarks/detectors yolo11n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks' / 'detectors'}", "OMP_NUM_THREADS": "1"}
    # It would download packages that it misses, and write settings into the home folder.
    environment |= {"YOLO_AUTOINSTALL": "false", "YOLO_OFFLINE": "true", "YOLO_CONFIG_DIR": str(tmp_path)}
    command = [str(ENVIRONMENT / "bin" / "python"), str(PROGRAM), backend, str(WEIGHTS)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert result["names"] == {"0": "disc", "1": "square", "2": "triangle", "3": "star", "4": "cross"}
    assert (result["task"], result["imgsz"], result["stride"], result["batch"]) == ("detect", [96, 96], 32, 1)
    assert sum(map(len, result["ours"])) >= 10
    for expected, given in zip(result["ours"], result["yolo"], strict=True):
        assert [box[5] for box in given] == [box[5] for box in expected]
        for right, box in zip(expected, given, strict=True):
            # Sides in pixels, and the confidence.
            assert box[:5] == pytest.approx(right[:5], abs=1e-3)
    row = Row(client=YOLO, task=DETECTOR, backend=backend, **result["row"])
    keep(row)
    assert row.sqnr >= max(LIMITS[backend], row.engine)
