"""A run for whatever is fastest: the backend is chosen after calibration, by the time of its engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

for _package in ("transformers", "sklearn", "onnx", "onnxscript", "openvino", "onnxruntime", "jinja2"):
    pytest.importorskip(_package, reason="a run needs quantizer[hf,onnx,openvino,onnxruntime,report]")

from tiny_run import tiny_run  # noqa: E402

import quantizer.runs.measure as run_measure  # noqa: E402
import quantizer.runs.pick_backend as pick  # noqa: E402
import quantizer.runs.run  # noqa: E402
from quantizer import Quantizer  # noqa: E402
from quantizer.cli.main import main  # noqa: E402
from quantizer.config import dump_yaml  # noqa: E402
from quantizer.config import load_run  # noqa: E402
from quantizer.engines import BuildResult  # noqa: E402
from quantizer.engines import PeakMemory  # noqa: E402
from quantizer.engines.candidates import Variant  # noqa: E402
from quantizer.engines.candidates import cpu_candidates  # noqa: E402
from quantizer.engines.candidates import cpu_variants  # noqa: E402
from quantizer.errors import EngineError  # noqa: E402
from quantizer.report import read_record  # noqa: E402

OPENVINO, ONNXRUNTIME, TORCH = sorted(cpu_candidates()[0], key=lambda name: ("torch" in name, "onnx" in name))
TIMES = {f"{OPENVINO} float32": 4.0, f"{OPENVINO} int8": 3.0, f"{ONNXRUNTIME} float32": 5.0, f"{ONNXRUNTIME} int8": 2.0}

pytestmark = [
    pytest.mark.usefixtures("exact_byte_products"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU auto is tensorrt"),
]


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)
    settings = tiny_run(tmp_path)
    settings["quantizer"].pop("backend", None)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump({**settings, "output": "done"}))
    monkeypatch.setattr(run_measure, "peak_memory_mib", lambda *_, **__: PeakMemory(peak_mib=3.0, baseline_mib=1.0))
    return tmp_path


def _taking(times: Mapping[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(calls: Mapping[str, Any], **_: int) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        return {name: [times[name]] for name in calls}

    def variants(*given: Any, **more: Any) -> tuple[Variant, ...]:
        # Each takes seconds to build: those that have a time.
        return tuple(variant for variant in cpu_variants(*given, **more) if variant.name in times)

    monkeypatch.setattr(pick, "interleaved_latency", taken)
    monkeypatch.setattr(pick, "cpu_variants", variants)


@pytest.mark.promise("the run goes on with the fastest; its first line and the report say which that is")
def test_the_run_goes_on_with_the_fastest(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_run("tiny.yaml").quantizer.backend == "auto"
    _taking(TIMES, monkeypatch)
    assert main(["run", "tiny.yaml"]) == 0
    record = read_record(at / "done" / "report.json")
    assert record.choice is not None
    assert [one.name for one in record.choice.candidates] == sorted(TIMES, key=lambda name: TIMES[name])
    assert all(one.sqnr_db for one in record.choice.candidates)
    chosen, *_, plain = record.choice.candidates
    assert plain.score_difference == 0
    assert chosen.score_difference == record.scores[-1].difference
    # The chosen engine was scored once, as the rows of the choice.
    assert [stage.name for stage in record.stages].count("score the float") == 1
    assert "score the engine" not in [stage.name for stage in record.stages]
    assert record.engine is not None
    assert record.engine.backend == ONNXRUNTIME
    assert record.scores[-1].which == "engine"
    assert load_run("done/config.yaml").quantizer.backend == ONNXRUNTIME
    assert Quantizer.load("done/quantizer").config.backend == ONNXRUNTIME
    said = capsys.readouterr().out
    assert record.choice.headline in said
    assert said.splitlines()[-1] == f"deploy  {record.choice.deploy}"
    assert record.choice.headline.split(",")[0][1:] in (at / "done" / "report.html").read_text()


@pytest.mark.promise("Where float won, the last line of a run names `float.engine` as what to deploy")
def test_float_wins_and_is_named_in_the_end(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _taking({f"{ONNXRUNTIME} float32": 1.0, f"{ONNXRUNTIME} int8": 2.0}, monkeypatch)

    def last(calls: Mapping[str, Any], **_: int) -> dict[str, list[float]]:
        return {name: [{"float": 1.0, "engine": 2.0}[name]] for name in calls}

    monkeypatch.setattr(run_measure, "interleaved_latency", last)
    assert main(["run", "tiny.yaml"]) == 0
    said = capsys.readouterr().out
    record = read_record(at / "done" / "report.json")
    assert record.choice is not None
    assert record.choice.headline.startswith(
        f"nothing in INT8 is faster than float here, and {ONNXRUNTIME} float32 is delivered"
    )
    assert record.choice.deploy == "float.engine, 2.00x as fast as the quantized model.engine beside it"
    assert said.splitlines()[-1] == f"deploy  {record.choice.deploy}"
    assert "To deploy: float.engine, 2.00" in (at / "done" / "report.html").read_text()
    assert (at / "done" / "float.engine").exists()
    assert (at / "done" / "model.engine").exists()


def test_only_float_is_right(at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    built = pick.tried_build

    def crash(name: str, onnx: Path, engine: Path, *more: Any, **options: Any) -> BuildResult:
        if "int8" in engine.name:
            raise EngineError("building it crashed")
        return built(name, onnx, engine, *more, **options)

    monkeypatch.setattr(pick, "tried_build", crash)
    _taking(TIMES, monkeypatch)
    assert main(["run", "tiny.yaml"]) == 1
    said = capsys.readouterr().err
    assert "no quantized engine is right and runs here: " in said
    assert f"{ONNXRUNTIME} int8: failed: building it crashed" in said
    assert not (at / "done").exists()


def test_in_a_notebook_it_is_an_engine_for_this_cpu() -> None:
    assert Quantizer(backend="auto").config.backend == cpu_candidates()[0][0]


@pytest.mark.parametrize("written", [{"backend": [ONNXRUNTIME]}, {"backend": "auto", "candidates": [ONNXRUNTIME]}])
@pytest.mark.promise("A list such as `backend: [openvino, torch]` narrows the choice")
def test_a_list_narrows_the_choice(written: dict[str, Any], at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = yaml.safe_load(Path("tiny.yaml").read_text())
    settings["quantizer"].update(written)
    Path("tiny.yaml").write_text(yaml.safe_dump(settings))
    config = load_run("tiny.yaml")
    Path("again.yaml").write_text(dump_yaml(config))
    assert load_run("again.yaml") == config
    names: list[tuple[str, ...]] = []

    def picks(*asked: Any) -> None:
        names.append(asked[-1])
        raise EngineError("that is enough")

    monkeypatch.setattr(quantizer.runs.run, "pick_backend", picks)
    assert main(["run", "tiny.yaml"]) == 1
    assert names == [(ONNXRUNTIME,)]
    assert cpu_candidates(names[0])[0] == (ONNXRUNTIME,)
    assert Quantizer("tiny.yaml").config.backend == ONNXRUNTIME


def test_a_list_with_an_engine_of_a_gpu(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.yaml", "quantizer.backend=[openvino, tensorrt]"]) == 1
    assert "auto times engines on this CPU, and tensorrt's run elsewhere" in capsys.readouterr().err
    assert not (at / "done").exists()
