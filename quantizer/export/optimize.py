"""Constant folding and rewriting of an exported graph, in time that grows with the graph.

The exporter's own ``optimize`` (``onnxscript.optimizer``) does the same, but one of its rules has two outputs
(``Slice`` and ``Slice`` to ``Split``), and for each node of the graph the matcher of such rules goes through the whole
graph again: a third of the time of an export of 32 layers. The rule is left out. It compares each slice with itself
first, and where that does not match, with no other, so that it never did anything to two slices in their usual order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir

__all__ = ["optimize"]


def optimize(model: onnx_ir.Model) -> None:
    """Fold constants, apply the rules of onnxscript, and join equal constants and nodes, in place.

    Args:
        model: what ``torch.onnx.export(optimize=False)`` made.
    """
    import onnx_ir
    import onnx_ir.passes.common as common
    from onnxscript import optimizer
    from onnxscript import rewriter
    from onnxscript.rewriter import onnx_fusions
    from onnxscript.rewriter.rules.common import slice_split_rule

    rules = [rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule is not slice_split_rule]

    class FoldConstants(onnx_ir.passes.InPlacePass):
        def call(self, model: onnx_ir.Model) -> onnx_ir.passes.PassResult:
            return optimizer.fold_constants(model, onnx_shape_inference=True)

    unused = common.RemoveUnusedFunctionsPass()  # type: ignore[no-untyped-call]
    cleaned = (common.RemoveUnusedNodesPass(), unused, common.RemoveUnusedOpsetsPass())
    onnx_ir.passes.Sequential(
        common.InlinePass(),
        onnx_ir.passes.PassManager([FoldConstants(), rewriter.RewritePass(rules), *cleaned], steps=2),
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)
    onnx_fusions.fuse(model)
