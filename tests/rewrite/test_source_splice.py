"""What becomes of the text: every form of expression, at its place, on its line."""

from __future__ import annotations

import ast
import math
import textwrap
from pathlib import Path

import pytest
import torch
from source_tools import rewritten_body, sites_of, source_file, stripped

from quantizer.plan.reasons import ReasonCode
from quantizer.rewrite.host_argument import HOST
from quantizer.rewrite.text_edits import Edit, LineIndex, apply_edits, find_symbol


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a @ b", "return s.matmul_0(a, b)"),
        ("return a@b", "return s.matmul_0(a,b)"),
        ("return a  @ b", "return s.matmul_0(a , b)"),
        # Two expressions that start at one column: the outer opens first.
        ("return a @ b @ c", "return s.matmul_0(s.matmul_1(a, b), c)"),
        ("return a @ (b @ c)", "return s.matmul_0(a, (s.matmul_1(b, c)))"),
        ("return (a @ b) @ c", "return s.matmul_0((s.matmul_1(a, b)), c)"),
        ("return (a) @ (b)", "return s.matmul_0((a), (b))"),
        ("return ((a)) @ -b", "return s.matmul_0(((a)), -b)"),
        ("return a + b @ c", "return s.add_0(a, s.matmul_0(b, c))"),
        ("return a @ b + c", "return s.add_0(s.matmul_0(a, b), c)"),
        ("return a + b + c + a", "return s.add_0(s.add_1(s.add_2(a, b), c), a)"),
        ("return -(a @ b)[0].T", "return -(s.matmul_0(a, b))[0].T"),
        ("return a @ b if c else b @ a", "return s.matmul_0(a, b) if c else s.matmul_1(b, a)"),
        ("return [a @ x for x in b]", "return [s.matmul_0(a, x) for x in b]"),
        ("return (a @ x for x in b)", "return (s.matmul_0(a, x) for x in b)"),
        ("return sum(a @ x for x in b)", "return sum(s.matmul_0(a, x) for x in b)"),
        ("return {a + x: b for x in c}", "return {s.add_0(a, x): b for x in c}"),
        ("return (lambda y: a @ y)(b)", "return (lambda y: s.matmul_0(a, y))(b)"),
        ("return a if (x := a @ b) is None else x", "return a if (x := s.matmul_0(a, b)) is None else x"),
        ("return a[b + c]", "return a[s.add_0(b, c)]"),
        ("yield a @ b", "yield s.matmul_0(a, b)"),
        ("assert a @ b, c", "assert s.matmul_0(a, b), c"),
        ("x: object = a @ b; return x", "x: object = s.matmul_0(a, b); return x"),
        # Calls.
        ("return torch.matmul(a, b)", "return s.matmul_0(torch.matmul, a, b)"),
        ("return torch.matmul( a, b )", "return s.matmul_0(torch.matmul,  a, b )"),
        ("return torch.matmul(input=a, other=b)", "return s.matmul_0(torch.matmul, input=a, other=b)"),
        ("return torch.matmul(a, other=b)", "return s.matmul_0(torch.matmul, a, other=b)"),
        ("return torch . matmul (a, b)", "return s.matmul_0(torch . matmul , a, b)"),
        ("return (torch.matmul)(a, b)", "return s.matmul_0((torch.matmul), a, b)"),
        ("return torch.bmm(a, torch.bmm(b, c))", "return s.bmm_0(torch.bmm, a, s.bmm_1(torch.bmm, b, c))"),
        ("return torch.nn.functional.linear(a, b, c)", "return s.linear_0(torch.nn.functional.linear, a, b, c)"),
        ("return F.linear(a, b, bias=c)", "return s.linear_0(F.linear, a, b, bias=c)"),
        ("return F.conv2d(a, b, stride=2)", "return s.conv2d_0(F.conv2d, a, b, stride=2)"),
        ("return torch.add(a, b, alpha=2)", "return s.add_0(torch.add, a, b, alpha=2)"),
        # Methods.
        ("return a.matmul(b)", "return s.matmul_0(a, b)"),
        ("return a.matmul(other=b)", "return s.matmul_0(a, other=b)"),
        ("return a.T.bmm(b.T)", "return s.bmm_0(a.T, b.T)"),
        ("return a.matmul(b).matmul(c)", "return s.matmul_0(s.matmul_1(a, b), c)"),
        ("return (a @ b).matmul(c)", "return s.matmul_0((s.matmul_1(a, b)), c)"),
        ("return (a + b).bmm(c)", "return s.bmm_0((s.add_0(a, b)), c)"),
        # In place.
        ("a += b", "a = s.add_0(a, b)"),
        ("a+=b", "a= s.add_0(a,b)"),
        ("a @= b @ c", "a = s.matmul_0(a, s.matmul_1(b, c))"),
        ("a += b if c else a", "a = s.add_0(a, b if c else a)"),
        ("a += lambda: b", "a = s.add_0(a, lambda: b)"),
        # Literals are no tensors.
        ("return a + 1", "return a + 1"),
        ("return 'x' + a", "return 'x' + a"),
        ("return [a] + b", "return [a] + b"),
        ("return (a, b) + c", "return (a, b) + c"),
        ("return -1 + a", "return -1 + a"),
        ("a += 1", "a += 1"),
        ("return a - b * c / a // b % c", "return a - s.mul_0(b, c) / a // b % c"),
    ],
)
def test_forms(tmp_path: Path, body: str, expected: str) -> None:
    assert rewritten_body(tmp_path, body) == expected


@pytest.mark.parametrize(
    "body",
    [
        "return (a  # + comment @ (\n    @  # the operator\n    b)",
        "return (\n    a\n    @ b\n    @ (  # deeper )\n        c\n    )\n)",
        "return a \\\n    @ \\\n    b",
        "return torch.matmul(  # first (\n    a,\n    b,  # last\n)",
        "return torch \\\n    .matmul(a, b)",
        "return (torch\n    .matmul(a, b))",
        "return a.matmul(\n    b\n)",
        "return (a\n    .transpose(0, 1)\n    .matmul(b))",
        "a += (\n    b  # += c\n    @ c\n)",
        "x = a @ b; y = x @ c\nreturn x + y",
        "if (a @ b).any(): return a\nreturn c",
        "return torch.matmul(\n\n\n    a, b)",
        "\x0creturn a @ b",
        "x = a\n\x0c\ny = b\nreturn x @ y",
        "x = '''\n@ + (\n'''\nreturn a @ b, x",
        "return 'äöü🙂', a @ b",
        "äö = a @ b; return äö @ 'ß'.join(c) + äö",
        "return (a @ b  # 🙂\n    @ c)",
        "return torch.matmul(a, b, )",
    ],
)
def test_layout_is_kept(tmp_path: Path, body: str) -> None:
    """``rewritten_body`` checks the number of lines, that the result compiles, and that it strips back."""
    result = rewritten_body(tmp_path, body)
    assert "s." in result
    assert result.count("#") == body.count("#")
    for comment in ("# + comment @ (", "# deeper )", "# first (", "# += c", "# 🙂"):
        assert (comment in result) == (comment in body)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("return f'{a @ b}'", "a call inside an f-string is not quantized; to quantize it"),
        ("return f'{f\"{a @ b}\"}'", "a call inside an f-string"),
        ("return f'{torch.matmul(a, b)}'", "a call inside an f-string"),
        ("return f'{a:{b @ c}}'", "a call inside an f-string"),
        (
            "return torch.matmul(a, b, out=c)",
            "out= writes into a tensor of the caller, so it is not quantized",
        ),
        ("self.x += a", "an in-place operation on an attribute or an item is not quantized; to quantize it"),
        ("a[0] += b", "an in-place operation on an attribute or an item is not quantized; to quantize it"),
        ("return [(lambda self: self @ a)(b)]", "an argument 'self' of an inner function hides the module"),
        (
            "def inner(self):\n    return self @ a\nreturn inner(b)",
            "an argument 'self' of an inner function hides the module",
        ),
        ("class Inner:\n    x = a @ b\nreturn Inner", "a class defined inside a function is not quantized"),
        ("return a.matmul \\\n    (b)", "the method name and its parenthesis are on different lines"),
        ("self = a\nreturn self @ b", "the function assigns to its argument 'self'"),
        ("return [self @ a for self in b]", "the function assigns to its argument 'self'"),
    ],
)
def test_what_is_left_alone_says_why(tmp_path: Path, body: str, reason: str) -> None:
    assert "s." not in rewritten_body(tmp_path, body).replace("self.x", "")
    text = "def forward(self, a, b, c):\n" + "".join(f"    {line}\n" for line in body.split("\n"))
    reasons = {site.reason for site in sites_of(source_file(tmp_path, text))}
    assert len(reasons) == 1
    assert (reasons.pop() or "").startswith(reason)


def test_names_are_ordinal_and_lines_those_of_the_text(tmp_path: Path) -> None:
    file = source_file(
        tmp_path,
        """
        def forward(self, a, b):
            x = a @ b

            y = x @ b + torch.matmul(x, b)
            return f"{a @ b}", y @ y
        """,
    )
    found = [(site.name, site.line, site.reason is None) for site in sites_of(file)]
    assert found == [
        ("forward.matmul_0", 3, True),
        ("forward.add_0", 5, True),
        ("forward.matmul_1", 5, True),
        ("forward.matmul_2", 5, True),
        ("forward.matmul_3", 6, False),
        ("forward.matmul_4", 6, True),
    ]
    assert {site.attribute for site in sites_of(file)} >= {"site_forward_matmul_0", "site_forward_add_0"}


@pytest.mark.parametrize(
    ("imports", "call"),
    [
        ("import torch as t", "t.matmul(a, b)"),
        ("import torch.nn.functional as fun", "fun.linear(a, b)"),
        ("from torch.nn import functional", "functional.linear(a, b)"),
        ("from torch.nn.functional import linear as li", "li(a, b)"),
        ("from torch import bmm", "bmm(a, b)"),
        ("import torch.nn", "torch.nn.functional.linear(a, b)"),
        ("from torch import conv1d", "conv1d(a, b)"),
    ],
)
def test_import_aliases(tmp_path: Path, imports: str, call: str) -> None:
    namespace: dict[str, object] = {}
    exec(imports, namespace)
    namespace.pop("__builtins__")
    result = rewritten_body(tmp_path, f"return {call}", **namespace)
    assert result.startswith("return s.")


@pytest.mark.parametrize(
    "body",
    [
        "linear = a\nreturn linear(a, b)",
        "def linear(x, y): return x\nreturn linear(a, b)",
        "for linear in a:\n    linear(a, b)",
        "with a as linear:\n    linear(a, b)",
        "import math as linear\nreturn linear(a, b)",
        "from math import floor as linear\nreturn linear(a, b)",
        "return [linear(a, b) for linear in c]",
        "try:\n    pass\nexcept ValueError as linear:\n    linear(a, b)",
        "class linear: pass\nreturn linear(a, b)",
        "match a:\n    case linear:\n        return linear(a, b)",
    ],
)
def test_a_local_hides_a_global(tmp_path: Path, body: str) -> None:
    result = rewritten_body(tmp_path, body, linear=torch.nn.functional.linear)
    assert "s." not in result


def test_an_argument_hides_a_global(tmp_path: Path) -> None:
    result = rewritten_body(tmp_path, "return linear(a, b)", "self, a, b, linear", linear=torch.nn.functional.linear)
    assert "s." not in result


def test_a_global_statement(tmp_path: Path) -> None:
    body = "global linear\nreturn linear(a, b)"
    assert "s.linear_0(linear, a, b)" in rewritten_body(tmp_path, body, linear=torch.nn.functional.linear)


@pytest.mark.parametrize("call", ["math.add(a, b)", "np.matmul(a, b)", "self.matmul(a, b)", "unknown(a, b)"])
def test_other_functions_of_the_same_name(tmp_path: Path, call: str) -> None:
    import numpy

    result = rewritten_body(tmp_path, f"return {call}", math=math, np=numpy)
    # A method called matmul of something unknown may be a tensor's; the site calls whatever it is.
    assert result in (f"return {call}", "return s.matmul_0(self, a, b)")


@pytest.mark.parametrize(
    ("signature", "host"),
    [
        ("def f(module, a, b):", "module"),
        ("def f(self, a, b):", "self"),
        ("def f(attention: nn.Module, a, b):", "attention"),
        ("def f(attention: 'torch.nn.Module', a, b):", "attention"),
        ("def f(attention: Module, a, b):", "attention"),
        ("async def f(module, a, b):", "module"),
        ("def f(module, /, a, b):", "module"),
        ("def f(a, b):", "_quantizer_host"),
        ("def f(a: nn.Linear, b):", "_quantizer_host"),
        ("def f(*module, a, b):", "_quantizer_host"),
        ("def f(*, module, a, b):", "_quantizer_host"),
    ],
)
def test_which_argument_is_the_module(tmp_path: Path, signature: str, host: str) -> None:
    file = source_file(tmp_path, f"{signature}\n    return a @ b\n")
    assert f"return {host}.site_f_matmul_0(a, b)" in file.rewritten_text()
    assert ("_quantizer_host)" in file.rewritten_text() or "_quantizer_host, " in file.rewritten_text()) == (
        host == "_quantizer_host"
    )


@pytest.mark.parametrize("decorator", ["staticmethod", "classmethod"])
def test_methods_without_a_module(tmp_path: Path, decorator: str) -> None:
    file = source_file(tmp_path, f"class C:\n    @{decorator}\n    def f(x, a, b):\n        return a @ b\n")
    assert f"    def f(x, a, b, *, {HOST}):\n        return {HOST}.site_f_matmul_0(a, b)\n" in file.rewritten_text()


SIGNATURES = [
    ("()", f"(*, {HOST})"),
    ("( )", f"(*, {HOST} )"),
    ("(a, b=1)", f"(a, b=1, *, {HOST})"),
    ("(a, b=(1))", f"(a, b=(1), *, {HOST})"),
    ("(a, b=(1, 2),)", f"(a, b=(1, 2), *, {HOST})"),
    ("(a, /)", f"(a, /, *, {HOST})"),
    ("(a: 'x' = ')', /, b: dict[str, int] = {})", f"(a: 'x' = ')', /, b: dict[str, int] = {{}}, *, {HOST})"),
    ("(*args)", f"(*args, {HOST})"),
    ("(*args: int, )", f"(*args: int, {HOST}, )"),
    ("(a, *, c=1, d)", f"(a, *, {HOST}, c=1, d)"),
    ("(*args, c: int)", f"(*args, {HOST}, c: int)"),
    ("(**kw)", f"(*, {HOST}, **kw)"),
    ("(a=2**3, ** kw)", f"(a=2**3, *, {HOST}, ** kw)"),
    ("(a, *args, **kw)", f"(a, *args, {HOST}, **kw)"),
    ("(a, *, c, **kw)", f"(a, *, {HOST}, c, **kw)"),
    ("(\n    a,  # é ** )\n    b='é)',\n)", f"(\n    a,  # é ** )\n    b='é)', *, {HOST}\n)"),
    ("(\n    a,  # é\n    **kw,\n)", f"(\n    a,  # é\n    *, {HOST}, **kw,\n)"),
    ("(\n    a  # ,\n)", f"(\n    a, *, {HOST}  # ,\n)"),
]


@pytest.mark.parametrize(("signature", "expected"), SIGNATURES)
@pytest.mark.parametrize("arrow", ["", " -> Tensor"])
def test_the_argument_for_a_host_fits_every_signature(
    tmp_path: Path, signature: str, expected: str, arrow: str
) -> None:
    file = source_file(tmp_path, f"é = 1\nasync def f{signature}{arrow}:\n    return x @ y\n")
    assert file.rewritten_text().partition(":\n    return")[0] == f"é = 1\nasync def f{expected}{arrow}"
    assert stripped(file) == ast.dump(ast.parse(file.text))


def test_a_function_that_reads_its_locals_gets_no_argument_more(tmp_path: Path) -> None:
    file = source_file(tmp_path, "def f(a, b):\n    return a @ b + len(locals())\n")
    assert {site.reason for site in sites_of(file)} == {ReasonCode.READS_LOCALS.text()}
    assert file.rewritten_text() == file.text


def test_loops_over_children_do_not_see_the_sites(tmp_path: Path) -> None:
    body = """
    for m in self.children(): a = m(a)
    for n, m in b.named_modules(): a = m(a)
    self._modules['x'] = c
    del self._modules['x']
    return list(self._modules.values())
    """
    text = rewritten_body(tmp_path, textwrap.dedent(body).strip())
    assert (
        text
        == textwrap.dedent("""
        for m in _quantizer_visible(self.children()): a = m(a)
        for n, m in _quantizer_visible(b.named_modules()): a = m(a)
        self._modules['x'] = c
        del self._modules['x']
        return list(_quantizer_visible(self._modules).values())
    """).strip()
    )


def test_decorators_defaults_and_annotations_are_not_rewritten(tmp_path: Path) -> None:
    text = """
    def forward(self, a, b=X @ X):
        return a @ b

    @decorate(X @ X)
    def other(self, a: X @ X) -> X @ X:
        def inner(c=a @ a): return c
        return inner
    """
    file = source_file(tmp_path, text)
    assert [site.name for site in sites_of(file)] == ["forward.matmul_0", "other.matmul_0"]
    assert "b=X @ X" in file.rewritten_text()
    assert "decorate(X @ X)" in file.rewritten_text()
    assert stripped(file) == ast.dump(ast.parse(file.text))


def test_functions_under_conditions_and_in_functions(tmp_path: Path) -> None:
    file = source_file(
        tmp_path,
        """
        if torch:
            def one(self, a): return a @ a
        else:
            def one(self, a): return a @ a
        try:
            class C:
                def two(self, a): return a @ a
        except ImportError:
            class C:
                def two(self, a): return a @ a
        finally:
            pass
        with open:
            def three(self, a): return a @ a
        def four(self):
            class Inner(Base):
                def five(self, a): return a @ a
            class Helper:
                def seven(self, a): return a @ a
            def six(self, a): return a @ a
            return Inner
        """,
    )
    found = {(name, len(function.sites)) for (name, _), function in file.functions.items()}
    assert found == {("one", 1), ("C.two", 1), ("three", 1), ("four", 3), ("four.<locals>.Inner.five", 1)}
    assert len(file.functions) == 7
    assert file.rewritten_text().count(".site_") == 6
    assert stripped(file) == ast.dump(ast.parse(file.text))


# -- the small tools -----------------------------------------------------------------------------------------------


def test_columns_are_bytes_and_lines_end_at_newlines_only() -> None:
    text = "x = 'ä\x0c\x1c\u2028'; y = z\r\nw = 1\n"
    tree = ast.parse(text)
    index = LineIndex(text)
    y = tree.body[1]
    assert isinstance(y, ast.Assign)
    assert index.data[index.start(y) : index.end(y)] == b"y = z"
    w = tree.body[2]
    assert index.data[index.start(w) : index.end(w)] == b"w = 1"


@pytest.mark.parametrize(
    ("text", "expected"), [(b" @ ", 1), (b" # @\n @", 6), (b" # @", None), (b"\\\n@", 2), (b") + (", None), (b"", None)]
)
def test_find_symbol(text: bytes, expected: int | None) -> None:
    assert find_symbol(text, b"@", 0, len(text)) == expected


def test_edits_at_one_place() -> None:
    edits = [
        Edit.opening(1, "inner(", 2),
        Edit.opening(1, "outer(", 1),
        Edit.closing(1, ")", 2),
        Edit.closing(1, "]", 1),
        Edit.replacing(2, 1, "ü"),
    ]
    for order in (edits, edits[::-1]):
        assert apply_edits(b"abcd", order) == "a)]outer(inner(büd"
