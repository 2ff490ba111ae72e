"""Integer weights and factors from data: GPTQ, AWQ and cross-layer equalization as functions of tensors.

Legend: W [N, K] the weight of x W^T; H [K, K] = sum of x^T x over the inputs x [K]; Q [N, K] the rounded weight; U the
upper Cholesky factor of the inverse of H, U^T U = H^-1. All arguments may have leading axes, as in a grouped
convolution.

GPTQ (arXiv:2210.17323) minimizes tr((W - Q) H (W - Q)^T), the sum of |x (W - Q)^T|^2 over the inputs. It rounds the
columns in order, and corrects the remaining columns for the change of column j (Algorithm 1 of the paper):

    W[:, j+1:] -= (W[:, j] - Q[:, j]) / U[j, j] * U[j, j+1:]

The diagonal of H is damped by K / M times its mean for M inputs, at least by the paper's 0.01. H of few inputs says
little about other data, and columns would overfit to these inputs. docs/design/calibration.md has the measurement.

AWQ (arXiv:2306.00978), with m [K] the mean of |x_j|, s [K] > 0 the factors, and Q(.) rounding to nearest:

    (x / s) Q(W s)^T ~ x W^T        s_j = m_j**alpha / sqrt(max s * min s)        (equation 4 of the paper)

A channel with large inputs matters most, and a large factor gives it a finer resolution. The best alpha is found by
trying values: the error is tr((W - Q(W s) / s) H (W - Q(W s) / s)^T).

Cross-layer equalization (arXiv:1906.04721), with W1 [C, ..] the weight of a layer, W2 that of the next, x [B, C, ..]
the activation between them, s [C] > 0:

    (W2 * s) (x / s) = W2 x        s_i = sqrt(r1_i r2_i) / r2_i        (equations 8 and 11 of the paper)

r1_i is the largest magnitude of W1 in its output channel i, and r2_i that of W2 in its input channel i. Afterwards both
weights have the largest magnitude sqrt(r1_i r2_i) in each channel, so one scale fits all channels.

The end of the file packs 8-bit and 4-bit integers as files and kernels store them. torch's quantized tensors are
deprecated, but the replacement in ``quantized_decomposed`` takes five operators and ten times as long.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_DAMPING = 0.01
"""Least damping of the diagonal of H as a share of its mean, from the paper."""

_COLUMNS = 100
"""Number of columns after which the others are updated at once, which affects only the time (paper, 3.3)."""


_MOST_GAIN = 0.5
"""Largest distance of a gain from 1; measured gains are within 0.2."""


def gptq_codes(
    weight: Tensor, hessian: Tensor, scale: Tensor, qmin: int, qmax: int, *, rows: int, by_size: bool = False
) -> Tensor | None:
    """Return the integers of a weight by GPTQ, int8 [.., N, K]; None if H is not finite."""
    if not bool(torch.isfinite(hessian).all()):
        return None
    values, scales = weight.double(), scale.double().expand(weight.shape)
    order = _order(hessian, by_size)
    values, scales = _columns(values, order), _columns(scales, order)
    factor = _inverse_factor(_in_order(hessian, order), rows)
    codes = torch.empty_like(values)
    columns = weight.shape[-1]
    for start in range(0, columns, _COLUMNS):
        end = min(start + _COLUMNS, columns)
        errors = torch.empty_like(values[..., start:end])
        for column in range(start, end):
            exact, step = values[..., column], scales[..., column]
            # In float32, as in rounding to nearest.
            code = (exact.float() / step.float()).round_().clamp_(qmin, qmax).double()
            row = factor[..., column, column:end]
            error = (exact - code * step) / row[..., :1]
            values[..., column:end] -= error[..., None] * row[..., None, :]
            codes[..., column], errors[..., column - start] = code, error
        values[..., end:] -= errors @ factor[..., start:end, end:]
    return _columns(codes, order.argsort(-1)).to(torch.int8)


def column_costs(hessian: Tensor, *, rows: int, by_size: bool = False) -> Tensor | None:
    """Return the cost of a unit error in each column, 1 / U[j, j]^2 [.., K]; None if H is not finite.

    It is the smallest error that remains after later columns correct for it (section 3.1 of the paper). The arguments
    are those of ``gptq_codes``.
    """
    if not bool(torch.isfinite(hessian).all()):
        return None
    order = _order(hessian, by_size)
    factor = _inverse_factor(_in_order(hessian, order), rows)
    return factor.diagonal(dim1=-2, dim2=-1).square().reciprocal().gather(-1, order.argsort(-1))


def output_error(weight: Tensor, rounded: Tensor, hessian: Tensor) -> float:
    """Return tr((W - Q) H (W - Q)^T), for W and Q [.., N, K] and H [.., K, K]."""
    change = weight.double() - rounded.double()
    return float(((change @ hessian.double()) * change).sum())


def output_gains(weight: Tensor, rounded: Tensor, covariance: Tensor) -> Tensor:
    """Return per-channel gains that rescale x Q^T to the magnitude of x W^T, float64 [.., N].

    The outputs with the least error are slightly too small, and so are all later ones without normalization in between.
    The gain is w C w / w C q for the rows w and q of W and Q: the regression of the rounded output on the exact one
    then has slope 1. The gain is 1 where the two have little in common.
    """
    products = weight.double() @ covariance
    gains = (products * weight).sum(-1) / (products * rounded).sum(-1)
    return torch.where((gains - 1).abs() < _MOST_GAIN, gains, torch.ones_like(gains))


def _order(hessian: Tensor, by_size: bool) -> Tensor:
    """Return the order in which columns are rounded, [.., K]."""
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    if by_size:
        return diagonal.argsort(dim=-1, descending=True, stable=True)
    return torch.arange(diagonal.shape[-1], device=diagonal.device).expand(diagonal.shape)


def _columns(values: Tensor, order: Tensor) -> Tensor:
    """Return values [.., N, K] with their columns in an order [.., K]."""
    return values.gather(-1, order[..., None, :].expand(values.shape))


def _in_order(hessian: Tensor, order: Tensor) -> Tensor:
    """Return H with its rows and columns in an order [.., K], in float64."""
    return _columns(_columns(hessian.double(), order).mT, order).mT


def _inverse_factor(hessian: Tensor, rows: int) -> Tensor:
    """Return U [.., K, K] of the damped H, or of the identity where all inputs are zero."""
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    damping = max(_DAMPING, diagonal.shape[-1] / max(rows, 1)) * diagonal.mean(-1, keepdim=True)
    damped_diagonal = torch.where(damping > 0, damping, torch.ones_like(damping)).expand(diagonal.shape)
    lower = torch.linalg.cholesky(hessian + torch.diag_embed(damped_diagonal))
    factor: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return factor


_ALPHAS = tuple(step / 20 for step in range(1, 20))
"""Values of alpha, from the paper's grid of 20."""

_LEAST = 1e-4
"""Smallest mean magnitude as a share of the largest, so that channels of zeros have a finite factor."""


def input_factors(magnitude: Tensor, alpha: float) -> Tensor:
    """Return the AWQ factors s [K], float64, for m [K] with at least one nonzero value."""
    m = magnitude.double()
    s = m.clamp(min=_LEAST * float(m.max())) ** alpha
    return s / (s.max() * s.min()).sqrt()


def awq_share(
    weights: Sequence[tuple[Tensor, Callable[[Tensor], Tensor]]], magnitude: Tensor, hessian: Tensor
) -> tuple[float, float] | None:
    """Return the alpha with the least error, and the ratio of that error to the error without factors.

    None if no alpha reduces the error, or if H is not finite.

    Args:
        weights: each W [N, K] with the same input x, and a function that returns Q(W s) / s [N, K] for s [K].
        magnitude: m, [K].
        hessian: H, [K, K].
    """
    if not bool(torch.isfinite(hessian).all()) or not bool(magnitude.any()):
        return None

    def error(s: Tensor) -> float:
        return math.fsum(output_error(weight, rounded(s), hessian) for weight, rounded in weights)

    plain_error = error(torch.ones_like(magnitude, dtype=torch.float64))
    least_error, alpha = min((error(input_factors(magnitude, alpha)), alpha) for alpha in _ALPHAS)
    return (alpha, least_error / plain_error) if least_error < plain_error else None


def equalizing_factors(first: Tensor, second: Tensor) -> Tensor:
    """Return s [C] for r1 [C] and r2 [C], float64; 1 for a channel of zeros."""
    r1, r2 = first.double(), second.double()
    s = (r1 * r2).sqrt() / r2
    return torch.where(torch.isfinite(s) & (s > 0), s, torch.ones_like(s))


def byte_codes(values: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return clamp(round(values / scale) + zero_point, 0, 255) in UINT8, for float32 values on the CPU.

    The result shares the memory of a quantized tensor, because ``int_repr`` would copy it, which takes four times as
    long as quantizing.
    """
    quantized = torch.quantize_per_tensor(values, scale, zero_point, torch.quint8)
    return torch.empty(0, dtype=torch.uint8).set_(quantized.untyped_storage(), 0, quantized.shape, quantized.stride())


def spend_deprecation_warning() -> None:
    """Trigger and hide torch's warning that quantized tensor types are deprecated, which it gives once per process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        byte_codes(torch.zeros(1, dtype=torch.float32), 1.0, 0)


_LOW = 0b1111
_SIGN = 0b1000


def packed_size(count: int) -> int:
    """Return the number of bytes of ``count`` packed 4-bit integers."""
    return (count + 1) // 2


def pack_pairs(codes: Tensor) -> Tensor:
    """Return int8 values [*] from -8 to 7 as uint8 [packed_size(*)], the first of two in the lower half of a byte."""
    flat = torch.nn.functional.pad(codes.flatten(), (0, codes.numel() % 2)).view(torch.uint8) & _LOW
    return flat[0::2] | (flat[1::2] << _LOW.bit_length())


def unpack_pairs(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the int8 values of ``shape`` that ``pack_pairs`` packed."""
    halves = torch.stack([packed & _LOW, packed >> _LOW.bit_length()], dim=1).flatten()
    # Two's complement of 4 bits: the highest bit has the weight -8.
    codes = (halves ^ _SIGN).view(torch.int8) - _SIGN
    return codes[: torch.Size(shape).numel()].reshape(shape).clone()
