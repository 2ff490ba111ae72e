"""Steps of what models of others do: weights spread over the batch, changes in place, parts of TorchScript."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from model_steps import ANY, ROW, SEQUENCE, SIZES, flag, one_of, step
from model_text import ModelText


def _spread(draw: st.DrawFn, weight: str, rows: int, columns: int) -> str:
    """Return a weight once for each row of the batch: [rows, columns] as [B, rows, columns]."""
    batch = one_of(draw, "x.shape[0]", "x.size(0)")
    return one_of(
        draw,
        f"{weight}.expand({batch}, -1, -1)",
        f"{weight}[None].expand({batch}, {rows}, {columns})",
        f"{weight}.unsqueeze(0).broadcast_to({batch}, {rows}, {columns})",
        f"{weight}.repeat({batch}, 1, 1)",
        f"{weight}[None].repeat_interleave({batch}, dim=0)",
        f"({weight} * 0.5).expand({batch}, -1, -1)",
    )


@step(ROW, SEQUENCE, keeps=True)
def spread_weight(model: ModelText, draw: st.DrawFn) -> None:
    old, width = model.width, draw(SIZES)
    spread = _spread(draw, model.parameter(old, width), old, width)
    given = "x" if len(model.shape) == SEQUENCE else "x[:, None]"
    product = one_of(
        draw,
        f"torch.bmm({given}, {spread})",
        f"{given} @ {spread}",
        f"torch.matmul({given}, {spread})",
        f"torch.einsum('btc,bcd->btd', {given}, {spread})",
        f"torch.baddbmm({model.parameter(width, scale=0.1)}, {given}, {spread}, alpha=0.5)",
    )
    model.do(f"x = {product}" if given == "x" else f"x = ({product})[:, 0]")
    model.width = width


@step(SEQUENCE)
def queries(model: ModelText, draw: st.DrawFn) -> None:
    """Learned queries that look at the tokens: their number takes the place of the length."""
    number, width = draw(st.sampled_from((1, 3, 8))), model.width
    spread = _spread(draw, model.parameter(number, width, scale=1.0), number, width)
    scale = f"{1 / math.sqrt(width):.3g}"
    result = one_of(
        draw,
        f"torch.bmm((torch.bmm(x, queries.mT).mT * {scale}).softmax(-1), x)",
        f"(queries @ x.transpose(1, 2) * {scale}).softmax(-1) @ x",
        f"torch.einsum('bqd,bkd->bqk', queries, x).mul({scale}).softmax(-1) @ x + queries",
    )
    model.do(f"queries = {spread}", f"x = {result}")
    model.reduce((number, width))


@step(*ANY, keeps=True, times=2)
def in_place(model: ModelText, draw: st.DrawFn) -> None:
    """A change of ``x`` itself, which as the first step is the caller's."""
    change = one_of(
        draw,
        "x.mul_(0.5)",
        "x += 0.25",
        "x.clamp_(-2, 2)",
        "x[:, :1] = 0.5",
        "x[..., 0] *= 2",
        "x[..., 0].add_(1)",
        "x.sub_(x.mean()).div_(x.abs().mean() + 1)",
        "torch.relu_(x)",
        "F.relu(x, inplace=True)",
        "x.copy_(x * 0.5)",
        "torch.mul(x, 0.5, out=x)",
    )
    model.do("with torch.no_grad():", f"    {change}") if "out=" in change else model.do(change)


@step(ROW, SEQUENCE, keeps=True)
def scripted(model: ModelText, draw: st.DrawFn) -> None:
    """A part that torch has compiled: its products have no source."""
    old, width = model.width, draw(SIZES)
    layers = f"nn.Sequential(nn.Linear({old}, {width}), nn.{one_of(draw, 'ReLU', 'GELU')}())"
    if flag(draw):
        layer = model.part("scripted", f"torch.jit.script({layers})")
    else:
        layer = model.part("traced", f"torch.jit.trace({layers}, torch.randn(2, {old}))")
    model.do(f"x = {layer}(x)")
    model.width = width
