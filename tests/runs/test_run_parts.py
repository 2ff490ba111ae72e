"""``quantizer run`` of models in parts: a folder with an engine for each, and a report of the whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml
from rich.console import Console

from quantizer.cli.main import main

for _package in ("transformers", "torchmetrics", "onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(_package, reason="a run needs enginequant[hf,onnx,onnxruntime]")

from tiny_seq2seq import TEXTS, tiny_t5

import quantizer
from quantizer import Quantizer
from quantizer.config import RunConfig, load_run
from quantizer.engines.candidates import Variant
from quantizer.errors import EngineError, QuantizerError
from quantizer.files.temporary import OLD, new_name
from quantizer.report import read_record
from quantizer.report.compare import read_resamples
from quantizer.report.record import Candidate
from quantizer.runs.convert import load_converted, measure
from quantizer.runs.convert.choose import PYTORCH
from quantizer.runs.convert.inputs import ConversionInputs
from quantizer.runs.convert.measure import ShapeLatency
from quantizer.runs.convert.parts import course
from quantizer.runs.convert.parts.course import PartsCourse, PartsDone
from quantizer.runs.convert.parts.loaded import ConvertedParts
from quantizer.runs.convert.parts.measure import write_once
from quantizer.runs.convert.parts.result import WholeLatency
from quantizer.runs.progress.stage_timer import StageTimer
from quantizer.runs.written_sizes import with_written_sizes
from quantizer.tasks import load_model
from quantizer.tasks.seq2seq.writer import Writer

pytestmark = pytest.mark.usefixtures("exact_byte_products")


def _settings(place: Path) -> dict[str, Any]:
    rows = {"name": "text-pairs", "path": str(place / "pairs.csv")}
    return {
        "model": {"source": str(place / "t5"), "task": "text-to-text", "max_length": 16, "new_tokens": 6},
        "data": {"calibration": rows, "evaluation": rows, "batch_size": 4},
        "quantizer": {"backend": "onnxruntime", "preset": "plain"},
        "export": {"dynamic": {"batch": [1, 2, 4], "sequence": [4, 8, 16]}},
        "report": {"latency_batch": 3, "latency_sequence": 8, "bootstrap": 50},
        "output": str(place / "out"),
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    tiny_t5(folder / "t5")
    (folder / "pairs.csv").write_text(
        "source,target\n" + "".join(f"{text},{TEXTS[number - 1]}\n" for number, text in enumerate(TEXTS)) * 4
    )
    (folder / "run.yaml").write_text(yaml.safe_dump(_settings(folder)))
    return folder


@pytest.fixture(scope="module")
def made(place: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_SECONDS", 0.1)
        assert main(["run", str(place / "run.yaml")]) == 0
    return place / "out"


@pytest.mark.promise("`quantizer run` makes the same of a configuration")
def test_the_folder_of_a_run_writes_what_the_quantized_model_writes(made: Path, place: Path) -> None:
    loaded = load_converted(made)
    assert isinstance(loaded, ConvertedParts)
    proxy = Quantizer.load(made / "quantizer").quantize(load_model(str(place / "t5"), "text-to-text"))
    batch = {name: torch.from_numpy(value) for name, value in loaded.inputs(TEXTS).items()}
    right = Writer(proxy, 6)(**batch)["sequences"]
    assert loaded.generate(TEXTS) == [loaded.processor.decode(row, skip_special_tokens=True) for row in right]
    with pytest.raises(QuantizerError, match=r"an engine for each, .*load_converted\(.*\)\.generate"):
        quantizer.load(made)


def test_loading_puts_back_what_a_kill_left_aside(made: Path) -> None:
    made.rename(new_name(made).with_suffix(OLD))
    assert isinstance(load_converted(made), ConvertedParts)
    assert made.is_dir()


def test_the_report_of_a_run_is_of_all_parts(made: Path) -> None:
    record = read_record(made / "report.json")
    assert record.name == "out"
    assert [(one.which, one.metric, one.rows) for one in record.scores] == [
        (which, "rouge_l", 12) for which in ("float", "proxy", "engine")
    ]
    assert [one.output for one in record.outputs] == [
        "encoder_model: last_hidden_state",
        "decoder_model: logits",
        "decoder_with_past_model: logits",
        "token by token: logits",
    ]
    assert all(one.batch == 3 for one in record.outputs)
    assert record.latency is not None
    assert (record.latency.batch, record.latency.sequence) == (3, 8)
    assert (made / "report.html").is_file()
    kept = read_resamples(made)
    assert kept is not None
    assert len(kept.scores["engine"]) == 50


def test_the_configuration_of_a_run_is_the_one_to_repeat_it(made: Path) -> None:
    again = load_run(made / "config.yaml")
    assert again.export.dynamic.batch == (1, 2, 4)
    assert again.quantizer.preset == "plain"
    assert main(["validate", str(made / "config.yaml")]) == 0


def test_sizes_that_nobody_said_fit_what_writes_token_by_token(place: Path) -> None:
    said = _settings(place)
    plain = {key: said[key] for key in ("model", "quantizer")} | {"data": {**said["data"], "batch_size": 16}}
    sized = with_written_sizes(RunConfig.model_validate(plain))
    assert sized.export.dynamic.batch == (1, 4, 16)
    assert (sized.report.latency_batch, sized.report.latency_sequence) == (4, 128)
    del plain["data"]["batch_size"]
    sized = with_written_sizes(RunConfig.model_validate(plain))
    assert (sized.data.batch_size, sized.export.dynamic.batch) == (4, (1, 4, 8))
    # The same again, whether it was said or not.
    assert with_written_sizes(RunConfig.model_validate(sized.model_dump(mode="json"))) == sized


def test_sizes_of_the_latency_are_what_was_said(place: Path) -> None:
    said = _settings(place) | {"export": {}, "report": {"latency_batch": 16}}
    said["data"] = {**said["data"], "batch_size": 4}
    sized = with_written_sizes(RunConfig.model_validate(said))
    assert (sized.export.dynamic.batch, sized.report.latency_batch) == ((1, 4, 16), 16)
    facts = ConversionInputs(name="a", source="b", task="c", labels=(), batch=(1, 1, 8), sequence=None)
    assert facts.shapes[facts.usual] == (1, None)
    assert replace(facts, batch=(1, 8, 8)).usual == 1
    assert replace(facts, batch=(1, 4, 8), sequence=(4, 4, 16)).usual == 1


def test_of_a_choice_a_run_goes_on_with_what_is_quantized() -> None:
    ran = {"milliseconds": (1.0,), "verdict": ""}
    candidates = (
        Candidate(backend="openvino", format="float32", **ran),
        Candidate(backend="onnxruntime", format="int8", **ran),
    )
    asked = SimpleNamespace(needs_quantized=True)
    choice: Any = SimpleNamespace(candidates=candidates)
    choosing: Any = SimpleNamespace(asked=asked)
    assert PartsCourse._best(choosing, choice) == "onnxruntime int8"
    asked.needs_quantized = False
    assert PartsCourse._best(choosing, choice) == "openvino float32"
    asked.needs_quantized, choice.candidates = True, candidates[:1]
    with pytest.raises(EngineError, match="no quantized engine is right and runs here"):
        PartsCourse._best(choosing, choice)


class _Choice(PartsCourse):
    """A choice between engines that are made and delivered already."""

    def __init__(self, models: dict[str, Any]) -> None:
        variants = [Variant(backend=name, dtype="int8", precision=None) for name in models]
        self.asked: Any = SimpleNamespace(variants=variants, missing=(), needs_quantized=True)
        self.models, self.done, self.model, self.maker = models, PartsDone(), None, cast("Any", None)
        self.stage: Any = StageTimer(Console(quiet=True))
        self.told: list[str] = []
        self.stage.tell = self.told.append
        self.delivered: tuple[Any, ...] = ()

    def _made(self, variant: Variant) -> Any:
        return SimpleNamespace(variant=variant, model=self.models[variant.backend], checks=(), quantized=True)

    def _beside_pytorch(self, models: Any) -> WholeLatency:
        times = {name: (model(),) for name, model in {PYTORCH: lambda: 9.0, **models}.items()}
        took = {name: of_model[0] for name, of_model in times.items()}
        return WholeLatency(4, ShapeLatency(batch=1, sequence=8, rounds=1, milliseconds=took, times_ms=times))

    def _deliver(self, *given: Any) -> None:
        self.delivered = given


def test_engines_that_fail_while_they_are_timed_leave_the_choice_to_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken() -> float:
        raise RuntimeError("no memory for this batch")

    monkeypatch.setattr(course, "write_once", lambda maker, model: model())
    choosing = _Choice({"openvino": broken, "onnxruntime": lambda: 2.0})
    choosing._choose()
    assert choosing.done.choice is not None
    assert [one.name for one in choosing.done.choice.candidates] == ["onnxruntime int8", "openvino int8"]
    assert choosing.told[-1] == "openvino int8 failed: no memory for this batch"
    made, plain, whole = choosing.delivered
    assert (made.variant.backend, plain, whole.latency.milliseconds) == (
        "onnxruntime",
        None,
        {PYTORCH: 9.0, "engine": 2.0},
    )
    choosing = _Choice({"openvino": broken})
    with pytest.raises(EngineError, match="no engine is right and runs here: openvino int8: failed: no memory"):
        choosing._choose()


def test_what_is_timed_is_written_once(place: Path) -> None:
    model = load_model(str(place / "t5"), "text-to-text")
    ids = torch.arange(4, 8)[None]
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    maker: Any = SimpleNamespace(tokens=3, facts=SimpleNamespace(usual=0), checked_on=[SimpleNamespace(read=batch)])
    written: Any = write_once(maker, model)
    assert written["sequences"].shape == (1, 1 + 3)


REFUSED = {
    "a measurement": ("amp={}", "amp: task 'text-to-text' is of a model in several parts, for which nothing is put"),
    "engines without weights": (
        "engine.strip_weights=true",
        "engine.strip_weights: task 'text-to-text' is of a model in several parts, whose engines hold their weights",
    ),
    "no tokens": ("model.new_tokens=0", "model.new_tokens=0': model.new_tokens: got the whole number 0; expected"),
    "a task of one engine": ("model.task=fill-mask", "model.new_tokens: got 6, and task 'fill-mask' writes no text"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_run_of_models_in_parts_cannot_have(what: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, said = REFUSED[what]
    assert main(["run", str(place / "run.yaml"), asked, "--output", str(place / "refused")]) != 0
    told = capsys.readouterr()
    assert said in " ".join((told.out + told.err).split())
    assert not (place / "refused").exists()


def test_what_it_cannot_have_is_told_beside_other_problems(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(place / "run.yaml"), "quantizer.bakend=openvino", "amp={}"]) != 0
    told = capsys.readouterr()
    words = " ".join((told.out + told.err).split())
    assert "quantizer.bakend: unknown key" in words
    assert "amp: task 'text-to-text' is of a model in several parts" in words
