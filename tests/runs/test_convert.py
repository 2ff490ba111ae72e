"""``quantizer convert``: what a folder holds, that it serves, by Triton too, and that nothing wrong is written."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quantizer import Quantizer
from quantizer.cli.main import main
from quantizer.engines import BuildOptions
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import EngineError, QuantizerError
from quantizer.report.record import RunRecord, read_record
from quantizer.report.trackers import TRACKERS
from quantizer.report.verdict import verdict_of
from quantizer.tasks import build_task, load_examples, load_model, load_tokenizer
from quantizer.utils.files import MARKER

for _package in ("transformers", "scipy", "onnx", "onnxscript", "openvino", "onnxruntime"):
    pytest.importorskip(_package, reason="a conversion needs enginequant[hf,onnx,openvino,onnxruntime]")

import onnxruntime as ort
import openvino as ov
import transformers
from helpers import openvino_core, read_json
from pbtxt import read_pbtxt
from test_right_engines import Wrong
from tiny_run import tiny_run

import quantizer
import quantizer.algorithms.range_search as attention
import quantizer.pipeline.run_engines as run_engines
import quantizer.pipeline.stages as stages
from quantizer.pipeline import benchmark
from quantizer.pipeline import progress as stage_timer
from quantizer.pipeline.compare_outputs import OutputCheck, tolerance
from quantizer.pipeline.convert_options import conversion_configs
from quantizer.pipeline.fastest_engine import variants_of
from quantizer.pipeline.load import load_converted

(ONNXRUNTIME,), _ = cpu_candidates(("onnxruntime",))
"""The backend for this CPU."""
SIZES = ["--batch-size", "1", "2", "4", "--seq-len", "16", "24", "32"]
BACKENDS = ("openvino", "onnxruntime")
AHEAD = find_spec("tensorrt_rtx_bindings") is not None and not torch.cuda.is_available()
NUMPY = {"TYPE_INT64": np.int64, "TYPE_FP32": np.float32}

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@dataclass(frozen=True)
class Place:
    """A tiny classifier with its data, and conversions of it: "int8" and "float"."""

    folder: Path

    @property
    def model(self) -> str:
        return str(self.folder / "model")

    @property
    def done(self) -> Path:
        return self.folder / "int8"

    @property
    def float(self) -> Path:
        return self.folder / "float"

    def data(self, name: str) -> str:
        return f"text-csv:{self.folder / name}.csv"

    def texts(self) -> list[str]:
        return [row.text for row in load_examples("text-csv", path=self.folder / "evaluation.csv")]

    def served(self, kind: str, backend: str) -> Path:
        """The folder of a model in the model repository."""
        return self.folder / kind / backend / "triton" / kind

    def convert(self, name: str, *words: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
            # Random weights of 32 channels: rounding attention costs them more than 1 dB.
            for limit in ("_GAIN_DB", "_GAIN_OF_SHARE_DB"):
                patch.setattr(attention, limit, math.inf)
            assert main(["convert", "-m", self.model, *words, *SIZES, "-o", str(self.folder / name)]) == 0
        return self.folder / name


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    here = Place(tmp_path_factory.mktemp("conversion"))
    torch.set_num_threads(1)
    tiny_run(here.folder)
    words = ["--quantization", "--calibration", here.data("calibration"), "--samples", "12"]
    words += ["--max-drop", "0.5", "--tuning", here.data("calibration"), "--evaluation", here.data("evaluation")]
    here.convert("int8", *words, "--backend", *BACKENDS, "--deliver", "openvino", "onnx")
    here.convert("float", "--backend", *BACKENDS)
    return here


@pytest.fixture
def convert(
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str]]:
    """Runs a conversion in an empty folder; its exit code and what it said of errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)

    def run(*words: str, model: str = place.model) -> tuple[int, str]:
        # One engine by default: test_run_auto.py has the choice between all.
        code = main(["convert", "-m", model, *(() if "--backend" in words else ("--backend", "openvino")), *words])
        return code, capsys.readouterr().err

    return run


# -- what is written ---------------------------------------------------------------------------------------------------


def test_what_was_converted_is_shown_compared_and_run(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the folders hold, and what is printed: tests/goldens."""
    assert {path.name for path in place.done.iterdir()} == {*BACKENDS, MARKER}
    assert not list(place.folder.glob("*.search"))
    for backend in BACKENDS:
        folder = place.done / backend
        card = (folder / "README.md").read_text(encoding="utf-8")
        monkeypatch.chdir(folder)
        exec(compile(card.split("```python\n")[1].split("```")[0], "README.md", "exec"), {})
        quantization = read_json(folder / "config.json")["quantization"]
        assert "fallback(max_drop=0.5)" in quantization["reason"]
        (check,) = quantization["budget"]
        assert check["samples"] == len(load_examples("text-csv", path=place.folder / "calibration.csv")) // 3
        # Which one it is depends on how busy the machine is.
        level = verdict_of(read_record(folder / "report.json")).level
        assert f"<strong>{level.capitalize()}" in (folder / "report.html").read_text(encoding="utf-8")
        assert main(["show", str(folder)]) == 0
        assert f"verdict {level}" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *(str(place.done / backend) for backend in BACKENDS)]) == 0


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
    rows = load_examples("text-csv", path=place.folder / "evaluation.csv")
    scored = read_record(folder / "report.json").scores
    right = sum(label == f"LABEL_{row.label}" for label, row in zip(labels, rows, strict=True))
    assert right / len(rows) == pytest.approx(next(score.value for score in scored if score.form == "engine"))
    assert len(set(labels)) == 2
    frozen = Quantizer.load(folder / "quantizer").quantize(model)
    decided = task.predict(lambda batch: frozen(**batch), rows).decisions
    assert labels == [f"LABEL_{label}" for label in decided]


def test_more_texts_than_it_was_built_for(place: Place) -> None:
    served, texts = load_converted(place.float / "openvino"), place.texts()
    assert len(texts) == 24
    alone = [served([text])["logits"][0] for text in texts]
    assert np.abs(served(texts)["logits"] - alone).max() < 1e-4
    assert served.labels(texts) == [f"LABEL_{int(np.argmax(one))}" for one in alone]
    assert served(["good " * 100])["logits"].shape == (1, 2)
    for call in (served, served.labels):
        with pytest.raises(QuantizerError, match="got no texts, expected at least one"):
            call([])
        with pytest.raises(QuantizerError, match="got one text, expected a list of texts: pass it in a list"):
            call("a text")


def test_a_pipeline_returns_what_that_of_transformers_returns(place: Place, tmp_path: Path) -> None:
    texts = [*place.texts(), "good " * 60]
    pipe, own = (
        quantizer.load_pipeline(place.float / "openvino"),
        transformers.pipeline("text-classification", model=place.model),
    )
    options = {"truncation": True, "max_length": 32}
    for given in (texts, texts[0]):
        for top_k in (1, None):
            found, expected = pipe(given, top_k=top_k), own(given, top_k=top_k, **options)
            assert _numbers(found) == pytest.approx(_numbers(expected), abs=1e-5)
            assert _labels(found) == _labels(expected)
    assert _numbers(quantizer.load_pipeline(place.float / "openvino", function_to_apply="none")(texts)) != _numbers(
        pipe(texts)
    )
    (quantized,) = quantizer.load_pipeline(place.done / "onnxruntime")([texts[0]])
    assert quantized["label"] == load_converted(place.done / "onnxruntime").labels(texts[:1])[0]
    with pytest.raises(QuantizerError, match="input_ids has the length 62, but the engine was built for at most 32"):
        pipe(texts[-1], truncation=False)
    shutil.copytree(place.float / "openvino", tmp_path / "older")
    (tmp_path / "older" / "tokenizer" / "config.json").unlink()
    with pytest.raises(QuantizerError, match=r"tokenizer has no config\.json, .* convert the model again"):
        quantizer.load_pipeline(tmp_path / "older")


def _results(found: Any) -> list[dict[str, Any]]:
    """All results of a pipeline, one after the other."""
    return [found] if isinstance(found, dict) else [one for part in found for one in _results(part)]


def _numbers(found: Any) -> list[float]:
    return [one["score"] for one in _results(found)]


def _labels(found: Any) -> list[str]:
    return [one["label"] for one in _results(found)]


def test_a_folder_that_is_none_of_ours(place: Place, tmp_path: Path) -> None:
    with pytest.raises(QuantizerError, match=r"has no readable config\.json"):
        load_converted(place.done)
    shutil.copytree(place.done / "openvino", tmp_path / "later")
    config = read_json(tmp_path / "later" / "config.json")
    (tmp_path / "later" / "config.json").write_text(json.dumps({**config, "format": 9}))
    with pytest.raises(QuantizerError, match="has format 9, expected 1: convert the model again"):
        load_converted(tmp_path / "later")


def test_a_float_model_needs_no_data(place: Place) -> None:
    assert {path.name for path in place.float.iterdir()} == {*BACKENDS, MARKER}
    assert not list(place.float.glob("openvino/float.*"))
    assert main(["show", str(place.float / "openvino")]) == 0
    config = read_json(place.float / "openvino" / "config.json")
    assert config["quantization"] is None
    assert all(check["sqnr_db"] is None or check["sqnr_db"] > 60 for check in config["checks"])
    assert all(check["cosine"] > 0.9999 for check in config["checks"])


def test_without_a_name_and_sizes_they_are_those_of_the_model(
    convert: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    words = ("--batch-size", "1", "2", "3")
    assert convert(*words) == (0, "")
    config = read_json(tmp_path / "converted" / "model" / "openvino" / "config.json")
    assert (config["name"], config["dimensions"]["sequence"]) == ("model", [16, 64, 64])
    code, said = convert(*words)
    assert (code, "already exists; choose another folder, or replace it with --force" in said) == (1, True)


def test_what_cannot_run_here_is_not_called_verified(convert: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings", reason="needs the wheels of TensorRT-RTX")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, so the engine may run here")
    assert convert("--backend", "tensorrt-rtx", "--compute-capability", "sm89", *SIZES, "-o", "rtx")[0] == 0
    config = read_json(tmp_path / "rtx" / "tensorrt-rtx" / "config.json")
    assert config["verified"].startswith("not verified")
    assert config["checks"] == []
    assert config["compute_capability"] == "sm89"
    assert config["float_dtype"] == "float16"


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


def test_interrupted_the_calibration_alone_is_left(
    convert: Callable[..., tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At one stage, as it is one pipeline: at each of them in test_run.py."""

    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "measure_latency", stopped)
    code, said = convert(*SIZES)
    (kept,) = (tmp_path / "converted").iterdir()
    words = (
        f"interrupted: the calibration, plans and engines are kept in {kept}; run the same command again to resume\n"
    )
    assert (code, said) == (130, words)


def test_a_conversion_whose_engine_is_refused_fails(
    convert: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    load = run_engines.load_engine
    monkeypatch.setattr(run_engines, "load_engine", lambda *at, **more: Wrong(load(*at, **more), lambda _: True, 1.5))
    code, said = convert(*SIZES, "-o", "out")
    assert code == 1
    assert "the engine is refused: openvino engine, batch " in said
    assert "SQNR 6.0 dB against PyTorch" in said
    folder = Path("out/openvino")
    assert not list(folder.glob("model.engine*"))
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
    config = read_json(folder / "config.json")
    assert config["only_sizes"] == list(second.only_sizes)
    assert {(check["batch"], check["sequence"]) for check in config["checks"]} == compared
    served = load_converted(folder)
    # Texts are padded to a length that the engine takes, in batches of any size; only those of a longer one are cut.
    lengths = {length for _, length in compared}
    for texts in (place.texts()[:2], ["good"], ["good " * 100, "bad"]):
        assert served.inputs(texts)["input_ids"].shape[1] in lengths
        assert served(texts)["logits"].shape == (len(texts), 2)
    assert served.inputs(["good " * 100, "bad"])["input_ids"].shape == (2, max(lengths))
    # A batch of another size is filled up, or split.
    texts = place.texts()
    expected = np.concatenate([served(texts[at : at + 8])["logits"] for at in (0, 8, 16)])
    assert np.abs(served(texts[:3])["logits"] - expected[:3]).max() < 1e-4
    assert np.abs(served(texts)["logits"] - expected).max() < 1e-4
    pipe = quantizer.load_pipeline(folder)
    assert [one["label"] for one in pipe([*texts, "good"])][:24] == served.labels(texts)
    ids = np.ones((3, 17), np.int64)
    with pytest.raises(EngineError, match="it has no model for"):
        served.engine(dict.fromkeys(served.engine.input_names, ids))
    card = " ".join((folder / "README.md").read_text(encoding="utf-8").split())
    assert "with a model for each: openvino's model for all sizes is wrong (SQNR " in card


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
    words = ["--quantization", "--calibration", place.data("calibration"), "--samples", "12", *SIZES, "-o", "out"]
    code, said = convert(*words, "--config", "run.yaml", "--set", "quantizer.activations.percentile=99", "deliver=[]")
    assert (code, said) == (0, "")
    record = read_record(tmp_path / "out" / "openvino" / "report.json")
    assert [place for _, place in tracked] == [tmp_path / "out" / "openvino"]
    assert len(record.fallback.groups) == 1
    assert record.sensitivity
    assert record.other_latencies == ()
    assert record.config["quantizer"]["activations"]["percentile"] == 99
    assert not (tmp_path / "out" / "openvino" / "config.json").exists()


# -- as a server takes them: what Triton would load gives what our engine gives ----------------------------------------


def read(model: Path) -> dict[str, Any]:
    """A model's configuration."""
    return read_pbtxt((model / "config.pbtxt").read_text(encoding="utf-8"))


def parameters(config: Mapping[str, Any]) -> dict[str, str]:
    return {one["key"][0]: one["value"][0]["string_value"][0] for one in config["parameters"]}


def batch(config: Mapping[str, Any], rows: int, tokens: int) -> dict[str, Any]:
    """Inputs under the names and in the types of a configuration."""
    values = {"input_ids": np.arange(rows * tokens).reshape(rows, tokens) % 20 + 5}
    values["attention_mask"] = np.ones_like(values["input_ids"])
    values["attention_mask"][1:, tokens // 2 :] = 0
    values["token_type_ids"] = np.zeros_like(values["input_ids"])
    return {one["name"][0]: values[one["name"][0]].astype(NUMPY[one["data_type"][0]]) for one in config["input"]}


def sqnr(right: Any, given: Any) -> float:
    noise = float(((right - given) ** 2).sum())
    return math.inf if noise == 0 else 10 * math.log10(float((right**2).sum()) / noise)


SHAPES = [(1, 16), (2, 24), (3, 20), (4, 32)]


@pytest.mark.parametrize("kind", ["int8", "float"])
def test_onnx_runtime_gives_what_our_engine_gives(place: Place, kind: str) -> None:
    model, ours = place.served(kind, "onnxruntime"), load_converted(place.folder / kind / "onnxruntime").engine
    config = read(model)
    assert config["name"] == [kind]
    assert config["max_batch_size"] == [4]
    assert config["dynamic_batching"] == [{"preferred_batch_size": [2, 4]}]
    options = ort.SessionOptions()
    options.intra_op_num_threads = int(parameters(config)["intra_op_thread_count"])
    # Triton's -1 is the level of basic optimizations.
    assert config["optimization"] == [{"graph": [{"level": [-1]}]}]
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = ort.InferenceSession(model / "1" / config["default_model_filename"][0], options)
    # As Triton's backend compares them: names are all there, outputs have the same dimensions, a name counts as -1.
    for field, found in (("input", session.get_inputs()), ("output", session.get_outputs())):
        told = {one["name"][0]: [-1, *one["dims"]] for one in config[field]}
        assert told == {one.name: [size if isinstance(size, int) else -1 for size in one.shape] for one in found}
    for shape in SHAPES:
        inputs = batch(config, *shape)
        np.testing.assert_array_equal(session.run(["logits"], inputs)[0], ours(inputs)["logits"])


def compiled(model: Path, precision: str | None = None) -> Any:
    """A model as Triton's backend for OpenVINO compiles it."""
    config = read(model)
    given = parameters(config)
    settings: dict[str, Any] = {name: value for name, value in given.items() if name != "HINT_BF16"}
    if "HINT_BF16" in given:
        settings["INFERENCE_PRECISION_HINT"] = "bf16"
    elif precision is not None:
        settings["INFERENCE_PRECISION_HINT"] = precision
    core = openvino_core()
    network = core.read_model(model / "1" / config["default_model_filename"][0])
    for field, ports in (("input", network.inputs), ("output", network.outputs)):
        told = {one["name"][0]: one["dims"] for one in config[field]}
        assert told == {
            port.any_name: [-1 if size.is_dynamic else size.get_length() for size in port.partial_shape]
            for port in ports
        }
    return core.compile_model(network, "CPU", settings)


@pytest.mark.parametrize("kind", ["int8", "float"])
def test_openvino_gives_what_our_engine_gives(place: Place, kind: str) -> None:
    model, ours = place.served(kind, "openvino"), load_converted(place.folder / kind / "openvino").engine
    config = read(model)
    # Its backend has no setting for float32, which is its own choice on CPUs without BF16.
    network = compiled(model, "f32")
    for shape in SHAPES:
        inputs = batch(config, *shape)
        right, given = ours(inputs)["logits"], network(inputs)[0]
        assert given.shape == (shape[0], 2)
        assert sqnr(right, given) > 90, shape


def test_plain_runtimes_read_the_layouts(place: Place) -> None:
    """With no option of ours, except for the precision, which is OpenVINO's own choice."""
    served = {backend: place.done / backend for backend in BACKENDS}
    assert {path.name for path in (served["openvino"] / "openvino").iterdir()} == {
        "model.xml",
        "model.bin",
        "README.md",
        "tokenizer",
    }
    assert not (served["openvino"] / "onnx").exists()
    assert not (served["onnxruntime"] / "openvino").exists()
    network = openvino_core().read_model(served["openvino"] / "openvino" / "model.xml")
    compiled = openvino_core().compile_model(network, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    session = ort.InferenceSession(served["onnxruntime"] / "onnx" / "model.onnx")
    config = read(place.served("int8", "openvino"))
    for shape in SHAPES:
        inputs = batch(config, *shape)
        given = {
            "openvino": compiled({port.any_name: inputs[port.any_name] for port in network.inputs})["logits"],
            "onnxruntime": session.run(["logits"], {node.name: inputs[node.name] for node in session.get_inputs()})[0],
        }
        for backend, folder in served.items():
            # ONNX Runtime applies fusions that our engine leaves out, so that some values round differently.
            least = {"openvino": 60, "onnxruntime": 30}[backend]
            assert sqnr(load_converted(folder).engine(inputs)["logits"], given[backend]) > least, (backend, shape)


def test_openvino_computes_in_bfloat16_where_our_engine_does(place: Place) -> None:
    if "BF16" not in openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU has no BF16")
    place.convert("bf16", "--backend", "openvino", "--inference-precision", "bfloat16")
    model, ours = place.served("bf16", "openvino"), load_converted(place.folder / "bf16" / "openvino").engine
    network = compiled(model)
    assert network.get_property("INFERENCE_PRECISION_HINT") == ov.Type.bf16
    plain = compiled(place.served("float", "openvino"), "f32")
    inputs = batch(read(model), 3, 20)
    assert sqnr(ours(inputs)["logits"], network(inputs)[0]) > sqnr(ours(inputs)["logits"], plain(inputs)[0]) + 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_files_are_told_and_links_survive(place: Place, tmp_path: Path, backend: str) -> None:
    folder = place.folder / "int8" / backend
    files = json.loads((folder / "config.json").read_text(encoding="utf-8"))["files"]
    assert files["triton"] == "triton/int8"
    assert "gpu_check" not in files
    linked = folder / "triton" / "int8" / "1" / "model.onnx"
    assert linked.samefile(folder / {"openvino": "model.onnx", "onnxruntime": "model.engine"}[backend])
    # A copy into another place, without links, is a repository as well.
    shutil.copytree(folder / "triton", tmp_path / "repository")
    assert sorted(os.listdir(tmp_path / "repository" / "int8")) == ["1", "config.pbtxt"]


def test_a_conversion_replaces_one_with_links_in_it(place: Place) -> None:
    folder = place.convert("again", "--backend", "onnxruntime")
    before = (folder / "onnxruntime" / "model.engine").stat().st_ino
    place.convert("again", "--backend", "onnxruntime", "--force")
    assert (folder / "onnxruntime" / "model.engine").stat().st_ino != before
    assert not list(place.folder.glob(".again*"))


class _Input:
    """An input as Triton's client has it."""

    def __init__(self, name: str, shape: list[int], datatype: str) -> None:
        self.name, self.shape, self.datatype = name, shape, datatype

    def set_data_from_numpy(self, values: Any) -> None:
        assert list(values.shape) == self.shape
        self.values = values


class _Client:
    """A client whose server is ONNX Runtime, with the model repository of a folder."""

    folder: Path

    def __init__(self, address: str) -> None:
        assert address == "localhost:8000"

    def get_model_metadata(self, name: str) -> dict[str, Any]:
        told = read(self.folder / name)["input"]
        return {"inputs": [{"name": i["name"][0], "datatype": i["data_type"][0].removeprefix("TYPE_")} for i in told]}

    def infer(self, name: str, inputs: list[_Input]) -> Any:
        session = ort.InferenceSession(self.folder / name / "1" / "model.onnx")
        assert {one.datatype for one in inputs} == {"INT64"}
        outputs = session.run(None, {one.name: one.values for one in inputs})
        found = dict(zip([one.name for one in session.get_outputs()], outputs, strict=True))
        return SimpleNamespace(as_numpy=found.__getitem__)


def test_the_client_of_the_guide_asks_for_what_is_served(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "serving.md"
    blocks = re.findall(r"^```py\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    (snippet,) = [block for block in blocks if "tritonclient" in block]
    folder = tmp_path / "converted" / "my-model" / "onnxruntime"
    shutil.copytree(place.folder / "int8" / "onnxruntime", folder)
    (folder / "triton" / "int8").rename(folder / "triton" / "my-model")
    monkeypatch.setattr(_Client, "folder", folder / "triton", raising=False)
    client = ModuleType("tritonclient.http")
    client.InferenceServerClient, client.InferInput = _Client, _Input  # type: ignore[attr-defined]
    package = ModuleType("tritonclient")
    package.http = client  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tritonclient", package)
    monkeypatch.setitem(sys.modules, "tritonclient.http", client)
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, str(page), "exec"), {})
    logits = load_converted(folder)(["a fine film", "a dull plot"])["logits"]
    assert capsys.readouterr().out.strip() == str(logits)


# -- for a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not AHEAD, reason="needs the wheels of TensorRT-RTX, and no GPU")
def test_an_engine_for_a_gpu_comes_with_its_check(place: Place, tmp_path: Path) -> None:
    data = ("--quantization", "--calibration", place.data("calibration"), "--samples", "12")
    folder = place.convert("rtx", *data, "--backend", "tensorrt-rtx", "--compute-capability", "sm89") / "tensorrt-rtx"
    files = json.loads((folder / "config.json").read_text(encoding="utf-8"))["files"]
    assert files["gpu_check"] == "run_on_gpu.sh"
    # Its engines are not those of Triton's TensorRT.
    assert "triton" not in files
    assert not (folder / "triton").exists()
    cases = [path.name for path in (folder / "gpu").iterdir() if path.is_dir()]
    assert set(cases) > {"1x16", "2x24", "4x32"}
    assert set(os.listdir(folder / "gpu")) == {*cases, "compare.py", "config.pbtxt", "settings.sh"}
    config = read(folder / "gpu")
    assert config["platform"] == ["tensorrt_plan"]
    assert config["output"] == [{"name": ["logits"], "data_type": ["TYPE_FP16"], "dims": [2]}]
    model = load_model(str(place.folder / "model"), "sequence-classification")
    for case in cases:
        rows, tokens = map(int, case.split("x"))
        told = json.loads((folder / "gpu" / case / "case.json").read_text(encoding="utf-8"))
        assert told["tolerance"]["decibels"] == 30
        inputs = {
            entry.partition(":")[0]: torch.from_numpy(
                np.fromfile(folder / entry.partition(":")[2], np.int64).reshape(rows, tokens)
            )
            for entry in (folder / "gpu" / case / "inputs").read_text(encoding="utf-8").strip().split(",")
        }
        with torch.no_grad():
            logits = model(**inputs).logits.numpy()
        # An engine that loses nothing passes, however far the quantized model is.
        values = ", ".join(f"{value:g}" for value in logits.ravel())
        export = f'[\n  {{ "name" : "logits"\n  , "dimensions" : "{rows}x2"\n  , "values" : [ {values} ]\n  }}\n]\n'
        (tmp_path / f"{case}.json").write_text(export, encoding="utf-8")
    tool = tmp_path / "tensorrt_rtx"
    words = 'for word in "$@"; do case $word in --exportOutput=*) cp "$EXPORTS/${word##*/}" "${word#*=}" ;; esac; done'
    tool.write_text(f"#!/bin/sh\n{words}\n", encoding="utf-8")
    tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "EXPORTS": str(tmp_path)}
    done = subprocess.run(
        ["sh", str(folder / "run_on_gpu.sh"), str(tmp_path / "results")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("logits: ok: SQNR") == len(cases)
