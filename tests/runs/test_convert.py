"""``quantizer convert``: what a folder holds, that it serves, and that nothing half-done or wrong is written."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from quantizer import Quantizer
from quantizer.cli.main import main
from quantizer.engines import BuildOptions
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import EngineError, QuantizerError
from quantizer.report.record import RunRecord, read_record
from quantizer.report.trackers import TRACKERS
from quantizer.report.verdict import verdict_of
from quantizer.tasks import build_task, load_model, load_rows, load_tokenizer
from quantizer.utils.files import MARKER

for _package in ("transformers", "scipy", "onnx", "onnxscript", "openvino", "onnxruntime"):
    pytest.importorskip(_package, reason="a conversion needs enginequant[hf,onnx,openvino,onnxruntime]")

from test_right_engines import Wrong
from tiny_run import tiny_run

import quantizer.algorithms.range_search as attention
import quantizer.pipeline.context as run_context
import quantizer.pipeline.run_engines as run_engines
import quantizer.pipeline.stages as stages
from quantizer.pipeline import benchmark
from quantizer.pipeline import progress as stage_timer
from quantizer.pipeline import time_groups as place_groups
from quantizer.pipeline.budget import EngineBudget
from quantizer.pipeline.compare_outputs import OutputCheck, tolerance
from quantizer.pipeline.convert_options import conversion_configs
from quantizer.pipeline.fastest_engine import variants_of
from quantizer.pipeline.load_converted import load_converted

(ONNXRUNTIME,), _ = cpu_candidates(("onnxruntime",))
"""The backend for this CPU."""
SIZES = ["--batch-size", "1", "2", "4", "--seq-len", "16", "24", "32"]
BACKENDS = ("openvino", "onnxruntime")

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@dataclass(frozen=True)
class Place:
    """A tiny classifier with its data, and what a conversion made of it."""

    folder: Path

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    @property
    def done(self) -> Path:
        return self.folder / "done"

    @property
    def float(self) -> Path:
        return self.folder / "float"

    def data(self, name: str) -> str:
        return f"text-csv:{self.folder / name}.csv"

    def texts(self) -> list[str]:
        return [row.text for row in load_rows("text-csv", path=self.folder / "evaluation.csv")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("conversion")
    torch.set_num_threads(1)
    tiny_run(folder)
    here = Place(folder)
    words = ["convert", "-m", here.model, "--quantization", "--calibration", here.data("calibration"), "--rows", "12"]
    words += ["--max-drop", "0.5", "--tuning", here.data("calibration"), "--evaluation", here.data("evaluation")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
        # Random weights of 32 channels: rounding attention costs them more than 1 dB.
        patch.setattr(attention, "_GAIN_DB", math.inf)
        # Of a model as small as this it depends on the CPU which groups are slower in integers.
        patch.setattr(place_groups, "is_faster", lambda *_: False)
        assert main([*words, "--backend", *BACKENDS, *SIZES, "-o", str(here.done)]) == 0
        assert main(["convert", "-m", here.model, "--backend", "openvino", *SIZES, "-o", str(here.float)]) == 0
    return here


class Exports(list[torch.dtype]):
    """The float types in which the float model was exported."""


@pytest.fixture
def exports(place: Place, monkeypatch: pytest.MonkeyPatch) -> Exports:
    """Both exports give what they gave before, as they take seconds, unless groups went back to float since."""
    made, real = Exports(), Quantizer.export

    def export_float(_: object, path: Path, __: object, *, dtype: torch.dtype, **___: object) -> None:
        made.append(dtype)
        shutil.copy(place.float / "openvino" / "model.onnx", path)

    def export(self: Quantizer, quantized: nn.Module, path: Path, example: Any, **options: Any) -> None:
        if self.chosen_fallback is not None and self.chosen_fallback.reasons():
            real(self, quantized, path, example, **options)
        else:
            shutil.copy(place.done / "openvino" / "model.onnx", path)

    monkeypatch.setattr(run_engines, "export_onnx", export_float)
    monkeypatch.setattr(Quantizer, "export", export)
    return made


@pytest.fixture
def convert(
    place: Place,
    exports: Exports,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Runs a conversion in an empty folder; its exit code and what it said of errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)

    def run(*words: str, model: str = place.model) -> tuple[int, str]:
        # One engine by default: test_convert_auto.py has the choice between all.
        code = main(["convert", "-m", model, *(() if "--backend" in words else ("--backend", "openvino")), *words])
        return code, capsys.readouterr().err

    return run


def _read(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


# -- what is written ---------------------------------------------------------------------------------------------------


@pytest.mark.promise(
    "quantizes for both engines from that one calibration, builds them, holds their outputs to PyTorch's at "
    "several shapes, times them, and writes `converted/my-model` with a folder for each."
)
def test_the_folder_holds_what_a_server_needs(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {path.name for path in place.done.iterdir()} == {
        *BACKENDS,
        MARKER,
    }
    assert not list(place.folder.glob("*.search"))
    for backend in BACKENDS:
        folder = place.done / backend
        assert {path.name for path in folder.iterdir()} == {
            *("model.onnx", "model.engine", "tokenizer", "config.json", "README.md", "report.json", "report.html"),
            *("float.onnx", "float.engine", "config.yaml", "quantizer", "resamples.json", "triton"),
        }
        card = (folder / "README.md").read_text(encoding="utf-8")
        monkeypatch.chdir(folder)
        exec(compile(card.split("```python\n")[1].split("```")[0], "README.md", "exec"), {})
        config = _read(folder / "config.json")
        assert config["backend"] == backend
        assert config["task"] == "sequence-classification"
        assert config["dimensions"] == {"batch": [1, 2, 4], "sequence": [16, 24, 32]}
        inputs = {value["name"]: (value["dtype"], value["shape"]) for value in config["inputs"]}
        assert inputs["input_ids"] == ("int64", ["batch", "sequence"])
        assert [(v["name"], v["dtype"], v["shape"]) for v in config["outputs"]] == [("logits", "float32", ["batch", 2])]
        assert config["labels"] == ["LABEL_0", "LABEL_1"]
        assert config["quantization"]["dtype"] == "int8"
        assert config["quantization"]["rows"] == 12
        assert "fallback(max_drop=0.5)" in config["quantization"]["reason"]
        (check,) = config["quantization"]["budget"]
        assert check["rows"] == len(load_rows("text-csv", path=place.folder / "calibration.csv")) // 3
        shapes = [(check["batch"], check["sequence"]) for check in config["checks"]]
        assert set(shapes) > {(1, 16), (2, 24), (4, 32)}
        assert config["verified"].startswith("outputs agree with PyTorch's: SQNR of 30 dB or more, or at most 3 dB")


@pytest.mark.promise(
    "quantizes for both engines from that one calibration, builds them, holds their outputs to PyTorch's at "
    "several shapes, times them, and writes `converted/my-model` with a folder for each."
)
def test_the_record_has_latency_and_scores_of_each_backend(place: Place) -> None:
    for backend in BACKENDS:
        record = read_record(place.done / backend / "report.json")
        assert record.latency is not None
        latencies = (record.latency, *record.other_latencies)
        assert [(one.batch, one.sequence) for one in latencies] == [(2, 24), (1, 16), (4, 32)]
        for one in latencies:
            assert {entry.name for entry in one.engines} == {"PyTorch float", "float", "engine"}
            assert one.reference == f"{backend} float32"
        assert [score.which for score in record.scores] == ["float", "proxy", "engine"]
        assert all(score.rows == 24 for score in record.scores)


@pytest.mark.promise("Each engine has the folder that a run has")
def test_each_backend_has_a_report_with_a_verdict(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for backend in BACKENDS:
        folder = place.done / backend
        record = read_record(folder / "report.json")
        assert [score.which for score in record.scores] == ["float", "proxy", "engine"]
        assert {(one.output, one.batch, one.sequence) for one in record.outputs} > {
            ("logits", *shape) for shape in ((1, 16), (2, 24), (4, 32))
        }
        assert record.coverage
        assert record.inspection is not None
        page = (folder / "report.html").read_text(encoding="utf-8")
        # Which one it is depends on how busy the machine is.
        assert f"<strong>{verdict_of(record).level.capitalize()}" in page
        assert main(["show", str(folder)]) == 0
        assert f"verdict {verdict_of(record).level}" in capsys.readouterr().out
    assert main(["compare", *(str(place.done / backend) for backend in BACKENDS)]) == 0


def test_each_backend_has_the_sites_that_it_wants(place: Place) -> None:
    """One calibration, two plans: ONNX Runtime leaves attention matmuls in float."""
    sites = {name: _read(place.done / name / "config.json")["quantization"]["sites"] for name in BACKENDS}
    assert sites["openvino"]["matmul"][0] == 2
    assert sites["onnxruntime"]["matmul"][0] == 0


@pytest.mark.promise(
    "where it loses more the search goes on with a smaller budget, for at most three engines "
    "(`quantization.budget` and `quantization.outcome` in `config.json`)"
)
def test_a_budget_that_an_engine_misses_is_searched_again(
    place: Place, convert: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, real = iter([0.14, 0.0]), EngineBudget._score
    monkeypatch.setattr(
        EngineBudget,
        "_score",
        lambda self, model: real(self, self._context.model) - (0.0 if isinstance(model, nn.Module) else next(lost)),
    )
    words = ["--quantization", "--calibration", place.data("calibration"), "--rows", "12", *SIZES, "-o", "out"]
    tuning = ["--max-drop", "0.1", "--tuning", place.data("calibration")]
    code, error = convert(*words, *tuning, "--backend", "openvino")
    assert not error
    assert code == 0
    told = _read(Path("out/openvino/config.json"))["quantization"]
    first, second = told["budget"]
    assert (first["drop"], second["drop"]) == (pytest.approx(0.14), 0.0)
    assert "max_drop=0.06" in told["reason"]
    assert second["groups"] >= first["groups"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_engine_and_tokenizer_serve_alone(place: Place, tmp_path: Path, backend: str) -> None:
    """Moved elsewhere and without the ONNX file: the labels are those that were scored in the conversion.

    They are those of the frozen model in PyTorch.
    """
    folder = tmp_path / "served"
    shutil.copytree(place.done / backend, folder)
    (folder / "model.onnx").unlink()
    served = load_converted(folder)
    texts = place.texts()
    labels = [label for start in range(0, 24, 4) for label in served.labels(texts[start : start + 4])]
    model = load_model(place.model, "sequence-classification")
    task = build_task(
        "sequence-classification", model, load_tokenizer(place.model), max_length=32, batch_size=4, min_length=16
    )
    rows = load_rows("text-csv", path=place.folder / "evaluation.csv")
    scored = read_record(folder / "report.json").scores
    right = sum(label == f"LABEL_{row.label}" for label, row in zip(labels, rows, strict=True))
    assert right / len(rows) == pytest.approx(next(score.value for score in scored if score.which == "engine"))
    assert len(set(labels)) == 2
    frozen = Quantizer.load(folder / "quantizer").quantize(model)
    decided = task.predict(lambda batch: frozen(**batch), rows).decisions
    assert labels == [f"LABEL_{label}" for label in decided]


def test_more_texts_than_it_was_built_for(place: Place) -> None:
    served = load_converted(place.done / "openvino")
    with pytest.raises(QuantizerError, match="5 texts at once, and this engine was built for 1 to 4"):
        served(place.texts()[:5])
    assert served(["good " * 100])["logits"].shape == (1, 2)


def test_a_folder_that_is_none_of_ours(place: Place, tmp_path: Path) -> None:
    with pytest.raises(QuantizerError, match=r"holds no config\.json that can be read"):
        load_converted(place.done)
    shutil.copytree(place.done / "openvino", tmp_path / "later")
    config = _read(tmp_path / "later" / "config.json")
    (tmp_path / "later" / "config.json").write_text(json.dumps({**config, "format": 9}))
    with pytest.raises(QuantizerError, match="has format 9, expected 1: convert the model again"):
        load_converted(tmp_path / "later")


@pytest.mark.promise("Without data it stops and says so; without `--quantization` it converts the float model.")
def test_a_float_model_needs_no_data(place: Place) -> None:
    assert {path.name for path in place.float.iterdir()} == {"openvino", MARKER}
    assert not list(place.float.glob("openvino/float.*"))
    assert main(["show", str(place.float / "openvino")]) == 0
    config = _read(place.float / "openvino" / "config.json")
    assert config["quantization"] is None
    assert all(check["sqnr_db"] is None or check["sqnr_db"] > 60 for check in config["checks"])
    assert all(check["cosine"] > 0.9999 for check in config["checks"])


def test_a_folder_has_a_name_of_its_own(convert: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    assert convert(*SIZES) == (0, "")
    assert (tmp_path / "converted" / "model" / "openvino" / "model.engine").is_file()
    assert _read(tmp_path / "converted" / "model" / "openvino" / "config.json")["name"] == "model"
    code, said = convert(*SIZES)
    assert (code, "exists already; choose another folder, or replace it with --force" in said) == (1, True)


def test_the_usual_sizes_are_lowered_to_the_positions(convert: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    assert convert("--batch-size", "1", "2", "3", "-o", "out") == (0, "")
    assert _read(tmp_path / "out" / "openvino" / "config.json")["dimensions"]["sequence"] == [16, 64, 64]


def test_a_bf16_rest(convert: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    status, error = convert("--inference-precision", "bfloat16", *SIZES, "-o", "out")
    if "where bf16 was asked for" in error:
        pytest.skip(error)
    assert (status, error) == (0, "")
    config = _read(tmp_path / "out" / "openvino" / "config.json")
    assert config["inference_precision"] == "bfloat16"
    assert config["float_dtype"] == "float32"
    # Float32 is held to 60 dB, which an engine in BF16 cannot reach.
    assert config["verified"] == "outputs agree with PyTorch's: SQNR of 30 dB or more; see checks"
    assert max(check["sqnr_db"] for check in config["checks"]) < 60


def test_what_cannot_run_here_is_not_called_verified(
    convert: Callable[..., tuple[int, str]], exports: Exports, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the wheels of TensorRT-RTX")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, so the engine may run here")
    assert convert("--backend", "tensorrt-rtx", "--compute-capability", "sm89", *SIZES, "-o", "rtx")[0] == 0
    config = _read(tmp_path / "rtx" / "tensorrt-rtx" / "config.json")
    assert config["verified"].startswith("not verified")
    assert config["checks"] == []
    assert config["compute_capability"] == "sm89"
    assert config["float_dtype"] == "float16"
    assert exports == [torch.float16]


@pytest.mark.promise(
    "an engine's outputs are at least 30 dB from those of the frozen model in PyTorch, or at most 3 dB further "
    "from the float model than these"
)
@pytest.mark.parametrize(
    ("sqnr", "to_float", "of_proxy", "right"),
    [
        (31.0, 10.0, 10.0, True),  # near enough in any case
        (17.0, 14.0, 14.4, True),  # another sample of the same error
        (17.0, 11.3, 14.4, False),  # a larger error
        (29.0, None, 14.4, True),  # the float model itself
        (29.0, 29.0, None, False),  # nothing is quantized, so nothing explains a difference
        (None, 14.4, 14.4, True),  # equal
    ],
)
def test_what_a_right_engine_is(
    sqnr: float | None, to_float: float | None, of_proxy: float | None, right: bool
) -> None:
    check = OutputCheck(
        batch=1, sequence=16, output="y", sqnr_db=sqnr, float_db=to_float, proxy_float_db=of_proxy, cosine=0.9
    )
    assert tolerance(None, True, torch.float32).holds(check) is right
    assert tolerance(25.0, True, torch.float32).holds(check) is (sqnr is None or sqnr > 25)


# -- what is not written -----------------------------------------------------------------------------------------------


def _with_a_wrong_scale(build: Callable[..., Any]) -> Callable[..., Any]:
    """A builder that reads one scale four times as large as it is."""

    def built(name: str, path: Path, engine: Path, options: Any) -> Any:
        import onnx

        model = onnx.load(str(path))
        scales = {node.input[1] for node in model.graph.node if node.op_type == "DequantizeLinear"}
        found = [value for value in model.graph.initializer if value.name in scales and value.dims]
        # The float model's file has none.
        for scale in found[:1]:
            scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * 4, scale.name))
            onnx.save(model, str(path))
        return build(name, path, engine, options)

    return built


@pytest.mark.promise("An engine that fails is not written; the report says why.")
def test_an_engine_that_computes_something_else_is_refused(
    place: Place, convert: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_timer, "build_engine", _with_a_wrong_scale(stage_timer.build_engine))
    code, said = convert("--quantization", "--calibration", place.data("calibration"), "--rows", "12", *SIZES)
    assert code == 1
    assert re.search(r"openvino engine, batch \d+ x sequence \d+, output 'logits': SQNR ", said)
    assert " dB against the float model where PyTorch has " in said
    assert "expected an SQNR of 30 dB or more, or at most 3 dB further from the float model than PyTorch" in said
    folder = tmp_path / "converted" / "model" / "openvino"
    assert not list(folder.glob("model.engine*"))
    assert not (folder / "config.json").exists()
    assert verdict_of(read_record(folder / "report.json")).level == "do not use"


def test_a_model_for_all_sizes_that_is_wrong_gives_way_to_fixed_sizes(
    place: Place, convert: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is delivered for the sizes that were compared, and for no others."""
    build, load = stage_timer.build_engine, run_engines.load_engine
    asked: list[BuildOptions] = []

    def built(name: str, path: Path, engine: Path, options: BuildOptions) -> Any:
        asked.append(options)
        return build(name, path, engine, options)

    def loaded(name: str, path: Path, **settings: Any) -> Any:
        engine = load(name, path, **settings)
        return engine if asked[-1].only_sizes else Wrong(engine, lambda rows: rows == 1, 1.5)

    monkeypatch.setattr(stage_timer, "build_engine", built)
    monkeypatch.setattr(run_engines, "load_engine", loaded)
    code, said = convert("--batch-size", "1", "2", "8", *SIZES[4:], "-o", "out")
    assert (code, said) == (0, "")
    first, second = asked
    assert not first.only_sizes
    compared = {tuple(sizes.values()) for sizes in second.only_sizes}
    assert compared >= {(2, 24), (1, 32), (8, 16)}
    folder = Path("out/openvino")
    config = _read(folder / "config.json")
    assert config["only_sizes"] == list(second.only_sizes)
    assert {(check["batch"], check["sequence"]) for check in config["checks"]} == compared
    served = load_converted(folder)
    # Texts are padded to a length that the engine takes, and those of a longer one are cut.
    for texts in (place.texts()[:2], ["good"], ["good " * 100, "bad"]):
        assert served.inputs(texts)["input_ids"].shape in compared
        assert served(texts)["logits"].shape == (len(texts), 2)
    with pytest.raises(QuantizerError, match="3 texts at once, and this engine was built for 1, 2, 4, 8 alone"):
        served(place.texts()[:3])
    ids = np.ones((3, 17), np.int64)
    with pytest.raises(EngineError, match="it has no model for"):
        served.engine(dict.fromkeys(served.engine.input_names, ids))
    card = " ".join((folder / "README.md").read_text(encoding="utf-8").split())
    assert "with a model for each: openvino's model for all sizes is wrong (SQNR " in card


STEPS = [
    (stage_timer, "build_engine"),
    (stages, "right_engine"),
    (stages, "measure_latency"),
    (run_engines, "export_onnx"),
]


@pytest.mark.parametrize(("where", "step"), STEPS, ids=[name for _, name in STEPS])
def test_interrupted_nothing_is_left(
    convert: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: Any, step: str
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, step, stopped)
    assert convert(*SIZES) == (130, "interrupted: nothing was written\n")
    assert not list(tmp_path.iterdir())


SETTINGS = {
    "plain": "preset: plain\n",
    "wrong": "preset: fats\n",
    "backend": "backend: openvino\n",
    "dynamic": "formats:\n  - {activations: dynamic}\n",
    "fp8": "formats:\n  - {activations: fp8, weights: fp8}\n",
}
DATA = ("--quantization", "--calibration", "texts.txt")
BAD = {
    "no data": (("--quantization",), "--quantization needs data to calibrate on, and --calibration is missing"),
    "data for nothing": (("--calibration", "texts.txt"), "--calibration texts.txt is used with --quantization only"),
    "no file": ((*DATA[:2], "missing.txt"), "there is no file missing.txt"),
    "no rows": ((*DATA[:2], "empty.txt"), "empty.txt holds no texts"),
    "too few rows": ((*DATA, "--rows", "9"), "texts.txt has 2 rows, fewer than --rows 9"),
    "what kind of data": (
        (*DATA[:2], "texts.parquet"),
        "expected a file of texts (.txt, .csv, .jsonl), a folder of im",
    ),
    "data set without file": ((*DATA[:2], "text-csv"), "the path is missing; expected text-csv:PATH"),
    "range turned round": (
        ("--batch-size", "8", "4", "2"),
        "--batch-size 8 4 2: export.dynamic.batch: got [8, 4, 2]; expected [min, opt, max]",
    ),
    "beyond positions": (("--seq-len", "16", "64", "512"), "the model has 64 positions; lower the last number"),
    "one token": (("--seq-len", "1", "8", "16"), "--seq-len 1 ...: expected 2 or more"),
    "backend": (("--backend", "tensort"), "--backend tensort: unknown; expected auto, or some of onnxruntime, "),
    "auto and a GPU": (
        ("--backend", "auto", "tensorrt-rtx"),
        "auto times engines on this CPU, and tensorrt-rtx's run elsewhere",
    ),
    "format for no CPU": (
        (*DATA, "--backend", "auto", "--dtype", "fp8"),
        "quantizer.dtype: openvino has no activations in fp8",
    ),
    "backend twice": (("--backend", "openvino", "openvino"), "expected at least one, each of them once"),
    "task": (
        ("--task", "poetry"),
        "--task poetry: unknown; expected one of audio-classification, automatic-speech-recognition",
    ),
    "budget without rows": ((*DATA, "--max-drop", "0.1"), "there is nothing to score on"),
    "budget without labels": ((*DATA, "--max-drop", "0.1", "--tuning", "texts.txt"), "texts alone cannot be scored"),
    "rows without budget": (
        (*DATA, "--tuning", "text-csv:a.csv"),
        "--tuning a.csv: data.tuning: is used by fallback.max_drop",
    ),
    "negative budget": (
        (*DATA, "--max-drop", "-1", "--tuning", "text-csv:a.csv"),
        "--max-drop -1.0: fallback.max_drop: got the number -1.0; expected a number, at least 0",
    ),
    "same rows": (
        (*DATA, "--max-drop", "0", "--tuning", "text-csv:a.csv", "--evaluation", "text-csv:a.csv"),
        "--tuning and --evaluation are both text-csv:a.csv",
    ),
    "format": ((*DATA, "--dtype", "fp8"), "quantizer.dtype: openvino has no activations in fp8; it takes int8, uint8"),
    "capability": (("--compute-capability", "sm89"), "--compute-capability sm89 is for --backend tensorrt-rtx"),
    "precision": (
        ("--backend", "onnxruntime", "--inference-precision", "bfloat16"),
        "engine.inference_precision: onnxruntime computes in the types of the ONNX file; leave 'bfloat16' out",
    ),
    "unknown precision": (
        ("--inference-precision", "int8"),
        "--inference-precision int8: engine.inference_precision: got the text 'int8'; expected 'float32' or",
    ),
    "no capability": (
        ("--backend", "tensorrt-rtx", "--compute-capability", "ada"),
        "--compute-capability ada: engine.compute_capability: got the text 'ada'; expected a compute cap",
    ),
    "unknown capability": (
        ("--backend", "tensorrt-rtx", "--compute-capability", "sm999"),
        "engine.compute_capability: 'sm999' is unknown to tensorrt-rtx",
    ),
    "capability without the format": (
        (*DATA, "--backend", "tensorrt-rtx", "--dtype", "fp8", "--compute-capability", "sm80"),
        "engine.compute_capability: 'sm80' has no FP8",
    ),
    "settings that are wrong": (
        (*DATA, "--config", "wrong.yaml"),
        "wrong.yaml:1: preset: got the text 'fats'; expected",
    ),
    "no settings": ((*DATA, "--config", "none.yaml"), "none.yaml: there is no such file; expected a YAML file"),
    "settings that a backend lacks": (
        (*DATA, "--backend", "tensorrt", "--config", "dynamic.yaml"),
        "quantizer.formats[0]: tensorrt has no kernels for ranges at run time",
    ),
    "settings with a format that the GPU lacks": (
        (*DATA, "--backend", "tensorrt-rtx", "--compute-capability", "sm80", "--config", "fp8.yaml"),
        "engine.compute_capability: 'sm80' has no FP8",
    ),
    "threads": (
        ("--threads", "0"),
        "--threads 0: engine.threads: got the whole number 0; expected a whole number, at least 1",
    ),
    "exists": (("-o", "texts.txt"), "texts.txt cannot be written: it is no folder"),
    "the current folder": (("-o", ".", "--force"), "is the current folder, or holds it"),
    "no folder": (("-o", ""), "is the current folder, or holds it"),
    "a long name": (("-o", "n" * 300), "File name too long"),
    "no model": (("-m", "./nowhere"), "there is no folder nowhere"),
}


@pytest.mark.promise("Without data it stops and says so; without `--quantization` it converts the float model.")
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_before_the_model_is_loaded(
    convert: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    (tmp_path / "texts.txt").write_text("a good film\n\nthe plot was dull\n")
    (tmp_path / "empty.txt").write_text("\n \n")
    for name, text in SETTINGS.items():
        (tmp_path / f"{name}.yaml").write_text(text)
    there = {path.name for path in tmp_path.iterdir()}
    monkeypatch.setattr(run_context, "load_model", lambda *_: pytest.fail("the model was loaded"))
    words, expected = BAD[case]
    code, said = convert(*words)
    assert code == 1
    assert expected in said
    assert {path.name for path in tmp_path.iterdir()} == there


def test_a_dtype_that_is_wrong_is_told_once(convert: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("a good film\n")
    (tmp_path / "plain.yaml").write_text(SETTINGS["plain"])
    _, said = convert(*DATA, "--dtype", "fp8", "--config", "plain.yaml", "--backend", "openvino", "onnxruntime")
    for name in ("openvino", "onnxruntime"):
        assert said.count(f"quantizer.dtype: {name} has no activations in fp8") <= 1
    assert "quantizer.dtype: openvino has no activations in fp8" in said


@pytest.mark.parametrize(("ranges", "offered"), [("static", False), ("dynamic", False), (None, True)])
def test_ranges_of_a_file_are_those_of_all_engines(
    ranges: str | None, offered: bool, place: Place, tmp_path: Path
) -> None:
    config = tmp_path / "ranges.yaml"
    config.write_text("preset: plain\n" if ranges is None else f"activations: {{ranges: {ranges}}}\n")
    (tmp_path / "texts.txt").write_text("a good film\n")
    given = {"model": place.model, "output": tmp_path / "out", "quantization": True, "config": config}
    given |= {"calibration": str(tmp_path / "texts.txt"), "backend": ("auto", "onnxruntime")}
    (asked,) = conversion_configs(given)
    assert any(variant.dynamic for variant in variants_of(asked, ("onnxruntime",))) is offered


@pytest.mark.promise("Every key of a [run](../configuration.md) works here.")
def test_a_conversion_takes_every_key_of_a_run(
    place: Place, convert: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracked: list[tuple[RunRecord, Path]] = []
    monkeypatch.setitem(TRACKERS, "mlflow", lambda record, folder: str(tracked.append((record, folder))))
    # The package is looked for before all else.
    monkeypatch.setattr("quantizer.pipeline.preflight.require_package", lambda *names: None)
    run = "quantizer: {preset: plain}\namp: {batches: 1}\nfallback: {num: 1}\n"
    run += "report: {latency_shapes: usual, track: mlflow}\n"
    (tmp_path / "run.yaml").write_text(run)
    words = ["--quantization", "--calibration", place.data("calibration"), "--rows", "12", *SIZES, "-o", "out"]
    code, said = convert(*words, "--config", "run.yaml", "--set", "quantizer.activations.percentile=99", "deliver=[]")
    assert (code, said) == (0, "")
    record = read_record(tmp_path / "out" / "openvino" / "report.json")
    assert [place for _, place in tracked] == [tmp_path / "out" / "openvino"]
    assert record.fallback is not None
    assert len(record.fallback.groups) == 1
    assert record.sensitivity
    assert record.other_latencies == ()
    assert record.config["quantizer"]["activations"]["percentile"] == 99
    assert not (tmp_path / "out" / "openvino" / "config.json").exists()
    code, said = convert(*words, "--set", "quantizer.presett=plain", "--force")
    assert code == 1
    assert "override 'quantizer.presett=plain': quantizer.presett: unknown key" in said


def test_problems_are_told_together(convert: Callable[..., tuple[int, str]]) -> None:
    code, said = convert("--threads", "0", "--seq-len", "9", "8", "7")
    assert code == 1
    assert "2 problems" in said


def test_an_architecture_that_does_not_tell_the_task(
    place: Place, convert: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    shutil.copytree(place.model, tmp_path / "masked")
    config = _read(tmp_path / "masked" / "config.json")
    (tmp_path / "masked" / "config.json").write_text(json.dumps({**config, "architectures": ["BertForPreTraining"]}))
    code, said = convert("-o", "out", model="masked")
    assert code == 1
    assert "its architecture is BertForPreTraining, which does not tell the task" in said
    assert "--task with one of audio-classification, automatic-speech-recognition" in said
