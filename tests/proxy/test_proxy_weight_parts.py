"""The parts that hold a weight: which tensor is one, what no step holds, the quantizer of an operand, frozen scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import torch
from helpers import Mlp, assert_same
from torch import Tensor, nn
from torch.nn import functional

from quantizer import Quantizer
from quantizer.errors import CalibrationError, ProxyError
from quantizer.numerics.formats import qtype
from quantizer.numerics.rounding import GAIN
from quantizer.plan.apply import is_frozen_by, require_scales_of
from quantizer.plan.site_plan import OperandPlan, Plan, with_fallback
from quantizer.plan.weight_scales import (
    beyond,
    codes_of_file,
    file_of_codes,
    weight_amax,
    with_scales_of_weights,
    without_codes,
)
from quantizer.proxy.build import sites_of
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.weight import Weights, non_finite


def test_what_no_step_can_hold() -> None:
    assert non_finite(torch.tensor([1.0, -2.0])) is None
    assert non_finite(torch.tensor([1.0, float("nan"), float("inf")])) == "NaN"
    assert non_finite(torch.tensor([-float("inf"), 1.0])) == "-inf"
    assert non_finite(torch.tensor([-float("inf"), float("inf")])) == "inf"
    # What has no values to look at, or no order among them.
    assert non_finite(torch.tensor([[1.0, float("nan")]]).to_sparse()) is None
    assert non_finite(torch.empty(0, 3)) is None
    assert non_finite(torch.tensor([1, 2])) is None
    # torch knows no extremes of floats of 8 bits.
    assert non_finite(torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn)) is None
    assert non_finite(torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)) == "NaN"


def test_a_part_of_a_parameter_is_a_view_of_it() -> None:
    memory = torch.arange(64.0)
    first, second = nn.Parameter(memory[:32].view(4, 8)), nn.Parameter(memory[32:].view(4, 8))
    weights = Weights([("first", first), ("second", second)])
    for part in (second.t(), second[1:], second.view(2, 2, 8).transpose(0, 1), second[2].view(8, 1)):
        found = weights.find(part)
        assert found is not None
        assert found.paths == ("second",)
        assert_same(found.tensor(), part.detach().contiguous())
    # What lies in the memory of both is of neither, nor is what leaves out a column or repeats a row.
    for other in (memory[16:48].view(4, 8), memory.view(8, 8), second[:, 1:], second[0].expand(4, 8), second.int()):
        assert weights.find(other) is None


def test_two_weights_are_the_same_if_their_parameters_are() -> None:
    first, second = (nn.Parameter(torch.zeros(4, 8)) for _ in range(2))
    weights = Weights([("first", first), ("second", second)])
    (one, two), (again, _) = [[weights.find(each.t()) for each in (first, second)] for _ in range(2)]
    assert one is not None
    assert two is not None
    assert again is not None
    assert one.is_same(again)
    assert not one.is_same(two)


@pytest.mark.parametrize("shape", [(6,), (5,), (3, 6), (3, 5), (4, 5), (2, 3, 6), (2, 4, 3)])
def test_integers_of_a_file_are_those_that_were_stored(shape: tuple[int, ...]) -> None:
    codes = torch.randint(-8, 8, shape, dtype=torch.int8)
    stored = file_of_codes(codes, "int4")
    assert stored.shape == ((*shape[:-1], shape[-1] // 2) if shape[-1] % 2 == 0 else shape)
    assert_same(codes_of_file(stored, "int4"), codes)
    assert_same(file_of_codes(codes, "int8"), codes)
    # Of a damaged file nothing is made.
    damaged = codes.view(torch.uint8)
    assert codes_of_file(damaged, "int8") is damaged
    assert codes_of_file(damaged, "int5") is damaged


def test_one_scale_beyond_the_type_is_enough() -> None:
    assert beyond(1.0, torch.tensor([1.0, 2.0]), torch.float16) is None
    assert "float16" in str(beyond(1e9, torch.tensor([1.0, float("inf")]), torch.float16))


def test_the_range_of_a_vector_is_that_of_each_value() -> None:
    vector = torch.tensor([1.0, -2.0, 3.0])
    assert_same(weight_amax(vector, 0, None, qtype("int8"), "percentile 50"), vector.abs())
    assert_same(weight_amax(vector, None, None, qtype("int8"), "percentile 50"), torch.tensor(2.0))


def test_rounding_to_nearest_is_told_of_what_is_quantized() -> None:
    quantizer, _ = _frozen(weights={"rounding": "gptq"})
    plan = quantizer.plan
    first, second = (path for path in plan if "linear" in path)
    (group,) = {operand.group for operand in plan[first].operands if operand.group is not None}
    nearest = without_codes(with_fallback(plan, {group: "it was asked for"}), "it is told")
    assert nearest[first].reason == "it was asked for"
    assert "rounded to nearest: it is told" in nearest[second].reason
    assert without_codes(nearest, "it is told again")[second].reason == nearest[second].reason


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf")])
def test_a_scale_is_positive_and_finite(scale: float) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        OperandQuantizer().set_scale(torch.tensor([0.5, scale]), "int8", 0)


def test_a_quantizer_that_is_reset_passes_its_operand_through() -> None:
    quantizer = OperandQuantizer()
    quantizer.set_scale(torch.tensor(0.5), "int8", None)
    assert quantizer.enabled
    quantizer.reset()
    assert not quantizer.enabled
    assert quantizer.extra_repr() == "off"


def test_a_quantizer_says_what_shares_a_scale() -> None:
    quantizer = OperandQuantizer()
    quantizer.set_scale(torch.tensor(0.5), "int8", None)
    assert quantizer.extra_repr() == "int8, per tensor, amax 63.5, rounding"
    quantizer.set_scale(torch.tensor([0.5, 1.0]), "int8", 1)
    assert quantizer.extra_repr() == "int8, per channel, axis 1, amax 127, rounding"
    quantizer.set_scale(torch.tensor([[0.5, 1.0]]), "int4", 1, 32)
    assert quantizer.extra_repr() == "int4, blocks of 32, axis 1, amax 7, rounding"


def test_a_scale_that_is_learned_moves_until_it_is_fixed() -> None:
    quantizer = OperandQuantizer()
    quantizer.set_scale(torch.tensor(0.5), "int8", None)
    change = nn.Parameter(torch.tensor(0.0))
    quantizer.learn_scale(change)
    quantizer(torch.randn(8, 4)).sum().backward()
    assert change.grad is not None
    assert change.grad != 0
    with torch.no_grad():
        change.fill_(0.1)
    assert quantizer.current_scale() > 0.5
    quantizer.fix_scale()
    learned = quantizer.current_scale().clone()
    with torch.no_grad():
        change.fill_(0.3)
    assert torch.equal(quantizer.current_scale(), learned)


def test_the_gradient_of_a_learned_scale_is_that_of_lsq() -> None:
    # Esser et al. 2020 (arXiv:1902.08153), equation 3, divided as ``trained_scale`` says, of the scale's logarithm.
    x, scale = torch.randn(8, 4), 0.02
    quantizer = OperandQuantizer()
    quantizer.set_scale(torch.tensor(scale), "int8", None)
    change = nn.Parameter(torch.tensor(0.0))
    quantizer.learn_scale(change)
    quantizer(x).sum().backward()
    ratio = x.double() / scale
    steps = ratio.round().clamp(-128, 127)
    inside = (ratio >= -128) & (ratio <= 127)
    gradient = float(torch.where(inside, steps - ratio, steps).sum())
    assert change.grad is not None
    assert float(change.grad) == pytest.approx(gradient * scale / GAIN / (x.numel() * 127) ** 0.5, rel=1e-4)


def test_a_lookup_reads_the_rows_that_it_needs() -> None:
    table, ids = torch.randn(9, 4), torch.tensor([[2, 5, 2]])
    lookup = partial(functional.embedding, ids, table)
    quantizer = OperandQuantizer()
    quantizer.set_scale(torch.rand(9) + 0.1, "int8", 0)
    assert_same(quantizer.rows(table, ids, lookup), quantizer(table)[ids])
    quantizer.watcher = lambda *_: None
    assert quantizer.rows(table, ids, lookup) is None
    with torch.no_grad():
        assert_same(quantizer.rows(table, ids, lookup), quantizer(table)[ids])
    quantizer.set_codes(torch.arange(36, dtype=torch.int8).view(9, 4))
    assert_same(quantizer.rows(table, ids, lookup), quantizer(table)[ids])
    quantizer.store(table)
    assert_same(quantizer.rows(table, ids, lookup), quantizer(table)[ids])
    quantizer.enabled = False
    assert quantizer.rows(table, ids, lookup) is None
    quantizer.set_scale(torch.rand(4) + 0.1, "int8", 1)
    assert quantizer.rows(table, ids, lookup) is None


def _frozen(**options: object) -> tuple[Quantizer, nn.Module]:
    model = Mlp().eval()
    quantizer = Quantizer(preset="plain", backend="openvino", **options)  # type: ignore[arg-type]
    quantizer.calibrate(model, [torch.randn(4, 32)])
    return quantizer, quantizer.quantize(model)


def test_a_proxy_is_frozen_by_its_own_plan_alone() -> None:
    quantizer, frozen = _frozen()
    plan = quantizer.plan
    assert is_frozen_by(frozen, plan)
    first = next(iter(plan))
    others = {**{path: entry for path, entry in plan.items() if path != first}, "elsewhere": plan[first]}
    assert not is_frozen_by(frozen, others)
    assert not is_frozen_by(frozen, {path: entry for path, entry in plan.items() if path != first})


def _with(plan: Plan, role: str, change: Callable[[OperandPlan], dict[str, Any]]) -> Plan:
    """A plan with some fields changed of all operands of a role."""
    return {
        path: replace(entry, operands=tuple(replace(o, **change(o)) if o.role == role else o for o in entry.operands))
        for path, entry in plan.items()
    }


def test_a_plan_of_another_format_is_another_one() -> None:
    quantizer, frozen = _frozen()
    assert not is_frozen_by(frozen, _with(quantizer.plan, "activation", lambda _: {"dtype": "uint8"}))
    assert not is_frozen_by(frozen, _with(quantizer.plan, "activation", lambda _: {"dynamic": True}))


def test_a_plan_of_ranges_at_run_time_is_not_one_of_static_ones() -> None:
    model = Mlp().eval()
    quantizer = Quantizer(preset="plain", backend="onnxruntime", activations={"ranges": "dynamic"})
    quantizer.calibrate(model, [torch.randn(4, 32)])
    frozen = quantizer.quantize(model)
    assert is_frozen_by(frozen, quantizer.plan)
    assert not is_frozen_by(frozen, _with(quantizer.plan, "activation", lambda _: {"dynamic": False}))
    assert not is_frozen_by(frozen, _with(quantizer.plan, "activation", lambda _: {"block_size": 16}))


def test_a_plan_with_other_integers_is_another_one() -> None:
    quantizer, frozen = _frozen(weights={"rounding": "gptq"})
    assert is_frozen_by(frozen, quantizer.plan)
    assert not is_frozen_by(frozen, _with(quantizer.plan, "weight", lambda o: {"codes": -cast("Tensor", o.codes)}))


def test_one_row_that_a_type_does_not_hold_is_enough_to_refuse() -> None:
    _, frozen = _frozen()
    require_scales_of(frozen, torch.float16, "tensorrt")
    site = next(site for site in sites_of(frozen) if site.active)
    weight = next(site.quantizer(at) for at in range(len(site.quantizers)) if site.quantizer(at).axis is not None)
    assert weight.scale is not None
    weight.scale[0] = 1e-9
    with pytest.raises(ProxyError, match=r"scales of .*, such as 1e-09, cannot be represented in float16"):
        require_scales_of(frozen, torch.float16, "tensorrt")


def test_a_given_scale_whose_steps_saturate_is_refused() -> None:
    model = Mlp().eval()
    quantizer = Quantizer(preset="plain", backend="openvino-avx2")
    quantizer.calibrate(model, [torch.randn(4, 32)])
    plan = quantizer.plan
    given = {
        path: replace(
            entry,
            operands=tuple(
                replace(operand, given=True) if operand.role == "weight" else operand for operand in entry.operands
            ),
        )
        for path, entry in plan.items()
    }
    # The product's own scales have 64 steps, which the target adds.
    with_scales_of_weights(given, model, torch.float32, 64)
    for fewer in (63, 32):
        with pytest.raises(CalibrationError, match=f"saturate beyond {fewer}"):
            with_scales_of_weights(given, model, torch.float32, fewer)


def test_an_operand_that_stays_float_hides_no_scale_of_another() -> None:
    _, frozen = _frozen(formats=[{"activations": "float", "weights": "int8"}])
    site = next(site for site in sites_of(frozen) if site.active)
    assert site.quantizer(0).scale is None
    weight = site.quantizer(1)
    assert weight.scale is not None
    weight.scale[0] = 1e-9
    with pytest.raises(ProxyError, match="cannot be represented in float16"):
        require_scales_of(frozen, torch.float16, "tensorrt")


def test_a_proxy_that_lost_a_scale_is_frozen_by_no_plan() -> None:
    quantizer, frozen = _frozen()
    next(site for site in sites_of(frozen) if site.active).quantizer(0).scale = None
    assert not is_frozen_by(frozen, quantizer.plan)
