"""Which models the zoo has: those that the tests describe, all other types of transformers, and timm's families."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import architectures
import torch
from guess import guessed
from torch import Tensor, nn

__all__ = ["Made", "Subject", "subjects"]

_DESCRIBED = {
    "text encoder": architectures.TEXT_ENCODERS,
    "decoder": architectures.DECODERS,
    "mixture of experts": architectures.MIXTURES_OF_EXPERTS,
    "encoder-decoder": architectures.ENCODER_DECODERS,
    "vision": architectures.VISION,
    "sound": architectures.AUDIO,
    "several inputs": architectures.MULTIMODAL,
    "series": architectures.SERIES,
}
_BY_INPUT = {
    "input_ids": "text",
    "pixel_values": "vision",
    "pixel_values_videos": "vision",
    "images": "vision",
    "input_values": "sound",
    "input_features": "sound",
    "audio_values": "sound",
    "past_values": "series",
}


@dataclass(frozen=True, kw_only=True)
class Made:
    """A model in eval mode, and its inputs of a seed."""

    model: nn.Module
    batch: Callable[[int], dict[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model of the zoo by name; ``made()`` makes it, the same at each call, and may raise whatever a library does."""

    name: str
    library: str
    made: Callable[[], Made]

    @property
    def key(self) -> str:
        """The name of its row and of its file."""
        return self.name if self.library == "transformers" else f"{self.library}.{self.name}"


def subjects() -> list[Subject]:
    """Every type of transformers, by name, torch's own transformers, and one model of each family of timm."""
    from transformers import CONFIG_MAPPING

    described = {one.name: one for group in _DESCRIBED.values() for one in group}
    found = [
        Subject(name=name, library="transformers", made=_described(described[name]))
        if name in described
        else Subject(name=name, library="transformers", made=_guessed(name))
        for name in sorted({*CONFIG_MAPPING.keys(), *described})
    ]
    found += [Subject(name=one.name, library="torch", made=_described(one)) for one in architectures.TORCH]
    return found + [Subject(name=name, library="timm", made=_of_timm(name)) for name in _families_of_timm()]


def modality_of(name: str, inputs: list[str]) -> str:
    """The group of a table: that of a described one, else by what the model is given."""
    for group, entries in _DESCRIBED.items():
        if any(one.name == name for one in entries):
            return group
    known = {_BY_INPUT[one] for one in inputs if one in _BY_INPUT}
    if len(known) > 1:
        return "several inputs"
    if known == {"text"}:
        return "encoder-decoder" if "decoder_input_ids" in inputs else "decoder or text encoder"
    return known.pop() if known else "other"


def _described(one: architectures.Architecture | architectures.TorchArchitecture) -> Callable[[], Made]:
    return lambda: Made(model=one.build(), batch=one.batch)


def _guessed(name: str) -> Callable[[], Made]:
    def make() -> Made:
        found = guessed(name)
        return Made(model=found.model, batch=found.batch)

    return make


def _families_of_timm() -> list[str]:
    """One model of each family, a small one by its name: to count the parameters of all takes a quarter of an hour."""
    if find_spec("timm") is None:
        return []
    import timm

    return [min(timm.list_models(module=module), key=_size_by_name) for module in timm.list_modules()]


def _size_by_name(name: str) -> tuple[int, int, str]:
    known = [place for place, word in enumerate(_SMALL) if word in name]
    return (min(known, default=len(_SMALL)), len(name), name)


_SMALL = [
    "atto",
    "femto",
    "pico",
    "nano",
    "xxs",
    "xx_small",
    "_xs",
    "tiny",
    "mini",
    "small",
    "lite",
    "_s",
    "_b0",
    "_050",
]


def _of_timm(name: str) -> Callable[[], Made]:
    def make() -> Made:
        import timm

        torch.manual_seed(1)
        model: nn.Module = timm.create_model(name, pretrained=False).eval()
        shape = model.pretrained_cfg["input_size"]  # type: ignore[index, union-attr]

        def batch(seed: int) -> dict[str, Tensor]:
            return {"x": torch.randn((2, *shape), generator=torch.Generator().manual_seed(seed))}

        return Made(model=model, batch=batch)

    return make
