"""Whole runs of a tiny classifier: what a run folder holds, and that it is complete or absent."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from helpers import openvino_core

import quantizer.pipeline.benchmark as run_measure
import quantizer.pipeline.context as stages
import quantizer.pipeline.preflight as run_ready
import quantizer.pipeline.record as run_reports
import quantizer.pipeline.run as pipeline
import quantizer.pipeline.run_engines as run_engines
import quantizer.pipeline.scores as scoring
import quantizer.pipeline.time_groups as place_groups
from quantizer import Quantizer
from quantizer.cli.main import main
from quantizer.config import load_run
from quantizer.engines import PeakMemory, load_engine
from quantizer.errors import EngineError
from quantizer.pipeline import progress as stage_timer
from quantizer.report import read_record, trackers
from quantizer.tasks import load_model
from quantizer.utils.files import MARKER, write_folder

for _package in ("transformers", "sklearn", "onnx", "onnxscript", "openvino", "jinja2"):
    pytest.importorskip(_package, reason="a run needs enginequant[hf,onnx,openvino,report]")

from tiny_run import tiny_run

REPOSITORY = Path(__file__).parents[2]
COMPLETE = {
    ".quantizer.json",
    "README.md",
    "config.yaml",
    "float.engine",
    "float.onnx",
    "model.engine",
    "model.onnx",
    "quantizer",
    "report.html",
    "report.json",
    "resamples.json",
}

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@dataclass(frozen=True)
class Place:
    """A folder with a model, data and a configuration, and a run that is done."""

    folder: Path
    config: str = "tiny.yaml"

    @property
    def done(self) -> Path:
        return self.folder / "done"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("pipeline")
    torch.set_num_threads(1)
    run = {**tiny_run(folder), "amp": {"batches": 1}, "fallback": {"num": 2}, "output": "done"}
    (folder / "tiny.yaml").write_text(yaml.safe_dump(run))
    here = Path.cwd()
    os.chdir(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            # Of a model as small as this it depends on the CPU which groups are slower in integers.
            patch.setattr(place_groups, "is_faster", lambda *_: False)
            assert main(["run", "tiny.yaml"]) == 0
    finally:
        os.chdir(here)
    return Place(folder)


@pytest.fixture
def at(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with the configuration; slow steps give what the finished run gave."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(place.folder / "tiny.yaml", tmp_path)

    def copied(name: str) -> Callable[..., Path]:
        return lambda _, path, *arguments, **keywords: Path(shutil.copy(place.done / name, path))

    export = Quantizer.export

    def exported(self: Quantizer, *arguments: Any, **keywords: Any) -> Path:
        # The file of one target is none for another.
        if self.config.backend != "openvino":
            return export(self, *arguments, **keywords)
        return copied("model.onnx" if self.coverage.share else "float.onnx")(None, *arguments[1:])

    monkeypatch.setattr(Quantizer, "export", exported)
    monkeypatch.setattr(run_engines, "export_onnx", copied("float.onnx"))
    monkeypatch.setattr(run_measure, "peak_memory_mib", lambda *_, **__: PeakMemory(peak_mib=3.0, baseline_mib=1.0))
    return tmp_path


# -- a finished run ------------------------------------------------------------------------------------------------


@pytest.mark.promise("A run's folder is complete or absent.")
def test_the_folder_is_complete(place: Place) -> None:
    assert {path.name for path in place.done.iterdir()} == COMPLETE
    files = {path.name for path in (place.done / "quantizer").iterdir()}
    assert files == {".quantizer.json", "observed.safetensors", "quantizer.yaml", "ranges.safetensors"}
    left = {path.name for path in place.folder.iterdir()}
    # A run that repeats this one finds the times of its engines.
    assert left == {"model", "vocab.txt", "calibration.csv", "evaluation.csv", "tiny.yaml", "done", "done.times"}
    assert oct(place.done.stat().st_mode)[-3:] == "755"


@pytest.mark.promise("`config.yaml` with every default filled in.")
def test_the_resolved_configuration_gives_the_same_run(place: Place) -> None:
    resolved = load_run(place.done / "config.yaml")
    assert resolved == load_run(place.folder / "tiny.yaml")
    written = yaml.safe_load((place.done / "config.yaml").read_text())
    # Every default of the preset is there.
    assert written["quantizer"]["activations"] == {
        "ranges": "static",
        "calibrator": "percentile",
        "percentile": 99.99,
        "smooth": None,
        "zero_point": False,
        "all_experts": False,
    }


def test_the_report_holds_every_part(place: Place) -> None:
    json.loads((place.done / "report.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    record = read_record(place.done / "report.json")
    assert record.name == "done"
    assert [score.which for score in record.scores] == ["float", "proxy", "engine"]
    for score in record.scores:
        assert score.metric == "accuracy"
        assert score.rows == 24
    for score in record.scores[1:]:
        assert set(score.paired) == {"label_flips", "kl_divergence", "sqnr_db"}
        assert score.interval is not None
        assert score.interval[0] <= score.difference <= score.interval[1]
    assert record.latency is not None
    assert [entry.name for entry in record.latency.engines] == ["float", "engine"]
    assert (record.latency.batch, record.latency.sequence, record.latency.threads) == (2, 16, 1)
    assert {entry.name: entry.bytes for entry in record.size} == {
        name: (place.done / f"{file}.engine").stat().st_size for name, file in [("float", "float"), ("engine", "model")]
    }
    assert [entry.name for entry in record.memory] == ["float", "engine"]
    assert record.engine is not None
    assert (place.done / record.engine.path).is_file()
    assert "scored" in record.engine.verified
    assert record.inspection is not None
    assert record.inspection.verified
    assert {layer.precision for layer in record.inspection.layers if layer.role == "product"} >= {"int8"}
    operands = {f"{site.name}.{operand.name}": operand for site in record.coverage for operand in site.operands}
    noisiest = [operands[histogram.name].sqnr_db for histogram in record.histograms]
    assert 0 < len(noisiest) <= 6
    assert noisiest == sorted(noisiest)
    assert noisiest[0] == min(o.sqnr_db for o in operands.values() if o.quantized and o.sqnr_db is not None)
    assert record.diff.startswith("---")
    assert record.versions["torch"] == torch.__version__
    names = [stage.name for stage in record.stages]
    assert names == [
        "load model and data",
        "calibrate",
        "quantize",
        "export",
        "build the engines",
        "time the groups",
        "measure sensitivity",
        "quantize",
        "export",
        "build the engines",
        "compare the outputs",
        "score the float",
        "score the proxy",
        "inspect the engine",
        "score the engine",
        "compare the float engine",
        "measure latency",
        "measure memory",
        "look for causes",
    ]


def test_coverage_and_sensitivity_agree_in_the_report(place: Place) -> None:
    record = read_record(place.done / "report.json")
    assert record.fallback is not None
    assert len(record.fallback.groups) == 2
    ranked = {row.group: row for row in record.sensitivity}
    assert [row.rank for row in record.sensitivity] == list(range(1, len(ranked) + 1))
    assert [row.error for row in record.sensitivity] == sorted((row.error for row in record.sensitivity), reverse=True)
    assert [row.group for row in record.sensitivity if row.fallback] == list(record.fallback.groups)
    sites = {site.name: site for site in record.coverage}
    for row in record.sensitivity:
        for name in row.sites:
            quantized = [o.quantized for o in sites[name].operands if o.group == row.group]
            assert quantized
            assert set(quantized) == {not row.fallback}
    excluded = [site for site in record.coverage if site.name.startswith("classifier.")]
    assert [site.rule for site in excluded] == ["exclude.names: classifier"]


@pytest.mark.promise("`report.html` (one file, opens offline)")
def test_the_page_opens_offline(place: Place) -> None:
    page = (place.done / "report.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    for word in ("http://", "https://", "src=", "<link"):
        assert word not in page.replace("http://www.w3.org/", ""), word


@pytest.mark.promise("Beside an engine lies a model card in Hugging Face's format")
def test_the_card_beside_the_engine_has_scores_and_code_that_runs(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="comes with transformers: install enginequant[hf]")
    card = hub.ModelCard.load(place.done / "README.md")
    scores = {score.which: score for score in read_record(place.done / "report.json").scores}
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == (scores["engine"].metric, round(scores["engine"].value, 6))
    assert {"int8", "openvino"} <= set(card.data.tags)
    assert card.data.base_model is None, "a local folder is no model of the hub"
    code = card.text.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(place.done)
    exec(compile(code, "README.md", "exec"), {})
    assert "logits" in capsys.readouterr().out


def test_what_was_saved_gives_the_model_that_was_scored(place: Place) -> None:
    model = load_model(str(place.folder / "model"), "sequence-classification")
    saved = Quantizer.load(place.done / "quantizer")
    proxy = saved.quantize(model)
    ids = torch.randint(5, 20, (2, 16), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        expected = proxy(**inputs)["logits"]
    engine = load_engine("openvino", place.done / "model.engine")
    result = engine({name: inputs[name].numpy() for name in engine.input_names})["logits"]
    assert torch.allclose(torch.from_numpy(result), expected, atol=1e-3)


def test_show(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(place.done)]) == 0
    out = capsys.readouterr().out
    for word in ("accuracy", "float", "proxy", "engine", "model.engine", "report.html"):
        assert word in out


def test_validate(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", str(place.folder / "tiny.yaml"), str(place.done / "config.yaml")]) == 0
    assert capsys.readouterr().out.count("ok: ") == 2


def test_inspect(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(place.folder / "tiny.yaml"), "quantizer.sites.matmul=false", "--diff"]) == 0
    out = capsys.readouterr().out
    # A name is in one piece, also in a pipe, if need be without its middle; a reason may be folded in its cell.
    assert any(re.fullmatch(r"bert\.enc\S+…\S+query\.forward\.linear_0", word) for word in out.split())
    words = " ".join(out.split())
    assert "sites.matmul: false" in words
    assert "exclude.names: classifier" in words
    assert "+++" in out


# -- other configurations ------------------------------------------------------------------------------------------


def test_overrides_and_another_folder(at: Path) -> None:
    words = ["quantizer.activations.calibrator=max", "report.formats=[json]", "~fallback", "amp.batches=2"]
    assert main(["run", "tiny.yaml", *words, "--output", "deep/er/out"]) == 0
    record = read_record(at / "deep/er/out/report.json")
    assert record.config["quantizer"]["activations"]["calibrator"] == "max"
    assert record.fallback is None
    assert record.sensitivity
    assert {path.name for path in (at / "deep/er/out").iterdir()} == COMPLETE - {"report.html"}
    assert main(["show", "deep/er/out"]) == 0


def test_a_tracker_gets_the_run_and_one_that_fails_does_not_end_it(
    at: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(record: object, folder: Path) -> str:
        assert (folder / "report.html").is_file(), "the folder is complete by then"
        raise ConnectionError("nobody answers")

    monkeypatch.setitem(trackers.TRACKERS, "wandb", unreachable)
    stand_in = ModuleType("wandb")
    stand_in.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    assert main(["run", "tiny.yaml", "report.track=wandb"]) == 0
    said = capsys.readouterr().out
    assert "warning: wandb did not take the results (ConnectionError: nobody answers); the run is complete" in said
    assert {path.name for path in (at / "done").iterdir()} == COMPLETE


@pytest.mark.parametrize("tracker", trackers.TRACKERS)
def test_a_tracker_that_is_not_installed_is_told_before_the_work(
    tracker: str, at: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    assert main(["run", "tiny.yaml", f"report.track={tracker}"]) == 1
    assert f"pip install 'enginequant[{tracker}]'" in capsys.readouterr().err
    assert not (at / "done").exists()


def test_without_a_measurement(at: Path) -> None:
    assert main(["run", "tiny.yaml", "~fallback", "~amp", "--output", "out"]) == 0
    record = read_record(at / "out" / "report.json")
    assert record.sensitivity == ()
    assert "measure sensitivity" not in [stage.name for stage in record.stages]


def test_nothing_quantized_is_a_run_too(at: Path) -> None:
    off = [f"quantizer.sites.{kind}=false" for kind in ("linear", "conv", "matmul", "residual_add")]
    assert main(["run", "tiny.yaml", *off, "~fallback", "--output", "out"]) == 0
    text = (at / "out" / "report.json").read_text()
    record = read_record(at / "out" / "report.json")
    proxy = next(score for score in record.scores if score.which == "proxy")
    # The proxy is the float model: its ratio of signal to noise is infinite, for which JSON has no number.
    assert proxy.paired["sqnr_db"] is None
    assert proxy.paired["label_flips"] == 0
    assert "Infinity" not in text
    assert record.sensitivity == ()
    assert not any(site.quantized for site in record.coverage)


def test_fallback_of_more_groups_than_there_are(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.yaml", "fallback.num=999", "--output", "out"]) == 1
    assert "num=999: there are only" in capsys.readouterr().err
    assert _left(at) == ["tiny.yaml"]


def test_a_head_is_fitted_on_float_embeddings(
    at: Path, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise EngineError("far enough")

    monkeypatch.setattr(Quantizer, "export", stop)
    document = yaml.safe_load(Path("tiny.yaml").read_text())
    document["model"]["task"] = "embedding-classification"
    document["data"]["head"] = {"name": "text-csv", "path": str(place.folder / "calibration.csv")}
    del document["quantizer"]["exclude"]
    Path("head.yaml").write_text(yaml.safe_dump(document))
    assert main(["run", "head.yaml", "--output", "out"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: far enough\n"
    assert "fit the head on float embeddings" in captured.out
    assert _left(at) == ["head.yaml", "tiny.yaml"]


def test_a_head_that_no_task_reads(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "tiny.yaml", "data.head={name: text-csv, path: a.csv}"]) == 1
    assert "head" in capsys.readouterr().err
    assert _left(at) == ["tiny.yaml"]


@pytest.mark.nightly
def test_ahead_of_time_for_a_machine_with_a_gpu(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs enginequant[tensorrt-rtx]")
    words = ["quantizer.backend=tensorrt-rtx", "engine.compute_capability=sm89"]
    assert main(["run", "tiny.yaml", *words, "--output", "out"]) == 0
    record = read_record(at / "out" / "report.json")
    if torch.cuda.is_available():
        pytest.skip("the engine is run where there is a GPU")
    assert [score.which for score in record.scores] == ["float", "proxy", "simulation"]
    assert record.latency is None
    assert record.memory == ()
    assert record.engine is not None
    assert record.engine.verified == "not verified: built ahead of time, and there is no GPU here"
    assert (at / "out" / "model.engine").stat().st_size > 10_000
    assert record.inspection is not None
    assert not record.inspection.verified
    assert record.inspection.note.startswith("an engine of tensorrt-rtx runs on an NVIDIA GPU, and there is none here")
    assert "int8" in [share.precision for share in record.inspection.shares]
    assert all(share.time_share is None for share in record.inspection.shares)
    assert main(["show", "out"]) == 0
    assert main(["show", "out/model.engine"]) == 0
    assert " ".join(capsys.readouterr().out.split()).count("not verified: an engine of tensorrt-rtx") == 3


def test_a_bf16_rest_is_built_scored_and_seen(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "tiny.yaml", "engine.inference_precision=bfloat16", "--output", "out"]
    if main(words) != 0:
        error = capsys.readouterr().err
        assert "in f32 on this CPU, where bf16 was asked for" in error
        pytest.skip(error)
    native = "BF16" in openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    told = "warning: model.engine: this CPU has no BF16 instructions" in " ".join(capsys.readouterr().out.split())
    assert told == (not native)
    record = read_record(at / "out" / "report.json")
    assert record.inspection is not None
    assert {"int8", "bf16"} <= {share.precision for share in record.inspection.shares}
    assert main(["show", "out/model.engine"]) == 0
    assert "BF16" in capsys.readouterr().out.rpartition("model.engine")[2]


def test_a_bf16_rest_is_not_for_every_engine(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quantizer.backend=onnxruntime", "engine.inference_precision=bfloat16"]
    assert main(["run", "tiny.yaml", *words, "--output", "out"]) == 1
    message = "engine.inference_precision: onnxruntime computes in the types of the ONNX file; leave 'bfloat16' out"
    assert message in capsys.readouterr().err
    assert _left(at) == ["tiny.yaml"]


@pytest.mark.promise(
    "A run whose engine does less than half of the asked work in low precision says so in its verdict."
)
def test_an_engine_that_lacks_the_precision_gets_a_verdict(
    at: Path, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build = stage_timer.build_engine
    # The float model in the place of the quantized one.
    monkeypatch.setattr(
        stage_timer, "build_engine", lambda name, path, *rest: build(name, place.done / "float.onnx", *rest)
    )
    assert main(["run", "tiny.yaml", "--output", "out"]) == 0
    verdict = " ".join(capsys.readouterr().out.split())
    assert "openvino computes 0% of the work in low precision, where" in verdict


# -- complete or absent --------------------------------------------------------------------------------------------

STAGES: dict[str, tuple[Any, str]] = {
    "load": (stages, "load_model"),
    "data": (run_ready, "_rows"),
    "calibrate": (Quantizer, "calibrate"),
    "amp": (Quantizer, "amp"),
    "fallback": (Quantizer, "fallback"),
    "quantize": (Quantizer, "quantize"),
    "save": (Quantizer, "save"),
    "score": (scoring, "score_record"),
    "export": (Quantizer, "export"),
    "export float": (run_engines, "export_onnx"),
    "build": (stage_timer, "build_engine"),
    "inspect": (run_engines, "observe_engine"),
    "load engine": (run_engines, "load_engine"),
    "price": (place_groups, "price_groups"),
    "latency": (run_measure, "interleaved_latency"),
    "memory": (run_measure, "peak_memory_mib"),
    "report": (run_reports, "write_record"),
    "page": (run_reports, "write_html"),
}
# Each of the others is between two of these.
_DAILY = ("load", "calibrate", "save", "build", "page")


def _left(folder: Path) -> list[str]:
    """What a folder holds, without the times of engines, which stay for a run that repeats the one that ended."""
    return sorted(path.name for path in folder.iterdir() if path.name != "out.times")


def _fail(monkeypatch: pytest.MonkeyPatch, stage: str, error: BaseException) -> None:
    def raising(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(*STAGES[stage], raising)


@pytest.mark.promise("A run's folder is complete or absent.")
@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=[] if stage in _DAILY else pytest.mark.nightly) for stage in STAGES]
)
def test_an_interruption_leaves_nothing(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    _fail(monkeypatch, stage, KeyboardInterrupt())
    assert main(["run", "tiny.yaml", "--output", "out"]) == 130
    assert capsys.readouterr().err == "interrupted: nothing was written\n"
    assert _left(at) == ["tiny.yaml"]


@pytest.mark.promise("A run's folder is complete or absent.")
@pytest.mark.parametrize("stage", ["load", "build", pytest.param("page", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "error", [EngineError("no"), ZeroDivisionError("ours"), OSError(28, "No space left on device")]
)
def test_an_error_leaves_nothing(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str, error: Exception
) -> None:
    _fail(monkeypatch, stage, error)
    if isinstance(error, ZeroDivisionError):
        with pytest.raises(ZeroDivisionError, match="ours"):
            main(["run", "tiny.yaml", "--output", "out"])
    else:
        assert main(["run", "tiny.yaml", "--output", "out"]) == 1
        assert str(error.args[-1]) in capsys.readouterr().err
    assert _left(at) == ["tiny.yaml"]


def test_an_interrupted_replacement_keeps_what_was_there(at: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_folder(at / "out", lambda target: (target / "report.json").write_text("former"), kind=pipeline.RUN)
    _fail(monkeypatch, "page", KeyboardInterrupt())
    assert main(["run", "tiny.yaml", "--output", "out", "--force"]) == 130
    assert _left(at) == ["out", "tiny.yaml"]
    assert _left(at / "out") == [MARKER, "report.json"]
    assert (at / "out" / "report.json").read_text() == "former"


def test_an_existing_folder_is_kept_without_force(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(at / "out", lambda target: (target / "report.json").write_text("former"), kind=pipeline.RUN)
    assert main(["run", "tiny.yaml", "--output", "out"]) == 1
    assert "out exists already; choose another folder, or replace it with --force" in capsys.readouterr().err
    assert (at / "out" / "report.json").read_text() == "former"
    assert main(["run", "tiny.yaml", "--output", "out", "--force"]) == 0
    assert {path.name for path in (at / "out").iterdir()} == COMPLETE
    assert _left(at) == ["out", "tiny.yaml"]


@pytest.mark.parametrize("force", [[], ["--force"]], ids=["without force", "with force"])
@pytest.mark.parametrize("marked", [True, False])
def test_what_no_run_wrote_is_kept(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], force: list[str], marked: bool
) -> None:
    if marked:
        write_folder(at / "out", lambda target: (target / "report.json").write_text("former"), kind=pipeline.RUN)
    (at / "out").mkdir(exist_ok=True)
    (at / "out" / "mine").write_text("mine")
    before = _left(at / "out")
    _fail(monkeypatch, "load", AssertionError("loaded"))
    assert main(["run", "tiny.yaml", "--output", "out", *force]) == 1
    assert "'mine'" in capsys.readouterr().err
    assert _left(at / "out") == before
    assert _left(at) == ["out", "tiny.yaml"]


PLACES = {
    "the current folder": (".", "is the current folder, or holds it"),
    "nothing": ("", "is the current folder, or holds it"),
    "the root": ("/", "is the root of a file system"),
    "a dangling link": ("link", r"link is a link to nowhere, which does not exist"),
    "a file": ("tiny.yaml", "it is no folder"),
    "a long name": ("n" * 300, "File name too long"),
    "a name with a zero": ("a\0b", "is no name of a file or folder"),
}


@pytest.mark.parametrize("case", PLACES)
def test_where_no_run_can_be_is_told_before_the_work(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    (at / "link").symlink_to("nowhere")
    _fail(monkeypatch, "load", AssertionError("loaded"))
    name, message = PLACES[case]
    assert main(["run", "tiny.yaml", "--output", name, "--force"]) == 1
    assert message in capsys.readouterr().err
    assert _left(at) == ["link", "tiny.yaml"]


def test_no_room_is_told_before_anything_is_calibrated(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _fail(monkeypatch, "calibrate", AssertionError("calibrated"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert main(["run", "tiny.yaml", "--output", "out"]) == 1
    assert "no room in" in capsys.readouterr().err
    assert _left(at) == ["tiny.yaml"]


def test_a_file_in_the_place_of_the_folder(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (at / "out").write_text("mine")
    assert main(["run", "tiny.yaml", "--output", "out/run"]) == 1
    assert "out is no folder; choose another folder" in capsys.readouterr().err
    assert main(["run", "tiny.yaml", "--output", "out"]) == 1
    assert "out cannot be written: it is no folder" in capsys.readouterr().err
    assert (at / "out").read_text() == "mine"


def test_force_does_not_replace_a_file(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (at / "out").write_text("mine")
    assert main(["run", "tiny.yaml", "--output", "out", "--force"]) == 1
    assert "cannot be written" in capsys.readouterr().err
    assert (at / "out").read_text() == "mine"
    assert _left(at) == ["out", "tiny.yaml"]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a file system that nobody can write to: /proc")
def test_a_file_system_that_nobody_can_write_to(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Told before anything is loaded, not after the hour that a run may take.
    _fail(monkeypatch, "load", AssertionError("loaded"))
    assert main(["run", "tiny.yaml", "--output", "/proc/run"]) == 1
    assert "/proc/run cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("model.source=./nowhere", "there is no folder "),
        ("model.source=package:no_such_package/model", "the package 'no_such_package' is not installed"),
        ("data.calibration.path=nowhere.csv", "nowhere.csv"),
        ("data.evaluation.rows=9999", "has 24 rows, fewer than"),
        ("data.evaluation.name=nonsense", "unknown data set 'nonsense'"),
        ("quantizer.exclude.names=[nonsense]", "nonsense"),
        ("engine.compute_capability=sm89", "which has no compute capability; leave 'sm89' out"),
        ("engine.strip_weights=true", "engine.strip_weights: openvino keeps the weights in its engines; leave it out"),
    ],
)
def test_what_a_run_cannot_have(at: Path, capsys: pytest.CaptureFixture[str], word: str, message: str) -> None:
    assert main(["run", "tiny.yaml", word, "--output", "out"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in err
    assert _left(at) == ["tiny.yaml"]


def test_calibration_data_without_rows(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (at / "empty.csv").write_text("text,label\n")
    assert main(["run", "tiny.yaml", "data.calibration.path=empty.csv", "--output", "out"]) == 1
    assert "has no rows" in capsys.readouterr().err
    assert _left(at) == ["empty.csv", "tiny.yaml"]


@pytest.fixture
def _hangup_ends() -> Iterator[None]:
    """A process that is started here ends by SIGHUP, also where these tests run under nohup, which it would inherit."""
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, former)


# Of the process of a user; what it does where it is interrupted is above, its handlers are in test_cli_signals.py.
@pytest.mark.nightly
@pytest.mark.usefixtures("_hangup_ends")
@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        pytest.param(signal.SIGINT, 130, "interrupted", id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 143, "terminated", id="SIGTERM"),
        pytest.param(signal.SIGHUP, 129, "terminated", id="SIGHUP"),
    ],
)
def test_a_signal_to_end_leaves_nothing(place: Place, tmp_path: Path, number: int, code: int, word: str) -> None:
    command = [sys.executable, "-m", "quantizer", "run", str(place.folder / "tiny.yaml"), "--output", "out"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            # A slow machine is told how long it has to go: "[4/12] export, about 25 s".
            if line.rstrip().partition(",")[0].endswith("] export"):
                process.send_signal(number)
                break
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code
    assert f"{word}: nothing was written" in err
    assert "Traceback" not in err
    assert _left(tmp_path) == []
