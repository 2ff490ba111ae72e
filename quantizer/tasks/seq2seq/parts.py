"""The parts of an encoder-decoder model, each a module with tensors as inputs and outputs.

``encoder_model`` reads a text or a recording, ``decoder_model`` the first tokens, and ``decoder_with_past_model`` one
more token, with the cache of keys and values as inputs and outputs. Names follow the files of Optimum.

Shapes: B samples, S tokens that are read, P tokens in the cache, E steps of the encoder, H heads, D their width, W the
width of the encoder, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from quantizer.errors import TaskError
from quantizer.tasks.checkpoints import transformers_package
from quantizer.tasks.inputs import Batch
from quantizer.utils.dimension_names import CACHE, PAST, PRESENT

ENCODER, DECODER, WITH_PAST = "encoder_model", "decoder_model", "decoder_with_past_model"
PARTS = (ENCODER, DECODER, WITH_PAST)
"""The names of the parts, and of their files."""

ENCODER_STEPS = "encoder_sequence"
"""The name of the dynamic axis of the encoder's output; recordings have a fixed number of steps."""

PartRun: TypeAlias = Callable[[Batch], Mapping[str, Any]]
"""A call of a part, a module or an engine, with a batch that may have further inputs."""

_HALVES = ("decoder", "encoder")
_KINDS = ("key", "value")


class _Encoder(nn.Module):
    """The encoder: its inputs -> ``last_hidden_state`` [B x E x W]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        return {"last_hidden_state": self.model.get_encoder()(**inputs)[0]}


class _Decoder(nn.Module):
    """The first tokens [B x S] and the encoder's output -> logits [B x S x V], and the cache of both attentions."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, encoder_hidden_states: Tensor, encoder_attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        package = transformers_package()
        cache = package.EncoderDecoderCache(package.DynamicCache(), package.DynamicCache())
        output = _decoded(self.model, input_ids, encoder_hidden_states, encoder_attention_mask, cache)
        return {"logits": output.logits, **cached(cache, PRESENT, _HALVES)}


class _DecoderWithPast(nn.Module):
    """One token [B x 1] and the cache -> logits [B x 1 x V], and the self-attention cache with that token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, encoder_attention_mask: Tensor | None = None, **past: Tensor
    ) -> dict[str, Tensor]:
        package = transformers_package()
        own, cross = package.DynamicCache(), package.DynamicCache()
        for half, name in ((own, "decoder"), (cross, "encoder")):
            keep(half, past, CACHE, name)
        # The cache replaces the encoder's output, of which only the length is read.
        keys = past[f"{CACHE}.0.encoder.key"]
        hidden = keys.new_zeros(keys.shape[0], keys.shape[2], 1)
        cache = package.EncoderDecoderCache(own, cross)
        output = _decoded(self.model, input_ids, hidden, encoder_attention_mask, cache)
        return {"logits": output.logits, **cached(cache, PRESENT, _HALVES[:1])}


def _decoded(model: Any, ids: Tensor, hidden: Tensor, mask: Tensor | None, cache: Any) -> Any:
    outputs = transformers_package().modeling_outputs.BaseModelOutput(last_hidden_state=hidden)
    options = {} if mask is None else {"attention_mask": mask}
    return model(encoder_outputs=outputs, decoder_input_ids=ids, past_key_values=cache, use_cache=True, **options)


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a float model or frozen proxy by name; they share its tensors."""
    modules = (_Encoder(model), _Decoder(model), _DecoderWithPast(model))
    return {name: part.eval() for name, part in zip(PARTS, modules, strict=True)}


def require_parts(model: Any, batch: Batch) -> None:
    """Raise unless a model is an encoder-decoder whose cache holds the keys and values of all tokens."""
    if not getattr(model.config, "is_encoder_decoder", False):
        raise TaskError(
            f"{type(model).__name__} is not an encoder-decoder model: choose another checkpoint, or task "
            "text-generation"
        )
    with torch.no_grad():
        hidden = parts_of(model)[ENCODER](**batch)["last_hidden_state"]
        first = torch.zeros(len(hidden), 1, dtype=torch.long)
        package = transformers_package()
        cache = package.EncoderDecoderCache(package.DynamicCache(), package.DynamicCache())
        filled = _decoded(model, first, hidden, batch.get("attention_mask"), cache).past_key_values
    layers = [layer for half in halves(filled).values() for layer in half.layers] if filled is cache else []
    other_kinds = {type(layer).__name__ for layer in layers if type(layer).__name__ != "DynamicLayer"}
    if not layers or other_kinds:
        raise TaskError(
            f"{type(model).__name__} keeps {', '.join(sorted(other_kinds)) or type(filled).__name__} of former tokens, "
            "expected all keys and values of its self-attention and cross-attention: such a model cannot be split into "
            "parts"
        )


def halves(cache: Any) -> dict[str, Any]:
    """Return the self-attention and cross-attention caches, by their names in tensors."""
    return dict(zip(_HALVES, (cache.self_attention_cache, cache.cross_attention_cache), strict=True))


def cached(cache: Any, prefix: str, names: tuple[str, ...] = _HALVES) -> dict[str, Tensor]:
    """Return keys and values [B x H x P x D] of a cache by name, such as ``prefix.0.decoder.key`` for layer 0."""
    tensors = {}
    layers = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
    for number, pair in enumerate(layers):
        for name, layer in zip(_HALVES, pair, strict=True):
            if name in names:
                tensors[f"{prefix}.{number}.{name}.key"] = layer.keys
                tensors[f"{prefix}.{number}.{name}.value"] = layer.values
    return tensors


def keep(half: Any, tensors: Mapping[str, Tensor], prefix: str, name: str) -> None:
    """Set the keys and values of all layers of one half of a cache, named as by ``cached``."""
    numbers = sum(key.startswith(f"{prefix}.") and key.endswith(f".{name}.key") for key in tensors)
    for number in range(numbers):
        keys, values = (tensors[f"{prefix}.{number}.{name}.{kind}"] for kind in _KINDS)
        if number < len(half.layers) and half.layers[number].is_initialized:
            half.layers[number].keys, half.layers[number].values = keys, values
        else:
            half.update(keys, values, number)


def dynamic_axes(part: str, inputs: Batch, *, fixed_steps: bool) -> dict[str, dict[int, str]]:
    """Return the dynamic axes of a part's inputs, for its export."""
    steps = {} if fixed_steps else {1: ENCODER_STEPS}
    if part == ENCODER:
        return {name: {0: "batch"} | ({} if fixed_steps else {1: "sequence"}) for name in inputs}
    axes: dict[str, dict[int, str]] = {}
    for name in inputs:
        if name.startswith(CACHE):
            length = PAST if ".decoder." in name else None if fixed_steps else ENCODER_STEPS
            axes[name] = {0: "batch"} | ({} if length is None else {2: length})
        elif name == "input_ids":
            axes[name] = {0: "batch"} | ({1: "sequence"} if part == DECODER else {})
        else:
            axes[name] = {0: "batch"} | steps
    return axes
