"""The measure ``output``: the divergence of the model's output with one group rounded at a time.

It is exact on these batches. It costs a pass for each group, of which the part before the group is not computed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from quantizer.common.progress import counted
from quantizer.observe.padding import padding_mask
from quantizer.proxy.restored_state import unmoved
from quantizer.sensitivity.divergence import Divergence
from quantizer.sensitivity.groups import Group
from quantizer.sensitivity.passes import pass_of
from quantizer.sensitivity.reuse import Reuse


def output(
    proxy: nn.Module, groups: Sequence[Group], args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any
) -> dict[str, float]:
    """Return the divergence due to each group on one batch, by name; ``result`` is the float output."""
    divergence = Divergence(result, padding_mask(keywords, args))
    errors: dict[str, float] = {}
    with torch.no_grad(), Reuse(proxy) as reuse:
        with unmoved(proxy):
            pass_of(proxy, args, keywords)
        with counted(groups, "sensitivity", unit="group") as steps:
            for group in steps:
                with group.rounding(), reuse.until(group.sites), unmoved(proxy):
                    errors[group.name] = divergence.of(pass_of(proxy, args, keywords))
    return errors
