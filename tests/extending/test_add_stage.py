"""A stage in a scratch copy of the package: the changes of the guide, as they stand there."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

for _package in ("transformers", "onnx", "onnxscript", "openvino"):
    pytest.importorskip(_package, reason="a run needs enginequant[hf,onnx,openvino]")

from outside import apply_guide_changes
from tiny_run import tiny_run

import quantizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with the stage, and a run of a tiny float model."""
    path = tmp_path_factory.mktemp("copy")
    # With the bytecode, which each process would compile anew.
    shutil.copytree(Path(quantizer.__file__).parent, path / "quantizer")
    changed = apply_guide_changes(path, "add-a-stage.md")
    assert changed == ["quantizer/pipeline/stages.py", "quantizer/config/schema.py"]
    run = {**tiny_run(path), "quantize": False}
    del run["data"]["calibration"]
    run["quantizer"] = {"backend": "openvino"}
    run["report"] |= {"formats": ["json"], "bootstrap": 1}
    (path / "run.yaml").write_text(yaml.safe_dump(run), encoding="utf-8")
    return path


def run_in_copy(folder: Path, text: str) -> str:
    """Return what a script printed that imports the copy; the processes of ``outside`` have the package itself."""
    search = os.pathsep.join([str(folder), str(Path(__file__).parents[1])])
    command, environment = [sys.executable, "-c", text], {**os.environ, "PYTHONPATH": search}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_it_runs_in_its_place_and_is_numbered(folder: Path) -> None:
    printed = run_in_copy(
        folder,
        """
import quantizer.pipeline.benchmark as benchmark
from quantizer.cli.main import main
from quantizer.pipeline import stages
from trials_here import trials_here

benchmark._LATENCY_SECONDS = 0.1
# Engines are built in this process, and none has a process of its own for its memory.
stages.measure_memory = lambda *_: ()
with trials_here():
    assert main(["run", "run.yaml", "engine.checksums=true", "output=done"]) == 0
""",
    )
    lines = re.findall(r"^\[(\d+)/(\d+)\] ([^,\n]+)", printed, flags=re.MULTILINE)
    assert [line[2] for line in lines[-2:]] == ["measure latency", "write checksums"]
    assert [int(number) for number, _, _ in lines[-2:]] == [len(lines) - 1, len(lines)]
    assert {int(count) for _, count, _ in lines} == {len(lines)}
    digest = hashlib.sha256((folder / "done" / "model.engine").read_bytes()).hexdigest()
    assert (folder / "done" / "SHA256SUMS").read_text(encoding="utf-8") == f"{digest}  model.engine\n"


def test_its_key_and_its_errors(folder: Path) -> None:
    run_in_copy(
        folder,
        """
from types import SimpleNamespace

import pytest

from quantizer.config import load_run
from quantizer.errors import ConfigError
from quantizer.pipeline import stages
from quantizer.pipeline.job import Outline

for asked in (False, True):
    config = load_run("run.yaml", [f"engine.checksums={str(asked).lower()}"])
    outline = Outline.of(config, chooses=False)
    assert ("write checksums" in stages.stage_names(outline)) == asked

stages.TOGETHER = (stages.ALONE[-1],)
with pytest.raises(AttributeError) as caught:
    stages.carry_out(SimpleNamespace(config=config, among=None))
assert caught.value.__notes__ == ["in stage write_checksums"]

stages.ALONE = (stages.Stage(stages.write_checksums, lambda of: None),)
with pytest.raises(TypeError) as caught:
    list(stages.stage_names(outline))
assert caught.value.__notes__ == ["in the names of stage write_checksums"]

with pytest.raises(ConfigError, match="engine.checksum: unknown key.*checksums"):
    load_run("run.yaml", ["engine.checksum=true"])
""",
    )
