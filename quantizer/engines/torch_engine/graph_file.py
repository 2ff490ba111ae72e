"""A lowered graph as JSON and safetensors, in one zip archive: nothing in it is code that reading would run.

    engine.json          inputs, outputs, nodes; type and shape of every constant
    weights.safetensors  the constants, for the eager road
    compiled.pt2         what Inductor compiled, in place of the constants

The archive is not compressed: codes and floats of a model gain little, and reading would take longer.
"""

from __future__ import annotations

import io
import json
import operator
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import fx

from quantizer.engines.base import TensorSpec
from quantizer.errors import EngineError

__all__ = ["GraphFile", "unpack"]

DESCRIPTION = "engine.json"
_WEIGHTS, _COMPILED = "weights.safetensors", "compiled.pt2"
_FORMAT = 1
_NAMESPACES = ("aten", "onednn", "quantized_decomposed")
_REFUSED = ("aten.from_file.default",)
"""Operators that reach beyond the tensors they are given."""
_PLAIN = {name: getattr(operator, name) for name in ("getitem", "add", "sub", "mul", "floordiv")}


@dataclass(frozen=True, slots=True)
class GraphFile:
    """Contents of an engine file.

    Attributes:
        module: the graph. Of a compiled engine its constants are on the device ``meta``: shapes without data.
        inputs: in order.
        outputs: their names, in order.
        compiled: the package of the compiled road; None: the eager road.
        torch_version: of the torch that wrote the file.
    """

    module: fx.GraphModule
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    compiled: bytes | None
    torch_version: str

    def packed(self) -> bytes:
        """Return the archive."""
        return _pack(self)


def _pack(file: GraphFile) -> bytes:
    constants = {str(name): tensor.contiguous() for name, tensor in file.module.named_buffers()}
    description = {
        "format": _FORMAT,
        "torch": file.torch_version,
        "inputs": [
            {"name": spec.name, "dtype": spec.dtype.name, "shape": spec.shape, "dimensions": spec.dimensions}
            for spec in file.inputs
        ],
        "outputs": file.outputs,
        "constants": {name: [_type_name(held.dtype), list(held.shape)] for name, held in constants.items()},
        "nodes": [_written(node) for node in file.module.graph.nodes],
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(DESCRIPTION, json.dumps(description))
        if file.compiled is None:
            archive.writestr(_WEIGHTS, save_tensors(constants))
        else:
            archive.writestr(_COMPILED, file.compiled)
    return stream.getvalue()


def unpack(content: bytes) -> GraphFile:
    """Return what ``GraphFile.packed`` put in.

    Raises:
        EngineError: the content is none of it, or of another release; the message says what is wrong.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            description = json.loads(archive.read(DESCRIPTION))
            if description["format"] != _FORMAT:
                raise EngineError(f"it has the format {description['format']}, and this release reads {_FORMAT}")
            compiled = archive.read(_COMPILED) if _COMPILED in names else None
            constants = (
                {name: _empty(*held) for name, held in description["constants"].items()}
                if compiled is not None
                else load_tensors(archive.read(_WEIGHTS))
            )
        inputs = tuple(
            TensorSpec(spec["name"], np.dtype(spec["dtype"]), tuple(spec["shape"]), tuple(spec["dimensions"]))
            for spec in description["inputs"]
        )
        module = _read_graph(description["nodes"], constants)
        return GraphFile(module, inputs, tuple(description["outputs"]), compiled, str(description["torch"]))
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError, zipfile.BadZipFile) as error:
        raise EngineError(f"it does not hold a graph of this package ({type(error).__name__}: {error})") from error


def _written(node: fx.Node) -> dict[str, Any]:
    return {
        "op": node.op,
        "name": node.name,
        "target": _target_name(node.target) if node.op == "call_function" else str(node.target),
        "args": _encoded(node.args),
        "kwargs": _encoded(dict(node.kwargs)),
        "onnx": node.meta.get("onnx", ""),
    }


def _target_name(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else f"operator.{target.__name__}"


def _target(name: str) -> Any:
    space, _, rest = name.partition(".")
    if space == "operator" and rest in _PLAIN:
        return _PLAIN[rest]
    if space not in _NAMESPACES or name in _REFUSED or rest.count(".") != 1:
        raise ValueError(f"operator {name!r} is not one of those that the engine has")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(getattr(torch.ops, space), packet), overload)
    if not isinstance(found, torch._ops.OpOverload):
        raise ValueError(f"{name!r} is no operator")
    return found


def _encoded(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, torch.dtype):
        return {"dtype": _type_name(value)}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    if isinstance(value, dict):
        return {"items": {key: _encoded(item) for key, item in value.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be written to an engine file")


def _decoded(value: Any, nodes: Mapping[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    if "node" in value:
        return nodes[value["node"]]
    if "dtype" in value:
        return _type(value["dtype"])
    return {key: _decoded(item, nodes) for key, item in value["items"].items()}


def _read_graph(written: list[dict[str, Any]], constants: Mapping[str, torch.Tensor]) -> fx.GraphModule:
    root, graph = torch.nn.Module(), fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for name, tensor in constants.items():
        root.register_buffer(name, tensor)
    for entry in written:
        args, kwargs = _decoded(entry["args"], nodes), _decoded(entry["kwargs"], nodes)
        called = entry["op"] == "call_function"
        if entry["op"] not in ("placeholder", "get_attr", "call_function", "output"):
            raise ValueError(f"a node of kind {entry['op']!r} is not one of those that the engine has")
        target = _target(entry["target"]) if called else entry["target"]
        node = graph.create_node(entry["op"], target, tuple(args), kwargs, entry["name"])
        node.meta["onnx"] = entry["onnx"]
        nodes[entry["name"]] = node
    graph.lint()
    return fx.GraphModule(root, graph)


def _type_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _type(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no type of a tensor")
    return found


def _empty(dtype: str, shape: list[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=_type(dtype), device="meta")
