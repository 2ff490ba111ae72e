"""Latency interleaved, and the peak memory of a process of its own."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quantizer.engines import InputSizes, TensorSpec, build_engine, interleaved_latency, medians, peak_memory_mib
from quantizer.engines import measure as benchmark
from quantizer.engines.measure import made_up_inputs
from quantizer.errors import EngineError


def test_turns_and_counts() -> None:
    calls: list[str] = []
    samples = interleaved_latency({name: lambda name=name: calls.append(name) for name in "abc"}, rounds=3, warmup=1)
    assert "".join(calls) == "cab" + "abc" + "bca" + "cab"
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3, "c": 3}
    assert all(value >= 0 for values in samples.values() for value in values)


@pytest.mark.parametrize(("each", "counted", "in_all"), [(0.01, 15, 18), (1.0, 10, 12), (7.0, 3, 4), (12.0, 1, 2)])
def test_slow_calls_have_fewer_rounds(each: float, counted: int, in_all: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, 0

    def call() -> None:
        nonlocal now, calls
        now, calls = now + each, calls + 1

    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now)
    samples = interleaved_latency({"a": call, "b": call}, rounds=15, warmup=3, seconds=22.0)
    assert {len(values) for values in samples.values()} == {counted}
    assert calls == 2 * in_all
    assert all(value == pytest.approx(each) for values in samples.values() for value in values)


def test_medians() -> None:
    assert medians({"a": [3.0, 1.0, 2.0], "b": [1.0, 2.0]}) == {"a": 2.0, "b": 1.5}


def test_nothing_to_time() -> None:
    with pytest.raises(EngineError, match="no engine to time"):
        interleaved_latency({})
    with pytest.raises(EngineError, match="rounds is 0"):
        interleaved_latency({"a": lambda: None}, rounds=0)


def test_made_up_inputs() -> None:
    specs = [
        TensorSpec("ids", np.dtype(np.int64), (None, None)),
        TensorSpec("x", np.dtype(np.float16), (None, 7, None)),
    ]
    arrays = made_up_inputs(specs, sizes=InputSizes(2, 5))
    assert arrays["ids"].shape == (2, 5)
    assert arrays["ids"].dtype == np.int64
    assert set(arrays["ids"].ravel()) == {1}
    assert arrays["x"].shape == (2, 7, 5)
    assert arrays["x"].dtype == np.float16


@pytest.mark.parametrize("name", ["openvino", "onnxruntime"])
def test_peak_memory(name: str, qdq: Any, tmp_path: Path) -> None:
    pytest.importorskip(name)
    engine = build_engine(name, qdq.path, tmp_path / "model.engine").path
    memory = peak_memory_mib(engine, name, sizes=InputSizes(2, 4))
    assert 10 < memory.baseline_mib <= memory.peak_mib < 2000


@pytest.mark.skipif(sys.platform != "linux", reason="other systems start a program with a peak of zero")
def test_peak_memory_is_not_that_of_the_caller(qdq: Any) -> None:
    pytest.importorskip("onnxruntime")
    ballast = np.ones(1 << 30, np.uint8)
    memory = peak_memory_mib(qdq.path, "onnxruntime", sizes=InputSizes(1, 1))
    assert memory.peak_mib < ballast.nbytes / 2**20


def test_peak_memory_of_what_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"measuring the memory of .*none\.onnx failed: .*file not found"):
        peak_memory_mib(tmp_path / "none.onnx", "openvino")
    with pytest.raises(EngineError, match="unknown backend 'openvin'; known: onnxruntime"):
        peak_memory_mib(tmp_path / "none.onnx", "openvin")


def test_peak_memory_gives_up(qdq: Any) -> None:
    with pytest.raises(EngineError, match=r"took more than 0\.001 s"):
        peak_memory_mib(qdq.path, "onnxruntime", timeout_s=0.001)


def test_a_process_that_cannot_start_is_told(qdq: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(subprocess, "Popen", none)
    with pytest.raises(EngineError, match=r"measuring the memory of .* failed: its process cannot start \(Cannot"):
        peak_memory_mib(qdq.path, "onnxruntime")


def test_memory_that_cannot_be_measured_costs_no_result(tmp_path: Path) -> None:
    from contextlib import nullcontext
    from types import SimpleNamespace

    from quantizer.pipeline import benchmark

    def no_memory(*_: object, **__: object) -> None:
        raise EngineError("its process cannot start")

    context: Any = SimpleNamespace(timer=lambda name: nullcontext(), floats=None)
    part = SimpleNamespace(latency_batch=1, latency_sequence=1)
    config: Any = SimpleNamespace(
        report=part, engine=SimpleNamespace(threads=1), quantizer=SimpleNamespace(backend="openvino")
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "peak_memory_mib", no_memory)
        patch.setattr(benchmark, "run_sizes", lambda *_: {})
        with pytest.warns(UserWarning, match="memory was not measured; all other results are complete: its"):
            assert benchmark.measure_memory(context, config, {"int8": tmp_path / "model.engine"}) == ()
