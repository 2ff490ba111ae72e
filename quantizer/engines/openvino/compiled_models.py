"""Compiled models of OpenVINO in one file, where what they share is stored once.

Each model is told by the ranges of the stored bytes that it is made of. The first one is stored whole; of the others
only what is not stored yet.

OpenVINO compiles a model of fixed shapes into a faster one: additions and factors become parts of the products before
them, the kernels of attention know their loops, and no shape is derived at each run. MiniLM in INT8 takes 20% less time
at 1 x 16 and 10% less at 8 x 128. Each is compiled apart, and has a copy of the weights in memory.

Restoration of the alternate signal stack of a thread, which OpenVINO replaces.

The models that OpenVINO compiles of an ONNX file: one for all sizes of its inputs, and some for fixed ones.
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
"""Where the bytes of a model lie: start and end of each piece."""

_LEAST = 2**14
_MOST_PIECES = 2**12
"""Shorter pieces than the first, or than the first model divided by the second, are not worth a search, and a word on
each."""

_MOST_MODELS, _LARGEST_MODEL = 64, 8
"""How many models a file is read as, and how often the size of the file the largest may have."""

_ANCHOR = 256
"""How many bytes must be equal to begin with."""

_AHEAD, _BEHIND = 2**22, 2**24
"""How far a piece is looked for: behind the last one, as models keep most of their order, and, once 0, 1, 2, 4, 8, ...
searches in a row have failed, in what was stored last, as some constants are there for each layer; from 2 on in all."""

_BLOCK = 2**16


def share_bytes(parts: Sequence[memoryview]) -> tuple[memoryview, list[Ranges]]:
    """Return the bytes to store, and the ranges of all parts in them.

    Args:
        parts: the bytes of each model; all are to be the same model, compiled in other ways.
    """
    if not parts[1:]:
        return parts[0], [((0, len(parts[0])),)]
    stored = bytearray(parts[0])
    ranges: list[Ranges] = [((0, len(stored)),)]
    for part in map(bytes, parts[1:]):
        pieces, end = [], 0
        for start, place, count in _common(part, stored, len(parts[0])):
            if start > end:
                pieces.append((len(stored), len(stored) + start - end))
                stored += part[end:start]
            if count:
                pieces.append((place, place + count))
            end = start + count
        ranges.append(tuple(pieces))
    return memoryview(stored), ranges


def parts_of(content: bytes, ranges: Sequence[Ranges]) -> list[Array]:
    """Return the bytes of each model, as arrays of their own."""
    source, parts = np.frombuffer(content, dtype=np.uint8), []
    if len(ranges) > _MOST_MODELS:
        raise ValueError(f"{len(ranges)} models are told, and no engine has more than {_MOST_MODELS}")
    for pieces in ranges:
        if sum(end - start for start, end in pieces) > _LARGEST_MODEL * len(source):
            raise ValueError("a model is told that is much larger than all that is stored")
        if not pieces or not all(0 <= start < end <= len(source) for start, end in pieces):
            raise ValueError(f"the ranges {pieces} do not lie in {len(source)} bytes")
        parts.append(np.concatenate([source[start:end] for start, end in pieces]))
    if not parts:
        raise ValueError("no model is told")
    return parts


def _common(part: bytes, stored: bytearray, first: int) -> Iterator[tuple[int, int, int]]:
    """Yield what a part has in common with what is stored: its place in the part, in the other, and its length.

    The last has no length: it is the end of the part. What lies before each is stored before the next is looked for.

    Args:
        part: the bytes of a model.
        stored: the bytes of the first model, and what others have beside it.
        first: how many bytes the first model has.
    """
    least = max(_LEAST, first // _MOST_PIECES)
    done = at = misses = after = 0
    while at + _ANCHOR <= len(part):
        place = _place(part[at : at + _ANCHOR], stored, after, misses)
        back = count = 0
        if place >= 0:
            back = _equal(part, stored, at, place, done)
            count = back + _equal(part, stored, at, place)
        if count < least:
            at, misses = at + least, misses + 1
            continue
        yield at - back, place - back, count
        done = at = at - back + count
        after, misses = place - back + count, 0
    yield len(part), 0, 0


def _place(anchor: bytes, stored: bytearray, after: int, misses: int) -> int:
    """Return where an anchor is in what is stored; negative: nowhere that was searched."""
    place = stored.find(anchor, after, after + _AHEAD)
    if place < 0 and misses.bit_count() < 2:
        place = stored.find(anchor, max(0, len(stored) - _BEHIND) if misses < 2 else 0)
    return place


def _equal(part: bytes, stored: bytearray, at: int, place: int, done: int | None = None) -> int:
    """Return how many bytes are equal from two places on, or before them, back to ``done`` in the part."""
    ours, theirs = (np.frombuffer(whole, dtype=np.uint8) for whole in (part, stored))
    if done is None:
        ours, theirs = ours[at:], theirs[place:]
    else:
        ours, theirs = ours[done:at][::-1], theirs[:place][::-1]
    most = min(len(ours), len(theirs))
    for start in range(0, most, _BLOCK):
        end = min(start + _BLOCK, most)
        differ = np.flatnonzero(ours[start:end] != theirs[start:end])
        if len(differ):
            return start + int(differ[0])
    return most


_SMALLEST, _USUAL = 0, 1
_BATCH = "batch"


def fixed_shapes(
    ports: Mapping[str, Sequence[Any]],
    names: Mapping[str, Sequence[str]],
    ranges: Mapping[str, Sequence[int]],
    weight_bytes: int,
) -> list[dict[str, list[int]]]:
    """Return the shapes of the inputs for each variant: the usual ones, then those with the smallest batch.

    There are none if no size is dynamic, or the usual one of some is not known; fewer if copies would be too large.

    Args:
        ports: the sizes of each input, as ``openvino.Dimension``.
        names: the name of each axis of each input.
        ranges: smallest, usual and largest size of each name.
        weight_bytes: size of the model's constants.
    """
    usual = {name: sizes[_USUAL] for name, sizes in ranges.items()}
    # One token of many, say, is no usual call.
    fewest = {name: ranges[name][_SMALLEST] if name == _BATCH else size for name, size in usual.items()}
    found: list[dict[str, list[int]]] = []
    for sizes in (usual, fewest):
        shapes = shapes_at(ports, names, sizes)
        if shapes is not None and shapes not in found and (len(found) + 1) * weight_bytes <= MOST_COPIED_BYTES:
            found.append(shapes)
    return found if any(size.is_dynamic for port_sizes in ports.values() for size in port_sizes) else []


def shapes_at(
    ports: Mapping[str, Sequence[Any]], names: Mapping[str, Sequence[str]], sizes: Mapping[str, int]
) -> dict[str, list[int]] | None:
    """Return the shapes of the inputs at one size of each name; None: the size of an axis is not known."""
    shapes = {port: _shape(port_sizes, names.get(port, ()), sizes) for port, port_sizes in ports.items()}
    known = {port: shape for port, shape in shapes.items() if shape is not None}
    return known if len(known) == len(ports) else None


def _shape(port: Sequence[Any], names: Sequence[str], sizes: Mapping[str, int]) -> list[int] | None:
    """Return the shape of an input; None: the size of an axis is not known."""
    fixed = [None if size.is_dynamic else int(size.get_length()) for size in port]
    named = [*names, *[""] * (len(fixed) - len(names))]
    shape = [sizes.get(name) if size is None else size for size, name in zip(fixed, named, strict=True)]
    known = [int(size) for size in shape if size is not None]
    return known if len(known) == len(shape) else None


class _Stack(ctypes.Structure):
    """``stack_t`` of <signal.h>, as Linux has it."""

    _fields_ = (("memory", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@contextmanager
def kept_signal_stack() -> Iterator[None]:
    """Restore this thread's alternate signal stack at the end of the block.

    The CPU plugin of OpenVINO 2026.4 maps a larger one when it is loaded and unmaps it with its core. If two cores are
    deleted in the order in which they were made, the thread keeps the stack of the first, which is unmapped: the next
    signal that Python handles, such as Ctrl-C, ends the process by SIGSEGV.
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
"""How many neighbours share a range where OpenVINO rounds the other operand of a stored weight at run time. It holds at
a load, whatever the build had."""

Dimensions: TypeAlias = Mapping[str, tuple[str, ...]]
Shapes: TypeAlias = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Models:
    """The compiled models of a file.

    Attributes:
        compiled: an ``openvino.CompiledModel`` for inputs of all sizes; None: those of ``fixed`` are all.
        dimensions: the name of each axis of each input, as far as it is known.
        fixed: those that were compiled for fixed shapes, by the shapes of all inputs.
        warnings: why one is missing although its shapes are known.
        held: the memory in which they keep their constants, which must live as long as they do.
    """

    compiled: Any
    dimensions: Dimensions
    fixed: Mapping[Shapes, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    held: tuple[Array, ...] = ()

    @property
    def all(self) -> tuple[Any, ...]:
        """All models, that for all sizes first."""
        return (*(() if self.compiled is None else (self.compiled,)), *self.fixed.values())

    def of(self, arrays: Sequence[Array]) -> Any:
        """Return the model that runs inputs of these shapes fastest; None: there is none."""
        return self.fixed.get(shapes_of(arrays), self.compiled)


def shapes_of(tensors: Iterable[Any]) -> Shapes:
    """Return the shapes of arrays, or of the inputs of a compiled model of fixed shapes."""
    return tuple(tuple(map(int, tensor.shape)) for tensor in tensors)


def compile_models(
    ov: Any,
    onnx_path: Path,
    settings: Mapping[str, object],
    ranges: Mapping[str, Sequence[int]] = MappingProxyType({}),
    only_sizes: Sequence[Mapping[str, int]] = (),
) -> Models:
    """Return the compiled models of an ONNX file; with ``ranges`` of its sizes also those for fixed shapes."""
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
            why = reason(error) if isinstance(error, RuntimeError) else error
            words = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
            warnings.append(f"no variant of its own for inputs of {words}: {why}")
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
            raise EngineError(f"only_sizes: {dict(sizes)} does not tell the size of each axis of {path} that is open")
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
    """Return the size of a model's constants, wherever the file keeps them: large ones lie in a second file."""
    stored = (node for node in model.get_ops() if node.get_type_name() == "Constant")
    bits = sum(math.prod(node.get_output_shape(0)) * node.get_element_type().bitwidth for node in stored)
    return int(bits) // 8


def _dynamic_group(model: Any) -> dict[str, object]:
    """Return the setting of ranges at run time: the one of our plans, unless weights of 4 bits may have smaller blocks,
    which would turn it off."""
    stored = (node.get_element_type().get_type_name() for node in model.get_ops() if node.get_type_name() == "Constant")
    return {} if {"i4", "u4"}.intersection(stored) else {GROUP: DYNAMIC_BLOCK}


def _check_outputs(model: Any, compiled: Any, path: Path) -> None:
    """Raise if an engine's outputs have other shapes than the file's: a fusion has lost or added an axis."""
    for asked, got in zip(model.outputs, compiled.outputs, strict=True):
        if not asked.partial_shape.compatible(got.partial_shape):
            raise EngineError(
                f"OpenVINO compiles {path} wrongly: its output {port_name(got)!r} has the shape {got.partial_shape}, "
                f"and that of the file is {asked.partial_shape}; take another release of OpenVINO, or onnxruntime"
            )


def checked_precision(compiled: Any, path: Path, settings: Mapping[str, object]) -> Any:
    """Return ``compiled`` if it computes in the precision that was asked for."""
    asked, got = settings["INFERENCE_PRECISION_HINT"], compiled.get_property("INFERENCE_PRECISION_HINT")
    if got.get_type_name() != asked:
        raise EngineError(
            f"OpenVINO computes {path} in {got.get_type_name()} on this CPU, where {asked} was asked for: BF16 needs "
            "AVX-512 or AMX; leave out inference_precision, or build on another machine"
        )
    return compiled


def port_name(port: Any) -> str:
    """Return the port's name in the ONNX file; removed nodes may have left theirs on the port as well."""
    own = str(port.node.friendly_name).partition("/sink_port_")[0]
    return own if own in port.names else str(port.any_name)


def reason(error: Exception) -> str:
    """Return an OpenVINO message without the lines that name places in its own source."""
    lines = [line.strip() for line in str(error).splitlines()]
    kept = [line for line in lines if line and not line.startswith(("Exception from ", "Check '", "Summary:"))]
    return " ".join(kept) or str(error)


def _dimensions(onnx_path: Path) -> dict[str, tuple[str, ...]]:
    """Return the names of dimensions in an ONNX file."""
    try:
        return input_dimensions(onnx_path)
    except ValueError as error:
        raise EngineError(f"{onnx_path} is damaged: {error}; export it again") from error
