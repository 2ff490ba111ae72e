"""Each kind of config.pbtxt, parsed with the protobuf of Triton's own client: ``make clients``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

for _package in ("onnx", "onnxruntime"):
    pytest.importorskip(_package, reason="the files of engines need enginequant[onnx,onnxruntime]")

from client_environment import client_prints
from served_engine import TEXTS, served, write_onnx

from quantizer.engines.onnxruntime import needs_basic_level
from quantizer.export.qdq.structure import Signature, Value
from quantizer.pipeline.triton import _TYPES, ServedEngine, config_text
from quantizer.plan.targets import profiles

pytestmark = pytest.mark.nightly

PARSE = """\
import json
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2

for text in json.load(open("texts.json")):
    try:
        message = text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        print(json.dumps({"error": str(error)}))
    else:
        print(json.dumps(json_format.MessageToDict(message, preserving_proto_field_name=True)))
"""
MIXED = Signature(
    inputs=tuple(Value(f"in {number}", kind, ("batch", 4)) for number, kind in enumerate(_TYPES)),
    outputs=(Value('a "name"', "float16", ("batch",)), Value("path\\to", "bfloat16", (3, 3))),
)
"""All types, names with special characters, an output with the batch alone, and one without a batch."""


def engines(folder: Path) -> Iterator[ServedEngine]:
    """An engine of each kind that config.pbtxt is written for."""
    for name in profiles.names():
        if profiles[name].triton is None:
            continue
        (own := folder / name).mkdir()
        for signature in (TEXTS, MIXED):
            for precision in (None, "float32", "bfloat16"):
                yield served(own, name, signature=signature, precision=precision, name=f"a {name}")
        yield served(own, name, signature=TEXTS, dimensions={"batch": (1, 1, 1)})
        # With more quantized convolutions than normalizations, ONNX Runtime has no level.
        yield served(own, name, engine=write_onnx(own / "convolutional.onnx", ("QLinearConv",)))


def parsed(texts: list[str], folder: Path) -> list[dict[str, object]]:
    """The messages of some configurations, in the form of JSON."""
    (folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")
    return [json.loads(line) for line in client_prints("tritonclient", PARSE, folder).splitlines()]


def test_every_configuration_is_read_as_it_was_meant(tmp_path: Path) -> None:
    given = list(engines(tmp_path))
    assert {engine.backend for engine in given} >= {"onnxruntime", "openvino", "tensorrt", "tensorrt-rtx"}
    for engine, message in zip(given, parsed([config_text(each) for each in given], tmp_path), strict=True):
        assert "error" not in message, message
        server = engine.server
        assert server is not None
        batched = engine.batch is not None and server.batches
        batch = engine.batch[-1] if batched and engine.batch is not None else 0
        assert message["name"] == engine.name
        assert message.get("backend", message.get("platform")) == server.chosen_by.partition('"')[2].rstrip('"')
        assert message["default_model_filename"] == server.file
        # A number of 0 is the default of a field, and is left out.
        assert message.get("max_batch_size", 0) == batch
        assert message["instance_group"] == [{"count": 1, "kind": server.kind}]
        for field, values in (("input", engine.signature.inputs), ("output", engine.signature.outputs)):
            tensors = message[field]
            assert isinstance(tensors, list)
            assert [tensor["name"] for tensor in tensors] == [value.name for value in values]
            assert [tensor["data_type"] for tensor in tensors] == [_TYPES[value.dtype] for value in values]
            for tensor, value in zip(tensors, values, strict=True):
                sizes = [size if isinstance(size, int) else -1 for size in value.shape[1 if batched else 0 :]]
                # 64 bits are text in JSON.
                assert [int(size) for size in tensor["dims"]] == (sizes or [1])
                assert ("reshape" in tensor) is (not sizes)
        assert ("dynamic_batching" in message) is (batch > 1)
        level = server.basic_level
        if level is not None and not needs_basic_level(engine.engine):
            level = None
        assert message.get("optimization") == (None if level is None else {"graph": {"level": int(level)}})
        assert set(server.parameters) <= set(message.get("parameters", {}))  # type: ignore[call-overload]


def test_a_misspelt_field_is_noticed(tmp_path: Path) -> None:
    text = config_text(served(tmp_path, "onnxruntime"))
    (message,) = parsed([text.replace("instance_group", "instance_groups")], tmp_path)
    assert "instance_groups" in str(message["error"])
