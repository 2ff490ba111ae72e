"""More steps of the grammar: containers, branches, state, views and a second input."""

from __future__ import annotations

import math

from hypothesis import strategies as st
from model_steps import ANY, IMAGE, ROW, SEQUENCE, add_step, flag, one_of, step
from model_text import ModelText


@step(ROW, SEQUENCE, keeps=True)
def container(model: ModelText, draw: st.DrawFn) -> None:
    width = model.width
    layers = f"nn.Linear({width}, {width}), nn.ReLU(), nn.Linear({width}, {width}, bias=False)"
    kind = one_of(draw, "sequential", "list", "dictionary", "sum", "parameters")
    if kind == "sequential":
        model.do(f"x = {model.part('sequence', f'nn.Sequential({layers})')}(x)")
    elif kind == "list":
        model.do(f"for layer in {model.part('layers', f'nn.ModuleList([{layers}])')}:", "    x = layer(x)")
    elif kind == "dictionary":
        named = model.part("named", f"nn.ModuleDict({{'a': nn.Linear({width}, {width}), 'b': nn.LayerNorm({width})}})")
        model.do(f"x = {named}['b'](x + {named}['a'](x))")
    elif kind == "sum":
        many = model.part("layers", f"nn.ModuleList([nn.Linear({width}, {width}) for _ in range(2)])")
        model.do(f"x = sum(layer(x) for layer in {many})")
    else:
        weights = model.part(
            "weights",
            f"nn.ParameterList([torch.randn({width}, {width}) * {1 / math.sqrt(width):.3g} for _ in range(2)])",
        )
        model.do(f"for weight in {weights}:", "    x = (x @ weight).tanh()")


@step(*ANY)
def branch(model: ModelText, draw: st.DrawFn) -> None:
    kept, shape = model.name("kept"), model.shape
    model.do(f"{kept} = x")
    for _ in range(draw(st.integers(1, 2))):
        add_step(model, draw, keeping=True)
    if model.width != shape[0 if len(shape) == IMAGE else -1]:
        width = shape[0] if len(shape) == IMAGE else shape[-1]
        layer = f"nn.Conv2d({model.width}, {width}, 1)" if len(shape) == IMAGE else f"nn.Linear({model.width}, {width})"
        model.do(f"x = {model.part('back', layer)}(x)")
    model.shape = shape
    joined = one_of(
        draw,
        f"x = x + {kept}",
        f"x += {kept}",
        f"x = torch.add({kept}, x)",
        f"x = {kept}.add(x, alpha=0.5)",
        f"x = x.add_({kept})",
        f"x = ({kept} + x) * 0.5",
    )
    model.do(joined)


@step(ROW, SEQUENCE, keeps=True)
def state(model: ModelText, draw: st.DrawFn) -> None:
    width = model.width
    held = one_of(draw, "buffer", "silent buffer", "parameter", "constant", "training")
    if held.endswith("buffer"):
        model.do(f"x = x * {model.buffer(f'torch.rand({width}) + 0.5', persistent=held == 'buffer')}")
    elif held == "parameter":
        model.do(f"x = x + {model.parameter(width, scale=0.5)}")
    elif held == "constant":
        model.do(f"x = x * {model.part('factor', '0.5')} + {model.part('_offset', '0.1')}")
    else:
        model.do("if self.training:", "    x = x * 1.5")


@step(ROW, SEQUENCE, keeps=True)
def hooked(model: ModelText, draw: st.DrawFn) -> None:
    layer = model.part("linear", f"nn.Linear({model.width}, {model.width})")
    if flag(draw):
        model.function("def shifted(module, args):\n    return (args[0] + 0.25,)")
        model.made(f"{layer}.register_forward_pre_hook(shifted)")
    else:
        model.function("def halved(module, args, output):\n    return output * 0.5")
        model.made(f"{layer}.register_forward_hook(halved)")
    model.do(f"x = {layer}(x)")


@step(SEQUENCE)
def view_of_sequence(model: ModelText, draw: st.DrawFn) -> None:
    tokens, width = model.shape
    changes = {
        "x.mean(1)": (width,),
        "x[:, 0]": (width,),
        "x.mT": (width, tokens),
        "torch.cat((x, x), -1)": (tokens, 2 * width),
    }
    if tokens > 1:
        changes |= {"x[:, 1:]": (tokens - 1, width), "x.roll(1, 1)": (tokens, width)}
    if width % 2 == 0:
        changes |= {"torch.mul(*x.chunk(2, -1))": (tokens, width // 2), "x[..., ::2]": (tokens, width // 2)}
    if tokens * width <= 256:
        changes |= {"x.flatten(1)": (tokens * width,), "x.mT[:, :, :, None]": (width, tokens, 1)}
    change = draw(st.sampled_from(list(changes)))
    model.do(f"x = {change}")
    if ".mT" in change or "flatten" in change:
        model.fix_sizes()
    model.reduce(changes[change]) if len(changes[change]) == ROW else model.resize(changes[change])


@step(ROW)
def view_of_row(model: ModelText, draw: st.DrawFn) -> None:
    width = model.width
    changes = {"x[:, None]": (1, width), "x[:, :, None, None]": (width, 1, 1), "x.repeat(1, 2)": (2 * width,)}
    for part in (2, 3, 4, 8):
        if width % part == 0:
            changes |= {f"x.unflatten(1, ({part}, {width // part}))": (part, width // part)}
            changes |= {f"x.view(-1, {width // part}, {part}).transpose(1, 2)": (part, width // part)}
    change = draw(st.sampled_from(list(changes)))
    model.do(f"x = {change}")
    model.shape = changes[change]


@step(IMAGE)
def view_of_image(model: ModelText, draw: st.DrawFn) -> None:
    width, height, breadth = model.shape
    changes: dict[str, tuple[int, ...]] = {
        "x.flatten(2).transpose(1, 2)": (height * breadth, width),
        "x.mean((2, 3))": (width,),
        "F.adaptive_avg_pool2d(x, 1).flatten(1)": (width,),
        "x.amax((2, 3))": (width,),
        "x.permute(0, 1, 3, 2)": (width, breadth, height),
    }
    if min(height, breadth) > 1:
        changes |= {"F.max_pool2d(x, 2)": (width, height // 2, breadth // 2)}
    if model.size <= 256:
        changes |= {"x.flatten(1)": (model.size,)}
    change = draw(st.sampled_from(list(changes)))
    model.do(f"x = {change}")
    if change == "x.flatten(1)":
        model.fix_sizes()
    model.reduce(changes[change]) if len(changes[change]) == ROW else model.resize(changes[change])
    model.is_as_long = False


@step(*ANY)
def second_input(model: ModelText, draw: st.DrawFn) -> None:
    if "other" in model.inputs:
        return
    uses = ["x + other", "x * other", "other + x", "torch.cat((x, other), 1)"]
    if len(model.shape) == SEQUENCE:
        uses += ["(x @ other.mT).softmax(-1) @ other", "F.scaled_dot_product_attention(x, other, other)"]
    use = one_of(draw, *uses)
    if not model.is_as_long:
        model.fix_sizes()
    model.inputs["other"] = model.shape
    model.do(f"x = {use}")
    if "cat" in use:
        model.shape, model.is_as_long = (2 * model.shape[0], *model.shape[1:]), False
