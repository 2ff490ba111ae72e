"""The parts of an encoder with a decoder, each a module with tensors in and out, as the usual runtimes name them.

``encoder_model`` reads a text or a recording, ``decoder_model`` the first tokens, and ``decoder_with_past_model`` one
token more, with the cache of keys and values as inputs and outputs. The names are those of Optimum's files.

Shapes: B rows, S tokens that are read, P tokens in the cache, E steps of the encoder, H heads, D their width, W the
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
"""The dimension of what the encoder gives: a text's tokens; a recording's steps are of one number."""

PartRun: TypeAlias = Callable[[Batch], Mapping[str, Any]]
"""One call of a part, as a module or an engine, with its inputs by name and maybe others."""

_HALVES = ("decoder", "encoder")
_KINDS = ("key", "value")


class _Encoder(nn.Module):
    """The encoder: what it reads -> ``last_hidden_state`` [B x E x W]."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:
        return {"last_hidden_state": self.model.get_encoder()(**inputs)[0]}


class _Decoder(nn.Module):
    """The first tokens [B x S], and what the encoder gave -> logits [B x S x V], and the cache of both attentions."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, encoder_hidden_states: Tensor, encoder_attention_mask: Tensor | None = None
    ) -> dict[str, Tensor]:
        package = transformers_package()
        cache = package.EncoderDecoderCache(package.DynamicCache(), package.DynamicCache())
        made = _decoded(self.model, input_ids, encoder_hidden_states, encoder_attention_mask, cache)
        return {"logits": made.logits, **cached(cache, PRESENT, _HALVES)}


class _DecoderWithPast(nn.Module):
    """One token [B x 1], and the cache -> logits [B x 1 x V], and the cache of its own attention with that token."""

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
        # What the encoder gave is in the cache already: its length alone is read.
        keys = past[f"{CACHE}.0.encoder.key"]
        hidden = keys.new_zeros(keys.shape[0], keys.shape[2], 1)
        cache = package.EncoderDecoderCache(own, cross)
        made = _decoded(self.model, input_ids, hidden, encoder_attention_mask, cache)
        return {"logits": made.logits, **cached(cache, PRESENT, _HALVES[:1])}


def _decoded(model: Any, ids: Tensor, hidden: Tensor, mask: Tensor | None, cache: Any) -> Any:
    outputs = transformers_package().modeling_outputs.BaseModelOutput(last_hidden_state=hidden)
    options = {} if mask is None else {"attention_mask": mask}
    return model(encoder_outputs=outputs, decoder_input_ids=ids, past_key_values=cache, use_cache=True, **options)


def parts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the parts of a float model or of a frozen proxy, by name; they share its tensors."""
    made = (_Encoder(model), _Decoder(model), _DecoderWithPast(model))
    return {name: part.eval() for name, part in zip(PARTS, made, strict=True)}


def require_parts(model: Any, batch: Batch) -> None:
    """Raise if a model is no encoder with a decoder whose cache are the keys and values of all tokens."""
    if not getattr(model.config, "is_encoder_decoder", False):
        raise TaskError(
            f"{type(model).__name__} is no encoder with a decoder: choose another checkpoint, or task text-generation"
        )
    with torch.no_grad():
        hidden = parts_of(model)[ENCODER](**batch)["last_hidden_state"]
        first = torch.zeros(len(hidden), 1, dtype=torch.long)
        package = transformers_package()
        cache = package.EncoderDecoderCache(package.DynamicCache(), package.DynamicCache())
        made = _decoded(model, first, hidden, batch.get("attention_mask"), cache).past_key_values
    layers = [layer for half in halves(made).values() for layer in half.layers] if made is cache else []
    strange = {type(layer).__name__ for layer in layers if type(layer).__name__ != "DynamicLayer"}
    if not layers or strange:
        raise TaskError(
            f"{type(model).__name__} keeps {', '.join(sorted(strange)) or type(made).__name__} of former tokens, "
            "expected the keys and values of all of them, of its own attention and of that to the encoder: such a "
            "model cannot be taken apart"
        )


def halves(cache: Any) -> dict[str, Any]:
    """Return the two caches in one of transformers, by the words that names of tensors have for them."""
    return dict(zip(_HALVES, (cache.self_attention_cache, cache.cross_attention_cache), strict=True))


def cached(cache: Any, prefix: str, names: tuple[str, ...] = _HALVES) -> dict[str, Tensor]:
    """Return keys and values [B x H x P x D] of halves of a cache: ``prefix.0.decoder.key`` is layer 0's."""
    made = {}
    layers = zip(cache.self_attention_cache.layers, cache.cross_attention_cache.layers, strict=True)
    for number, pair in enumerate(layers):
        for name, layer in zip(_HALVES, pair, strict=True):
            if name in names:
                made[f"{prefix}.{number}.{name}.key"] = layer.keys
                made[f"{prefix}.{number}.{name}.value"] = layer.values
    return made


def keep(half: Any, made: Mapping[str, Tensor], prefix: str, name: str) -> None:
    """Put the keys and values of all layers, named as ``cached`` does, in the place of those in a half of a cache."""
    numbers = sum(key.startswith(f"{prefix}.") and key.endswith(f".{name}.key") for key in made)
    for number in range(numbers):
        keys, values = (made[f"{prefix}.{number}.{name}.{kind}"] for kind in _KINDS)
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
