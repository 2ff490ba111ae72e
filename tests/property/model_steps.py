"""The grammar: each step adds something to the text of a model. Here are layers and products.

A step is a function of the text and of Hypothesis' ``draw``, registered for the ranks of ``x`` that it takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import strategies as st
from model_blocks import BLOCKS
from model_text import ModelText

Step = Callable[[ModelText, st.DrawFn], None]

ROW, SEQUENCE, IMAGE = 1, 2, 3
ANY = (ROW, SEQUENCE, IMAGE)
SIZES = st.sampled_from((8, 1, 3, 16, 17, 32, 33, 64))
_LARGEST = 2048  # numbers of a row, so that no step makes a model slow


@dataclass(frozen=True)
class Taken:
    """What a step is drawn for.

    Attributes:
        ranks: of ``x``.
        keeps: all sizes but the width are as they were.
        times: how often it is drawn for once of the others.
    """

    ranks: tuple[int, ...]
    keeps: bool
    times: int


STEPS: dict[Step, Taken] = {}


def step(*ranks: int, keeps: bool = False, times: int = 1) -> Callable[[Step], Step]:
    """Register a step for these ranks of ``x``; see ``Taken``."""

    def register(function: Step) -> Step:
        STEPS[function] = Taken(ranks, keeps, times)
        return function

    return register


def fitting(model: ModelText, *, keeping: bool = False) -> list[Step]:
    """The steps that take what ``x`` is now, each as often as it is drawn."""
    rank = len(model.shape)
    found = [(function, taken) for function, taken in STEPS.items() if rank in taken.ranks]
    return [function for function, taken in found if taken.keeps or not keeping for _ in range(taken.times)]


def add_step(model: ModelText, draw: st.DrawFn, *, keeping: bool = False) -> None:
    """Draw one more step."""
    draw(st.sampled_from(fitting(model, keeping=keeping)))(model, draw)


def one_of(draw: st.DrawFn, *texts: str) -> str:
    """One of some spellings."""
    return draw(st.sampled_from(texts))


def flag(draw: st.DrawFn) -> bool:
    """Yes or no."""
    return draw(st.booleans())


def _heads(draw: st.DrawFn, width: int) -> int:
    return draw(st.sampled_from([heads for heads in (1, 2, 4) if width % heads == 0]))


# -- layers --------------------------------------------------------------------------------------------------------


@step(ROW, SEQUENCE, keeps=True)
def linear(model: ModelText, draw: st.DrawFn) -> None:
    width = draw(SIZES)
    layer = model.part("linear", f"nn.Linear({model.width}, {width}, bias={flag(draw)})")
    model.do(f"x = {layer}(x)")
    model.width = width


@step(*ANY, keeps=True)
def activation(model: ModelText, draw: st.DrawFn) -> None:
    layer = model.part("activation", one_of(draw, "nn.GELU()", "nn.ReLU()", "nn.Dropout(0.1)", "nn.SiLU(inplace=True)"))
    value = one_of(
        draw, "x", f"{layer}(x)", "F.gelu(x)", "torch.relu(x)", "x.tanh()", "x * torch.sigmoid(x)", "x.abs()"
    )
    model.do(f"x = {value if value != 'x' else 'x.clone().mul_(0.5)'}")


@step(*ANY, keeps=True)
def norm(model: ModelText, draw: st.DrawFn) -> None:
    width = model.width
    kinds = {
        ROW: (f"nn.LayerNorm({width})", f"nn.RMSNorm({width})", f"nn.BatchNorm1d({width})"),
        SEQUENCE: (f"nn.LayerNorm({width})", f"nn.RMSNorm({width}, eps=1e-5)"),
        IMAGE: (f"nn.BatchNorm2d({width})", f"nn.GroupNorm(1, {width})"),
    }[len(model.shape)]
    layer = model.part("norm", one_of(draw, *kinds))
    model.do(f"x = {layer}(x)")


@step(IMAGE, keeps=True)
def convolution(model: ModelText, draw: st.DrawFn) -> None:
    width, old = draw(SIZES), model.width
    groups = math.gcd(old, width) if flag(draw) else 1
    kernel = draw(st.sampled_from((1, 3)))
    padding = "" if kernel == 1 else one_of(draw, ", padding=1", ", padding='same'")
    layer = model.part("conv", f"nn.Conv2d({old}, {width}, {kernel}{padding}, groups={groups}, bias={flag(draw)})")
    weight = model.parameter(width, old, 1, 1)
    model.do(f"x = {one_of(draw, f'{layer}(x)', f'F.conv2d(x, {weight})', f'torch.conv2d(x, {weight}[:, :])')}")
    model.width = width


@step(IMAGE)
def strided_convolution(model: ModelText, draw: st.DrawFn) -> None:
    width = draw(SIZES)
    old, height, breadth = model.shape
    if flag(draw) and width * height * breadth * 4 <= _LARGEST:
        layer = model.part("conv", f"nn.ConvTranspose2d({old}, {width}, 2, stride=2, bias={flag(draw)})")
        model.shape = (width, 2 * height, 2 * breadth)
    else:
        layer = model.part("conv", f"nn.Conv2d({old}, {width}, 2, stride=2, padding=1, bias={flag(draw)})")
        model.shape = (width, height // 2 + 1, breadth // 2 + 1)
    model.is_as_long = False
    model.do(f"x = {layer}(x)")


@step(SEQUENCE, keeps=True)
def convolution_over_time(model: ModelText, draw: st.DrawFn) -> None:
    width, old = draw(SIZES), model.width
    weight = model.parameter(width, old, 3)
    layers = (
        f"nn.Conv1d({old}, {width}, 3, padding=1, bias={flag(draw)})",
        f"nn.ConvTranspose1d({old}, {width}, 3, padding=1)",
    )
    layer = model.part("conv", one_of(draw, *layers))
    called = one_of(draw, f"{layer}(x.transpose(1, 2))", f"F.conv1d(x.mT, {weight}, padding=1)")
    model.do(f"x = {called}.{one_of(draw, 'transpose(1, 2)', 'permute(0, 2, 1)')}")
    model.width = width


# -- products with a weight that is no layer's ---------------------------------------------------------------------


@step(ROW, SEQUENCE, keeps=True)
def weighted_product(model: ModelText, draw: st.DrawFn) -> None:
    old, width = model.width, draw(SIZES)
    rows = flag(draw)  # the weight is [C', C], or [C, C']
    weight = model.parameter(*((width, old) if rows else (old, width)))
    if rows:
        spellings = [
            f"F.linear(x, {weight})",
            f"F.linear(input=x, weight={weight}, bias=None)",
            f"x @ {weight}.t()",
            f"torch.matmul(x, {weight}.T)",
            f"x.matmul({weight}.mT)",
            f"torch.einsum('...c,dc->...d', x, {weight})",
        ]
    else:
        bias = model.parameter(width, scale=0.1)
        spellings = [f"x @ {weight}", f"torch.matmul(input=x, other={weight})", f"torch.matmul(*(x, {weight}))"]
        if len(model.shape) == ROW:
            spellings += [f"torch.mm(x, {weight})", f"torch.addmm({bias}, x, {weight})", f"{bias}.addmm(x, {weight})"]
        else:
            spellings += [f"torch.einsum('btc,cd->btd', x, {weight})", f"x @ {weight}[None] + {bias}"]
    model.do(f"x = {one_of(draw, *spellings)}")
    model.width = width


@step(ROW, SEQUENCE, keeps=True)
def part_of_a_weight(model: ModelText, draw: st.DrawFn) -> None:
    old, width = model.width, draw(SIZES)
    rows, columns = model.parameter(3 * width, old), model.parameter(old, 3 * width)
    spellings = (
        f"F.linear(x, {rows}[:{width}])",
        f"F.linear(x, {rows}.chunk(3)[1])",
        f"F.linear(x, {rows}.view(3, {width}, {old})[2])",
        f"F.linear(x, {rows}).chunk(3, -1)[0]",
        f"x @ {columns}[:, {width}:{2 * width}]",
        f"x @ {columns}[:, ::3]",
        f"(x @ {rows}.t())[..., :{width}]",
        f"torch.matmul(x, {columns}.unflatten(1, (3, {width})).sum(1))",
    )
    model.do(f"x = {one_of(draw, *spellings)}")
    model.width = width


@step(ROW, SEQUENCE, keeps=True)
def shared_layer(model: ModelText, draw: st.DrawFn) -> None:
    layer = model.part("linear", f"nn.Linear({model.width}, {model.width})")
    other = model.part("linear", one_of(draw, layer, f"nn.Linear({model.width}, {model.width})"))
    if flag(draw):
        model.made(f"{other}.weight = {layer}.weight")
    last = one_of(draw, f"{layer}(x)", f"F.linear(x, {layer}.weight.t())", f"x @ {layer}.weight", f"x + {layer}.bias")
    model.do(f"x = {other}(torch.relu({layer}(x)))", f"x = {last}")


@step(*ANY, keeps=True)
def levels(model: ModelText, draw: st.DrawFn) -> None:
    """One module for several tensors, whose values may differ much."""
    width = model.width
    made = f"nn.Conv2d({width}, {width}, 3, padding=1)" if len(model.shape) == IMAGE else f"nn.Linear({width}, {width})"
    layer, factor = model.part("head", made), one_of(draw, "1", "3", "20", "100")
    given = one_of(draw, f"(x, x * {factor}, x / {factor})", f"(x * {factor}, x)", f"[x / {factor}] * 2 + [x]")
    if flag(draw):
        model.do(f"x = sum(torch.tanh({layer}(level)) for level in {given})")
    else:
        model.do("kept = x", f"for level in {given}:", f"    kept = kept + torch.tanh({layer}(level))", "x = kept")


# -- products of activations ---------------------------------------------------------------------------------------


@step(SEQUENCE, keeps=True)
def attention(model: ModelText, draw: st.DrawFn) -> None:
    width, heads = model.width, _heads(draw, model.width)
    packed = model.part("packed", f"nn.Linear({width}, {3 * width}, bias={flag(draw)})")
    split = one_of(
        draw,
        f"unflatten(-1, (3, {heads}, {width // heads})).permute(2, 0, 3, 1, 4).unbind(0)",
        f"view(x.shape[0], -1, 3, {heads}, {width // heads}).permute(2, 0, 3, 1, 4)",
    )
    model.do(f"q, k, v = {packed}(x).{split}")
    scores = one_of(draw, "q @ k.mT", "torch.matmul(q, k.transpose(-1, -2))", "torch.einsum('bhqd,bhkd->bhqk', q, k)")
    fused = one_of(draw, "", ", is_causal=True", ", dropout_p=0.1 if self.training else 0.0")
    result = one_of(draw, f"({scores} * 0.25).softmax(-1) @ v", f"F.scaled_dot_product_attention(q, k, v{fused})")
    model.do(f"x = ({result}).transpose(1, 2).{one_of(draw, 'flatten(2)', f'reshape(x.shape[0], -1, {width})')}")


@step(SEQUENCE, keeps=True)
def attention_module(model: ModelText, draw: st.DrawFn) -> None:
    width, heads = model.width, _heads(draw, model.width)
    first = "batch_first=True" if flag(draw) else "batch_first=False"
    if flag(draw):
        layer = model.part("attention", f"nn.MultiheadAttention({width}, {heads}, bias={flag(draw)}, {first})")
        model.do(f"x, _ = {layer}(x, x, x{one_of(draw, '', ', need_weights=False')})")
    else:
        options = f"{first}, norm_first={flag(draw)}"
        layer = model.part("layer", f"nn.TransformerEncoderLayer({width}, {heads}, {width + 1}, {options})")
        model.do(f"x = {layer}(x)")


@step(SEQUENCE, keeps=True)
def product_of_activations(model: ModelText, draw: st.DrawFn) -> None:
    model.function("def mixed(scores, values):\n    return torch.matmul(scores.softmax(-1), values)")
    scores = one_of(
        draw,
        "torch.bmm(x, x.transpose(1, 2))",
        "torch.baddbmm(x.mean(-1, keepdim=True), x, x.mT, alpha=0.5)",
        "torch.einsum('btc,bsc->bts', x, x)",
        "x.bmm(x.mT).contiguous()",
    )
    model.do(f"x = {one_of(draw, f'mixed({scores}, x)', f'({scores} * 0.1).tanh() @ x')}")


@step(ROW, SEQUENCE, keeps=True, times=4)
def handwritten(model: ModelText, draw: st.DrawFn) -> None:
    block = draw(st.sampled_from(BLOCKS))
    layer = model.part("block", f"blocks.{block.__name__}({model.width})")
    model.do(f"x = {layer}(x)")
