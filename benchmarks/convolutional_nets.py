"""Convolutional nets of the usual kinds, with what makes integer engines of them differ: what stands between products.

Weights are random, and the statistics of normalizations those of images, so that values are as spread as in a trained
net. Legend: B images, C channels, H x W pixels, T frames or samples.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Detector", "MobileNetV2", "ResNet18", "UNet", "Vocoder", "settled"]


def settled(model: nn.Module, batches: list[Tensor]) -> nn.Module:
    """Return the model in eval mode, with the statistics of normalizations taken from batches."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, 0.0, 0.3)
            module.momentum = None
    model.train()
    with torch.no_grad():
        for batch in batches:
            model(batch)
    return model.eval()


class _Unit(nn.Sequential):
    """A convolution with its normalization and activation."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1, act: nn.Module | None = None
    ) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            act or nn.Identity(),
        )


class _Basic(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None if stride == 1 and inputs == outputs else _Unit(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """Images [B, 3, H, W] to logits [B, 1000]; written as torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        widths = (64, 64, 128, 256, 512)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(_Basic(before, width, 1 if width == before else 2), _Basic(width, width, 1))
                for before, width in itertools.pairwise(widths)
            )
        )
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(512, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(self.maxpool(self.relu(self.bn1(self.conv1(x)))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class _Inverted(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.conv = nn.Sequential(
            *([_Unit(inputs, wide, 1, act=nn.ReLU6(inplace=True))] if expansion > 1 else []),
            _Unit(wide, wide, 3, stride, wide, nn.ReLU6(inplace=True)),
            _Unit(wide, outputs, 1),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.adds else self.conv(x)


class MobileNetV2(nn.Module):
    """Images [B, 3, H, W] to logits [B, 1000]; written as torchvision's."""

    def __init__(self) -> None:
        super().__init__()
        stages = (
            (1, 16, 1, 1),
            (6, 24, 2, 2),
            (6, 32, 3, 2),
            (6, 64, 4, 2),
            (6, 96, 3, 1),
            (6, 160, 3, 2),
            (6, 320, 1, 1),
        )
        layers: list[nn.Module] = [_Unit(3, 32, 3, 2, act=nn.ReLU6(inplace=True))]
        inputs = 32
        for expansion, outputs, repeats, stride in stages:
            for repeat in range(repeats):
                layers.append(_Inverted(inputs, outputs, 1 if repeat else stride, expansion))
                inputs = outputs
        self.features = nn.Sequential(*layers, _Unit(inputs, 1280, 1, act=nn.ReLU6(inplace=True)))
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.features(x), (1, 1))
        return self.classifier(torch.flatten(x, 1))


class _Double(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(_Unit(inputs, outputs, act=nn.ReLU()), _Unit(outputs, outputs, act=nn.ReLU()))


class UNet(nn.Module):
    """Images [B, 3, H, W] to masks [B, 2, H, W], with bilinear upsampling."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = _Double(3, width)
        self.down = nn.ModuleList(_Double(width * 2**step, width * 2 ** (step + 1)) for step in range(3))
        self.up = nn.ModuleList(_Double(width * 3 * 2**step, width * 2**step) for step in reversed(range(3)))
        self.upsample = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.first(x)]
        for down in self.down:
            kept.append(down(F.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for up in self.up:
            x = up(torch.cat([kept.pop(), self.upsample(x)], 1))
        return self.last(x)


class _Squeeze(nn.Module):
    """Squeeze-and-excitation: each channel times a share that comes from the means of all."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        share = self.expand(self.act(self.reduce(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(share)


class Detector(nn.Module):
    """Images [B, 3, H, W] to boxes and scores [B, N, 4 + 21], at three sizes of a feature pyramid."""

    def __init__(self, width: int = 24, classes: int = 21) -> None:
        super().__init__()
        self.stem = _Unit(3, width, 3, 2, act=nn.SiLU())
        self.stages = nn.ModuleList()
        for step in range(4):
            inputs, outputs = width * 2**step, width * 2 ** (step + 1)
            self.stages.append(
                nn.Sequential(
                    _Unit(inputs, outputs, 3, 2, act=nn.SiLU()),
                    _Squeeze(outputs),
                    _Unit(outputs, outputs, act=nn.SiLU()),
                )
            )
        wide = width * 4
        self.lateral = nn.ModuleList(_Unit(wide * 2**step, wide, 1, act=nn.SiLU()) for step in range(3))
        self.merged = nn.ModuleList(_Unit(wide * 2, wide, 3, act=nn.SiLU()) for _ in range(2))
        self.heads = nn.ModuleList(nn.Conv2d(wide, 3 * (4 + classes), 3, 1, 1) for _ in range(3))
        self.values = 4 + classes

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        kept = []
        for stage in self.stages:
            x = stage(x)
            kept.append(x)
        levels = [lateral(feature) for lateral, feature in zip(self.lateral, kept[1:], strict=True)]
        for step in (1, 0):
            above = F.interpolate(levels[step + 1], scale_factor=2.0, mode="nearest")
            levels[step] = self.merged[step](torch.cat([levels[step], above], 1))
        found = [head(level).permute(0, 2, 3, 1).flatten(1, 2) for head, level in zip(self.heads, levels, strict=True)]
        return torch.cat([one.reshape(one.shape[0], -1, self.values) for one in found], 1)


class _Residual(nn.Module):
    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.dilated = nn.ModuleList(
            nn.Conv1d(channels, channels, kernel, 1, (kernel - 1) * dilation // 2, dilation) for dilation in (1, 3, 5)
        )
        self.plain = nn.ModuleList(nn.Conv1d(channels, channels, kernel, 1, kernel // 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for dilated, plain in zip(self.dilated, self.plain, strict=True):
            y = dilated(F.leaky_relu(x, 0.1))
            y = plain(F.leaky_relu(y, 0.1))
            x = y + x
        return x


class Vocoder(nn.Module):
    """Mel frames [B, 80, T] to samples [B, 1, 64 T]: the generator of HiFi-GAN, of its third version's size."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.before = nn.Conv1d(80, width, 7, 1, 3)
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        for step, (rate, kernel) in enumerate(((8, 16), (4, 8), (2, 4))):
            inputs, outputs = width // 2**step, width // 2 ** (step + 1)
            self.ups.append(nn.ConvTranspose1d(inputs, outputs, kernel, rate, (kernel - rate) // 2))
            self.blocks.append(nn.ModuleList(_Residual(outputs, size) for size in (3, 5, 7)))
        self.after = nn.Conv1d(width // 8, 1, 7, 1, 3)

    def forward(self, mel: Tensor) -> Tensor:
        x = self.before(mel)
        for up, blocks in zip(self.ups, self.blocks, strict=True):
            x = up(F.leaky_relu(x, 0.1))
            total = blocks[0](x)
            for block in list(blocks)[1:]:
                total = total + block(x)
            x = total / len(blocks)
        return torch.tanh(self.after(F.leaky_relu(x)))
