"""Graph passes, one a file, in the order in which they run."""

from __future__ import annotations

from quantizer.export.passes.base import GraphPass
from quantizer.export.passes.base import run_passes
from quantizer.export.passes.clamp_masks import ClampMasks
from quantizer.export.passes.fold_channel_factors import FoldChannelFactors
from quantizer.export.passes.name_nodes import NameNodes
from quantizer.export.passes.store_weights import StoreWeights
from quantizer.export.passes.unsigned_activations import UnsignedActivations
from quantizer.export.passes.weights_as_read import WeightsAsRead

__all__ = ["PASSES", "FoldChannelFactors", "GraphPass", "UnsignedActivations", "run_passes"]

PASSES: tuple[GraphPass, ...] = (StoreWeights(), WeightsAsRead(), FoldChannelFactors(), ClampMasks(), NameNodes())
