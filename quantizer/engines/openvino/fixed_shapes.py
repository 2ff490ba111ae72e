"""The shapes that have a variant of a model to themselves, beside the one for all sizes: the usual, the least batch.

OpenVINO compiles a model of fixed shapes into a faster one: additions and factors become parts of the products before
them, the kernels of attention know their loops, and no shape is derived at each run. MiniLM in INT8 takes 20% less time
at 1 x 16 and 10% less at 8 x 128. Each is compiled apart, and has a copy of the weights in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quantizer.engines.base import MOST_COPIED_BYTES

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
