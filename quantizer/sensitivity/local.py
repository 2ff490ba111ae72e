"""The measure ``local``: the relative error at the outputs of a group's sites, by two to three float passes in all.

Legend: y a site's float output, d its change if the group is rounded. The error is |d|^2 / |y|^2, the mean over the
calls of the group's sites. The effect on the rest of the network does not count.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.observe.padding import padding_mask, without_padding
from quantizer.proxy.site import Site
from quantizer.sensitivity.groups import Group
from quantizer.sensitivity.passes import pass_of
from quantizer.sensitivity.site_changes import Pending, watched


def local(
    proxy: nn.Module, groups: Sequence[Group], args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any
) -> dict[str, float]:
    """Return the error of each group on one batch, by name."""
    del result
    mask = padding_mask(keywords, args)
    errors: dict[str, list[float]] = defaultdict(list)

    def visit(site: Site, output: Tensor, pending: Pending) -> Tensor:
        last = site.operation.name == "linear"
        power = float(without_padding(output, mask, channels_last=last).double().square().sum())
        for name, change in pending.changes().by_group.items():
            error = float(without_padding(change, mask, channels_last=last).double().square().sum())
            errors[name].append(error / power if power > 0 else 0.0)
        return output

    with torch.no_grad(), watched(groups, visit):
        pass_of(proxy, args, keywords)
    return {name: sum(values) / len(values) for name, values in errors.items()}
