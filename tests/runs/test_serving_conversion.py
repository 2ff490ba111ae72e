"""Folders of conversions as a server takes them: what Triton would load gives what our engine gives."""

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
from helpers import openvino_core
from pbtxt import read_pbtxt

for _package in ("transformers", "scipy", "onnx", "onnxscript", "openvino", "onnxruntime"):
    pytest.importorskip(_package, reason="a conversion needs enginequant[hf,onnx,openvino,onnxruntime]")

import onnxruntime as ort
import openvino as ov
from tiny_run import tiny_run

import quantizer.algorithms.range_search as attention
from quantizer.cli.main import main
from quantizer.pipeline import benchmark
from quantizer.pipeline.load_converted import load_converted
from quantizer.tasks import load_model

SIZES = ("--batch-size", "1", "2", "4", "--seq-len", "16", "24", "32")
ON_CPU = ("openvino", "onnxruntime")
AHEAD = find_spec("tensorrt_rtx_bindings") is not None and not torch.cuda.is_available()
NUMPY = {"TYPE_INT64": np.int64, "TYPE_FP32": np.float32}

pytestmark = pytest.mark.usefixtures("exact_byte_products")


@dataclass(frozen=True)
class Place:
    """A tiny classifier, and conversions of it: "int8" and "float"."""

    folder: Path
    convert: Callable[..., Path]

    def model(self, kind: str, backend: str) -> Path:
        """The folder of a model in the model repository."""
        return self.folder / kind / backend / "triton" / kind


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("served")
    torch.set_num_threads(1)
    tiny_run(folder)

    def convert(name: str, *words: str) -> Path:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
            # Random weights of 32 channels: rounding attention costs them more than 1 dB.
            patch.setattr(attention, "_GAIN_DB", math.inf)
            assert main(["convert", "-m", str(folder / "model"), *SIZES, *words, "-o", str(folder / name)]) == 0
        return folder / name

    ahead = ("tensorrt-rtx", "--compute-capability", "sm89") if AHEAD else ()
    data = ("--quantization", "--calibration", f"text-csv:{folder / 'calibration.csv'}", "--rows", "12")
    convert("int8", *data, "--backend", *ON_CPU, *ahead)
    convert("float", "--backend", *ON_CPU)
    return Place(folder, convert)


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


@pytest.mark.promise("Each folder of a backend has a model repository")
@pytest.mark.parametrize("kind", ["int8", "float"])
def test_onnx_runtime_gives_what_our_engine_gives(place: Place, kind: str) -> None:
    model, ours = place.model(kind, "onnxruntime"), load_converted(place.folder / kind / "onnxruntime").engine
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
    model, ours = place.model(kind, "openvino"), load_converted(place.folder / kind / "openvino").engine
    config = read(model)
    # Its backend has no setting for float32, which is its own choice on CPUs without BF16.
    network = compiled(model, "f32")
    for shape in SHAPES:
        inputs = batch(config, *shape)
        right, given = ours(inputs)["logits"], network(inputs)[0]
        assert given.shape == (shape[0], 2)
        assert sqnr(right, given) > 90, shape


@pytest.mark.promise("`HINT_BF16` where the engine was built for bfloat16")
def test_openvino_computes_in_bfloat16_where_our_engine_does(place: Place) -> None:
    if "BF16" not in openvino_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        pytest.skip("this CPU has no BF16")
    place.convert("bf16", "--backend", "openvino", "--inference-precision", "bfloat16")
    model, ours = place.model("bf16", "openvino"), load_converted(place.folder / "bf16" / "openvino").engine
    network = compiled(model)
    assert network.get_property("INFERENCE_PRECISION_HINT") == ov.Type.bf16
    plain = compiled(place.model("float", "openvino"), "f32")
    inputs = batch(read(model), 3, 20)
    assert sqnr(ours(inputs)["logits"], network(inputs)[0]) > sqnr(ours(inputs)["logits"], plain(inputs)[0]) + 10


@pytest.mark.parametrize("backend", ON_CPU)
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
    page = Path(__file__).parents[2] / "docs" / "guide" / "serving.md"
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
    folder = place.folder / "int8" / "tensorrt-rtx"
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
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("logits: ok: SQNR") == len(cases)
