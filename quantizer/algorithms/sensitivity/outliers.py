"""The detector of outliers in the values of an activation: channels, tokens, branches, clipping.

Legend: x [N, K] the rows of an activation that linears read; m_j the largest magnitude of channel j.
"""

from __future__ import annotations

from torch import Tensor

from quantizer.numerics.formats import qtype
from quantizer.plan.site_plan import OperandPlan

_RATIO = 8.0
"""How many times as large as the median a channel or a token must be to count: three of the eight bits are lost."""

_HOLDS = 4.0
"""Channels above the largest magnitude divided by this count as those that hold the range."""

_TOKENS = 0.01
"""The largest share of the rows that count as single tokens."""


def scaled(x: Tensor, planned: OperandPlan) -> Tensor:
    """Return an activation as it is rounded: times its factors [K], which lie along an axis of the whole tensor."""
    if planned.factor is None:
        return x
    assert planned.smooth_axis is not None
    moved = x.movedim(planned.smooth_axis, -1) * planned.factor.to(x.device)
    return moved.movedim(-1, planned.smooth_axis)


def outliers(x: Tensor, planned: OperandPlan, *, rows: bool) -> list[str]:
    """Return what is wrong with the range of an activation, in words; empty if nothing stands out."""
    found = [] if not rows else _by_structure(x.detach().float().reshape(-1, x.shape[-1]).abs())
    return [*found, *_clipped(x.detach().double(), planned)]


def _by_structure(x: Tensor) -> list[str]:
    """Return the finding of massive tokens, of two branches, or of a few large channels, in magnitudes x [N, K]."""
    by_row = x.amax(1)
    few = max(1, int(_TOKENS * len(x)))
    rest = x[by_row <= by_row.sort(descending=True).values[few]] if len(x) > few else x
    largest, typical = float(by_row.max()), float(rest.max())
    if typical > 0 and largest >= _RATIO * float(by_row.median()) and largest >= _HOLDS * typical:
        several = int((by_row > typical).sum())
        return [f"{_counted(several, 'token')} of {len(x)} hold its range, {largest / typical:.0f}x the rest"]
    m = rest.amax(0)
    half = _branches(m)
    if half is not None:
        return [half]
    median = float(m.median())
    if median > 0 and float(m.max()) >= _RATIO * median:
        several = int((m > m.max() / _HOLDS).sum())
        return [f"its channels differ by {float(m.max()) / median:.0f}x: {_counted(several, 'channel')} hold its range"]
    return []


def _branches(m: Tensor) -> str | None:
    """Return the finding of one range for two branches: all channels on one side of a cut far above the other side."""
    least = max(2, len(m) // 8)
    for cut in range(least, len(m) - least + 1):
        low, high = sorted((m[:cut], m[cut:]), key=lambda side: float(side.max()))
        if float(low.max()) > 0 and float(high.min()) > float(low.max()):
            ratio = float(high.max() / low.max())
            if ratio >= _RATIO:
                return (
                    f"one range for two branches: the channels before {cut} and those after it differ by {ratio:.0f}x"
                )
    return None


def _clipped(x: Tensor, planned: OperandPlan) -> list[str]:
    """Return the finding that clipping makes most of the rounding error."""
    dtype = qtype(planned.dtype)
    if planned.scale is None or planned.scale.numel() > 1 or dtype.is_float:
        return []
    scale, zero = float(planned.scale), planned.zero_point or 0
    beyond = x - x.clamp((dtype.qmin - zero) * scale, (dtype.qmax - zero) * scale)
    # Less than half of a step beyond is rounding, not clipping.
    beyond = beyond[beyond.abs() > scale / 2]
    error = float(beyond.square().sum())
    rounding = x.numel() * scale**2 / 12
    if error <= rounding:
        return []
    share = len(beyond) / x.numel()
    return [f"{100 * share:.2g}% of its values are clipped, {100 * error / (error + rounding):.0f}% of its error"]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
