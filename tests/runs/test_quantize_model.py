"""``quantize_model``: a module of one's own, from its data to engines, figures and a report, in one call."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

for _package in ("onnx", "onnxscript", "onnxruntime", "jinja2"):
    pytest.importorskip(_package, reason="quantize_model needs enginequant[onnx,onnxruntime,report]")

import quantizer
from quantizer.config import FallbackConfig
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import CalibrationError, CalibrationWarning, ConfigError, EngineError, QuantizerError, TaskError
from quantizer.pipeline.check_rules import check_rules
from quantizer.report import read_record
from quantizer.report.compare import compare, read_runs
from quantizer.report.compare_shown import html_from_comparison

ONNXRUNTIME = next(name for name in cpu_candidates()[0] if name.startswith("onnxruntime"))

pytestmark = pytest.mark.usefixtures("exact_byte_products")


class Net(nn.Module):
    """A small convolutional net, with dropout that eval mode switches off."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, image: Tensor) -> Tensor:
        hidden: Tensor = torch.relu(self.norm(self.first(image)))
        out: Tensor = self.head(nn.functional.dropout(hidden.mean((2, 3)), 0.5, self.training))
        return out


class Pairs(nn.Module):
    """Two inputs by name, and a mapping of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.linear = nn.Linear(16, 16)

    def forward(self, tokens: Tensor, weight: Tensor) -> dict[str, Tensor]:
        hidden = self.linear(self.embed(tokens))
        return {"hidden": hidden, "pooled": (hidden * weight[:, None, None]).mean(1)}


def _images(rows: int = 4, batches: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 3, 8, 8, generator=generator) for _ in range(batches)]


def _net() -> Net:
    torch.manual_seed(3)
    return Net().eval()


def _quantize(model: Any, data: Any, **settings: Any) -> Any:
    return quantizer.quantize_model(model, data, **{"backend": ONNXRUNTIME, "preset": "plain", **settings})


def _usual_size_first(record: Any) -> int:
    """Return the first size at which outputs were compared; one row and sizes between follow."""
    sizes = list(dict.fromkeys(output.batch for output in record.outputs))
    assert min(sizes) == 1
    assert len(sizes) > 2
    return int(sizes[0])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    torch.set_num_threads(1)
    return quantizer.quantize_model(_net(), _images(), score=_mean_score, backend=ONNXRUNTIME)


def _mean_score(model: nn.Module) -> float:
    with torch.no_grad():
        return float(torch.cat([model(image) for image in _images()]).mean())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exclude": {"names": ["headd"]}}, r"quantizer\.exclude\.names: 'headd' .*did you mean 'head'\?"),
        ({"include": {"module_types": ["Linea"]}}, r"quantizer\.include\.module_types: .*did you mean 'Linear'\?"),
        ({"exclude": {"sites": ["head.forward.linear_1"]}}, r"exclude\.sites: .*did you mean 'head.forward.linear_0'"),
        ({"fallback": {"names": ["headd"]}}, r"fallback\.names: 'headd' matches nothing: .*did you mean 'head'\?"),
        ({"fallback": {"names": ["head.forward.linear_0.input", "head.forward.linear_9"]}}, r"'head.forward.linear_9'"),
    ],
)
def test_a_rule_that_matches_nothing_is_found_before_scoring(settings: dict[str, Any], message: str) -> None:
    def score(_: nn.Module) -> float:
        raise AssertionError("the model was scored")

    with pytest.raises(ConfigError, match=message) as problems:
        _quantize(_net(), _images(), score=score, **settings)
    assert len(problems.value.problems) == 1


@pytest.mark.parametrize("name", ["head", "*ea*", "head.forward.linear_0", "head.forward.linear_0.weight", "**"])
def test_names_of_all_kinds_may_fall_back(name: str) -> None:
    config = FallbackConfig(names=[name])
    check_rules(quantizer.Quantizer(backend=ONNXRUNTIME), _net(), config)


def test_causes_are_looked_for_on_some_rows_of_large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def diagnose(self: quantizer.Quantizer, model: nn.Module, batches: Any, num: int) -> Any:
        seen.extend(len(batch["image"]) for batch in batches)
        return SimpleNamespace(rows=())

    monkeypatch.setattr(quantizer.Quantizer, "diagnose", diagnose)
    _quantize(_net(), _images(40), diagnose=True)
    assert seen == [8, 8]


def test_a_search_for_causes_that_fails_costs_no_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise AssertionError("no such <operand>")

    monkeypatch.setattr(quantizer.Quantizer, "diagnose", fails)
    with pytest.warns(UserWarning, match="the diagnosis failed; .* AssertionError: no such <operand>"):
        result = _quantize(_net(), _images(), diagnose=True)
    assert result.record.diagnosis_error == "AssertionError: no such <operand>"
    assert "are unknown: AssertionError: no such <operand>" in " ".join(result.summary().split())
    assert "no such &lt;operand&gt;" in result.report(tmp_path / "r.html").read_text()
    again = quantizer.load(result.save(tmp_path / "saved"))
    torch.testing.assert_close(again(_images()[0]), result.engine(_images()[0]))


class WritesInputs(Net):
    """A model that normalizes in place and keeps state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history = 0, []
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, image: Tensor) -> Any:
        self.calls += 1
        self.history.append(self.calls)
        image -= 1.0
        image *= 2.0
        self.mean = 0.9 * self.mean + 0.1 * image.mean()
        return super().forward(image) + self.mean


def test_neither_data_nor_model_change() -> None:
    data, seen = _images(), []

    def score(model: nn.Module) -> float:
        with torch.no_grad():
            seen.append([float(model(image).mean()) for image in data])
        return sum(seen[-1])

    torch.manual_seed(3)
    model = WritesInputs().eval()
    result = _quantize(model, data, score=score)
    assert all(map(torch.equal, data, _images()))
    assert (model.calls, model.history, float(model.mean)) == (0, [], 0.0)
    # Every form was scored on the same pixels, and began in the same state; an engine stays in it.
    assert len(seen) >= 2
    assert all(one[0] == pytest.approx(seen[0][0], abs=0.1) for one in seen)
    assert _usual_size_first(result.record) == 4
    assert all(output.sqnr_db > 25 for output in result.record.outputs)


@dataclass
class Scores:
    """A dataclass of which torch knows nothing, with a part that is no tensor."""

    logits: Tensor
    mean: Tensor
    labels: tuple[str, ...] = ("a", "b")


class ReturnsDataclass(Net):
    def forward(self, image: Tensor) -> Any:
        made = super().forward(image)
        return Scores(made, made.mean(-1))


def test_a_model_that_returns_a_dataclass(tmp_path: Path) -> None:
    torch.manual_seed(3)
    result = _quantize(ReturnsDataclass().eval(), _images())
    image = _images()[0]
    given, right = result.engine(image), result.model(image)
    assert isinstance(given, Scores)
    assert given.labels == ("a", "b")
    torch.testing.assert_close(given.logits, right.logits, rtol=0.1, atol=0.1)
    assert _usual_size_first(result.record) == 4
    sizes = dict.fromkeys(output.batch for output in result.record.outputs)
    compared = [(output.output, output.batch) for output in result.record.outputs]
    assert compared == [(name, size) for size in sizes for name in ("logits", "mean")]
    # A folder holds no class of the user's.
    loaded = quantizer.load(result.save(tmp_path / "saved"))(image)
    assert {name: list(value) if name == "labels" else value.shape for name, value in loaded.items()} == {
        "logits": right.logits.shape,
        "mean": right.mean.shape,
        "labels": ["a", "b"],
    }


def test_engines_figures_and_score(made: Any) -> None:
    record, image = made.record, _images()[0]
    with torch.no_grad():
        expected = made.model(image)
    torch.testing.assert_close(made.float_engine(image), expected, rtol=1e-4, atol=1e-5)
    assert 0 < (made.engine(image) - expected).abs().max() < 0.1
    assert _usual_size_first(record) == 4
    # At each size 32 rows or the few more that fill the last batch, the 12 rows in turn.
    images = torch.cat(_images())
    for output in record.outputs:
        assert output.engine
        batches = images[torch.arange(-(-32 // output.batch) * output.batch) % len(images)].split(output.batch)
        with torch.no_grad():
            right = torch.cat([made.model(batch) for batch in batches])
        difference = torch.cat([made.engine(batch) for batch in batches]) - right
        figure = float(10 * torch.log10(right.square().sum() / difference.square().sum()))
        assert output.sqnr_db == pytest.approx(figure, abs=0.1)
    assert [one.form for one in record.scores] == ["float", "engine"]
    assert record.scores[0].metric == "_mean_score"
    assert record.scores[1].value == pytest.approx(_mean_score(made.engine))
    assert record.scores[1].difference == pytest.approx(_mean_score(made.engine) - _mean_score(made.model))
    assert {entry.name for entry in record.latency.engines} == {"float", "engine"}
    assert record.latency.batch == 4
    assert record.size[1].bytes == (made.folder / "model.engine").stat().st_size
    proxy = made.quantizer.quantize(made.model)
    torch.testing.assert_close(made.engine(image), proxy(image), rtol=1e-3, atol=1e-3)


def test_summary_and_report(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = made.summary()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # Jupyter sets it
    assert made.summary() == said
    monkeypatch.undo()
    assert "verdict usable: " in said or "verdict check: " in said
    page = made.report(tmp_path / "r.html").read_text()
    assert "<h1>Net</h1>" in page
    assert 'class="judgement ' in page


def test_saved_like_a_run(made: Any, tmp_path: Path) -> None:
    folder = made.save(tmp_path / "saved")
    assert read_record(folder / "report.json") == made.record
    assert {"model.engine", "float.engine", "model.onnx", "float.onnx", "quantizer", "report.html"} <= {
        path.name for path in folder.iterdir()
    }
    with pytest.raises(QuantizerError, match="already exists"):
        made.save(folder)
    assert made.save(folder, replace=True) == folder


def test_saved_results_are_compared(made: Any, tmp_path: Path) -> None:
    other = _quantize(made.model, _images(), score=_mean_score)
    found = compare(read_runs([made.save(tmp_path / "all8"), other.save(tmp_path / "fast")]))
    assert found.best is not None
    (pair,) = found.to_best.values()
    assert pair.difference is not None
    assert abs(pair.difference) == pytest.approx(abs(made.record.scores[1].value - other.record.scores[1].value))
    page = html_from_comparison(found, "two", tmp_path)
    assert "No run has a score" not in page
    assert "other samples" not in page


def test_the_model_is_not_changed_and_its_mode_is_none_of_the_result() -> None:
    model = _net().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = _net()(_images()[0])
    with pytest.warns(CalibrationWarning, match="the model is in train mode; a copy in eval mode"):
        result = _quantize(model, _images())
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    torch.testing.assert_close(result.float_engine(_images()[0]), expected, rtol=1e-4, atol=1e-5)


def test_a_model_and_data_in_bfloat16() -> None:
    model, images = _net().bfloat16(), [batch.bfloat16() for batch in _images()]
    found = _quantize(model, images)
    right = model(images[0]).float()
    assert (found.engine(images[0]) - right).norm() < 0.1 * right.norm()


def test_a_batch_that_the_model_does_not_take() -> None:
    said = r"batch 0 \(.* \[8, 2, 12, 12\]\): Net.forward\(\) failed, with RuntimeError: Given groups=1"
    with pytest.raises(TaskError, match=said):
        _quantize(_net(), [torch.randn(8, 2, 12, 12)])


def test_names_types_and_lengths_of_several_inputs() -> None:
    torch.manual_seed(0)
    model = Pairs().eval()
    batches = [{"tokens": torch.randint(0, 32, (2, length)), "weight": torch.rand(2)} for length in (6, 4, 6)]
    result = _quantize(model, batches)
    with torch.no_grad():
        expected = model(**batches[1])
    for given in (result.engine(**batches[1]), result.engine(batches[1]["tokens"], weight=batches[1]["weight"])):
        assert list(given) == ["hidden", "pooled"]
        assert given["hidden"].shape == (2, 4, 16)
        torch.testing.assert_close(given["pooled"], expected["pooled"], rtol=0.1, atol=0.05)
    assert {one.output for one in result.record.outputs} == {"hidden", "pooled"}
    assert result.record.latency.sequence == 6
    with pytest.raises(EngineError, match=r"the input does not fit Pairs.forward\(.*missing a required argument"):
        result.engine(batches[0]["tokens"])


class _Masked(nn.Module):
    """Takes a mask that is the same for all rows, however many these are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.linear(x) @ mask
        return out


def test_an_input_that_is_the_same_for_all_rows() -> None:
    torch.manual_seed(0)
    model, mask = _Masked().eval(), torch.ones(6, 6).tril()
    batches = [{"x": torch.randn(32, 6), "mask": mask} for _ in range(2)]
    result = _quantize(model, batches)
    assert _usual_size_first(result.record) == 32
    for output in result.record.outputs:
        assert output.sqnr_db > 20
    torch.testing.assert_close(result.float_engine(**batches[0]), model(**batches[0]), rtol=1e-4, atol=1e-4)


class _Variadic(nn.Module):
    def forward(self, *images: Tensor) -> Tensor:
        return images[0]


@pytest.mark.parametrize(
    ("model", "data", "error", "said"),
    [
        (_net, [], CalibrationError, "the calibration data is empty"),
        (_net, [(torch.ones(2, 3, 8, 8), torch.ones(2), torch.ones(2))], CalibrationError, "which parts are inputs"),
        (_net, [{"image": [1.0]}], CalibrationError, "image is list; expected a tensor with the samples"),
        (_net, [torch.tensor(1.0)], CalibrationError, r"image is a tensor of shape \[\]; expected a tensor with"),
        (_Variadic, [torch.ones(2, 3)], CalibrationError, "variadic positional arguments have no names"),
        (lambda: "net", [torch.ones(2, 3)], QuantizerError, "expects a float torch.nn.Module, but got"),
    ],
)
def test_what_does_not_fit(model: Callable[[], Any], data: list[Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        _quantize(model(), data)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"threads": 0}, "engine.threads: got the .*; expected a .*number, at least"),
        ({"time_budget": -1.0}, "time_budget: got the .*; expected a .*number, at least"),
        ({"optimize_for": "speed"}, "optimize_for: got the text 'speed'; expected .*latency.*throughput.*both"),
    ],
)
def test_engine_options_are_checked(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        quantizer.quantize_model(_net(), [_images()[0]], **options)


def test_a_loader_with_labels_and_no_end() -> None:
    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield _images()[0], torch.zeros(4, dtype=torch.int64)

    result = _quantize(_net(), endless(), samples=32)
    assert result.record.config["data"]["calibration"]["samples"] == 32


def test_a_format_of_a_later_opset() -> None:
    import onnx

    openvino = next(name for name in cpu_candidates()[0] if name.startswith("openvino"))
    four = [{"weights": "int4", "kinds": ["linear"]}]
    made = _quantize(_net(), _images(), backend=openvino, formats=four)
    file = onnx.load(made.folder / "model.onnx")
    assert file.opset_import[0].version == 21
    assert onnx.TensorProto.INT4 in {constant.data_type for constant in file.graph.initializer}


class Halves(nn.Module):
    """A model that computes with the length of its batch as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.one(x[: len(x) // 2]))
        out: Tensor = self.two(hidden) - self.two(x[len(x) // 2 :])
        return out


def test_a_model_that_fixes_its_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    data = [torch.randn(6, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    model = Halves().eval()
    wanted = "the engine accepts only batches with a size of 6 along axis 0 of 'x'"

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt("before the calibration")

    with monkeypatch.context() as early:
        early.setattr(quantizer.Quantizer, "calibrate", stopped)
        with (
            pytest.warns(CalibrationWarning, match=wanted),
            pytest.raises(KeyboardInterrupt, match="before the calibration"),
        ):
            _quantize(model, data)
    advice = r"view\(6, ...\) or a parameter of that length. Use x.shape and -1 in the model"
    with pytest.warns(CalibrationWarning, match=f"{wanted}: the model fixes that size, for example by .*{advice}"):
        result = _quantize(model, data)
    summary = " ".join(result.summary(1000).split())
    assert f"{wanted}: the model fixes that size" in summary
    assert "for example by" not in summary
    assert result.engine(data[0]).shape == (3, 4)
    with pytest.raises(EngineError, match="6"):
        result.engine(data[0][:4])


def test_settings_are_those_of_a_quantizer() -> None:
    with pytest.raises(ConfigError, match="bakend"):
        quantizer.quantize_model(_net(), _images(), bakend="openvino")


def test_a_score_that_is_no_number_and_what_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(TaskError, match=r"the score of the .* is nan; expected a finite number"):
        _quantize(_net(), _images(), score=lambda _: float("nan"))
    assert not list(tmp_path.glob("quantizer-*"))
    result = _quantize(_net(), _images())
    assert result.folder.parent.parent == tmp_path
    del result
    gc.collect()
    assert not list(tmp_path.glob("quantizer-*"))
