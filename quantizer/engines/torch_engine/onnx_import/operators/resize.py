"""Resize, in the forms in which torch's own interpolation is exported."""

from __future__ import annotations

from typing import Any

import torch

from quantizer.engines.torch_engine.onnx_import.graph_builder import Constant, GraphBuilder, OnnxNode, Value, operators

aten = torch.ops.aten

_HALVES = ("half_pixel", "pytorch_half_pixel")
_KERNELS = {
    "linear": {
        3: aten.upsample_linear1d.vec,
        4: aten.upsample_bilinear2d.vec,
        5: aten.upsample_trilinear3d.vec,
    },
    "cubic": {4: aten.upsample_bicubic2d.vec},
    "nearest": {3: aten.upsample_nearest1d.vec, 4: aten.upsample_nearest2d.vec, 5: aten.upsample_nearest3d.vec},
}


@operators.add("Resize")
def _resize(build: GraphBuilder, node: OnnxNode) -> Value:
    mode, rank = node.attributes.get("mode", "nearest"), node.ranks[0]
    kernel = None if rank is None else _KERNELS.get(mode, {}).get(rank)
    if kernel is None or node.attributes.get("axes") or node.attributes.get("antialias", 0):
        raise node.fault(f"torch cannot resize by mode {mode!r} a tensor of {rank} axes in this form")
    size, scales = _extent(build, node)
    given = build.tensor(node.inputs[0])
    places = node.attributes.get("coordinate_transformation_mode", "half_pixel")
    if mode == "nearest":
        if places != "asymmetric" or node.attributes.get("nearest_mode", "round_prefer_floor") != "floor":
            raise node.fault("the nearest neighbour of torch is 'asymmetric' and 'floor'; this node asks for another")
        return build.call(kernel, given, size, scales)
    if places not in (*_HALVES, "align_corners"):
        raise node.fault(f"coordinates {places!r} are not supported")
    if mode == "cubic" and node.attributes.get("cubic_coeff_a", -0.75) != -0.75:
        raise node.fault("torch's cubic kernel has the coefficient -0.75; this node asks for another")
    return build.call(kernel, given, size, places == "align_corners", scales)


def _extent(build: GraphBuilder, node: OnnxNode) -> tuple[list[Any] | None, list[float] | None]:
    """Return the sizes, or else the scales, of the axes behind the first two."""
    scales = node.input(2)
    if isinstance(scales, Constant) and scales.array.size:
        return None, [float(scale) for scale in scales.array[2:]]
    return build.needed_sizes(node, 3)[2:], None
