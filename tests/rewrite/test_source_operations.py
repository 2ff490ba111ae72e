"""Every operation of the catalogue is found under any name and in any form of call, or left alone with a reason."""

from __future__ import annotations

import pkgutil
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from source_tools import rewritten_body, sites_of, source_file
from torch.nn import functional

from quantizer.plan.reasons import ReasonCode
from quantizer.rewrite.operations import CATALOGUE, kind_of, operation, operation_of
from quantizer.rewrite.product_sizes import Call, Geometry, labels


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return torch.mm(a, b)", "return s.mm_0(torch.mm, a, b)"),
        ("return torch.mm(a, mat2=b)", "return s.mm_0(torch.mm, a, mat2=b)"),
        ("return a.mm(b)", "return s.mm_0(a, b)"),
        ("return torch.addmm(a, b, c)", "return s.addmm_0(torch.addmm, a, b, c)"),
        ("return torch.addmm(a, mat1=b, mat2=c)", "return s.addmm_0(torch.addmm, a, mat1=b, mat2=c)"),
        ("return a.addmm(b, c, beta=0.5)", "return s.addmm_0(a, b, c, beta=0.5)"),
        ("return torch.baddbmm(a, b, c, alpha=2)", "return s.baddbmm_0(torch.baddbmm, a, b, c, alpha=2)"),
        ("return a.baddbmm(b, c)", "return s.baddbmm_0(a, b, c)"),
        ("return torch.addbmm(a, b, c)", "return s.addbmm_0(torch.addbmm, a, b, c)"),
        ("return a.addbmm(batch1=b, batch2=c)", "return s.addbmm_0(a, batch1=b, batch2=c)"),
        ("return F.conv_transpose1d(a, b)", "return s.conv_transpose1d_0(F.conv_transpose1d, a, b)"),
        ("return torch.conv_transpose2d(a, b)", "return s.conv_transpose2d_0(torch.conv_transpose2d, a, b)"),
        ("return F.conv_transpose3d(a, weight=b)", "return s.conv_transpose3d_0(F.conv_transpose3d, a, weight=b)"),
        ("return torch.conv3d(a, b)", "return s.conv3d_0(torch.conv3d, a, b)"),
        ("return F.embedding(a, b)", "return s.embedding_0(F.embedding, a, b)"),
        ("return F.embedding(input=a, weight=b)", "return s.embedding_0(F.embedding, input=a, weight=b)"),
        ("return torch.einsum('ij,jk->ik', a, b)", "return s.einsum_0(torch.einsum, 'ij,jk->ik', a, b)"),
        ("return torch.einsum('ij,jk->ik', (a, b))", "return s.einsum_0(torch.einsum, 'ij,jk->ik', *(a, b))"),
        (
            "return torch.einsum('ij,jk', ([a, b @ c]))",
            "return s.einsum_0(torch.einsum, 'ij,jk', *([a, s.matmul_0(b, c)]))",
        ),
        ("return torch.einsum('ij,jk', a)", "return s.einsum_0(torch.einsum, 'ij,jk', *a)"),
        ("return a.addmm_(b, c)", "return s.addmm_0(a, b, c)"),
        ("return a.baddbmm_(b, c)", "return s.baddbmm_0(a, b, c)"),
        ("a.add_(b, alpha=2)", "s.add_0(a, b, alpha=2)"),
        ("return a.add(b)", "return s.add_0(a, b)"),
        ("a.add(b)", "a.add(b)"),
        ("self.add(b); self.matmul(b)", "self.add(b); self.matmul(b)"),
        ("return torch.Tensor.matmul(a, b)", "return s.matmul_0(torch.Tensor.matmul, a, b)"),
        ("return torch.Tensor.addmm_(a, b, c)", "return s.addmm_0(torch.Tensor.addmm_, a, b, c)"),
        ("return torch.einsum(GRAM, a, b)", "return s.einsum_0(torch.einsum, GRAM, a, b)"),
        ("e = 'ij,jk'; return torch.einsum(e, a, b)", "e = 'ij,jk'; return s.einsum_0(torch.einsum, e, a, b)"),
        (
            "return F.scaled_dot_product_attention(a, b, c)",
            "return s.scaled_dot_product_attention_0(F.scaled_dot_product_attention, a, b, c)",
        ),
        (
            "return torch._C._nn.scaled_dot_product_attention(a, b, value=c)",
            "return s.scaled_dot_product_attention_0(torch._C._nn.scaled_dot_product_attention, a, b, value=c)",
        ),
        ("return sdpa(a, b, c)", "return s.scaled_dot_product_attention_0(sdpa, a, b, c)"),
        ("return times(a, b, c)", "return s.addmm_0(times, a, b, c)"),
        ("return es('ij,jk', a, b)", "return s.einsum_0(es, 'ij,jk', a, b)"),
        ("return torch.mm(*a)", "return s.mm_0(torch.mm, *a)"),
        ("a += torch.mm(b, c)", "a = s.add_0(a, s.mm_0(torch.mm, b, c))"),
    ],
    ids=lambda text: text.removeprefix("return ") if "s." not in text else "",
)
def test_forms(tmp_path: Path, body: str, expected: str) -> None:
    names = {"sdpa": functional.scaled_dot_product_attention, "times": torch.addmm, "es": torch.einsum, "GRAM": "ij,ik"}
    assert rewritten_body(tmp_path, body, **names) == expected


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("torch.mm(a, b, out=c)", ReasonCode.OUT_ARGUMENT.text()),
        ("torch.addmm(a, b, c, out=a)", ReasonCode.OUT_ARGUMENT.text()),
        ("torch.baddbmm(a, b, c, out=a)", ReasonCode.OUT_ARGUMENT.text()),
        ("torch.einsum(a, b, c)", ReasonCode.EINSUM_UNSPELLED.text()),
        ("torch.einsum(f'{a},jk', b, c)", ReasonCode.EINSUM_UNSPELLED.text()),
        ("torch.einsum(a + 'jk', b, c)", ReasonCode.EINSUM_UNSPELLED.text()),
        ("torch.einsum(self.e, b, c)", ReasonCode.EINSUM_UNSPELLED.text()),
        ("torch.einsum('ij,jk', *a)", ReasonCode.EINSUM_STARRED.text()),
        ("torch.einsum(*a)", ReasonCode.EINSUM_STARRED.text()),
        ("torch.einsum('ij->ji', a)", ReasonCode.EINSUM_OF_ONE.text()),
        ("torch.einsum('ij,jk,kl', a, b, c)", ReasonCode.EINSUM_OF_MANY.text(count=3)),
        ("torch.einsum('ii,ij', a, b)", ReasonCode.EINSUM_TWICE.text()),
    ],
)
def test_calls_that_are_left_alone(tmp_path: Path, expression: str, reason: str) -> None:
    text = f"def forward(self, a, b, c):\n    return {expression}\n"
    file = source_file(tmp_path, text)
    assert [site.reason for site in sites_of(file)] == [reason]
    assert file.rewritten_text() == text


@pytest.mark.parametrize(
    "before",
    ["e = 'ij,jk'; e = 'ij,kj'", "e = 'ij,jk'; e += a", "e: str = c", "e, f = 'ij'", "def e(): ...", "global e"],
)
def test_an_equation_that_is_not_constant(tmp_path: Path, before: str) -> None:
    text = f"def forward(self, a, b, c):\n    {before}; return torch.einsum(e, a, b)\n".replace("...; ", "...\n    ")
    (site,) = [site for site in sites_of(source_file(tmp_path, text)) if site.operation == "einsum"]
    assert site.reason == ReasonCode.EINSUM_UNSPELLED.text()


def test_an_equation_in_a_constant_is_kept_with_its_site(tmp_path: Path) -> None:
    text = "def forward(self, a, b):\n    e = 'ij,kj'\n    return torch.einsum(GRAM, a, b) @ torch.einsum(e, (a, b))\n"
    sites = sites_of(source_file(tmp_path, text, {"GRAM": "ij,ik"}))
    assert [site.equation for site in sites] == ["", "ij,ik", "ij,kj"]


def test_an_equation_is_kept_with_its_site(tmp_path: Path) -> None:
    file = source_file(tmp_path, "def forward(self, a, b):\n    return torch.einsum('ij, jk -> ik', a, b)\n")
    assert [site.equation for site in sites_of(file)] == ["ij, jk -> ik"]


@pytest.mark.parametrize("entry", CATALOGUE, ids=lambda entry: entry.name)
def test_every_spelling_leads_to_its_entry(entry: object) -> None:
    assert isinstance(entry, type(CATALOGUE[0]))
    for dotted in entry.functions:
        assert operation_of(pkgutil.resolve_name(dotted)) is entry
    for method in entry.methods:
        assert hasattr(torch.Tensor, method)
    assert operation(entry.name) is entry


def test_a_function_that_a_version_of_its_package_lacks_is_no_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    (dotted,) = operation("grouped_mm").where_loaded
    module, _, name = dotted.rpartition(".")
    older, newer = types.ModuleType(module), types.ModuleType(module)
    setattr(newer, name, lambda a, b, offs: a)
    monkeypatch.setitem(sys.modules, module, older)
    assert operation_of(torch.mm) is operation("mm")
    monkeypatch.setitem(sys.modules, module, newer)
    assert operation_of(getattr(newer, name)) is operation("grouped_mm")
    # What is known by identity is kept: the next test must not find the made-up function in it.
    monkeypatch.setitem(sys.modules, module, older)
    assert operation_of(torch.mm) is operation("mm")


def test_names_are_unique_and_those_in_saved_files_stay() -> None:
    names = [entry.name for entry in CATALOGUE]
    assert len(set(names)) == len(names)
    assert set(names) >= {"linear", "conv1d", "conv2d", "conv3d", "matmul", "bmm", "add"}


def test_a_product_by_a_weight_is_a_linear() -> None:
    assert kind_of(operation("matmul"), weighted=True) == "linear"
    assert kind_of(operation("matmul"), weighted=False) == "matmul"
    assert kind_of(operation("conv2d"), weighted=True) == "conv"
    assert kind_of(operation("embedding"), weighted=True) == "embedding"


# -- geometry ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "operands", "result", "weight", "expected"),
    [
        ("linear", [(2, 5, 16), (24, 16)], (2, 5, 24), 1, (16, 24, 2 * 5 * 16 * 24, 0)),
        ("conv2d", [(2, 4, 8, 8), (6, 2, 3, 3)], (2, 6, 6, 6), 1, (18, 6, 2 * 6 * 36 * 18, 0)),
        ("conv_transpose2d", [(2, 4, 5, 5), (4, 6, 3, 3)], (2, 6, 7, 7), 1, (36, 6, 200 * 54, 1)),
        ("conv_transpose2d", [(4, 5, 5), (4, 6, 3, 3)], (6, 7, 7), 1, (36, 6, 100 * 54, 1)),
        ("conv_transpose1d", [(2, 4, 5), (4, 3, 2)], (2, 6, 6), 1, (4, 6, 40 * 6, None)),
        ("conv_transpose1d", [(2, 4, 5), (4, 1, 2)], (2, 4, 6), 1, (2, 4, 40 * 2, 0)),
        ("conv_transpose1d", [(2, 4, 5), (4, 3, 2)], (2, 12, 6), 1, (2, 12, 40 * 6, 0)),
        ("conv_transpose1d", [(2, 1, 5), (1, 3, 2)], (2, 3, 6), 1, (2, 3, 10 * 6, 1)),
        ("matmul", [(2, 3, 5, 7), (2, 3, 7, 9)], (2, 3, 5, 9), None, (7, 9, 6 * 5 * 7 * 9, None)),
        ("matmul", [(3, 5, 7), (7, 9)], (3, 5, 9), 1, (7, 9, 3 * 5 * 7 * 9, 1)),
        ("matmul", [(9, 7), (3, 7, 5)], (3, 9, 5), 0, (7, 9, 3 * 5 * 7 * 9, 0)),
        ("matmul", [(3, 7), (7,)], (3,), 1, (7, 1, 21, None)),
        ("matmul", [(7,), (7, 9)], (9,), 0, (7, 1, 63, None)),
        ("matmul", [(7,), (7, 9)], (9,), 1, (7, 9, 63, 1)),
        ("addmm", [(5, 7), (7, 9)], (5, 9), 1, (7, 9, 5 * 7 * 9, 1)),
        ("addbmm", [(4, 5, 7), (4, 7, 9)], (5, 9), None, (7, 9, 4 * 5 * 7 * 9, None)),
        (
            "scaled_dot_product_attention",
            [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)],
            (2, 3, 5, 6),
            None,
            (7, 6, 6 * 5 * 7 * (8 + 6), None),
        ),
        ("embedding", [(10, 4)], (2, 4), 0, (0, 0, 0, 0)),
    ],
)
def test_geometry(
    name: str, operands: list[tuple[int, ...]], result: tuple[int, ...], weight: int | None, expected: tuple[int, ...]
) -> None:
    measure = operation(name).geometry
    assert measure is not None
    depth, width, multiply_adds, axis = expected
    found = measure(Call(operands=tuple(operands), result=result, weight=weight))
    plain = replace(found, inner=None, rows=0, head=0, sequence=0)
    assert plain == Geometry(depth=depth, width=width, multiply_adds=multiply_adds, axis=axis)
    if found.inner is not None:
        assert weight is not None
        assert operands[weight][found.inner] == depth
        assert found.inner != found.axis


@pytest.mark.parametrize(
    ("equation", "first", "second", "weight", "expected"),
    [
        ("bij,bjk->bik", (2, 3, 4), (2, 4, 5), None, (4, 5, 120, None)),
        ("bij,jk->bik", (2, 3, 4), (4, 5), 1, (4, 5, 120, 1)),
        ("kj,bij->bik", (5, 4), (2, 3, 4), 0, (4, 5, 120, 0)),
        ("ij,jk", (3, 4), (4, 5), 1, (4, 5, 60, 1)),
        # The largest of the weight's own labels.
        ("bthd,hdop->btop", (2, 3, 4, 5), (4, 5, 6, 7), 1, (20, 42, 6 * 20 * 42, 3)),
        ("bi , bi -> b", (2, 3), (2, 3), 1, (3, 1, 6, None)),
        ("...ij,...jk->...ik", (2, 3, 4), (4, 5), 1, (4, 5, 120, 1)),
        ("...ij,jk", (2, 3, 4), (4, 5), None, (4, 5, 120, None)),
        ("ij,kj->", (3, 4), (5, 4), 1, (60, 1, 60, None)),
        ("bij,bjk->bik", (1, 3, 4), (2, 4, 5), None, (4, 5, 120, None)),
    ],
)
def test_geometry_of_an_einsum(
    equation: str, first: tuple[int, ...], second: tuple[int, ...], weight: int | None, expected: tuple[int, ...]
) -> None:
    result = tuple(torch.einsum(equation, torch.zeros(first), torch.zeros(second)).shape)
    measure = operation("einsum").geometry
    assert measure is not None
    depth, width, multiply_adds, axis = expected
    found = measure(Call(operands=(first, second), result=result, weight=weight, equation=equation))
    assert replace(found, rows=0) == Geometry(depth=depth, width=width, multiply_adds=multiply_adds, axis=axis)


def test_batch_axes_of_an_ellipsis_are_counted_from_the_right() -> None:
    found = labels("...ij,...jk->...ik", [4, 3])
    assert found.operands == (("...2", "...1", "i", "j"), ("...1", "j", "k"))
    assert found.output == {"...2", "...1", "i", "k"}
