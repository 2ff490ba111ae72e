"""Graph passes, one a file, in the order in which they run."""

from __future__ import annotations

from quantizer.common.registry import Registry
from quantizer.export.passes.base import GraphPass, run_passes
from quantizer.export.passes.clamp_masks import ClampMasks
from quantizer.export.passes.drop_unread_nodes import DropUnreadNodes
from quantizer.export.passes.einsum_to_matmul import EinsumToMatMul
from quantizer.export.passes.einsum_weights import EinsumWeights
from quantizer.export.passes.expert_weights import ExpertWeights
from quantizer.export.passes.float_types import FloatTypes
from quantizer.export.passes.folding.fold_batch_norm import FoldBatchNorm
from quantizer.export.passes.folding.fold_channel_factors import FoldChannelFactors
from quantizer.export.passes.folding.fold_convolution_factors import FoldConvolutionFactors
from quantizer.export.passes.folding.fold_padding import FoldPadding
from quantizer.export.passes.gemm_to_matmul import GemmToMatMul
from quantizer.export.passes.layout_before_quantize import LayoutBeforeQuantize
from quantizer.export.passes.name_nodes import NameNodes
from quantizer.export.passes.per_target.bytes_first import BytesFirst
from quantizer.export.passes.per_target.kept_axes import ConcatsBeforeQuantize, GathersApart, KeptAxes
from quantizer.export.passes.per_target.moves_of_codes import MovesOfCodes
from quantizer.export.passes.per_target.pairs_of_codes import PairsOfCodes
from quantizer.export.passes.per_target.plain_softplus import PlainSoftplus
from quantizer.export.passes.per_target.rows_of_codes import RowsOfCodes
from quantizer.export.passes.per_target.unfused_products import (
    NumbersBehindProducts,
    UnfusedProducts,
    WeightsReadOneWay,
)
from quantizer.export.passes.per_target.unfused_rectifiers import UnfusedRectifiers
from quantizer.export.passes.per_target.unfused_reductions import FactorsBeforeReductions, UnfusedReductions
from quantizer.export.passes.per_target.unshared_products import BiasesApart, UnsharedProducts
from quantizer.export.passes.per_target.unsigned_activations import UnsignedActivations
from quantizer.export.passes.quantize_once import QuantizeOnce
from quantizer.export.passes.rectify_before_quantize import RectifyBeforeQuantize
from quantizer.export.passes.scale_before_quantize import ScaleBeforeQuantize
from quantizer.export.passes.share_quantizers import ShareQuantizers
from quantizer.export.passes.store_weights import StoreWeights
from quantizer.export.passes.unspread_weights import UnspreadWeights
from quantizer.export.passes.weights_as_read import WeightsAsRead
from quantizer.qdq.graph import WIDTHS
from quantizer.targets import TargetProfile

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

graph_passes: Registry[GraphPass] = Registry("graph pass")
"""Those of other packages, for every file too: ``graph_passes.add(name)(MyPass())`` adds one."""


def passes(target: TargetProfile | None = None, dtype: str = "float32") -> tuple[GraphPass, ...]:
    """Return the passes of a file for a target, or for none.

    Args:
        target: the target.
        dtype: the float type of what is not quantized.
    """
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
