"""Engines that compute wrongly: they are replaced by models for fixed sizes, or refused, and never delivered."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import quantizer
import quantizer.pipeline.compare_outputs as compare_outputs
import quantizer.pipeline.run_engines as run_engines
from quantizer.cli.main import main
from quantizer.engines import build_engine
from quantizer.errors import EngineError
from quantizer.export.passes import openvino as openvino_passes
from quantizer.pipeline.compare_outputs import refusal
from quantizer.pipeline.layouts import batch_of
from quantizer.pipeline.model_graphs import FLOAT_STEM, QUANTIZED_STEM
from quantizer.report import read_record
from quantizer.report.verdict import verdict_of

for _package in ("onnx", "onnxscript", "onnxruntime", "openvino"):
    pytest.importorskip(_package, reason="install enginequant[onnx,onnxruntime,openvino]")

from tiny_run import tiny_run

pytestmark = pytest.mark.usefixtures("exact_byte_products")


class Gated(nn.Module):
    """Two convolutions without biases, of which one is read twice: OpenVINO's model for all sizes is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.c = nn.Conv2d(32, 16, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        return self.c(torch.cat([a, b], 1)) * torch.sigmoid(a)


class Wrong:
    """An engine that multiplies its outputs by a factor at some numbers of samples."""

    def __init__(self, engine: Any, rows: Callable[[int], bool], factor: float) -> None:
        self._engine, self._rows, self._factor = engine, rows, factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __call__(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run it."""
        found = self._engine(inputs)
        is_wrong = self._rows(len(next(iter(inputs.values()))))
        return {name: value * np.float32(self._factor) if is_wrong else value for name, value in found.items()}


def plant(
    monkeypatch: pytest.MonkeyPatch, stem: str, rows: Callable[[int], bool] = lambda _: True, factor: float = 1.5
) -> None:
    """Let a run's engine compute something else."""
    load = run_engines.load_engine

    def loaded(backend: str, path: Path, **settings: Any) -> Any:
        engine = load(backend, path, **settings)
        return Wrong(engine, rows, factor) if path.stem == stem else engine

    monkeypatch.setattr(run_engines, "load_engine", loaded)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that OpenVINO's model for all sizes computes wrongly."""
    monkeypatch.setattr(openvino_passes, "is_shared_product", lambda _: False)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).eval()


def _quantized(model: nn.Module, shape: tuple[int, ...], backend: str, batches: int = 16) -> Any:
    torch.manual_seed(1)
    data = [torch.randn(4, *shape) for _ in range(batches)]
    return quantizer.quantize_model(model, data, backend=backend, preset="plain")


def _db(right: Tensor, found: Tensor) -> float:
    return float(10 * torch.log10(right.square().sum() / (right - found).square().sum()))


@pytest.mark.usefixtures("shared")
def test_a_model_for_all_sizes_that_is_wrong_gives_way_to_fixed_sizes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Gated().eval()
    made = _quantized(model, (16, 8, 8), "openvino")
    (note,) = made.record.fixed_sizes
    assert note.startswith("the engine accepts only batch 1, 2, 4, ")
    assert ", with a model for each: openvino's model for all sizes is wrong (SQNR " in note
    assert batch_of(made._config, made.record.fixed_sizes) == made._config.export.dynamic.batch[1]
    assert " ".join(note.split()) in " ".join(made.summary().split())
    assert made.record.engine_refused is None
    engine = quantizer.load(made.save(tmp_path / "saved"))
    for rows in (1, 2, 4):
        x = torch.randn(rows, 16, 8, 8)
        assert _db(model(x).detach(), engine(x)) > 30
    with pytest.raises(EngineError, match=r"it has no model for x \[3, 16, 8, 8\]; expected x \[4, 16, 8, 8\] or x"):
        engine(torch.randn(3, 16, 8, 8))
    # What was compared are the sizes that it has.
    assert {one.batch for one in made.record.outputs} >= {1, 2, 4}
    assert all(one.is_alike for one in made.record.outputs)


@pytest.mark.usefixtures("shared")
def test_a_score_that_needs_other_sizes_is_an_error() -> None:
    model, data = Gated().eval(), [torch.randn(4, 16, 8, 8) for _ in range(8)]

    def score(model: Any) -> float:
        return float(model(torch.randn(3, 16, 8, 8)).detach().mean())

    with pytest.raises(
        EngineError, match=r"the engine is refused: .*, but its score needs other sizes: .* no model for x"
    ):
        quantizer.quantize_model(model, data, score=score, backend="openvino", preset="plain")


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_an_engine_that_is_wrong_at_one_size_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, backend: str
) -> None:
    plant(monkeypatch, QUANTIZED_STEM, lambda rows: rows == 2)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(EngineError, match="the engine is refused") as refused:
        _quantized(_net(), (32,), backend)
    said = str(refused.value)
    assert f"the engine is refused: {backend} engine, batch 2, output" in said
    assert "SQNR 6." in said
    assert "expected an SQNR of 30 dB or more, or at most 3 dB further from the float model than PyTorch" in said
    assert "does not compute the same as the model at batch 2, but does at batch 4, batch 1, " in said
    assert "Use another backend (`auto` chooses the fastest correct engine)" in said
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("quantizer-")]


def test_where_products_saturate_a_refusal_names_the_exact_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Use another backend (`auto`" in refusal("why", "openvino-avx2")
    monkeypatch.setattr(compare_outputs, "saturates", lambda: True)
    assert "Use the backend onnxruntime-avx2, because this CPU has no VNNI" in refusal("why", "onnxruntime")
    assert "Use another backend (`auto`" in refusal("why", "onnxruntime-avx2")


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_an_engine_of_no_numbers_is_refused(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    plant(monkeypatch, QUANTIZED_STEM, factor=factor)
    with pytest.raises(
        EngineError, match=r"the engine is refused: .* its NaN or infinite values differ from PyTorch's"
    ):
        _quantized(_net(), (32,), "onnxruntime")


def test_an_engine_that_does_not_run_at_a_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(rows: int) -> bool:
        if rows == 1:
            raise EngineError("no memory")
        return False

    plant(monkeypatch, QUANTIZED_STEM, fails)
    with pytest.raises(EngineError, match="it does not run at batch 1, but PyTorch does: no memory"):
        _quantized(_net(), (32,), "onnxruntime")


def test_a_wrong_float_engine_is_not_delivered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # At a size that is not the usual one.
    plant(monkeypatch, FLOAT_STEM, lambda rows: rows == 1)
    made = _quantized(_net(), (32,), "onnxruntime")
    assert made.record.engine_refused is None
    assert made.record.float_engine_refused is not None
    assert made.record.float_engine_db == pytest.approx(6.0, abs=0.1)
    assert "deploy float.engine" not in made.summary()
    assert "SQNR of the float engine against the model in PyTorch is 6.0 dB: it was deleted" in " ".join(
        made.summary().split()
    )
    assert _db(_net()(torch.ones(3, 32)).detach(), made.engine(torch.ones(3, 32))) > 20
    with pytest.raises(EngineError, match=r"the float engine is refused: .* batch 1.*60 dB or more"):
        _ = made.float_engine
    folder = made.save(tmp_path / "saved")
    assert not (folder / "float.engine").exists()
    assert read_record(folder / "report.json").float_engine_refused == made.record.float_engine_refused
    with pytest.raises(EngineError, match=r"has no float\.engine, because the run refused it: .*6\.0 dB"):
        quantizer.load(folder, float_engine=True)


@pytest.mark.nightly
def test_a_run_keeps_what_tells_the_cause_of_a_refused_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="install enginequant[hf]")
    plant(monkeypatch, QUANTIZED_STEM, lambda rows: rows == 8)
    (tmp_path / "run.yaml").write_text(json.dumps(tiny_run(tmp_path) | {"output": str(tmp_path / "out")}))
    assert main(["run", str(tmp_path / "run.yaml")]) == 1
    said = " ".join("".join(capsys.readouterr()).split())
    folder = tmp_path / "out"
    assert "the engine is refused: openvino engine, batch 8 x sequence 16, output 'logits': SQNR 6.0 dB" in said
    assert f"{folder} contains the report, the quantizer and model.onnx" in said
    assert "engine refused, see the verdict" in said
    assert {"model.onnx", "float.engine", "report.json", "quantizer"} <= {path.name for path in folder.iterdir()}
    assert not list(folder.rglob("model.engine*"))
    record = read_record(folder / "report.json")
    assert record.engine is None
    assert record.latency is None
    assert [one.form for one in record.scores] == ["float", "proxy"]
    assert any(not one.is_alike for one in record.outputs)
    verdict = verdict_of(record)
    assert verdict.level == "do not use"
    assert verdict.reasons[0].startswith("the engine was refused and deleted: openvino engine, batch 8")
    with pytest.raises(
        EngineError, match=r"has no model\.engine, because the run refused it: openvino engine, batch 8"
    ):
        quantizer.load(folder)
    # The file alone can be built, for whoever knows better.
    assert build_engine("openvino", folder / "model.onnx", tmp_path / "mine.engine").size_bytes
