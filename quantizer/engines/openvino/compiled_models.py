"""Compiled OpenVINO models of an ONNX file: one for all sizes and some for fixed shapes, stored in one file.

Models for fixed shapes are faster: OpenVINO fuses more operators, knows the loops of attention, and derives no shapes.
MiniLM in INT8 takes 20% less time at 1 x 16, and 10% less at 8 x 128. Each model has a copy of the weights in memory.

The file stores shared bytes once. The first model is stored completely; others are ranges of the stored bytes.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from quantizer.engines.base import MOST_COPIED_BYTES, Array, ranges_with_cache
from quantizer.engines.onnx_graph import explain_error
from quantizer.errors import EngineError
from quantizer.export.qdq.onnx_file import input_dimensions
from quantizer.plan.targets.openvino import DYNAMIC_BLOCK

Ranges = tuple[tuple[int, int], ...]
"""Byte ranges of a model: start and end of each piece."""

_MIN_PIECE = 2**14
_MAX_PIECES = 2**12
"""Minimum length of a shared piece in bytes, and maximum number of pieces per model."""

_MAX_MODELS, _MAX_MODEL_RATIO = 64, 8
"""Maximum number of models in a file, and maximum size of a model relative to the file."""

_ANCHOR = 256
"""Number of equal bytes that start a comparison."""

_AHEAD, _BEHIND = 2**22, 2**24
"""Search distances in bytes: after the last piece, and before the end of the stored bytes.

Models mostly keep their order, so the search continues after the last piece. After 0 and 1 failed searches it also
covers the bytes stored last; after 2, 4, 8, ... it covers all bytes.
"""

_BLOCK = 2**16


def share_bytes(parts: Sequence[memoryview]) -> tuple[memoryview, list[Ranges]]:
    """Return the bytes to store, and the byte ranges of all models in them.

    Args:
        parts: bytes of each model; all are compilations of one model.
    """
    if not parts[1:]:
        return parts[0], [((0, len(parts[0])),)]
    stored = bytearray(parts[0])
    ranges: list[Ranges] = [((0, len(stored)),)]
    for part in map(bytes, parts[1:]):
        pieces, end = [], 0
        for start, position, count in _common(part, stored, len(parts[0])):
            if start > end:
                pieces.append((len(stored), len(stored) + start - end))
                stored += part[end:start]
            if count:
                pieces.append((position, position + count))
            end = start + count
        ranges.append(tuple(pieces))
    return memoryview(stored), ranges


def parts_of(content: memoryview, ranges: Sequence[Ranges]) -> list[Array]:
    """Return the bytes of each model as an array, which shares the memory of ``content`` if it is one piece of it."""
    source, parts = np.frombuffer(content, dtype=np.uint8), []
    if len(ranges) > _MAX_MODELS:
        raise ValueError(f"{len(ranges)} models are listed; an engine has at most {_MAX_MODELS}")
    for pieces in ranges:
        if sum(end - start for start, end in pieces) > _MAX_MODEL_RATIO * len(source):
            raise ValueError("a listed model is much larger than the stored bytes")
        if not pieces or not all(0 <= start < end <= len(source) for start, end in pieces):
            raise ValueError(f"the ranges {pieces} exceed the {len(source)} stored bytes")
        arrays = [source[start:end] for start, end in pieces]
        parts.append(np.concatenate(arrays) if len(arrays) > 1 else arrays[0])
    if not parts:
        raise ValueError("no model is listed")
    return parts


def _common(part: bytes, stored: bytearray, first: int) -> Iterator[tuple[int, int, int]]:
    """Yield the common ranges of a model and the stored bytes: position in the model, position in the store, length.

    The last range has length 0 and marks the end of the model. The bytes before a range are stored before the next
    search.

    Args:
        part: bytes of a model.
        stored: bytes of the first model, and bytes that other models added.
        first: size of the first model.
    """
    min_length = max(_MIN_PIECE, first // _MAX_PIECES)
    written = offset = misses = search_from = 0
    while offset + _ANCHOR <= len(part):
        position = _find_anchor(part[offset : offset + _ANCHOR], stored, search_from, misses)
        back = count = 0
        if position >= 0:
            back = _equal(part, stored, offset, position, written)
            count = back + _equal(part, stored, offset, position)
        if count < min_length:
            offset, misses = offset + min_length, misses + 1
            continue
        yield offset - back, position - back, count
        written = offset = offset - back + count
        search_from, misses = position - back + count, 0
    yield len(part), 0, 0


def _find_anchor(anchor: bytes, stored: bytearray, after: int, misses: int) -> int:
    """Return the position of an anchor in the stored bytes; negative if not found."""
    place = stored.find(anchor, after, after + _AHEAD)
    if place < 0 and misses.bit_count() < 2:
        place = stored.find(anchor, max(0, len(stored) - _BEHIND) if misses < 2 else 0)
    return place


def _equal(part: bytes, stored: bytearray, offset: int, stored_offset: int, done: int | None = None) -> int:
    """Return the number of equal bytes after two positions, or before them, at most back to ``done``."""
    left, right = (np.frombuffer(buffer, dtype=np.uint8) for buffer in (part, stored))
    if done is None:
        left, right = left[offset:], right[stored_offset:]
    else:
        left, right = left[done:offset][::-1], right[:stored_offset][::-1]
    length = min(len(left), len(right))
    for start in range(0, length, _BLOCK):
        end = min(start + _BLOCK, length)
        differ = np.flatnonzero(left[start:end] != right[start:end])
        if len(differ):
            return start + int(differ[0])
    return length


_SMALLEST, _USUAL = 0, 1
_BATCH = "batch"


def fixed_shapes(
    ports: Mapping[str, Sequence[Any]],
    names: Mapping[str, Sequence[str]],
    ranges: Mapping[str, Sequence[int]],
    weight_bytes: int,
) -> list[dict[str, list[int]]]:
    """Return the input shapes of each variant: the usual sizes, then those with the smallest batch.

    The list is empty without dynamic sizes or with an unknown usual size; it is shorter if copies would be too large.

    Args:
        ports: sizes of each input, as ``openvino.Dimension``.
        names: name of each axis of each input.
        ranges: smallest, usual and largest size of each name.
        weight_bytes: size of the model's constants.
    """
    usual = {name: sizes[_USUAL] for name, sizes in ranges.items()}
    # A smaller sequence, such as a single token, is not a usual call.
    smallest_batch = {name: ranges[name][_SMALLEST] if name == _BATCH else size for name, size in usual.items()}
    variants: list[dict[str, list[int]]] = []
    for sizes in (usual, smallest_batch):
        shapes = shapes_at(ports, names, sizes)
        if shapes is not None and shapes not in variants and (len(variants) + 1) * weight_bytes <= MOST_COPIED_BYTES:
            variants.append(shapes)
    return variants if any(size.is_dynamic for port_sizes in ports.values() for size in port_sizes) else []


def shapes_at(
    ports: Mapping[str, Sequence[Any]], names: Mapping[str, Sequence[str]], sizes: Mapping[str, int]
) -> dict[str, list[int]] | None:
    """Return the shapes of the inputs for one size of each name; None if the size of an axis is unknown."""
    shapes = {port: _shape(port_sizes, names.get(port, ()), sizes) for port, port_sizes in ports.items()}
    known = {port: shape for port, shape in shapes.items() if shape is not None}
    return known if len(known) == len(ports) else None


def _shape(port: Sequence[Any], names: Sequence[str], sizes: Mapping[str, int]) -> list[int] | None:
    """Return the shape of an input; None if the size of an axis is unknown."""
    fixed = [None if size.is_dynamic else int(size.get_length()) for size in port]
    named = [*names, *[""] * (len(fixed) - len(names))]
    shape = [sizes.get(name) if size is None else size for size, name in zip(fixed, named, strict=True)]
    known = [int(size) for size in shape if size is not None]
    return known if len(known) == len(shape) else None


class _Stack(ctypes.Structure):
    """``stack_t`` of Linux's <signal.h>."""

    _fields_ = (("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """Restore the alternate signal stack of this thread at the end of the block.

    The CPU plugin of OpenVINO 2026.4 maps a new stack at load and unmaps it with its core. If two cores are deleted in
    order of creation, the thread keeps an unmapped stack. The next signal that Python handles, such as Ctrl-C, then
    causes SIGSEGV.
    """
    if sys.platform != "linux":
        yield
        return
    sigaltstack = ctypes.CDLL(None).sigaltstack
    former = _Stack()
    sigaltstack(None, ctypes.byref(former))
    try:
        yield
    finally:
        sigaltstack(ctypes.byref(former), None)


GROUP = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
"""Property for the number of values that share a range at run time; it must be set again at load time."""

Dimensions: TypeAlias = Mapping[str, tuple[str, ...]]
Shapes: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Models:
    """Compiled models of a file.

    Attributes:
        compiled: ``openvino.CompiledModel`` for all sizes; None if only ``fixed`` exist.
        dimensions: name of each axis of each input, if known.
        fixed: models for fixed shapes, by the shapes of all inputs.
        warnings: reasons why a model with known shapes is missing.
        buffers: memory of the constants, which must live as long as the models.
    """

    compiled: Any
    dimensions: Dimensions
    fixed: Mapping[Shapes, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    buffers: tuple[Array, ...] = ()

    @property
    def all(self) -> tuple[Any, ...]:
        """All models, first the model for all sizes."""
        return (*(() if self.compiled is None else (self.compiled,)), *self.fixed.values())

    def of(self, arrays: Sequence[Array]) -> Any:
        """Return the fastest model for inputs of these shapes; None without one."""
        return self.fixed.get(shapes_of(arrays), self.compiled)


def shapes_of(tensors: Iterable[Any]) -> Shapes:
    """Return the shapes of arrays, or of the inputs of a model for fixed shapes."""
    return tuple(tuple(map(int, tensor.shape)) for tensor in tensors)


def compile_models(
    ov: Any,
    onnx_path: Path,
    settings: Mapping[str, object],
    ranges: Mapping[str, Sequence[int]] = MappingProxyType({}),
    only_sizes: Sequence[Mapping[str, int]] = (),
) -> Models:
    """Return the compiled models of an ONNX file; ``ranges`` of its sizes add models for fixed shapes."""
    core = ov.Core()
    try:
        model = core.read_model(str(onnx_path))
        ports = {port_name(port): port.partial_shape for port in model.inputs}
        compiled = None if only_sizes else _compiled(core, model, settings, onnx_path)
    except RuntimeError as error:
        raise EngineError(f"OpenVINO refused {onnx_path}: {explain_error(onnx_path, reason(error))}") from error
    dimensions = _dimensions(onnx_path)
    if only_sizes:
        return Models(None, dimensions, _for_sizes(core, model, settings, onnx_path, ports, dimensions, only_sizes))
    ranges = ranges_with_cache(ranges, dimensions.values())
    fixed, warnings = {}, []
    for shapes in fixed_shapes(ports, dimensions, ranges, _weight_bytes(model)):
        try:
            model.reshape(dict(enumerate(shapes.values())))
            variant = _compiled(core, model, settings, onnx_path)
        except (EngineError, RuntimeError) as error:
            cause = reason(error) if isinstance(error, RuntimeError) else error
            words = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            warnings.append(f"no separate model for inputs of {words}: {cause}")
        else:
            fixed[shapes_of(variant.inputs)] = variant
    return Models(compiled, dimensions, fixed, tuple(warnings))


def _for_sizes(
    core: Any,
    model: Any,
    settings: Mapping[str, object],
    path: Path,
    ports: Mapping[str, Sequence[Any]],
    dimensions: Dimensions,
    only_sizes: Sequence[Mapping[str, int]],
) -> dict[Shapes, Any]:
    fixed = {}
    for sizes in only_sizes:
        shapes = shapes_at(ports, dimensions, sizes)
        if shapes is None:
            raise EngineError(f"only_sizes: {dict(sizes)} lacks the size of a dynamic axis of {path}")
        try:
            model.reshape(dict(enumerate(shapes.values())))
            variant = _compiled(core, model, settings, path)
        except RuntimeError as error:
            raise EngineError(f"OpenVINO refused {path} at {dict(sizes)}: {reason(error)}") from error
        fixed[shapes_of(variant.inputs)] = variant
    return fixed


def _compiled(core: Any, model: Any, settings: Mapping[str, object], path: Path) -> Any:
    with kept_signal_stack():
        compiled = core.compile_model(model, "CPU", {**_dynamic_group(model), **settings})
    _check_outputs(model, compiled, path)
    return checked_precision(compiled, path, settings)


def _weight_bytes(model: Any) -> int:
    """Return the size of a model's constants in bytes, including constants in a second file."""
    stored = (node for node in model.get_ops() if node.get_type_name() == "Constant")
    bits = sum(math.prod(node.get_output_shape(0)) * node.get_element_type().bitwidth for node in stored)
    return int(bits) // 8


def _dynamic_group(model: Any) -> dict[str, object]:
    """Return the block size of ranges at run time; {} for models with 4-bit weights, whose blocks may be smaller."""
    stored = (node.get_element_type().get_type_name() for node in model.get_ops() if node.get_type_name() == "Constant")
    return {} if {"i4", "u4"}.intersection(stored) else {GROUP: DYNAMIC_BLOCK}


def _check_outputs(model: Any, compiled: Any, path: Path) -> None:
    """Raise if a compiled output has another shape than the file's: a wrong fusion lost or added an axis."""
    for expected, actual in zip(model.outputs, compiled.outputs, strict=True):
        if not expected.partial_shape.compatible(actual.partial_shape):
            raise EngineError(
                f"OpenVINO compiles {path} wrongly: its output {port_name(actual)!r} has the shape "
                f"{actual.partial_shape}, but the file states {expected.partial_shape}; use another release of "
                "OpenVINO, or onnxruntime"
            )


def checked_precision(compiled: Any, path: Path, settings: Mapping[str, object]) -> Any:
    """Return ``compiled`` after a check of its inference precision."""
    expected, actual = settings["INFERENCE_PRECISION_HINT"], compiled.get_property("INFERENCE_PRECISION_HINT")
    if actual.get_type_name() != expected:
        raise EngineError(
            f"OpenVINO computes {path} in {actual.get_type_name()} on this CPU instead of {expected}: BF16 needs "
            "AVX-512 or AMX; leave out inference_precision, or build on another machine"
        )
    return compiled


def port_name(port: Any) -> str:
    """Return the port's name in the ONNX file; removed nodes may have added other names."""
    name = str(port.node.friendly_name).partition("/sink_port_")[0]
    return name if name in port.names else str(port.any_name)


def reason(error: Exception) -> str:
    """Return an OpenVINO message without lines about its source code."""
    lines = [line.strip() for line in str(error).splitlines()]
    relevant = [line for line in lines if line and not line.startswith(("Exception from ", "Check '", "Summary:"))]
    return " ".join(relevant) or str(error)


def _dimensions(onnx_path: Path) -> dict[str, tuple[str, ...]]:
    """Return the dimension names of an ONNX file."""
    try:
        return input_dimensions(onnx_path)
    except ValueError as error:
        raise EngineError(f"{onnx_path} is damaged: {error}; export it again") from error
