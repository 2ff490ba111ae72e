"""Cross-layer equalisation (Nagel et al. 2019, arXiv:1906.04721, section 4.1).

Legend: W1 [C, ..] the weight of a layer, W2 that of the next, x [B, C, ..] what is between them, s [C] > 0.

    (W2 * s) (x / s) = W2 x        s_i = sqrt(r1_i r2_i) / r2_i        (equations 8 and 11 of the paper)

There r1_i is the largest magnitude of W1 for its output channel i, and r2_i that of W2 for its input channel i. W1 / s
and W2 * s then have the same largest magnitude in each channel, sqrt(r1_i r2_i), so one scale serves all channels.
"""

from __future__ import annotations

import torch
from torch import Tensor


def equalizing_factors(first: Tensor, second: Tensor) -> Tensor:
    """Return s [C] for r1 [C] and r2 [C], float64; 1 for a channel of zeros, which no factor changes."""
    r1, r2 = first.double(), second.double()
    s = (r1 * r2).sqrt() / r2
    return torch.where(torch.isfinite(s) & (s > 0), s, torch.ones_like(s))
