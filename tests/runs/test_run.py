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
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from daily import some_daily
from helpers import openvino_core, read_json

import quantizer.pipeline.benchmark as run_measure
import quantizer.pipeline.run as pipeline
import quantizer.pipeline.stages as stages
from quantizer import Quantizer
from quantizer.cli.main import main
from quantizer.config import load_run
from quantizer.engines import PeakMemory, load_engine
from quantizer.errors import EngineError
from quantizer.pipeline import progress as stage_timer
from quantizer.pipeline.job import Job
from quantizer.report import read_record, trackers
from quantizer.tasks import load_model
from quantizer.utils.files import MARKER, write_folder

for _package in ("transformers", "sklearn", "onnx", "onnxscript", "openvino", "jinja2"):
    pytest.importorskip(_package, reason="a run needs enginequant[hf,onnx,openvino,report]")

from tiny_run import tiny_run

REPOSITORY = Path(__file__).parents[2]
COMPLETE = {
    *(".quantizer.json", "README.md", "config.yaml", "report.html", "report.json", "resamples.json"),
    *("float.engine", "float.onnx", "model.engine", "model.onnx", "quantizer"),
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
        assert main(["run", "tiny.yaml"]) == 0
    finally:
        os.chdir(here)
    return Place(folder)


@pytest.fixture
def at(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder with the configuration; memory is not measured."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(place.folder / "tiny.yaml", tmp_path)
    monkeypatch.setattr(run_measure, "peak_memory_mib", lambda *_, **__: PeakMemory(peak_mib=3.0, baseline_mib=1.0))
    return tmp_path


# -- a finished run ------------------------------------------------------------------------------------------------


def test_the_folder_is_complete(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """What its files hold, and what is printed: tests/goldens."""
    assert {path.name for path in place.done.iterdir()} == COMPLETE
    left = {path.name for path in place.folder.iterdir()}
    # A run that repeats this one finds the times of its engines.
    assert left == {"model", "vocab.txt", "calibration.csv", "evaluation.csv", "tiny.yaml", "done", "done.times"}
    assert oct(place.done.stat().st_mode)[-3:] == "755"
    assert load_run(place.done / "config.yaml") == load_run(place.folder / "tiny.yaml")
    assert main(["validate", str(place.folder / "tiny.yaml"), str(place.done / "config.yaml")]) == 0
    assert main(["show", str(place.done)]) == 0
    out = capsys.readouterr().out
    assert out.count("ok: ") == 2
    assert all(word in out for word in ("accuracy", "float", "engine", "model.engine", "report.html"))


def test_what_the_report_says_is_so(place: Place) -> None:
    json.loads((place.done / "report.json").read_text(), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    record = read_record(place.done / "report.json")
    assert record.versions["torch"] == torch.__version__
    operands = {f"{site.name}.{operand.name}": operand for site in record.coverage for operand in site.operands}
    noisiest = [operands[histogram.name].sqnr_db for histogram in record.histograms]
    assert 0 < len(noisiest) <= 6
    assert noisiest == sorted(noisiest)
    assert noisiest[0] == min(o.sqnr_db for o in operands.values() if o.quantized and o.sqnr_db is not None)


def test_the_code_of_the_card_runs(
    place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="comes with transformers: install enginequant[hf]")
    card = hub.ModelCard.load(place.done / "README.md")
    assert len(card.data.eval_results) == 1
    monkeypatch.chdir(place.done)
    exec(compile(card.text.split("```python\n")[1].split("```")[0], "README.md", "exec"), {})
    assert "logits" in capsys.readouterr().out


def test_the_page_opens_offline(place: Place) -> None:
    page = (place.done / "report.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    for word in ("http://", "https://", "src=", "<link"):
        assert word not in page.replace("http://www.w3.org/", ""), word


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


@pytest.mark.nightly
def test_overrides_and_another_folder(at: Path) -> None:
    words = ["quantizer.activations.calibrator=max", "report.formats=[json]", "~fallback", "amp.batches=2"]
    assert main(["run", "tiny.yaml", *words, "--output", "deep/er/out"]) == 0
    record = read_record(at / "deep/er/out/report.json")
    assert record.config["quantizer"]["activations"]["calibrator"] == "max"
    assert record.fallback is None
    assert record.sensitivity
    assert {path.name for path in (at / "deep/er/out").iterdir()} == COMPLETE - {"report.html"}
    assert main(["show", "deep/er/out"]) == 0


@pytest.mark.nightly
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
    assert "warning: wandb rejected the results (ConnectionError: nobody answers); the run is complete" in said
    assert {path.name for path in (at / "done").iterdir()} == COMPLETE


@pytest.mark.parametrize("tracker", trackers.TRACKERS)
def test_a_tracker_that_is_not_installed_is_told_before_the_work(
    tracker: str, at: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, tracker, None)
    assert main(["run", "tiny.yaml", f"report.track={tracker}"]) == 1
    assert f"pip install 'enginequant[{tracker}]'" in capsys.readouterr().err
    assert not (at / "done").exists()


def test_nothing_quantized_is_a_run_too(at: Path) -> None:
    off = [f"quantizer.sites.{kind}=false" for kind in ("linear", "conv", "matmul", "residual_add")]
    assert main(["run", "tiny.yaml", *off, "~fallback", "report.diagnose=true", "--output", "out"]) == 0
    text = (at / "out" / "report.json").read_text()
    record = read_record(at / "out" / "report.json")
    proxy = next(score for score in record.scores if score.form == "proxy")
    # The proxy is the float model: its ratio of signal to noise is infinite, for which JSON has no number.
    assert proxy.paired["sqnr_db"] is None
    assert proxy.paired["label_flips"] == 0
    assert "Infinity" not in text
    assert record.sensitivity == ()
    assert not any(site.quantized for site in record.coverage)


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


@pytest.mark.nightly
def test_ahead_of_time_for_a_machine_with_a_gpu(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs enginequant[tensorrt-rtx]")
    words = ["quantizer.backend=tensorrt-rtx", "engine.compute_capability=sm89"]
    assert main(["run", "tiny.yaml", *words, "--output", "out"]) == 0
    record = read_record(at / "out" / "report.json")
    if torch.cuda.is_available():
        pytest.skip("the engine is run where there is a GPU")
    assert [score.form for score in record.scores] == ["float", "proxy", "simulation"]
    assert record.latency is None
    assert record.memory == ()
    assert record.engine.verified == "not verified: built ahead of time, and this machine has no GPU"
    assert (at / "out" / "model.engine").stat().st_size > 10_000
    assert not record.inspection.verified
    assert record.inspection.note.startswith("an engine of tensorrt-rtx needs an NVIDIA GPU, which this machine lacks")
    assert "int8" in [share.precision for share in record.inspection.shares]
    assert all(share.time_share is None for share in record.inspection.shares)
    assert main(["show", "out"]) == 0
    assert main(["show", "out/model.engine"]) == 0
    assert " ".join(capsys.readouterr().out.split()).count("not verified: an engine of tensorrt-rtx") == 3


@pytest.mark.nightly
def test_a_bf16_rest_is_built_scored_and_seen(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", "tiny.yaml", "engine.inference_precision=bfloat16", "deliver=[processor]", "--output", "out"]
    if main(words) != 0:
        error = capsys.readouterr().err
        assert "in f32 on this CPU instead of bf16" in error
        pytest.skip(error)
    native = "BF16" in openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    told = "warning: model.engine: this CPU has no BF16 instructions" in " ".join(capsys.readouterr().out.split())
    assert told == (not native)
    record, config = read_record(at / "out" / "report.json"), read_json(at / "out" / "config.json")
    assert {"int8", "bf16"} <= {share.precision for share in record.inspection.shares}
    assert (config["inference_precision"], config["float_dtype"]) == ("bfloat16", "float32")
    assert main(["show", "out/model.engine"]) == 0
    assert "BF16" in capsys.readouterr().out.rpartition("model.engine")[2]


@pytest.mark.nightly
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
    assert "openvino runs 0% of the multiply-adds in low precision, although" in verdict


# -- complete or absent --------------------------------------------------------------------------------------------

STAGES = [stage.run.__name__ for stage in (*stages.TOGETHER, *stages.ALONE)]
# Before anything is kept, and after the first and the last work that is.
_DAILY = ("load", "calibrate", "report")


def _left(folder: Path) -> list[str]:
    """What a folder holds, without the times of engines, which stay for a run that repeats the one that ended."""
    return sorted(path.name for path in folder.iterdir() if path.name != "out.times")


def _fail(monkeypatch: pytest.MonkeyPatch, name: str, error: BaseException) -> None:
    """Let a stage end with an error after all of its work."""

    def failing(run: Callable[[Job], Any]) -> Callable[[Job], None]:
        def carried_out(job: Job) -> None:
            run(job)
            raise error

        return carried_out

    if name == "report":
        monkeypatch.setattr(stages, "report", failing(stages.report))
    for kind in ("TOGETHER", "ALONE"):
        found = [replace(s, run=failing(s.run)) if s.run.__name__ == name else s for s in getattr(stages, kind)]
        monkeypatch.setattr(stages, kind, tuple(found))


@pytest.mark.parametrize(
    "stage", [pytest.param(name, marks=[] if name in _DAILY else pytest.mark.nightly) for name in (*STAGES, "report")]
)
def test_an_interruption_leaves_the_calibration_alone(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    _fail(monkeypatch, stage, KeyboardInterrupt())
    assert main(["run", "tiny.yaml", "~fallback", "~amp", "--output", "out"]) == 130
    said = capsys.readouterr().err
    if stage == "load":
        assert said == "interrupted: nothing was written\n"
        assert _left(at) == ["tiny.yaml"]
    else:
        kept = f"the calibration, plans and engines are kept in {at / 'out.resume'}"
        assert said == f"interrupted: {kept}; run the same command again to resume\n"
        assert _left(at) == ["out.resume", "tiny.yaml"]


@pytest.mark.parametrize(
    "error",
    some_daily([ZeroDivisionError("ours"), OSError(28, "No space left on device"), EngineError("no")], 1),
)
def test_an_error_leaves_nothing(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    _fail(monkeypatch, "build", error)
    if isinstance(error, ZeroDivisionError):
        with pytest.raises(ZeroDivisionError, match="ours"):
            main(["run", "tiny.yaml", "--output", "out"])
    else:
        assert main(["run", "tiny.yaml", "--output", "out"]) == 1
        assert str(error.args[-1]) in capsys.readouterr().err
    assert _left(at) == ["tiny.yaml"]


@pytest.mark.nightly
def test_only_what_a_run_wrote_is_replaced_and_only_in_the_end(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which folders may be replaced: tests/files."""
    write_folder(at / "out", lambda target: (target / "report.json").write_text("former"), kind=pipeline.RUN)
    assert main(["run", "tiny.yaml", "--output", "out"]) == 1
    assert "out already exists; choose another folder, or replace it with --force" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        _fail(patch, "report", KeyboardInterrupt())
        assert main(["run", "tiny.yaml", "--output", "out", "--force"]) == 130
    assert _left(at / "out") == [MARKER, "report.json"]
    assert (at / "out" / "report.json").read_text() == "former"
    assert main(["run", "tiny.yaml", "--output", "out", "--force"]) == 0
    assert {path.name for path in (at / "out").iterdir()} == COMPLETE
    assert _left(at) == ["out", "tiny.yaml"]


def test_no_room_is_told_before_anything_is_calibrated(
    at: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Quantizer, "calibrate", lambda *_, **__: pytest.fail("it was calibrated"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    assert main(["run", "tiny.yaml", "--output", "out"]) == 1
    assert "no room in" in capsys.readouterr().err
    assert _left(at) == ["tiny.yaml"]


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
        for line in process.stdout:
            # A slow machine is told how long it has to go: "[4/12] export, about 25 s".
            if line.rstrip().partition(",")[0].endswith("] export"):
                process.send_signal(number)
                break
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code
    assert f"{word}: the calibration, plans and engines are kept in {tmp_path / 'out.resume'}; run the same" in err
    assert "Traceback" not in err
    assert _left(tmp_path) == ["out.resume"]
