"""Generated functions: the rewritten one computes the same, and stripping it gives back the original tree."""

from __future__ import annotations

import ast
import linecache
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from source_tools import NAMESPACE, stripped
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.rewrite.source_file import SourceFile

# Every expression is a square matrix, so that any two can be multiplied, added and compared.
NAMES = ("a", "b", "ä", "self.w")
SPACES = st.sampled_from(("", " ", "  ", " \\\n  ", " # c ( @ + )\n"))


def _pad(expression: str, space: str) -> str:
    return expression if "\n" in space or "\\" in space else f"{space}{expression}{space}"


@st.composite
def _binary(draw: st.DrawFn, inner: st.SearchStrategy[str]) -> str:
    left, right = draw(inner), draw(inner)
    operator = draw(st.sampled_from(("@", "+", "-", "*")))
    before, after = draw(SPACES), draw(SPACES)
    return f"({left}{before}{operator}{after}{right})" if draw(st.booleans()) else f"({left} {operator} {right})"


@st.composite
def _call(draw: st.DrawFn, inner: st.SearchStrategy[str]) -> str:
    left, right = draw(inner), draw(inner)
    space, name = draw(SPACES), draw(st.sampled_from(NAMES))
    return draw(
        st.sampled_from(
            (
                f"torch.matmul({space}{left},{space}{right}{space})",
                f"torch.matmul({left}, other={right})",
                f"torch.matmul(other={right}, input={left})",
                f"torch.matmul(*[{left}, {right}])",
                f"torch.matmul({left}, *({right},))",
                f"F.linear({left}, {right})",
                f"({left}).matmul({right})",
                f"({left}).T.matmul({right}).T",
                f"torch.add({left}, {right}, alpha=0.5)",
                f"torch.bmm(({left})[None], ({right})[None])[0]",
                f"torch.mm({space}{left}, mat2={right})",
                f"({left}).addmm({right},{space}{left})",
                f"torch.baddbmm(({left})[None], ({left})[None], batch2=({right})[None])[0]",
                f"torch.einsum('ij,jk->ik',{space}{left}, {right})",
                f"torch.einsum('ij,jk->ik',{space}({left}, {right}))",
                f"torch.einsum('ij,jk->ik', ([{left}, {right}]))",
                f"torch.einsum('ij,jk,kl->il', {left}, {right}, {left})",
                f"F.scaled_dot_product_attention({left}, {right}, value={left}{space})",
                f"(lambda y: y @ {right})({left})",
                f"[x @ {right} for x in ({left},)][0]",
                f"sum(x + {right} for x in ({left}, {left}))",
                f"({left} if a is b else {right})",
                f"(z := {left} + {right})",
                f"(f'{{{name} @ b}}' and {right})",
                f"helper(self, {left}, y={right})",
                f"{{'ö': {left} @ a}}['ö']",
            )
        )
    )


@st.composite
def _unary(draw: st.DrawFn, inner: st.SearchStrategy[str]) -> str:
    body = draw(inner)
    return draw(st.sampled_from((f"-{body}", f"({body}).T", f"({body}).tanh()", f"({body})[:]", f"(({body}))")))


EXPRESSIONS = st.recursive(
    st.sampled_from(NAMES), lambda inner: st.one_of(_binary(inner), _call(inner), _unary(inner)), max_leaves=8
)


@st.composite
def _statements(draw: st.DrawFn) -> list[str]:
    lines = []
    for _ in range(draw(st.integers(0, 4))):
        value = draw(EXPRESSIONS)
        lines += draw(
            st.sampled_from(
                (
                    [f"a = {value}"],
                    [f"b = b.clone(); alias = b; b += {value}; a = alias"],
                    [f"a @= {value}"],
                    [f"b: object = {value}"],
                    [f"ä = {value}; b = ä @ a"],
                    [f"if a.sum() > 0: b = {value}"],
                    ["for _ in range(2):", f"    b = (b @ {value}).tanh()"],
                    ["def inner(y, w=b):", f"    return y @ w + ({value})", "a = inner(a)"],
                    ["'''", "a @ b + \x0c ä", "'''", f"a = {value}"],
                )
            )
        )
    return lines


@st.composite
def modules(draw: st.DrawFn) -> str:
    """The text of a module with a class ``Made`` and a function ``helper``."""
    forward = [*draw(_statements()), f"return {draw(EXPRESSIONS)}"]
    return "\n".join(
        (
            "import torch",
            "from torch import nn",
            "import torch.nn.functional as F",
            "",
            "def helper(module, x, y):",
            "    z = x @ y  # Größe",
            "    return torch.matmul(z, module.w) + x",
            "",
            "class Made(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            "        self.w = nn.Parameter(torch.randn(16, 16) / 4)",
            "",
            "    def forward(self, a, b, ä):",
            "        a, b, ä = a.clone(), b.clone(), ä.clone()",
            *(f"        {line}" for line in forward),
            "",
        )
    )


def _made(text: str) -> dict[str, Any]:
    """Execute a module's text, whose lines are known to ``linecache``."""
    name = f"<generated {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, [line + "\n" for line in text.split("\n")], name)
    namespace: dict[str, Any] = {"__name__": "generated"}
    exec(compile(text, name, "exec", dont_inherit=True), namespace)
    return namespace


QUICK = settings(
    max_examples=60,
    report_multiple_bugs=False,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@QUICK
@given(modules())
def test_stripping_gives_back_the_original_tree(text: str) -> None:
    name = f"<generated {abs(hash(text))}>"
    linecache.cache[name] = (len(text), None, [line + "\n" for line in text.split("\n")][:-1], name)
    file = SourceFile(name, dict(NAMESPACE))
    assert file.text == text
    result = file.rewritten_text()
    assert result.count("\n") == text.count("\n")
    assert result.count("#") == text.count("#")
    assert stripped(file) == ast.dump(ast.parse(text))


@QUICK
@given(modules())
def test_a_proxy_of_a_generated_module_computes_the_same(text: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = _made(text)["Made"]().eval()
    inputs = [torch.randn(16, 16) / 4 for _ in range(3)]

    def outcome(module: nn.Module) -> tuple[Tensor, ...]:
        module.zero_grad()
        copies = [x.clone().requires_grad_() for x in inputs]
        result = module(*copies)
        try:
            result.sum().backward()
        except RuntimeError:
            return (result.detach(),)  # in-place changes may leave no gradient, in the original too
        gradients = [x.grad for x in [*copies, *model.parameters()]]
        return result.detach(), *(grad.clone() for grad in gradients if grad is not None)

    expected = outcome(model)
    q = Quantizer(preset="plain", backend="openvino")
    found = outcome(q.proxy(model))
    assert len(found) == len(expected)
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, expected, strict=True))
    if not expected[0].isfinite().all():
        return
    with torch.no_grad():
        assert torch.equal(q.calibrate(model, [inputs])(*inputs), expected[0])
        assert q.quantize(model)(*inputs).shape == expected[0].shape
