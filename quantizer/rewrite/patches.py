"""The operator patches for torch's modules and for transformers, registered when this file is imported.

Each patch is exact: the model computes the same floats as before. Only ``_overflow_guards`` is exact in float16 only
for values up to 64,504.
"""

from __future__ import annotations

from quantizer.rewrite.host_argument import PADDED, RECURRENT
from quantizer.rewrite.operator_patches import OperatorPatch, register_operator_patch


def _nested_encoder() -> OperatorPatch:
    """Return the patch for an encoder with padding: as with nested tensors, padded positions are 0."""
    before = "        if convert_to_nested:\n            output = output.to_padded_tensor(0.0, src.size())"
    after = f"        output = {PADDED}(\n            self, convert_to_nested, output, src, src_key_padding_mask, mask)"
    return register_operator_patch(
        OperatorPatch(
            name="padding of nn.TransformerEncoder",
            function="torch.nn.modules.transformer:TransformerEncoder.forward",
            before=before,
            after=after,
            target="onnx",
            reason="nested tensors cannot be exported, and layers without them do not set padded positions to 0",
        )
    )


def _recurrences() -> list[OperatorPatch]:
    """Return the patches with which recurrent modules can run their layers in Python instead of a compiled kernel."""
    # The call of the kernel without the batch sizes of a PackedSequence.
    outer, inner = (f"(\n{indent}input,\n{indent}hx," for indent in (" " * 16, " " * 20))
    calls = {
        "LSTM": [(f"_VF.lstm{outer}", "lstm")],
        "GRU": [(f"_VF.gru{outer}", "gru")],
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
                reason="torch runs all steps in one compiled kernel, whose operands cannot be rounded",
            )
        )
        for module, of_module in calls.items()
        for before, kernel in of_module
    ]


TORCH_PATCHES = (_nested_encoder(), *_recurrences())


def _patch(name: str, function: str, before: str, after: str, target: str, reason: str) -> OperatorPatch:
    where = f"transformers.{function}" if function.startswith("integrations.") else f"transformers.models.{function}"
    patch = OperatorPatch(name=name, function=where, before=before, after=after, target=target, reason=reason)
    return register_operator_patch(patch)


def _masked_assignments() -> list[OperatorPatch]:
    """Return patches for ``x[mask] = 0``, which exports as NonZero and ScatterND; Where gives the same zeros."""
    padding, places = "~expand_attention_mask", "multimodal_mask"
    encoders = {
        "data2vec.modeling_data2vec_audio": ["Data2VecAudioEncoder"],
        "hubert.modeling_hubert": ["HubertEncoder", "HubertEncoderStableLayerNorm"],
        "unispeech.modeling_unispeech": ["UniSpeechEncoder", "UniSpeechEncoderStableLayerNorm"],
        "unispeech_sat.modeling_unispeech_sat": ["UniSpeechSatEncoder", "UniSpeechSatEncoderStableLayerNorm"],
        "wav2vec2.modeling_wav2vec2": ["Wav2Vec2Encoder", "Wav2Vec2EncoderStableLayerNorm"],
        "wavlm.modeling_wavlm": ["WavLMEncoder", "WavLMEncoderStableLayerNorm"],
    }
    of_ids = {
        "gemma3.modeling_gemma3:Gemma3Model": "special_image_mask",
        "granite_speech.modeling_granite_speech:GraniteSpeechModel": "is_audio_idx",
        "granite_speech_plus.modeling_granite_speech_plus:GraniteSpeechPlusModel": "is_audio_idx",
        "kimi_k25.modeling_kimi_k25:Kimi_K25Model": places,
        "muse_glimmer.modeling_muse_glimmer:MuseGlimmerModel": places,
        "muse_spark.modeling_muse_spark:MuseSparkModel": places,
        "paligemma.modeling_paligemma:PaliGemmaModel": "special_image_mask",
    }
    hidden = "hidden_states"
    masked = [(f"{module}:{name}", hidden, padding, "0") for module, names in encoders.items() for name in names]
    masked += [("sew.modeling_sew:SEWEncoder", hidden, padding, "0.0")]
    masked += [(function, "llm_input_ids", mask, "0") for function, mask in of_ids.items()]
    return [
        _patch(
            f"masked assignment in {function.partition(':')[2]}",
            f"{function}.forward",
            f"{value}[{mask}] = {zero}",
            f"{value} = {value}.masked_fill({mask}, {zero})",
            "tensorrt-rtx",
            "NonZero plugin creator not found: an assignment by mask exports as NonZero and ScatterND",
        )
        for function, value, mask, zero in masked
    ]


def _einsum_letters() -> list[OperatorPatch]:
    """Return patches for einsum equations with upper-case letters, which ONNX allows and the parser rejects."""
    reason = "Invalid character(s) in Einsum equation: the parser accepts only lower-case letters"
    of_global = ["BHGF,BHXF->BHGX", "BHGX,BHXF->BHGF"]
    of_local = ["BHNKF,BHGF->BHNKG", "BHNKF,BHNXF->BHNKX", "BHNKG,BHGF->BHNKF", "BHNKX,BHNXF->BHNKF"]
    attention = "pegasus_x.modeling_pegasus_x:PegasusXGlobalLocalAttention.compute_{}_attention_representations"
    return [
        _patch(
            f"einsum letters {equation}",
            attention.format(part),
            f'"{equation}"',
            f'"{equation.lower()}"',
            "tensorrt-rtx",
            reason,
        )
        for part, equations in (("global", of_global), ("local", of_local))
        for equation in equations
    ]


def _overflow_guards() -> list[OperatorPatch]:
    """Return patches for layers that clamp after a float16 overflow: clamp always, as mBART, M2M100 and Pegasus do."""
    reason = "a branch that depends on the data cannot be exported in float16"
    before = "if hidden_states.dtype == torch.float16 and not torch.isfinite(hidden_states).all():"
    layers = {
        "autoformer.modeling_autoformer": "AutoformerEncoderLayer",
        "bart.modeling_bart": "BartEncoderLayer",
        "bigbird_pegasus.modeling_bigbird_pegasus": "BigBirdPegasusEncoderLayer",
        "blenderbot_small.modeling_blenderbot_small": "BlenderbotSmallEncoderLayer",
        "informer.modeling_informer": "InformerEncoderLayer",
        "led.modeling_led": "LEDEncoderLayer",
        "marian.modeling_marian": "MarianEncoderLayer",
        "mvp.modeling_mvp": "MvpEncoderLayer",
        "nllb_moe.modeling_nllb_moe": "NllbMoeEncoderLayer",
        "plbart.modeling_plbart": "PLBartEncoderLayer",
        "time_series_transformer.modeling_time_series_transformer": "TimeSeriesTransformerEncoderLayer",
    }
    after = "if hidden_states.dtype == torch.float16:"
    return [
        _patch(f"overflow guard of {layer}", f"{module}:{layer}.forward", before, after, "onnx", reason)
        for module, layer in layers.items()
    ]


def _overflow_guards_of_blocks() -> list[OperatorPatch]:
    """Return the same patches for blocks with several guards, which are distinguished by the line before."""
    reason = "a branch that depends on the data cannot be exported in float16"
    guard = "if hidden_states.dtype == torch.float16 and torch.isinf(hidden_states).any():"
    attention = "# Keep self-attention outputs and relative position weights"
    cross_attention = "    hidden_states = cross_attention_outputs[0]"
    blocks = {
        "longt5.modeling_longt5:LongT5Block": (
            "fp16 inference - check https://github.com/huggingface/transformers/pull/19229/",
            "hidden_states = self.layer[-1](hidden_states)",
        ),
        "pix2struct.modeling_pix2struct:Pix2StructTextBlock": (
            "fp16 training",
            "hidden_states = self.mlp(hidden_states)",
        ),
    }
    places = [
        (block, line, " " * (len(line) - len(line.lstrip()) + 8), purpose)
        for block, (purpose, feed_forward) in blocks.items()
        for line in (attention, cross_attention, feed_forward)
    ]
    return [
        _patch(
            f"overflow guard {number % 3 + 1} of {block.partition(':')[2]}",
            f"{block}.forward",
            f"{line.lstrip()}\n\n{indent}# clamp inf values to enable {purpose}\n{indent}{guard}",
            f"{line.lstrip()}\n\n{indent}# clamp inf values to enable {purpose}\n"
            f"{indent}if hidden_states.dtype == torch.float16:",
            "onnx",
            reason,
        )
        for number, (block, line, indent, purpose) in enumerate(places)
    ]


def _float_masks() -> list[OperatorPatch]:
    """Return patches for a float minus an integer mask: cast the mask to float first, as the subtraction does."""
    reason = "aten.sub of a float and an int64 tensor has no translation in torch's ONNX exporter"
    ngrams = "prophetnet.modeling_prophetnet:ProphetNet"
    heads = "[:, None, None, :].repeat(1, self.config.num_{}_attention_heads, 1, 1)"
    places = {
        "xlnet.modeling_xlnet:XLNetModel.forward": "attention_mask",
        f"{ngrams}Encoder.forward": f"attention_mask{heads.format('encoder')}",
        f"{ngrams}Decoder.forward": f"encoder_attention_mask{heads.format('decoder')}",
        f"{ngrams}Decoder.prepare_attention_mask": "attention_mask[:, None, None, :]",
        f"{ngrams}Decoder.prepare_predict_attention_mask": "attention_mask[:, None, None, None, :]",
    }
    return [
        _patch(
            f"float minus an integer mask in {function.partition(':')[2]}",
            function,
            f"1.0 - {mask}",
            f"1.0 - {mask}.float()",
            "onnx",
            reason,
        )
        for function, mask in places.items()
    ]


def _batch_sizes() -> list[OperatorPatch]:
    """Return patches for a batch size by ``len()``, which is a number in the file; ``shape`` keeps the axis dynamic."""
    models = {
        "d_fine.modeling_d_fine": "DFineModel",
        "deimv2.modeling_deimv2": "Deimv2Model",
        "pp_doclayout_v2.modeling_pp_doclayout_v2": "PPDocLayoutV2Model",
        "pp_doclayout_v3.modeling_pp_doclayout_v3": "PPDocLayoutV3Model",
        "rt_detr.modeling_rt_detr": "RTDetrModel",
        "rt_detr_v2.modeling_rt_detr_v2": "RTDetrV2Model",
    }
    return [
        _patch(
            f"batch size of {model}",
            f"{module}:{model}.forward",
            "len(source_flatten)",
            "source_flatten.shape[0]",
            "onnx",
            "a length by len() fixes the batch size of the exported file",
        )
        for module, model in models.items()
    ]


def _grouped_products() -> list[OperatorPatch]:
    """Return patches for the two matrix multiplications of experts, which share a helper: each becomes its own call."""
    reason = "one helper multiplies by both weights, so the two calls cannot be distinguished"
    weight = "selected_weights if self.is_transposed else selected_weights.transpose(-2, -1)"
    return [
        _patch(
            f"product of experts by {rows}",
            "integrations.moe:grouped_mm_experts_forward",
            f"""_grouped_linear(
        {rows}, selected_weights, offsets, bias=selected_biases, is_transposed=self.is_transposed
    )""",
            f"""_grouped_mm(
        {rows}, {weight}, offsets
    ); proj_out = proj_out if selected_biases is None else proj_out.add_(selected_biases)""",
            "onnx",
            reason,
        )
        for rows in ("selected_hidden_states_g", "proj_out")
    ]


def _experts_in_a_loop() -> OperatorPatch:
    """Return the patch of a loop over experts, which becomes a grouped matrix multiplication."""
    return _patch(
        "loop over the experts of JetMoe",
        "jetmoe.modeling_jetmoe:JetMoeParallelExperts.forward",
        """input_list = inputs.split(expert_size, dim=0)
        output_list = []
        for i in range(self.num_experts):
            output_list.append(F.linear(input_list[i], self.weight[i]))
        results = torch.cat(output_list, dim=0)""",
        """sizes = [torch.full((1,), size, device=inputs.device) for size in expert_size]
        ends = torch.cat(sizes).cumsum(0).to(torch.int32)
        results = F.grouped_mm(
            inputs, self.weight.transpose(-2, -1), offs=ends
        )""",
        "onnx",
        "each iteration of the loop has another weight, so they cannot share one scale",
    )


TRANSFORMERS_PATCHES = (
    *_grouped_products(),
    _experts_in_a_loop(),
    *_masked_assignments(),
    *_einsum_letters(),
    *_overflow_guards(),
    *_overflow_guards_of_blocks(),
    *_float_masks(),
    *_batch_sizes(),
    _patch(
        "first token of a table cell",
        "tapas.modeling_tapas:TapasEmbeddings.forward",
        """first_position_per_segment = reduce_min(position_ids, full_index)[0]
                # ? shape (batch_size, seq_len). First absolute position of the cell for every token
                first_position = gather(first_position_per_segment, full_index)""",
        """same_cell = full_index.indices[:, :, None] == full_index.indices[:, None, :]
                # ? shape (batch_size, seq_len). First absolute position of the cell for every token
                first_position = torch.where(same_cell, position_ids[:, None, :], seq_length).amin(-1)""",
        "tensorrt-rtx",
        "Unsupported reduction type: ScatterElements with the reduction min",
    ),
    _patch(
        "a padding mask that is empty",
        "fsmt.modeling_fsmt:make_padding_mask",
        "if not padding_mask.any():",
        "if False:",
        "onnx",
        "a branch that depends on the data cannot be exported; a mask without padding hides nothing",
    ),
)
"""All patches for ``transformers``."""
