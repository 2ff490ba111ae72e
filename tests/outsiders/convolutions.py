"""Blocks of convolutional networks: residual, inverted, grouped, dilated, transposed, gated, pooled, concatenated."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outsiders.case import Case, noise, smooth

# No engine here has an integer kernel for a transposed convolution: the share is that of the other products.

_ROUNDED_RESULTS = {"sqnr": 28.0}
"""The convolutions of ONNX Runtime have their results rounded too."""

_NO_KERNEL_FOR_VOLUMES = {"torch": {"integer": 0.0}, "onnxruntime": _ROUNDED_RESULTS}
"""torch's integer convolutions have one or two dimensions."""


class _Residual(nn.Module):
    """A block of ResNet with its norms, and a strided one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.one, self.two = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(2))
        self.norm_one, self.norm_two = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.down, self.side = nn.Conv2d(16, 32, 3, 2, 1), nn.Conv2d(16, 32, 1, 2)
        self.head = nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = F.relu(x + self.norm_two(self.two(F.relu(self.norm_one(self.one(x))))))
        x = F.relu(self.down(x) + self.side(x))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class _Inverted(nn.Module):
    """The block of MobileNetV2: expand, depthwise, project, add."""

    def __init__(self, act: Callable[[], nn.Module] = nn.ReLU6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.block = nn.Sequential(
            nn.Conv2d(16, 64, 1), act(), nn.Conv2d(64, 64, 3, 1, 1, groups=64), act(), nn.Conv2d(64, 16, 1)
        )
        self.head = nn.Conv2d(16, 32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + self.block(x))


class _SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(32, 32, 3, 1, 1)
        self.squeeze, self.excite = nn.Conv2d(32, 16, 1), nn.Conv2d(16, 32, 1)
        self.head = nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.conv(F.silu(self.stem(x))))
        gate = torch.sigmoid(self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        return self.head(x * gate)


class _UNet(nn.Module):
    """Down, up by interpolation, concatenation with what lies beside."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.one, self.two = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.low, self.up, self.out = (
            nn.Conv2d(32, 32, 3, padding=1),
            nn.Conv2d(48, 16, 3, padding=1),
            nn.Conv2d(16, 16, 1),
        )
        self.transposed = nn.ConvTranspose2d(32, 32, 2, 2)

    def forward(self, x: Tensor) -> Tensor:
        one = F.relu(self.one(x))
        low = F.relu(self.low(F.relu(self.two(F.max_pool2d(one, 2)))))
        up = self.transposed(low) if self.mode == "transposed" else F.interpolate(low, scale_factor=2, mode=self.mode)
        return self.out(F.relu(self.up(torch.cat([up, one], 1))))


class _Branches(nn.Module):
    """Inception: branches of one input, joined."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.a, self.b, self.c = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(16, 16, 5, 1, 2)
        self.out = nn.Conv2d(64, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        pooled = F.max_pool2d(x, 3, 1, 1)
        return self.out(torch.cat([F.relu(self.a(x)), F.relu(self.b(x)), F.relu(self.c(x)), pooled], 1))


class _Dense(nn.Module):
    """DenseNet: each layer reads all that came before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 2, 1)
        self.layers = nn.ModuleList(nn.Conv2d(16 * (n + 1), 16, 3, 1, 1) for n in range(3))
        self.out = nn.Conv2d(64, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(F.relu(layer(torch.cat(found, 1))))
        return self.out(torch.cat(found, 1))


class _Shuffle(nn.Module):
    """ShuffleNet: half of the channels pass, then all are interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.conv, self.out = nn.Conv2d(3, 32, 3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1), nn.Conv2d(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = F.relu(self.stem(x)).chunk(2, 1)
        x = torch.cat([left, F.relu(self.conv(right))], 1)
        return self.out(x.unflatten(1, (2, 16)).transpose(1, 2).flatten(1, 2))


class _PixelShuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 48, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.pixel_shuffle(self.two(F.relu(self.one(x))), 2)


def _chain(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), *layers, nn.ReLU(), nn.Conv2d(32, 16, 1))


def _picture(rows: int) -> Tensor:
    return smooth(noise(rows, 3, 32, 32))


def _signal(rows: int) -> Tensor:
    return smooth(noise(rows, 8, 64))


def _volume(rows: int) -> Tensor:
    return smooth(noise(rows, 4, 6, 12, 12))


CASES = {
    "residual": Case(net=_Residual, batch=_picture),
    "inverted_relu6": Case(net=_Inverted, batch=_picture),
    "inverted_silu": Case(net=lambda: _Inverted(nn.SiLU), batch=_picture),
    "inverted_hardswish": Case(net=lambda: _Inverted(nn.Hardswish), batch=_picture),
    "squeeze_excite": Case(net=_SqueezeExcite, batch=_picture),
    "unet_nearest": Case(net=lambda: _UNet("nearest"), batch=_picture),
    "unet_bilinear": Case(net=lambda: _UNet("bilinear"), batch=_picture),
    "unet_transposed": Case(net=lambda: _UNet("transposed"), batch=_picture, integer=0.9),
    "branches": Case(net=_Branches, batch=_picture),
    # Each result is joined three times, with another range each time.
    "dense": Case(net=_Dense, batch=_picture, by_backend={"openvino": {"speed": "converted"}}),
    # ONNX Runtime splits and interleaves channels in floats.
    "shuffle": Case(net=_Shuffle, batch=_picture, by_backend={"onnxruntime": {"speed": "scattered"}}),
    "pixel_shuffle": Case(net=_PixelShuffle, batch=_picture),
    "grouped": Case(net=_chain(nn.Conv2d(32, 32, 3, 1, 1, groups=4)), batch=_picture),
    "depthwise": Case(net=_chain(nn.Conv2d(32, 32, 3, 1, 1, groups=32)), batch=_picture),
    "dilated": Case(net=_chain(nn.Conv2d(32, 32, 3, 1, 2, dilation=2)), batch=_picture),
    "strided": Case(net=_chain(nn.Conv2d(32, 32, 3, 2, 1)), batch=_picture),
    "padded_same": Case(net=_chain(nn.Conv2d(32, 32, 2, padding="same")), batch=_picture),
    "padded_reflect": Case(net=_chain(nn.Conv2d(32, 32, 3, padding=1, padding_mode="reflect")), batch=_picture),
    "max_pool": Case(net=_chain(nn.MaxPool2d(2), nn.Conv2d(32, 32, 3)), batch=_picture),
    "average_pool": Case(net=_chain(nn.AvgPool2d(2), nn.Conv2d(32, 32, 3)), batch=_picture),
    "group_norm": Case(net=_chain(nn.Conv2d(32, 32, 3), nn.GroupNorm(4, 32)), batch=_picture),
    "instance_norm": Case(net=_chain(nn.Conv2d(32, 32, 3), nn.InstanceNorm2d(32)), batch=_picture),
    "dropout": Case(net=_chain(nn.Conv2d(32, 32, 3), nn.Dropout2d(0.2)), batch=_picture),
    "transposed_2d": Case(
        net=_chain(nn.ConvTranspose2d(32, 32, 4, 2, 1)),
        batch=_picture,
        integer=0.14,
    ),
    "conv1d": Case(
        net=lambda: nn.Sequential(
            nn.Conv1d(8, 32, 5, padding=2), nn.ReLU(), nn.Conv1d(32, 32, 3), nn.GELU(), nn.Conv1d(32, 16, 1)
        ),
        batch=_signal,
    ),
    "conv1d_dilated": Case(
        net=lambda: nn.Sequential(
            nn.Conv1d(8, 32, 3, dilation=2),
            nn.ReLU(),
            nn.Conv1d(32, 32, 3, dilation=4),
            nn.ReLU(),
            nn.Conv1d(32, 16, 1),
        ),
        batch=_signal,
    ),
    "transposed_1d": Case(
        net=lambda: nn.Sequential(
            nn.Conv1d(8, 32, 3),
            nn.LeakyReLU(0.1),
            nn.ConvTranspose1d(32, 16, 4, 2, 1),
            nn.LeakyReLU(0.1),
            nn.Conv1d(16, 16, 7, padding=3),
        ),
        batch=_signal,
        integer=0.65,
        by_backend={"onnxruntime": _ROUNDED_RESULTS},
    ),
    "conv3d": Case(
        net=lambda: nn.Sequential(nn.Conv3d(4, 16, 3, padding=1), nn.ReLU(), nn.Conv3d(16, 16, 3, padding=1)),
        batch=_volume,
        by_backend=_NO_KERNEL_FOR_VOLUMES,
    ),
    "conv3d_flat": Case(
        net=lambda: nn.Sequential(
            nn.Conv3d(4, 16, (3, 1, 1), padding=(1, 0, 0)), nn.ReLU(), nn.Conv3d(16, 16, (1, 3, 3))
        ),
        batch=_volume,
        by_backend=_NO_KERNEL_FOR_VOLUMES,
    ),
}
