"""A product with a weight, written as x W^T: the rows of the weight, and the rows that they multiply.

Legend: W [G, N, K] the weight, N outputs of K inputs each; x [G, M, K] what it multiplies, one row for each position;
G products of their own: the groups of a convolution, or the matrices of a batched product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.nn import functional as F

from quantizer.operations.einsum import labels
from quantizer.proxy.site import Site
from quantizer.proxy.weight import laid_out


class ProductRows(Protocol):
    """A weighted product in rows."""

    def weight(self, values: Tensor) -> Tensor:
        """Return values in the weight's own shape as [G, N, K]."""

    def as_weight(self, rows: Tensor) -> Tensor:
        """Return values [G, N, K] in the weight's own shape, contiguous."""

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        """Yield all rows of the other operand, in parts [G, M, K]."""


def product_rows(
    site: Site, place: int, x: Tensor, weight: Tensor, args: Sequence[Any], keywords: Mapping[str, Any]
) -> ProductRows | str:
    """Return the rows of a site's call, or why it has none.

    Args:
        site: the site, of two operands.
        place: the place of the weight among its operands.
        x: the other operand.
        weight: the weight, as the site reads it.
        args: the positional arguments of the call, without the function.
        keywords: its keyword arguments.
    """
    name = site.operation.name
    if name in ("conv1d", "conv2d", "conv3d"):
        return _convolution(x, weight, args, keywords)
    equation = site.source.equation or _equation(name, x if place else weight, weight if place else x)
    return f"its operation is {name}" if equation is None else _contraction(equation, place, x, weight)


def _equation(name: str, lhs: Tensor, rhs: Tensor) -> str | None:
    """Return a product of the catalogue as an equation of ``einsum``; None if it is none."""
    if name == "linear":
        return "...k,nk->...n"
    if name == "addbmm":
        return "bmk,bkn->mn"
    if name in ("matmul", "mm", "bmm", "addmm", "baddbmm"):
        first, second = "...mk" if lhs.dim() > 1 else "k", "...kn" if rhs.dim() > 1 else "k"
        kept = ("m" if lhs.dim() > 1 else "") + ("n" if rhs.dim() > 1 else "")
        return f"{first},{second}->...{kept}" if lhs.dim() > 1 or rhs.dim() > 1 else "k,k->"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Contraction:
    """A product that an equation describes.

    Attributes:
        weight_axes: the axes of the weight: those of both operands that are kept, its own, and those summed over.
        other_axes: the same of the other operand.
        batch: the number of axes of the first kind.
        summed: the number of axes of the last kind.
        shape: the shape of the weight.
    """

    weight_axes: tuple[int, ...]
    other_axes: tuple[int, ...]
    batch: int
    summed: int
    shape: tuple[int, ...]

    def weight(self, values: Tensor) -> Tensor:
        return self._rows(values.permute(self.weight_axes))

    def as_weight(self, rows: Tensor) -> Tensor:
        inverse = [self.weight_axes.index(axis) for axis in range(len(self.shape))]
        return laid_out(rows.reshape([self.shape[axis] for axis in self.weight_axes]).permute(inverse))

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        yield self._rows(x.permute(self.other_axes))

    def _rows(self, values: Tensor) -> Tensor:
        depth = math.prod(values.shape[values.dim() - self.summed :])
        groups = math.prod(values.shape[: self.batch])
        return values.reshape(groups, values.numel() // max(groups * depth, 1), depth)


def _contraction(equation: str, place: int, x: Tensor, weight: Tensor) -> ProductRows | str:
    tensors = (x, weight) if place else (weight, x)
    found = labels(equation, [tensor.dim() for tensor in tensors])
    own, other = found.operands[place], found.operands[1 - place]
    sizes = found.sizes([tensor.shape for tensor in tensors])
    for names, tensor in zip(found.operands, tensors, strict=True):
        if any(sizes[name] != size for name, size in zip(names, tensor.shape, strict=True)):
            return "one of its operands is broadcast"
    both = [name for name in own if name in other]
    batch = [name for name in both if name in found.output]
    summed = [name for name in both if name not in found.output]
    if found.contracted - set(summed):
        return "it sums over an axis of one operand alone"

    def axes(names: tuple[str, ...]) -> tuple[int, ...]:
        single = [name for name in names if name not in both]
        return tuple(names.index(name) for name in [*batch, *single, *summed])

    return _Contraction(
        weight_axes=axes(own), other_axes=axes(other), batch=len(batch), summed=len(summed), shape=tuple(weight.shape)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Convolution:
    """A convolution: each position of its output is a row of the patch that it reads.

    Attributes:
        groups: G.
        stride, dilation: by axis of the image.
        padding: zeros before and after each axis, in the order of ``torch.nn.functional.pad``.
        shape: the shape of the weight, [G * N, channels of a group, *kernel].
    """

    groups: int
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[int, ...]
    shape: tuple[int, ...]

    def weight(self, values: Tensor) -> Tensor:
        return values.reshape(self.groups, self.shape[0] // self.groups, math.prod(self.shape[1:]))

    def as_weight(self, rows: Tensor) -> Tensor:
        return laid_out(rows.reshape(self.shape))

    def inputs(self, x: Tensor) -> Iterator[Tensor]:
        kernel = self.shape[2:]
        images = x if x.dim() == len(self.shape) else x.unsqueeze(0)
        # One image at a time: its patches are as many times as large as the kernel has elements.
        for image in images:
            patches = F.pad(image, self.padding)
            for axis, (size, step, apart) in enumerate(zip(kernel, self.stride, self.dilation, strict=True), start=1):
                patches = patches.unfold(axis, apart * (size - 1) + 1, step)[..., ::apart]
            # [channels, *positions, *kernel] to [G, positions, channels of a group, kernel].
            positions = math.prod(patches.shape[1 : 1 + len(kernel)])
            grouped = patches.reshape(self.groups, self.shape[1], positions, math.prod(kernel))
            yield grouped.movedim(1, 2).flatten(2)


def _convolution(x: Tensor, weight: Tensor, args: Sequence[Any], keywords: Mapping[str, Any]) -> ProductRows:
    given = dict(zip(("input", "weight", "bias", "stride", "padding", "dilation", "groups"), args, strict=False))
    given = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **given, **keywords}
    axes = weight.dim() - 2
    stride, dilation = _by_axis(given["stride"], axes), _by_axis(given["dilation"], axes)
    if given["padding"] == "same":
        total = [apart * (size - 1) for size, apart in zip(weight.shape[2:], dilation, strict=True)]
        sides = [(whole // 2, whole - whole // 2) for whole in total]
    else:
        sides = [(size, size) for size in _by_axis(0 if given["padding"] == "valid" else given["padding"], axes)]
    return _Convolution(
        groups=int(given["groups"]),
        stride=stride,
        dilation=dilation,
        padding=tuple(size for side in reversed(sides) for size in side),
        shape=tuple(weight.shape),
    )


def _by_axis(value: Any, axes: int) -> tuple[int, ...]:
    """Return an argument of a convolution for each axis: torch takes one number for all."""
    values = tuple(int(size) for size in value) if isinstance(value, Sequence) else (int(value),)
    return values * axes if len(values) == 1 else values
