"""Graph passes in the order in which they run."""

from __future__ import annotations

from quantizer.export.passes.base import DropUnreadNodes, GraphPass, NameNodes, run_passes
from quantizer.export.passes.codes import BytesFirst, MovesOfCodes, PairsOfCodes, RowsOfCodes, UnsignedActivations
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
    "PairsOfCodes",
    "PlainSoftplus",
    "RowsOfCodes",
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
"""Those of every file; names come behind them."""

graph_passes: Registry[GraphPass] = Registry("graph pass", of="object", has=("requires", "run", "ensures"))
"""Those of other packages, for every file too: ``graph_passes.add(name)(MyPass())`` adds one."""


def passes(target: TargetProfile | None = None, dtype: str = "float32") -> tuple[GraphPass, ...]:
    """Return the passes of a file for a target, or for none."""
    name = next(theirs for theirs, ours in WIDTHS.items() if ours == dtype)
    # First, as other passes look at what a product reads.
    types = FloatTypes(name, () if target is None else target.graph_rules.absent_floats)
    asked: list[GraphPass] = []
    if target is not None and target.graph_rules.narrow_inputs:
        asked.append(BytesFirst(target.graph_rules.narrow_inputs))
    if target is not None and target.unsigned_activations != "none":
        asked.append(UnsignedActivations(target.unsigned_activations))
    if target is not None and (target.unfused_reductions or target.misread_reductions):
        asked.append(FactorsBeforeReductions(target.misread_reductions))
        asked.append(UnfusedReductions(target.unfused_reductions, target.misread_reductions))
    if target is not None and target.unfused_products:
        asked += [UnfusedProducts(), NumbersBehindProducts(), WeightsReadOneWay()]
    if target is not None and target.unshared_products:
        asked += [BiasesApart(), UnsharedProducts()]
    if target is not None and target.kept_axes:
        asked += [GathersApart(), KeptAxes(), ConcatsBeforeQuantize()]
    if target is not None and target.even_pairs:
        asked.append(PairsOfCodes())
    if target is not None and target.quantizes_outputs:
        asked += [MovesOfCodes(), PlainSoftplus()]
    if target is not None and target.row_codes:
        asked.append(RowsOfCodes())
    if target is not None and target.unfused_rectifiers:
        asked.append(UnfusedRectifiers())
    return types, *PASSES, *asked, *(graph_passes[name] for name in graph_passes), NameNodes()
