"""Products that are called through attributes, items and partials: the reason says what hides them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from toy_nets import linear, net

from quantizer import Quantizer

MULTIPLY = partial(torch.matmul)
CATALOGUE = "the operation is not in the catalogue"
TEXT = "the source cannot be rewritten"


OPERATOR = "torch.ops.aten._addmm_activation(rows.new_zeros(rows.shape[1]), rows, self.weight).view_as(x)"
CALLS = {
    "self.projected(x)": "forward: self.projected is a functools.partial of linear",
    "self.nested(input=x)": "forward: self.nested is a functools.partial of linear",
    "projected = functools.partial(F.linear, weight=self.weight); x = projected(x)": "projected is a functools.partial",
    "functools.partial(F.linear, weight=self.weight)(x)": "is a functools.partial of linear",
    "self.attend(x, x, x)": "self.attend is a functools.partial of scaled_dot_product_attention",
    "self.multiply(x, self.weight)": "self.multiply is an attribute that holds matmul",
    "self.mm(x, self.weight)": "self.mm is an attribute that holds matmul",
    "self.table['multiply'](x, self.weight)": "self.table['multiply'] is an expression that gives matmul",
    "multiply = torch.matmul; x = multiply(x, self.weight)": "multiply is a local name for matmul",
    "getattr(F, 'linear')(x, self.weight)": "is an expression that gives linear",
    "next(map(self.projected, [x]))": "next: the called function is known only at run time",
    f"rows = x.flatten(0, 1); x = {OPERATOR}": "forward: torch.ops.aten._addmm_activation",
}


class OfGlobal(nn.Module):
    """A product by a name of the file."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))
        self.last = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(MULTIPLY(x, self.weight))


def _calling(call: str) -> nn.Module:
    weight = nn.Parameter(torch.randn(32, 32))
    return net(
        f"{call}; return self.last(x)" if "; x = " in call else f"self.last({call})",
        last=linear(),
        weight=weight,
        projected=partial(functional.linear, weight=weight),
        nested=partial(partial(functional.linear), weight=weight),
        multiply=torch.matmul,
        mm=torch.matmul,  # the name of another operation
        attend=partial(functional.scaled_dot_product_attention, is_causal=True),
        table={"multiply": torch.matmul},
    )


@pytest.mark.parametrize("call", [*CALLS, "a global name"])
def test_the_reason_says_what_hides_the_product(call: str) -> None:
    model, x = (OfGlobal() if call == "a global name" else _calling(call)).eval(), torch.randn(4, 6, 32)
    q = Quantizer(preset="plain", backend="openvino")
    with torch.no_grad():
        assert torch.equal(q.calib(model)(x), model(x))
    (not_quantized, *others) = q.coverage.not_quantized
    reason = CATALOGUE if "torch.ops" in call else TEXT
    detail = CALLS.get(call, "forward: MULTIPLY is a functools.partial of matmul")
    assert (not_quantized.reason, detail in not_quantized.detail) == (reason, True), not_quantized
    assert all(other.reason == not_quantized.reason for other in others)
    assert {row.name: row.quantized for row in q.coverage.rows} == {"last.forward.linear_0": True}
