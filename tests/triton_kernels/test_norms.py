"""Norms and embedding sums in one kernel, against operations of torch.

The order of sums differs, so y is held to 1e-5 of its largest value before it is rounded to its type, and quantized
values to one step.
"""

from __future__ import annotations

import pytest
import torch
from triton_kernels.interpreted import norms, steps

from quantizer.numerics.triton_kernels import reference

INT8, FP8 = torch.int8, torch.float8_e4m3fn
EPS = 1e-5


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 300), (4, 64)])
@pytest.mark.parametrize("rms", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_norm(shape: tuple[int, int], rms: bool, residual: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    rest = torch.randn(shape, generator=generator) if residual else None
    weight = torch.randn(shape[1], generator=generator)
    bias = None if rms else torch.randn(shape[1], generator=generator)
    h = x if rest is None else x + rest
    for dtype in (INT8, FP8, None):
        found = norms.norm(
            x, rest, weight, bias, EPS, rms=rms, total=True, quantized_as=dtype, next_scale=torch.tensor([0.03])
        )
        value, quantized = reference.normed(
            h, weight, bias, EPS, rms=rms, quantized_as=dtype, next_scale=torch.tensor([0.03])
        )
        assert found.total is not None
        assert found.value is not None
        assert torch.equal(found.total, h)
        torch.testing.assert_close(found.value, value, rtol=1e-5, atol=1e-5)
        if dtype is None:
            assert found.quantized is None
        else:
            assert found.quantized is not None
            assert quantized is not None
            assert steps(found.quantized, quantized) <= 1


def test_only_what_is_asked_for_is_written() -> None:
    x, weight = torch.randn(2, 8), torch.ones(8)
    found = norms.norm(x, None, weight, None, EPS, value=False, quantized_as=INT8, next_scale=torch.tensor([0.1]))
    assert found.total is None
    assert found.value is None
    assert found.quantized is not None


def test_half_precision_rounds_once() -> None:
    x, weight = torch.randn(4, 48).half(), torch.randn(48).half()
    found = norms.norm(x, None, weight, None, EPS)
    assert found.value is not None
    assert found.value.dtype == torch.float16
    expected, _ = reference.normed(x.float(), weight, None, EPS)
    assert steps(found.value, expected.half()) <= 1


@pytest.mark.parametrize("types", [True, False])
def test_embeddings(types: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    words, places, kinds = (torch.randn(rows, 30, generator=generator) for rows in (11, 9, 2))
    ids, positions, of = torch.tensor([3, 10, 0, 3]), torch.tensor([0, 1, 2, 8]), torch.tensor([0, 1, 1, 0])
    weight, bias = torch.randn(30, generator=generator), torch.randn(30, generator=generator)
    arguments = (ids, positions, of if types else None, words, places, kinds if types else None, weight, bias, EPS)
    found = norms.embedding_norm(*arguments, total=True, quantized_as=INT8, next_scale=torch.tensor([0.02]))
    h = words[ids] + (kinds[of] if types else 0.0) + places[positions]
    value, quantized = reference.normed(h, weight, bias, EPS, quantized_as=INT8, next_scale=torch.tensor([0.02]))
    assert found.total is not None
    assert found.value is not None
    assert found.quantized is not None
    assert quantized is not None
    assert torch.equal(found.total, h)
    torch.testing.assert_close(found.value, value, rtol=1e-5, atol=1e-5)
    assert steps(found.quantized, quantized) <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("table", ["ids", "positions", "types"])
@pytest.mark.parametrize("index_type", [torch.int32, torch.int64])
def test_an_index_beyond_a_table_is_nan(table: str, dtype: torch.dtype, index_type: torch.dtype) -> None:
    words, places, kinds = (
        torch.randn(rows + 4, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)
        for rows in (11, 9, 2)
    )
    ends = {"ids": 11, "positions": 9, "types": 2}
    indices = {name: torch.tensor([0, 1, 0, 1, end - 1], dtype=index_type) for name, end in ends.items()}
    indices[table][1], indices[table][3] = ends[table], -1
    # The memory behind each table, and before it, contains numbers.
    tables = (words[1:12], places[1:10], kinds[1:3])
    found = norms.embedding_norm(*indices.values(), *tables, torch.ones(30), None, EPS, total=True)
    assert found.total is not None
    assert found.value is not None
    for result in (found.total, found.value):
        assert result.isnan().all(1).tolist() == [False, True, False, True, False]
        assert result.isnan().any(1).tolist() == [False, True, False, True, False]


def test_nan_stays_in_its_row() -> None:
    x = torch.randn(3, 16)
    x[1, 4] = torch.nan
    found = norms.norm(x, None, torch.ones(16), None, EPS, quantized_as=INT8, next_scale=torch.tensor([0.1]))
    assert found.value is not None
    assert found.quantized is not None
    assert found.value.isnan().any(1).tolist() == [False, True, False]
    assert not found.quantized[1].any()


@pytest.mark.parametrize("point", [-128, 5])
def test_a_zero_point_of_the_quantized_values(point: int) -> None:
    x, weight = torch.randn(4, 30, generator=torch.Generator().manual_seed(0)), torch.ones(30)
    found = norms.norm(
        x, None, weight, None, EPS, quantized_as=INT8, next_scale=torch.tensor([0.02]), zero_point=point
    ).quantized
    _, expected = reference.normed(
        x, weight, None, EPS, quantized_as=INT8, next_scale=torch.tensor([0.02]), zero_point=point
    )
    assert found is not None
    assert expected is not None
    assert steps(found, expected) <= 1
    value, _ = reference.normed(x, weight, None, EPS)
    assert steps(found, ((value / 0.02).round() + point).clamp(-128, 127).to(INT8)) <= 1


def test_a_scale_for_each_column_of_the_quantized_values() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 30, generator=generator), torch.ones(30)
    next_scale = 0.01 + 0.05 * torch.rand(30, generator=generator)
    found = norms.norm(x, None, weight, None, EPS, quantized_as=INT8, next_scale=next_scale).quantized
    value, _ = reference.normed(x, weight, None, EPS)
    assert found is not None
    assert steps(found, (value / next_scale).round().clamp(-128, 127).to(INT8)) <= 1
