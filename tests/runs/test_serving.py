"""Files for servers: what config.pbtxt says (all of it: tests/goldens), and that its files are links that hold."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

for _package in ("onnx", "onnxruntime", "openvino"):
    pytest.importorskip(_package, reason="the files of engines need enginequant[onnx,openvino,onnxruntime]")

import onnx
import onnxruntime
from pbtxt import read_pbtxt
from served_engine import TEXTS, served, write_onnx

import quantizer.pipeline.triton as linked_files
from quantizer.engines.engine_file import content_bytes, read_engine
from quantizer.engines.onnxruntime import needs_basic_level
from quantizer.errors import EngineError
from quantizer.export.qdq.structure import Signature, Value, external_files
from quantizer.pipeline.deliver import model_name, write_serving_files
from quantizer.pipeline.triton import config_text

# -- config.pbtxt ------------------------------------------------------------------------------------------------------


def parameters(text: str) -> dict[str, str]:
    """The parameters of a configuration by name."""
    return {one["key"][0]: one["value"][0]["string_value"][0] for one in read_pbtxt(text).get("parameters", [])}


@pytest.mark.parametrize("precision", [None, "float32", "bfloat16"])
def test_a_configuration_for_openvino(tmp_path: Path, precision: str | None) -> None:
    text = config_text(served(tmp_path, "openvino", signature=TEXTS, precision=precision))
    config = read_pbtxt(text)
    assert config["backend"] == ["openvino"]
    assert config["default_model_filename"] == ["model.onnx"]
    # Its backend pads every request to max_batch_size.
    assert config["max_batch_size"] == [0]
    assert "dynamic_batching" not in config
    assert [one["dims"] for one in config["input"]] == [[-1, -1], [-1, -1]]
    assert [one["dims"] for one in config["output"]] == [[-1, 2], [-1, -1, 32]]
    assert config["instance_group"] == [{"count": [1], "kind": ["KIND_CPU"]}]
    latency = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": "2"}
    assert parameters(text) == latency | ({"HINT_BF16": "YES"} if precision == "bfloat16" else {})
    assert ("# with BF16 it uses bfloat16." in text) is (precision != "bfloat16")


def test_a_configuration_for_tensorrt(tmp_path: Path) -> None:
    config = read_pbtxt(config_text(served(tmp_path, "tensorrt", signature=TEXTS)))
    assert config["platform"] == ["tensorrt_plan"]
    assert config["default_model_filename"] == ["model.plan"]
    assert config["max_batch_size"] == [32]
    assert config["instance_group"] == [{"count": [1], "kind": ["KIND_GPU"]}]
    assert "parameters" not in config
    assert "optimization" not in config


def test_batches_are_put_together_only_where_all_tensors_have_one(tmp_path: Path) -> None:
    mask = Value("mask", "bool", (16, 16))
    config = read_pbtxt(
        config_text(served(tmp_path, "onnxruntime", signature=Signature((*TEXTS.inputs, mask), TEXTS.outputs)))
    )
    assert config["max_batch_size"] == [0]
    assert "dynamic_batching" not in config
    assert config["input"][-1] == {"name": ["mask"], "data_type": ["TYPE_BOOL"], "dims": [16, 16]}
    single = served(tmp_path, "onnxruntime", signature=TEXTS, dimensions={"batch": (1, 1, 1)})
    assert read_pbtxt(config_text(single))["max_batch_size"] == [1]
    assert "dynamic_batching" not in read_pbtxt(config_text(single))


def test_an_output_of_a_batch_alone_has_dims_that_triton_takes(tmp_path: Path) -> None:
    score = Signature(TEXTS.inputs, (Value("score", "float16", ("batch",)),))
    (output,) = read_pbtxt(config_text(served(tmp_path, "onnxruntime", signature=score)))["output"]
    assert output == {"name": ["score"], "data_type": ["TYPE_FP16"], "dims": [1], "reshape": [{"shape": []}]}


def test_a_type_that_triton_lacks_is_told(tmp_path: Path) -> None:
    odd = Signature(TEXTS.inputs, (Value("codes", "float8_e4m3fn", ("batch",)),))
    with pytest.raises(EngineError, match=r"output 'codes' has type float8_e4m3fn, which Triton does not support"):
        config_text(served(tmp_path, "onnxruntime", signature=odd))


def test_names_are_those_of_folders_and_addresses() -> None:
    assert [model_name(name) for name in ("my-model", "my model/é", "..")] == ["my-model", "my-model", "model"]


def test_convolutions_keep_their_layout_and_transformers_their_fusions(tmp_path: Path) -> None:
    assert needs_basic_level(write_onnx(tmp_path / "none.onnx", ("Relu",)))
    normalized = onnx.load(write_onnx(tmp_path / "norm.onnx", ("Relu",)))
    for kind, count in (("LayerNormalization", 2), ("Conv", 1)):
        normalized.graph.node.extend([onnx.helper.make_node(kind, ["0", "bias"], [f"{kind}{n}"]) for n in range(count)])
    onnx.save(normalized, tmp_path / "norm.onnx")
    assert needs_basic_level(tmp_path / "norm.onnx")
    normalized.graph.node.extend([onnx.helper.make_node("QLinearConv", ["0"], [f"c{n}"]) for n in range(2)])
    onnx.save(normalized, tmp_path / "norm.onnx")
    assert not needs_basic_level(tmp_path / "norm.onnx")
    level = config_text(served(tmp_path, "onnxruntime", engine=tmp_path / "norm.onnx"))
    assert "optimization" not in level


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "source"), [("onnxruntime", "model.engine"), ("openvino-avx2", "model.onnx")])
def test_the_file_of_a_model_is_a_link(tmp_path: Path, backend: str, source: str) -> None:
    files = write_serving_files(tmp_path, served(tmp_path, backend), None)
    place = tmp_path / "triton" / "m" / "1" / "model.onnx"
    assert place.samefile(tmp_path / source)
    assert files == {"triton": "triton/m"}
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    (moved / source).unlink()
    assert onnxruntime.InferenceSession(moved / "triton" / "m" / "1" / "model.onnx").get_outputs()[0].name == "y"


def test_without_links_files_are_copied_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("no links here")

    monkeypatch.setattr(linked_files.os, "link", refused)
    write_serving_files(tmp_path, served(tmp_path, "onnxruntime"), None)
    copy = tmp_path / "triton" / "m" / "1" / "model.onnx"
    assert copy.read_bytes() == (tmp_path / "model.engine").read_bytes()
    assert not copy.samefile(tmp_path / "model.engine")


def test_weights_in_another_file_come_along(tmp_path: Path) -> None:
    made = served(tmp_path, "openvino")
    write_onnx(made.onnx, external=True)
    assert external_files(made.onnx) == ("model.onnx.data",)
    write_serving_files(tmp_path, made, None)
    version = tmp_path / "triton" / "m" / "1"
    assert sorted(os.listdir(version)) == ["model.onnx", "model.onnx.data"]
    assert (version / "model.onnx.data").samefile(tmp_path / "model.onnx.data")
    session = onnxruntime.InferenceSession(version / "model.onnx")
    np.testing.assert_array_equal(session.run(None, {"x": np.ones((1, 4), np.float32)})[0], [[1, 2, 3, 4]])


def test_a_plan_is_what_the_library_built(tmp_path: Path) -> None:
    made = served(tmp_path, "tensorrt")
    write_serving_files(tmp_path, made, None)
    plan = tmp_path / "triton" / "m" / "1" / "model.plan"
    assert plan.read_bytes() == read_engine(made.engine)[0]
    assert content_bytes(made.engine) == plan.stat().st_size < made.engine.stat().st_size


def test_an_engine_file_without_a_line_is_all_content(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"plan")
    assert content_bytes(tmp_path / "old") == 4
    (tmp_path / "cut").write_bytes(b"plan\nquantizer engine: sha256 12")
    assert content_bytes(tmp_path / "cut") == len(read_engine(tmp_path / "cut")[0])


def test_an_engine_that_triton_has_no_backend_for_gets_no_files(tmp_path: Path) -> None:
    made = replace(served(tmp_path, "onnxruntime"), backend="torch")
    ahead_of_time = served(tmp_path, "tensorrt-rtx")
    before = set(tmp_path.iterdir())
    assert write_serving_files(tmp_path, made, None) == {}
    assert write_serving_files(tmp_path, ahead_of_time, None) == {}
    assert set(tmp_path.iterdir()) == before
