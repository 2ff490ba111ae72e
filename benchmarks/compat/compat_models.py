"""Tiny random models of the families that most people quantize, by config fields that no version has renamed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from zoo_models import Made, Subject

__all__ = ["MODELS", "PATCHES", "subject"]

PATCHES = "operator patches"
"""The row that is no model: which of our patches are refused."""

_VOCABULARY, _TOKENS = 99, 8
_ENCODER = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_TEXT = {**_ENCODER, "vocab_size": _VOCABULARY, "max_position_embeddings": 64}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_FRAMES, _BINS = 64, 16


def _text(generator: torch.Generator) -> dict[str, Tensor]:
    mask = torch.ones(2, _TOKENS, dtype=torch.long)
    mask[1, -2:] = 0
    return {"input_ids": torch.randint(4, _VOCABULARY, (2, _TOKENS), generator=generator), "attention_mask": mask}


def _image(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}


def _translation(generator: torch.Generator) -> dict[str, Tensor]:
    written = torch.randint(4, _VOCABULARY, (2, _TOKENS - 2), generator=generator)
    return {**_text(generator), "decoder_input_ids": written}


def _speech(generator: torch.Generator) -> dict[str, Tensor]:
    sound = torch.randn(2, _BINS, _FRAMES, generator=generator)
    return {"input_features": sound, "decoder_input_ids": _translation(generator)["decoder_input_ids"]}


MODELS: Mapping[str, tuple[Mapping[str, Any], Callable[[torch.Generator], dict[str, Tensor]]]] = {
    "bert": (_TEXT, _text),
    "roberta": ({**_TEXT, "pad_token_id": 1}, _text),
    "distilbert": (
        {
            "dim": 32,
            "n_layers": 2,
            "n_heads": 2,
            "hidden_dim": 64,
            "vocab_size": _VOCABULARY,
            "max_position_embeddings": 64,
        },
        _text,
    ),
    "vit": ({**_ENCODER, "image_size": 32, "patch_size": 8}, _image),
    "gpt2": (
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 64,
            "vocab_size": _VOCABULARY,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        _text,
    ),
    "t5": (
        {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": _VOCABULARY},
        _translation,
    ),
    "llama": ({**_TEXT, "num_key_value_heads": 1}, _text),
    "whisper": (
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "num_mel_bins": _BINS,
            "max_source_positions": _FRAMES // 2,
            "max_target_positions": 64,
            "vocab_size": _VOCABULARY,
            **_SPECIAL,
        },
        _speech,
    ),
}
"""What each model's config is made of, and what makes two rows of its inputs."""


def subject(name: str) -> Subject:
    """The model of ``MODELS`` by its ``model_type``, for the steps of the zoo."""
    options, inputs = MODELS[name]

    def made() -> Made:
        return Made(model=_model(name, options), batch=lambda seed: inputs(torch.Generator().manual_seed(seed)))

    return Subject(name=name, library="transformers", made=made)


def _model(name: str, options: Mapping[str, Any]) -> nn.Module:
    import transformers

    config = transformers.CONFIG_MAPPING[name](**options)
    config.use_cache = False  # a cache is an object, which no graph gives back
    torch.manual_seed(1)
    model: nn.Module = transformers.AutoModel.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Trained weights are not as small as fresh ones; biases and scales are not all alike.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()
