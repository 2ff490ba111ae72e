"""Constant folding and rewriting of an exported graph, in time that grows with the graph.

The exporter's own ``optimize`` (``onnxscript.optimizer``) does the same, but one of its rules has two outputs
(``Slice`` and ``Slice`` to ``Split``), and for each node of the graph the matcher of such rules goes through the whole
graph again: a third of the time of an export of 32 layers. The rule is left out. It compares each slice with itself
first, and where that does not match, with no other, so that it never did anything to two slices in their usual order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir


def optimize(model: onnx_ir.Model, output_names: Sequence[str] | None = None) -> None:
    """Fold constants, apply the rules of onnxscript, join equal constants and nodes, and name the outputs, in place."""
    import onnx_ir
    import onnx_ir.passes.common as common
    from onnxscript import optimizer, rewriter
    from onnxscript.rewriter import onnx_fusions
    from onnxscript.rewriter.rules.common import slice_split_rule

    rules = [rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule is not slice_split_rule]

    class FoldConstants(onnx_ir.passes.InPlacePass):
        def call(self, model: onnx_ir.Model) -> onnx_ir.passes.PassResult:
            return optimizer.fold_constants(model, onnx_shape_inference=True)

    class NameOutputs(onnx_ir.passes.InPlacePass):
        """Give each output a value of its own, with its own name, and let the inputs keep theirs.

        An output that is an input, or another output, becomes an Identity of it. ``OutputFixPass`` gives the Identity
        the name of the input, and the input another one.
        """

        def call(self, model: onnx_ir.Model) -> onnx_ir.passes.PassResult:
            inputs = {value.name: value for value in model.graph.inputs}
            common.OutputFixPass()(model)
            for output in model.graph.outputs:
                if output.name in inputs:
                    output.name = f"{output.name}_output"
            for name, value in inputs.items():
                value.name = name
            for output, name in zip(model.graph.outputs, output_names or (), strict=False):
                output.name = name
            return onnx_ir.passes.PassResult(model, modified=True)

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
        NameOutputs(),
        common.NameFixPass(),
    )(model)
    onnx_fusions.fuse(model)
