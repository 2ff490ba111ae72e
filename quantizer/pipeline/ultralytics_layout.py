"""The layout ``ultralytics``: the graph of an engine with the metadata that ``ultralytics.YOLO`` reads.

A model of ultralytics has its class names, stride and task as attributes. ultralytics is not imported.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from quantizer.config.layouts import layout_of
from quantizer.engines import GraphWriter, backend
from quantizer.errors import ExportError, TaskError
from quantizer.export.onnx_storage import fix_sizes
from quantizer.export.qdq.structure import read_signature
from quantizer.pipeline.triton import link_onnx
from quantizer.utils.sizes import BATCH

NAME = "ultralytics"
_METADATA = "metadata.yaml"
_NEEDED = ("names", "stride", "task", "model")
_KEYPOINTS = ("kpt_shape", "kpt_names")


def ultralytics_model(model: nn.Module) -> Any:
    """Return the model of ultralytics: the given module, or the one that it wraps.

    Raises:
        TaskError: no module has the attributes of such a model, or its head is not in export mode.
    """
    missing = {module: [name for name in _NEEDED if getattr(module, name, None) is None] for module in model.modules()}
    nearest = min(missing, key=lambda module: len(missing[module]))
    if missing[nearest]:
        raise TaskError(
            f"deliver: {NAME!r} needs a model of ultralytics, but {type(nearest).__name__} has no "
            f"{', '.join(missing[nearest])}; set these attributes, or pass the `model` of a YOLO object"
        )
    found: Any = nearest
    if not getattr(found.model[-1], "export", True):
        raise TaskError(
            f"deliver: {NAME!r} needs the head in export mode, because YOLO decodes its outputs; set "
            'model.model[-1].export = True and model.model[-1].format = "onnx" before you quantize the model'
        )
    return found


def write_ultralytics(folder: Path, name: str, model: nn.Module, backend_name: str, onnx: Path, batch: int) -> str:
    """Write the graph of an ONNX file for ``YOLO``, and return its path in the folder.

    The batch size becomes a constant. YOLO pads smaller batches and splits larger ones; for a graph without one it
    would also change the image size.

    Args:
        folder: the folder of the layout, which is created.
        name: the name of the file or folder that YOLO loads.
        model: a model of ultralytics, or a module that wraps one.
        backend_name: the backend of the engine.
        onnx: the graph.
        batch: the batch size, if the graph does not fix it.

    Raises:
        TaskError: the module is not a model of ultralytics.
        ExportError: the graph does not take images of one size alone.
    """
    facts = _metadata(ultralytics_model(model), name, _image_shape(onnx, batch))
    known = layout_of(NAME, backend_name)
    assert known is not None
    path = folder / known.file.format(name=name)
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes, texts = {BATCH: facts["batch"]}, {key: str(value) for key, value in facts.items()}
    if path.suffix == ".onnx":
        link_onnx(onnx, path)
        fix_sizes(path, sizes, texts)
        return path.name
    writer = backend(backend_name)
    assert isinstance(writer, GraphWriter)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        fixed = Path(scratch) / onnx.name
        link_onnx(onnx, fixed)
        fix_sizes(fixed, sizes, {})
        writer.write_graph(fixed, path)
    text = yaml.safe_dump(facts, sort_keys=False, allow_unicode=True)
    (path.parent / _METADATA).write_text(text, encoding="utf-8")
    return path.parent.name


def _image_shape(onnx: Path, batch: int) -> list[int]:
    """Return batch size, channels, height and width of the only input."""
    inputs = read_signature(onnx).inputs
    shape = [batch if size == BATCH else size for size in inputs[0].shape]
    sizes = [size for size in shape if isinstance(size, int)]
    if len(inputs) > 1 or len(shape) != 4 or len(sizes) != 4:
        named = "; ".join(f"{value.name} {list(value.shape)}" for value in inputs)
        raise ExportError(
            f"deliver: {NAME!r} needs one input [batch, channels, height, width] with a constant image size, but the "
            f"graph has {named}; quantize the model with images of one size"
        )
    return sizes


def _metadata(model: Any, name: str, shape: Sequence[int]) -> dict[str, Any]:
    """Return what ultralytics writes beside an exported model, as plain values."""
    batch, channels, *size = shape
    names = model.names if isinstance(model.names, Mapping) else dict(enumerate(model.names))
    head = model.model[-1]
    keypoints = {key: getattr(head, key, None) or getattr(model, key, None) for key in _KEYPOINTS}
    return {
        "description": f"{name}, made with quantizer from a model of Ultralytics",
        "author": "Ultralytics",
        "date": datetime.now().astimezone().isoformat(),
        "version": _version(),
        "license": "AGPL-3.0 License (https://ultralytics.com/license)",
        "docs": "https://docs.ultralytics.com",
        "stride": int(max(model.stride)),
        "task": str(model.task),
        "head": type(head).__name__,
        "batch": batch,
        "imgsz": size,
        "names": {int(number): str(label) for number, label in names.items()},
        # The arguments of an export: YOLO adapts the image size of a dynamic graph, and skips NMS after one with it.
        "args": {"batch": batch, "dynamic": False, "nms": False},
        "channels": channels,
        "end2end": bool(getattr(model, "end2end", False)),
        **{key: _plain(value) for key, value in keypoints.items() if value is not None},
    }


def _plain(value: Any) -> Any:
    """Return tuples as lists, which YAML has."""
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, list | tuple) else value


def _version() -> str:
    """Return the installed version of ultralytics."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return "unknown"
