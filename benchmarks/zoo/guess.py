"""Architectures that nobody described: a small config of a model type, and inputs that its model takes.

Everything is tried until one pass runs: sizes of the config from small to the defaults, and inputs by the names that
``forward`` has.
"""

from __future__ import annotations

import importlib
import inspect
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import architectures
import torch
from architectures import COMMON, shrunk
from torch import Tensor, nn

__all__ = ["Guessed", "NotBuilt", "guessed", "said"]

PARAMETERS = 150_000_000
"""The most that a tiny model may have."""

_ROWS, _FRAMES = 2, 64
_FEW = {name: COMMON[name] for name in COMMON if "layers" in name or name in ("vocab_size", "n_layer", "depths")}
_WIDE = {name: 8 * size if name not in _FEW and size in (16, 32, 64) else size for name, size in COMMON.items()}
_SIZES: tuple[Mapping[str, Any], ...] = (COMMON, _WIDE, _FEW, {})
_HEADS = ("MODEL_MAPPING", "MODEL_FOR_PRETRAINING_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_BACKBONE_MAPPING")


class NotBuilt(Exception):
    """No size of the config and no inputs gave a model that runs; the message has the last of the reasons."""


@dataclass(frozen=True, kw_only=True)
class Guessed:
    """A model that ran, and what it was given: arguments of ``Architecture.batch``'s kind, made anew for a seed."""

    model: nn.Module
    batch: Callable[[int], dict[str, Tensor]]


def guessed(name: str) -> Guessed:
    """Return the model of a type of transformers with random weights, in eval mode, and its inputs.

    Raises:
        NotBuilt: nothing that was tried ran.
    """
    why: list[str] = []
    for sizes in _SIZES:
        try:
            model = _model(name, sizes)
        except Exception as error:  # noqa: BLE001 - whatever a constructor raises is a reason, and the next is tried
            why.append(f"config: {said(error)}")
            continue
        for batch in _batches(model):
            try:
                for seed in (0, 1):
                    _run(model, batch(seed))
            except Exception as error:  # noqa: BLE001 - the same for forward
                why.append(f"forward: {said(error)}")
            else:
                return Guessed(model=model, batch=batch)
    raise NotBuilt(why[0] if why else "no inputs are known for it")


def _model(name: str, sizes: Mapping[str, Any]) -> nn.Module:
    import transformers

    config = shrunk(transformers.CONFIG_MAPPING[name], {}, sizes=sizes)
    made = _class_of(type(config))
    if made is None:
        raise NotBuilt("no class of a model for this config: it is a part of others, or made by code of its own")
    torch.manual_seed(1)
    with torch.device("meta"):
        try:
            count = sum(value.numel() for value in made._from_config(config).parameters())
        except Exception:  # noqa: BLE001 - some compute with values while they are built: the real one is tried
            count = 0
    if count > PARAMETERS:
        raise NotBuilt(f"{count / 1e6:.0f} million parameters, more than {PARAMETERS / 1e6:.0f}")
    model: nn.Module = made._from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def _class_of(config: type) -> Any:
    from transformers.models.auto import modeling_auto

    names = [name for name in vars(modeling_auto) if name.startswith("MODEL_") and name.endswith("_MAPPING")]
    for head in (*_HEADS, *names):
        mapping = getattr(modeling_auto, head, None)
        if mapping is not None and config in mapping:
            found = mapping[config]
            return found[0] if isinstance(found, tuple) else found
    return next(_parts_with(config), None)


def _parts_with(config: type) -> Iterator[Any]:
    """The models of the config's own file that are made from it, which are parts of others."""
    from transformers import PreTrainedModel

    try:
        module = importlib.import_module(config.__module__.replace(".configuration_", ".modeling_"))
    except ImportError:
        return
    for value in vars(module).values():
        runs = isinstance(value, type) and issubclass(value, PreTrainedModel) and "forward" in vars(value)
        if runs and config in (vars(value).get("config_class"), value.__annotations__.get("config")):
            yield value


def _run(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    torch.manual_seed(2)
    with torch.no_grad():
        return model(**batch)


def said(error: Exception) -> str:
    """Return an error in one line, without folders that are another each time."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+/", "", text)[:240]


def _batches(model: nn.Module) -> Iterator[Callable[[int], dict[str, Tensor]]]:
    """Inputs to try, the likeliest first."""
    taken = inspect.signature(model.forward).parameters
    needed = {
        name
        for name, value in taken.items()
        if value.default is inspect.Parameter.empty and value.kind is not inspect.Parameter.VAR_KEYWORD
    }
    main = getattr(model, "main_input_name", "input_ids")
    for shapes in _shapes(taken, main, model.config):
        if needed - {"kwargs"} <= set(shapes):
            yield _Batch(shapes, _vocabulary(model.config))


@dataclass(frozen=True)
class _Batch:
    """Random inputs of some shapes; ids of texts below ``vocabulary``, masks of ones, floats elsewhere."""

    shapes: Mapping[str, tuple[int, ...]]
    vocabulary: int

    def __call__(self, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return {name: self._value(name, shape, generator) for name, shape in self.shapes.items()}

    def _value(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        if name.endswith("mask"):
            return torch.ones(shape, dtype=torch.long)
        if name.endswith("ids"):
            return torch.randint(min(4, self.vocabulary - 1), self.vocabulary, shape, generator=generator)
        if name == "bbox":
            corners = torch.randint(0, 50, (*shape[:-1], 2), generator=generator)
            return torch.cat([corners, corners + 10], dim=-1)
        return torch.randn(shape, generator=generator)


def _vocabulary(config: Any) -> int:
    parts = [config, *vars(config).values()]
    sizes = [size for part in parts if isinstance(size := getattr(part, "vocab_size", None), int) and size > 1]
    return min([*sizes, COMMON["vocab_size"]])


def _shapes(taken: Mapping[str, Any], main: str, config: Any) -> Iterator[dict[str, tuple[int, ...]]]:
    text: dict[str, tuple[int, ...]] = {}
    tokens = architectures.TOKENS
    if "input_ids" in taken:
        text["input_ids"] = (_ROWS, tokens)
        text |= {"attention_mask": (_ROWS, tokens)} if "attention_mask" in taken else {}
        text |= {"bbox": (_ROWS, tokens, 4)} if "bbox" in taken else {}
    written = {"decoder_input_ids": (_ROWS, tokens - 2)} if "decoder_input_ids" in taken else {}
    for other in _others(taken, config):
        if main in other or main == "input_ids":
            yield {**text, **written, **other} if main == "input_ids" else {**other, **written}
            yield {**text, **other, **written}
            yield other
    if text:
        yield {**text, **written}
        yield {"input_ids": text["input_ids"], **written}
        yield {"input_ids": text["input_ids"]}


def _others(taken: Mapping[str, Any], config: Any) -> Iterator[dict[str, tuple[int, ...]]]:
    """Images, sounds and series, of the sizes that a config may mean."""
    parts = [config, *(getattr(config, name, None) for name in ("vision_config", "audio_config", "backbone_config"))]
    parts += [getattr(config, name, None) for name in ("encoder_config", "encoder", "perception_encoder_config")]

    def size(name: str, default: int) -> int:
        for part in parts:
            value = getattr(part, name, None)
            value = value[0] if isinstance(value, list | tuple) and value else value
            if isinstance(value, int) and value > 0:
                return value
        return default

    channels, frames = size("num_channels", size("in_channels", 3)), size("num_frames", 2)
    sides = list(dict.fromkeys([size("image_size", 32), 32, 64, 224, 256]))
    bins = list(dict.fromkeys([size("num_mel_bins", 80), size("feature_size", 80), size("input_dim", 80), 80, 128]))
    for name in ("pixel_values", "images", "image"):
        if name in taken:
            for side in sides:
                # Two images of this size would take minutes.
                yield {name: (_ROWS if side < 512 else 1, channels, side, side)}
            for side in sides[:2]:
                yield {name: (_ROWS, frames, channels, side, side)}
                yield {name: (_ROWS, channels, frames, side, side)}
    for name in ("pixel_values_videos", "video"):
        if name in taken:
            for side in sides:
                yield {name: (_ROWS, frames, channels, side, side)}
    for name in ("input_features", "audio_values", "spectrogram"):
        if name in taken:
            for many in bins:
                for length in (_FRAMES, 2 * size("max_source_positions", 32), 3000):
                    yield {name: (_ROWS, length, many)}
                    yield {name: (_ROWS, many, length)}
    if "input_values" in taken:
        for length in (1600, 16000):
            yield {"input_values": (_ROWS, length)}
            yield {"input_values": (_ROWS, 1, length)}
        for many in bins:
            yield {"input_values": (_ROWS, size("max_length", _FRAMES), many)}
    if "past_values" in taken:
        length = size("context_length", size("context_len", _FRAMES))
        yield {"past_values": (_ROWS, length, size("num_input_channels", 1))}
        yield {"past_values": (_ROWS, length)}
    if "inputs" in taken:
        yield {"inputs": (_ROWS, 12, size("d_model", 32))}
