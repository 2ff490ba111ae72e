"""Graph passes in the order in which they run."""

from __future__ import annotations

from quantizer.export.passes.base import DropUnreadNodes, GraphPass, NameNodes, run_passes
from quantizer.export.passes.codes import (
    BytesFirst,
    OddPairsAsBytes,
    QuantizedMoves,
    QuantizedRows,
    UnsignedActivations,
)
from quantizer.export.passes.einsum import EinsumToMatMul, EinsumWeights, GemmToMatMul
from quantizer.export.passes.float_types import ClampMasks, FloatTypes
from quantizer.export.passes.folding import FoldBatchNorm, FoldChannelFactors, FoldConvolutionFactors, FoldPadding
from quantizer.export.passes.onnxruntime import PlainSoftplus, UnfusedRectifiers
from quantizer.export.passes.openvino import (
    BiasesApart,
    ConcatsBeforeQuantize,
    FactorsBeforeReductions,
    GathersApart,
    KeptAxes,
    NumbersBehindProducts,
    UnfusedProducts,
    UnfusedReductions,
    UnsharedProducts,
    WeightsReadOneWay,
)
from quantizer.export.passes.quantizers import (
    LayoutBeforeQuantize,
    QuantizeOnce,
    RectifyBeforeQuantize,
    ScaleBeforeQuantize,
    ShareQuantizers,
)
from quantizer.export.passes.weights import ExpertWeights, StoreWeights, UnspreadWeights, WeightsAsRead
from quantizer.export.qdq.graph import WIDTHS
from quantizer.plan.targets import TargetProfile
from quantizer.utils.registry import Registry

__all__ = [
    "PASSES",
    "ConcatsBeforeQuantize",
    "FoldChannelFactors",
    "GraphPass",
    "BiasesApart",
    "GathersApart",
    "KeptAxes",
    "OddPairsAsBytes",
    "PlainSoftplus",
    "QuantizedRows",
    "FactorsBeforeReductions",
    "NumbersBehindProducts",
    "UnfusedProducts",
    "WeightsReadOneWay",
    "UnfusedRectifiers",
    "UnfusedReductions",
    "UnsharedProducts",
    "UnsignedActivations",
    "graph_passes",
    "passes",
    "run_passes",
]

PASSES: tuple[GraphPass, ...] = (
    StoreWeights(),
    ExpertWeights(),
    EinsumWeights(),
    EinsumToMatMul(),
    GemmToMatMul(),
    UnspreadWeights(),
    WeightsAsRead(),
    FoldBatchNorm(),
    FoldConvolutionFactors(),
    FoldPadding(),
    LayoutBeforeQuantize(),
    ScaleBeforeQuantize(),
    FoldChannelFactors(),
    RectifyBeforeQuantize(),
    QuantizeOnce(),
    ShareQuantizers(),
    ClampMasks(),
    DropUnreadNodes(),
)
"""Passes of every export; ``NameNodes`` runs after them."""

graph_passes: Registry[GraphPass] = Registry("graph pass", of="object", has=("requires", "run", "ensures"))
"""Passes of other packages, run for every export: ``graph_passes.add(name)(MyPass())`` registers one."""


def passes(target: TargetProfile | None = None, dtype: str = "float32") -> tuple[GraphPass, ...]:
    """Return the graph passes of an export for a target; without a target, the common passes."""
    name = next(onnx_name for onnx_name, torch_name in WIDTHS.items() if torch_name == dtype)
    # First, because other passes look at the inputs of matrix multiplications.
    types = FloatTypes(name, () if target is None else target.graph_rules.absent_floats)
    of_target: list[GraphPass] = []
    if target is not None and target.graph_rules.narrow_inputs:
        of_target.append(BytesFirst(target.graph_rules.narrow_inputs))
    if target is not None and target.unsigned_activations != "none":
        of_target.append(UnsignedActivations(target.unsigned_activations))
    if target is not None and (target.unfused_reductions or target.misread_reductions):
        of_target.append(FactorsBeforeReductions(target.misread_reductions))
        of_target.append(UnfusedReductions(target.unfused_reductions, target.misread_reductions))
    if target is not None and target.unfused_products:
        of_target += [UnfusedProducts(), NumbersBehindProducts(), WeightsReadOneWay()]
    if target is not None and target.unshared_products:
        of_target += [BiasesApart(), UnsharedProducts()]
    if target is not None and target.kept_axes:
        of_target += [GathersApart(), KeptAxes(), ConcatsBeforeQuantize()]
    if target is not None and target.even_pairs:
        of_target.append(OddPairsAsBytes())
    if target is not None and target.quantizes_outputs:
        of_target += [QuantizedMoves(), PlainSoftplus()]
    if target is not None and target.row_codes:
        of_target.append(QuantizedRows())
    if target is not None and target.unfused_rectifiers:
        of_target.append(UnfusedRectifiers())
    return types, *PASSES, *of_target, *(graph_passes[name] for name in graph_passes), NameNodes()
