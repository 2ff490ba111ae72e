"""The products of recurrent layers, under names of their own, so that plans can tell them from other linears."""

from __future__ import annotations

from functools import partial

from torch.nn import functional

# Not functions: their text would be searched for sites, too.
input_product = partial(functional.linear)
"""``input_product(x, weight, bias)`` with x [T, B, I]: one product for all steps."""

recurrent_product = partial(functional.linear)
"""``recurrent_product(hidden, weight, bias)`` with hidden [B, P]: one product in each step."""
