"""Steps of the grammar in several types: casts around products, autocast blocks, tensors that forward makes.

``self.kind`` is the float type of the model as it was drawn, which an export in another type does not change.
"""

from __future__ import annotations

from hypothesis import strategies as st
from model_steps import ANY, ROW, SEQUENCE, SIZES, flag, one_of, step
from model_text import ModelText

_KINDS = ("torch.float64", "torch.float16", "torch.bfloat16", "torch.float32")


@step(ROW, SEQUENCE, keeps=True)
def product_between_casts(model: ModelText, draw: st.DrawFn) -> None:
    old, width, kind = model.width, draw(SIZES), one_of(draw, *_KINDS)
    weight, bias = model.parameter(width, old), model.parameter(width, scale=0.1)
    product = one_of(
        draw,
        f"x.to({kind}) @ {weight}.to({kind}).t()",
        f"F.linear(x.to({kind}), {weight}.to({kind}), {bias}.to({kind}))",
        f"torch.einsum('...c,dc->...d', x.to({kind}), {weight}.to({kind}))",
    )
    model.do(f"x = ({product}).to(self.kind)")
    model.width = width


@step(ROW, SEQUENCE, keeps=True)
def autocast_block(model: ModelText, draw: st.DrawFn) -> None:
    width = draw(SIZES)
    layer, weight = model.part("linear", f"nn.Linear({model.width}, {width})"), model.parameter(width, width)
    inside = one_of(draw, f"{layer}(x)", f"F.gelu({layer}(x)) @ {weight}", f"({layer}(x) @ {weight}).softmax(-1)")
    model.do("with torch.autocast('cpu', dtype=torch.bfloat16):", f"    x = {inside}", "x = x.to(self.kind)")
    model.width = width


@step(*ANY)
def made_floats(model: ModelText, draw: st.DrawFn) -> None:
    last = "x.shape[-1]"
    made = one_of(
        draw,
        "(x > 0).to(self.kind)",
        f"torch.arange({last}).to(self.kind) / 8",
        f"torch.linspace(0, 1, {last}, dtype=self.kind)",
        f"torch.zeros({last}, dtype=self.kind)",
        f"torch.ones({last}, dtype=self.kind).cumsum(0).cos()",
    )
    where = "torch.where(x > 1, x, torch.full((1,), -1.0, dtype=self.kind))"
    model.do(f"x = {one_of(draw, f'x + {made}', f'x * {made}', where)}")
    if flag(draw):
        # On purpose in float32.
        model.do("x = (x.float() * torch.rsqrt(x.float().pow(2).mean() + 1e-3)).to(self.kind)")
