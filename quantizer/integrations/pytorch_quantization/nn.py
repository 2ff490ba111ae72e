"""``TensorQuantizer``, and the classes that hold the default descriptors of each kind of layer."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from quantizer.errors import CalibrationError
from quantizer.integrations.pytorch_quantization.calib import HistogramCalibrator, MaxCalibrator, amax_of
from quantizer.integrations.pytorch_quantization.tensor_quant import QuantDescriptor
from quantizer.numerics import torch_operators as ops
from quantizer.numerics.formats import INT8
from quantizer.proxy.operand_quantizer import OperandQuantizer


class TensorQuantizer(OperandQuantizer):
    """The quantizer of one operand, switched manually: it collects statistics, quantizes, both or neither.

    Without a loaded range, it uses the range of its current input, as in the toolkit.
    """

    use_fb_fake_quant: ClassVar[bool] = False
    """Whether all quantizers round with ``torch.fake_quantize_*``, which ``torch.onnx.export`` writes as Q/DQ nodes.

    These operators multiply by 1 / scale: a value near a tie may become the neighboring integer.
    """

    def __init__(self, quant_desc: QuantDescriptor | None = None) -> None:
        super().__init__()
        descriptor = quant_desc or QuantDescriptor()
        self.axis = descriptor.channel_axis
        self.enabled = True
        self._collecting = False
        self._collected = False
        self._calibrator: MaxCalibrator | HistogramCalibrator = (
            HistogramCalibrator() if descriptor.calib_method == "histogram" else MaxCalibrator(self.axis)
        )
        if descriptor.amax is not None:
            self._set_amax(torch.tensor(descriptor.amax, dtype=torch.float32))

    def enable_calib(self) -> None:
        """Collect the values of inputs from now on."""
        self._collecting = self._collected = True

    def disable_calib(self) -> None:
        """Stop collecting."""
        self._collecting = False

    def enable_quant(self) -> None:
        """Fake-quantize inputs."""
        self.enabled = True

    def disable_quant(self) -> None:
        """Return inputs unchanged."""
        self.enabled = False

    def enable(self) -> None:
        """Fake-quantize inputs, and stop collecting."""
        self.enabled, self._collecting = True, False

    def disable(self) -> None:
        """Stop quantizing and collecting."""
        self.enabled = self._collecting = False

    def load_calib_amax(self, *args: Any, strict: bool = True, **keywords: Any) -> None:
        """Set the range from the collected values; arguments as for the calibrator's ``compute_amax``.

        A quantizer without any input while it collected, such as in an unused branch, stays without a range.
        """
        amax = self._calibrator.compute_amax(*args, **keywords)
        if amax is not None:
            self._set_amax(amax)
        elif strict and not self._collected:
            raise CalibrationError(
                "load_calib_amax(): no values were collected: call enable_calib() and run data first"
            )

    @property
    def amax(self) -> Tensor | None:
        """The range [] or [C]; None before ``load_calib_amax``."""
        return None if self.scale is None else self.scale * INT8.qmax

    def forward(self, x: Tensor) -> Tensor:
        if self._collecting:
            self._calibrator.collect(x)
        if not self.enabled or (self.scale is not None and not self.use_fb_fake_quant):
            result: Tensor = super().forward(x)
            return result
        scale = _scale(amax_of(x, self.axis)) if self.scale is None else self.scale
        if not self.use_fb_fake_quant:
            rounded: Tensor = ops.fake_quantize(x, scale, self.dtype, self.axis)
            return rounded
        limits = int(INT8.qmin), int(INT8.qmax)
        zero_point = torch.zeros(scale.shape, dtype=torch.int32, device=scale.device)
        if self.axis is None:
            return torch.fake_quantize_per_tensor_affine(x, scale, zero_point, *limits)
        return torch.fake_quantize_per_channel_affine(x, scale, zero_point, self.axis % x.dim(), *limits)

    def _set_amax(self, amax: Tensor) -> None:
        rounding = self.enabled
        self.set_scale(_scale(amax), self.dtype, self.axis)
        self.enabled = rounding


def _scale(amax: Tensor) -> Tensor:
    scale = amax / INT8.qmax
    return torch.where(scale > 0, scale, torch.ones_like(scale))


class _Defaults:
    """The default descriptors of a kind of layer, under the class name of the toolkit."""

    default_quant_desc_input: ClassVar[QuantDescriptor] = QuantDescriptor()
    default_quant_desc_weight: ClassVar[QuantDescriptor] = QuantDescriptor(axis=(0,))

    @classmethod
    def set_default_quant_desc_input(cls, value: QuantDescriptor) -> None:
        """Set the descriptor of the inputs of models built from now on."""
        cls.default_quant_desc_input = value

    @classmethod
    def set_default_quant_desc_weight(cls, value: QuantDescriptor) -> None:
        """Set the descriptor of the weights of models built from now on."""
        cls.default_quant_desc_weight = value


class QuantLinear(_Defaults):
    """Defaults of linear layers, and of matrix multiplications of two activations."""


class QuantConv1d(_Defaults):
    """Defaults of ``F.conv1d``."""


class QuantConv2d(_Defaults):
    """Defaults of ``F.conv2d``."""


class QuantConv3d(_Defaults):
    """Defaults of ``F.conv3d``."""


class QuantConvTranspose1d(_Defaults):
    """Defaults of ``F.conv_transpose1d``, whose weight has its output channels on axis 1."""

    default_quant_desc_weight: ClassVar[QuantDescriptor] = QuantDescriptor(axis=(1,))


class QuantConvTranspose2d(_Defaults):
    """Defaults of ``F.conv_transpose2d``, whose weight has its output channels on axis 1."""

    default_quant_desc_weight: ClassVar[QuantDescriptor] = QuantDescriptor(axis=(1,))


class QuantConvTranspose3d(_Defaults):
    """Defaults of ``F.conv_transpose3d``, whose weight has its output channels on axis 1."""

    default_quant_desc_weight: ClassVar[QuantDescriptor] = QuantDescriptor(axis=(1,))
