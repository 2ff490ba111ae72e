"""Codes and factors of weights by data: GPTQ, AWQ and equalization, as functions of tensors.

Legend: W [N, K] the weight of a product x W^T; H [K, K] = sum of x^T x over the rows x [K] that it multiplies; Q [N, K]
the rounded weight; U the upper Cholesky factor of the inverse of H, U^T U = H^-1.

minimize tr((W - Q) H (W - Q)^T), the sum over rows of |x (W - Q)^T|^2

The columns are rounded one after another. What rounding changed at column j is made up for by the columns that are not
rounded yet (Algorithm 1 of the paper):

W[:, j+1:] -= (W[:, j] - Q[:, j]) / U[j, j] * U[j, j+1:]

First K / M times the mean of its diagonal is added to that of H, for M rows, and at least the paper's 0.01. H of few
rows says little about the inputs of other data, and columns would make up for each other as only those rows allow.
docs/design/calibration.md shows the measurement behind it.

All arguments may have leading axes, which are products of their own, as in a grouped convolution.

Legend: W [N, K] the weight of a product x W^T; m [K] the mean of |x_j|; s [K] > 0 the factors; H [K, K] the sum of
x^T x over the rows that it multiplies; Q(.) rounding to the nearest codes.

(x / s) Q(W s)^T ~ x W^T        s_j = m_j**alpha / sqrt(max s * min s)        (equation 4 of the paper)

A channel of large inputs counts most, and multiplied by a large factor it is rounded in finer steps. Which share alpha
is best is found by trying: the error of the product is tr((W - Q(W s) / s) H (W - Q(W s) / s)^T).

Legend: W1 [C, ..] the weight of a layer, W2 that of the next, x [B, C, ..] what is between them, s [C] > 0.

(W2 * s) (x / s) = W2 x        s_i = sqrt(r1_i r2_i) / r2_i        (equations 8 and 11 of the paper)

There r1_i is the largest magnitude of W1 for its output channel i, and r2_i that of W2 for its input channel i. W1 / s
and W2 * s then have the same largest magnitude in each channel, sqrt(r1_i r2_i), so one scale serves all channels.

Codes of one byte and of four bits, as files and kernels hold them.

torch's quantized tensors are deprecated, and nothing that replaces them is one pass: the operators of
``quantized_decomposed`` are five, which takes ten times as long.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_DAMPING = 0.01
"""The least that is added to the diagonal of H, as a share of its mean: that of the paper."""

_COLUMNS = 100
"""The number of columns after which the others are updated at once, which changes nothing but the time (paper, 3.3)."""


_MOST_GAIN = 0.5
"""How far from 1 a gain may be; those that were measured are within 0.2."""


def gptq_codes(
    weight: Tensor, hessian: Tensor, scale: Tensor, qmin: int, qmax: int, *, rows: int, by_size: bool = False
) -> Tensor | None:
    """Return the codes of a weight, int8 [.., N, K]; None if H is not finite."""
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
            # In float32, as the codes of nearest rounding are computed.
            code = (exact.float() / step.float()).round_().clamp_(qmin, qmax).double()
            row = factor[..., column, column:end]
            error = (exact - code * step) / row[..., :1]
            values[..., column:end] -= error[..., None] * row[..., None, :]
            codes[..., column], errors[..., column - start] = code, error
        values[..., end:] -= errors @ factor[..., start:end, end:]
    return _columns(codes, order.argsort(-1)).to(torch.int8)


def column_costs(hessian: Tensor, *, rows: int, by_size: bool = False) -> Tensor | None:
    """Return what an error of one in each column costs, 1 / U[j, j]^2 [.., K]; None if H is not finite.

    It is the least that is left of it once the columns that are rounded later have made up for it (section 3.1 of the
    paper). The arguments are those of ``gptq_codes``.
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
    """Return by what the outputs x Q^T are to be multiplied to be as large as x W^T, float64 [.., N].

    The least error is that of outputs which are a little too small, and so are those of each product behind, where no
    normalization comes between them. The gain is w C w / w C q for the rows w and q of W and Q: what the exact output
    predicts of the rounded one is then the exact one. It is 1 where the two have little in common.
    """
    products = weight.double() @ covariance
    gains = (products * weight).sum(-1) / (products * rounded).sum(-1)
    return torch.where((gains - 1).abs() < _MOST_GAIN, gains, torch.ones_like(gains))


def _order(hessian: Tensor, by_size: bool) -> Tensor:
    """Return the order of the columns, [.., K]."""
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
    """Return U [.., K, K] of H after damping; where all inputs are zero, of the identity."""
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    damping = max(_DAMPING, diagonal.shape[-1] / max(rows, 1)) * diagonal.mean(-1, keepdim=True)
    added = torch.where(damping > 0, damping, torch.ones_like(damping)).expand(diagonal.shape)
    lower = torch.linalg.cholesky(hessian + torch.diag_embed(added))
    factor: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
    return factor


_SHARES = tuple(step / 20 for step in range(1, 20))
"""Values of alpha, as the paper's grid of 20."""

_LEAST = 1e-4
"""The smallest mean magnitude, as a share of the largest, so that channels of zeros have a finite factor."""


def input_factors(magnitude: Tensor, alpha: float) -> Tensor:
    """Return s [K] of the formula above, float64, for m [K], of which at least one is not zero."""
    m = magnitude.double()
    s = m.clamp(min=_LEAST * float(m.max())) ** alpha
    return s / (s.max() * s.min()).sqrt()


def awq_share(
    weights: Sequence[tuple[Tensor, Callable[[Tensor], Tensor]]], magnitude: Tensor, hessian: Tensor
) -> tuple[float, float] | None:
    """Return the share alpha with the least error, and that error as a part of the error without factors.

    None if no share makes a smaller error, or if H is not finite.

    Args:
        weights: each W [N, K] that multiplies the same x, with the function that rounds W s [N, K] for given s [K], and
            divides by s.
        magnitude: m, [K].
        hessian: H, [K, K].
    """
    if not bool(torch.isfinite(hessian).all()) or not bool(magnitude.any()):
        return None

    def error(s: Tensor) -> float:
        return math.fsum(output_error(weight, rounded(s), hessian) for weight, rounded in weights)

    usual = error(torch.ones_like(magnitude, dtype=torch.float64))
    least, alpha = min((error(input_factors(magnitude, alpha)), alpha) for alpha in _SHARES)
    return (alpha, least / usual) if least < usual else None


def equalizing_factors(first: Tensor, second: Tensor) -> Tensor:
    """Return s [C] for r1 [C] and r2 [C], float64; 1 for a channel of zeros, which no factor changes."""
    r1, r2 = first.double(), second.double()
    s = (r1 * r2).sqrt() / r2
    return torch.where(torch.isfinite(s) & (s > 0), s, torch.ones_like(s))


def byte_codes(values: Tensor, scale: float, zero_point: int) -> Tensor:
    """Return UINT8 codes, clamp(round(values / scale) + zero_point, 0, 255), of float32 values on the CPU.

    ``int_repr`` would copy them one by one, which takes four times as long as making them; the codes' own memory is
    taken instead.
    """
    held = torch.quantize_per_tensor(values, scale, zero_point, torch.quint8)
    return torch.empty(0, dtype=torch.uint8).set_(held.untyped_storage(), 0, held.shape, held.stride())


def spend_deprecation_warning() -> None:
    """Let torch give its warning, once in a process, that tensors of quantized types will go, where nobody sees it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        byte_codes(torch.zeros(1), 1.0, 0)


_LOW = 0b1111
_SIGN = 0b1000


def packed_size(count: int) -> int:
    """Return the number of bytes of ``count`` packed codes."""
    return (count + 1) // 2


def pack_pairs(codes: Tensor) -> Tensor:
    """Return codes int8 [*] from -8 to 7 as uint8 [packed_size(*)], the first of two in the lower half of a byte."""
    flat = torch.nn.functional.pad(codes.flatten(), (0, codes.numel() % 2)).view(torch.uint8) & _LOW
    return flat[0::2] | (flat[1::2] << _LOW.bit_length())


def unpack_pairs(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the codes that ``pack_pairs`` packed, int8 of the given shape."""
    halves = torch.stack([packed & _LOW, packed >> _LOW.bit_length()], dim=1).flatten()
    # Two's complement of 4 bits: the highest bit has the weight -8.
    codes = (halves ^ _SIGN).view(torch.int8) - _SIGN
    return codes[: torch.Size(shape).numel()].reshape(shape).clone()
