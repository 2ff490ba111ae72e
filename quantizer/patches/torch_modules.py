"""Operator patches for torch's own modules. Importing this file registers them."""

from __future__ import annotations

from quantizer.rewrite.host_argument import PADDED, RECURRENT
from quantizer.rewrite.operator_patches import OperatorPatch, register_operator_patch


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


def _recurrences() -> list[OperatorPatch]:
    """Return the patches by which recurrent modules may run their layers in Python instead of a compiled kernel."""
    # Of the two calls of a kernel, that without the batch sizes of a PackedSequence.
    whole, inner = (f"(\n{indent}input,\n{indent}hx," for indent in (" " * 16, " " * 20))
    calls = {
        "LSTM": [(f"_VF.lstm{whole}", "lstm")],
        "GRU": [(f"_VF.gru{whole}", "gru")],
        "RNN": [(f"_VF.rnn_tanh{inner}", "rnn_tanh"), (f"_VF.rnn_relu{inner}", "rnn_relu")],
        "LSTMCell": [("_VF.lstm_cell(", "lstm_cell")],
        "GRUCell": [("_VF.gru_cell(", "gru_cell")],
        "RNNCell": [("_VF.rnn_tanh_cell(", "rnn_tanh_cell"), ("_VF.rnn_relu_cell(", "rnn_relu_cell")],
    }
    return [
        register_operator_patch(
            OperatorPatch(
                name=f"{kernel} of nn.{module}",
                function=f"torch.nn.modules.rnn:{module}.forward",
                before=before,
                after=before.replace(f"_VF.{kernel}(", f"{RECURRENT}(self, _VF.{kernel})("),
                target="quantizer",
                reason="torch runs all steps in one compiled kernel, whose products cannot be rounded",
            )
        )
        for module, of_module in calls.items()
        for before, kernel in of_module
    ]


TORCH_PATCHES = (_nested_encoder(), *_recurrences())
