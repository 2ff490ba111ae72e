"""The layout ``ultralytics``, loaded by ``YOLO`` in an environment of its own: ``make clients``.

The detector is the YOLO11n of ``benchmarks/detectors``, trained on synthetic scenes. It is quantized in that
environment, because its classes are those of ultralytics.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from client_code import LIMITS, Row, keep
from client_environment import CLIENTS
from client_models import BACKENDS, ROOT
from client_page import DETECTOR, YOLO

pytestmark = pytest.mark.nightly

ENVIRONMENT = Path(os.environ.get("QUANTIZER_ULTRALYTICS", CLIENTS / "ultralytics"))
WEIGHTS = Path(os.environ.get("QUANTIZER_YOLO_WEIGHTS", ROOT / "benchmarks" / "detectors" / "weights" / "yolo11n.pt"))
PROGRAM, TASKS = (Path(__file__).with_name(f"{name}.py") for name in ("yolo_program", "yolo_tasks_program"))


def _result(folder: Path, program: Path, *arguments: str) -> dict[str, Any]:
    """Return what a program writes in the environment of ultralytics."""
    if not (ENVIRONMENT / "bin" / "python").exists():
        pytest.skip(f"ultralytics is not installed in {ENVIRONMENT}: run make clients, or set QUANTIZER_ULTRALYTICS")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks' / 'detectors'}", "OMP_NUM_THREADS": "1"}
    # It would download packages that it misses, and write settings into the home folder.
    environment |= {"YOLO_AUTOINSTALL": "false", "YOLO_OFFLINE": "true", "YOLO_CONFIG_DIR": str(folder)}
    command = [str(ENVIRONMENT / "bin" / "python"), str(program), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return result


@pytest.mark.parametrize("backend", BACKENDS)
def test_boxes_of_yolo_are_those_of_our_engine(backend: str, tmp_path: Path) -> None:
    if not WEIGHTS.exists():
        pytest.skip(f"there are no trained weights at {WEIGHTS}: run python benchmarks/detectors yolo11n")
    result = _result(tmp_path, PROGRAM, backend, str(WEIGHTS))
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("task", ["segment", "pose"])
def test_masks_and_keypoints_are_those_of_our_engine(task: str, backend: str, tmp_path: Path) -> None:
    """With random weights, so that the detections have no meaning."""
    result = _result(tmp_path, TASKS, backend, task)
    assert result["task"] == task
    assert result["detections"] > 0
    shape = {"segment": result["masks"], "pose": result["keypoints"]}[task]
    assert shape == [result["detections"], *((96, 96) if task == "segment" else (5, 3))]
    expected, given = result["shapes"]
    assert expected == given
    assert result["sqnr"] >= max(LIMITS[backend], result["engine"])
