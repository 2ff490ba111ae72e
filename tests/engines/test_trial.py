"""Builds in a process of their own: one that crashes or hangs is told, and takes nothing else with it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quantizer.engines import BuildOptions, InputSizes, backends
from quantizer.engines.measure import begin_build, finish_trials, trial_process, tried_build
from quantizer.errors import EngineError
from quantizer.plan.targets import profiles

MODULE = """
import os
import time

from dataclasses import replace

from quantizer.engines import backends
from quantizer.plan.targets import profile, profiles


class Crashing:
    device = "cpu"
    name = "crashing"
    check = load = inspect = None  # never called

    def build(self, onnx_path, engine_path, options):
        engine_path.write_bytes(b"half of it")
        os.abort()


class Hanging(Crashing):
    name = "hanging"

    def build(self, onnx_path, engine_path, options):
        time.sleep(600)


for one in (Crashing(), Hanging()):
    profiles.add(one.name)(replace(profile("openvino"), name=one.name))
    backends.add(one.name)(one)
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "bad_backends.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for registry in (backends, profiles):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    importlib.import_module("bad_backends")
    yield
    del sys.modules["bad_backends"]


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_an_engine_is_built_and_run(name: str, qdq: Any, tmp_path: Path) -> None:
    pytest.importorskip(name)
    built = tried_build(name, qdq.path, tmp_path / "model.engine", BuildOptions(), sizes=InputSizes(2, 4))
    assert built.path == tmp_path / "model.engine"
    assert built.path.stat().st_size == built.size_bytes
    assert built.seconds > 0


@pytest.mark.usefixtures("outside")
def test_it_crashes(qdq: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"model\.engine for crashing .* crashed: Aborted \(signal 6\)"):
        tried_build("crashing", qdq.path, tmp_path / "model.engine", BuildOptions())


@pytest.mark.usefixtures("outside")
def test_it_hangs(qdq: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"model\.engine for hanging .* took more than 3 s"):
        tried_build("hanging", qdq.path, tmp_path / "model.engine", BuildOptions(), timeout_s=3.0)


@pytest.mark.usefixtures("outside")
def test_builds_that_began_early(qdq: Any, tmp_path: Path) -> None:
    """Each is built once, and one that crashes fails alone."""
    pytest.importorskip("onnxruntime")
    paths = {name: tmp_path / f"{name}.engine" for name in ("openvino", "crashing", "onnxruntime")}
    with trial_process():
        for name, path in paths.items():
            begin_build(name, qdq.path, path, BuildOptions())
        finish_trials()
        written = {name: paths[name].stat().st_mtime_ns for name in ("openvino", "onnxruntime")}
        for name in written:
            assert tried_build(name, qdq.path, paths[name], BuildOptions()).path.stat().st_mtime_ns == written[name]
        with pytest.raises(EngineError, match=r"crashing\.engine for crashing .* crashed: Aborted \(signal 6\)"):
            tried_build("crashing", qdq.path, paths["crashing"], BuildOptions())
        # Other options are another build.
        tried_build("openvino", qdq.path, paths["openvino"], BuildOptions(), threads=2)
        assert paths["openvino"].stat().st_mtime_ns > written["openvino"]


def test_what_cannot_be_built(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    with pytest.raises(EngineError, match=r"failed: .*none\.onnx"):
        tried_build("onnxruntime", tmp_path / "none.onnx", tmp_path / "model.engine", BuildOptions())
