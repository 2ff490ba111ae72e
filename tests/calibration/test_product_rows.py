"""Products with a weight as x W^T: the rows give what torch computes, for every operation that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from quantizer.algorithms.gptq import ProductRows, product_rows
from quantizer.proxy.build import build_proxy, sites_of


class Net(nn.Module):
    """One product: ``compute`` is in this class's own text, so that it has a site."""

    def __init__(self, kind: str, *shape: int, **options: Any) -> None:
        super().__init__()
        self.kind, self.options = kind, options
        self.weight = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Any:
        match self.kind:
            case "linear":
                return F.linear(x, self.weight)
            case "right":
                return x @ self.weight
            case "left":
                return self.weight @ x
            case "bmm":
                return torch.bmm(x, self.weight)
            case "addbmm":
                return torch.addbmm(torch.zeros(x.shape[1], self.weight.shape[2]), x, self.weight)
            case "addmm":
                return torch.addmm(torch.zeros(self.weight.shape[1]), x, self.weight)
            case "heads":
                return torch.einsum("bsd,dhe->bshe", x, self.weight)
            case "experts":
                return torch.einsum("nek,ekm->enm", x, self.weight)
            case "conv1d":
                return F.conv1d(x, self.weight, **self.options)
            case "conv2d":
                return F.conv2d(x, self.weight, **self.options)
            case "conv3d":
                return F.conv3d(x, self.weight, None, 2, 1)
            case "transposed":
                return F.conv_transpose2d(x, self.weight)
            case _:
                return torch.einsum("bk,nk->b", x, self.weight)


def rows_of(net: Net, x: Tensor) -> tuple[ProductRows | str, Tensor]:
    """The rows of the site that ``net`` calls, and its result."""
    proxy = build_proxy(net, eager_attention=False)
    found: list[tuple[ProductRows | str, Tensor]] = []

    def judge(site: Any, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        result = function(*args, **keywords)
        weight = next(place for place in range(2) if site.argument(place, args, keywords) is net.weight)
        other = site.argument(1 - weight, args, keywords)
        found.append((product_rows(site, weight, other, net.weight.detach(), args, keywords), result))
        return result

    for site in sites_of(proxy):
        site.judge = judge
    with torch.no_grad():
        proxy(x)
    (only,) = found
    return only


CASES = [
    (Net("linear", 5, 6), (2, 3, 6)),
    (Net("linear", 5, 6), (6,)),
    (Net("right", 6, 5), (2, 3, 6)),
    (Net("right", 6, 5), (6,)),
    (Net("right", 6), (4, 6)),
    (Net("right", 4, 6, 5), (4, 3, 6)),
    (Net("right", 4, 6, 5), (2, 4, 3, 6)),
    (Net("left", 5, 6), (2, 6, 3)),
    (Net("left", 5, 6), (6,)),
    (Net("bmm", 4, 6, 5), (4, 3, 6)),
    (Net("addbmm", 4, 6, 5), (4, 3, 6)),
    (Net("addmm", 6, 5), (3, 6)),
    (Net("heads", 6, 2, 5), (2, 3, 6)),
    (Net("experts", 4, 6, 5), (3, 4, 6)),
    (Net("conv1d", 6, 4, 3), (2, 4, 9)),
    (Net("conv1d", 6, 4, 4, padding="same", dilation=2), (2, 4, 9)),
    (Net("conv2d", 6, 4, 3, 2, stride=(2, 1), padding=(1, 2), dilation=(1, 2)), (2, 4, 9, 8)),
    (Net("conv2d", 6, 2, 3, 3, groups=2, padding="valid"), (2, 4, 9, 8)),
    (Net("conv2d", 4, 1, 3, 3, groups=4, padding=1), (4, 9, 8)),
    (Net("conv3d", 6, 4, 3, 3, 2), (2, 4, 5, 6, 7)),
]


@pytest.mark.parametrize(
    ("net", "shape"), CASES, ids=lambda value: value.kind if isinstance(value, Net) else str(value)
)
def test_the_rows_give_what_torch_computes(net: Net, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    product, result = rows_of(net, x)
    assert not isinstance(product, str), product
    weight = product.weight(net.weight.detach())
    assert torch.equal(product.as_weight(weight), net.weight)
    assert product.as_weight(weight).is_contiguous()
    found = torch.cat([part @ weight.mT for part in product.inputs(x)], dim=1)
    if net.kind == "addbmm":
        assert torch.allclose(found[0], result, atol=1e-5)
    # The axes are in another order than torch's: the values are compared as a set.
    assert torch.allclose(found.flatten().sort().values, result.flatten().sort().values, atol=1e-5)


@pytest.mark.parametrize(
    ("net", "shape", "reason"),
    [
        (Net("transposed", 4, 3, 2, 2), (2, 4, 5, 5), "its operation is conv_transpose2d"),
        (Net("right", 1, 6, 5), (4, 3, 6), "one of its operands is broadcast"),
        (Net("summed", 5, 6), (2, 6), "it sums over an axis of only one operand"),
    ],
)
def test_products_without_rows_have_a_reason(net: Net, shape: tuple[int, ...], reason: str) -> None:
    assert rows_of(net, torch.randn(shape))[0] == reason
