"""Operator patches for torch's own modules. Importing this file registers them."""

from __future__ import annotations

from quantizer.rewrite.host_argument import PADDED
from quantizer.rewrite.operator_patches import OperatorPatch
from quantizer.rewrite.operator_patches import register_operator_patch

__all__ = ["TORCH_PATCHES"]


def _nested_encoder() -> OperatorPatch:
    """Return the patch for an encoder with padding: as with nested tensors, padded positions give 0."""
    before = "        if convert_to_nested:\n            output = output.to_padded_tensor(0.0, src.size())"
    after = f"        output = {PADDED}(\n            self, convert_to_nested, output, src, src_key_padding_mask, mask)"
    return register_operator_patch(
        OperatorPatch(
            name="padding of nn.TransformerEncoder",
            function="torch.nn.modules.transformer:TransformerEncoder.forward",
            before=before,
            after=after,
            target="onnx",
            reason="its nested tensors have no graph, and the layers without them leave padded positions as they are",
        )
    )


TORCH_PATCHES = (_nested_encoder(),)
