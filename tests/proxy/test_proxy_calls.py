"""Several calls of one module in a pass: ranges of their own where these differ, one range elsewhere."""

from __future__ import annotations

import copy
import io
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from calibrated import make_calibrated
from helpers import assert_same
from onnx import numpy_helper
from torch import Tensor, nn
from toy_nets import net

from quantizer import Quantizer
from quantizer.errors import CalibrationError
from quantizer.observe.range_group import MOST_CALLS
from quantizer.plan.apply import is_frozen_by
from quantizer.plan.site_plan import Plan
from quantizer.proxy.build import quantizers_of, sites_of

MAX = {"calibrator": "max"}


class Pyramid(nn.Module):
    """One convolution at three levels, whose values differ by a factor: 3 x [B, 3, N, N] to 3 x [B, 8, N, N]."""

    def __init__(self, factor: float, copies: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.factor = factor
        heads = [nn.Conv2d(3, 8, 3, padding=1)] * 3
        self.heads = nn.ModuleList([copy.deepcopy(head) for head in heads] if copies else heads)

    def forward(self, p3: Tensor, p4: Tensor, p5: Tensor) -> tuple[Tensor, ...]:
        levels = (p3, self.factor * p4, p5 / self.factor)
        return tuple(torch.relu(head(level)) for head, level in zip(self.heads, levels, strict=True))


class Loop(nn.Module):
    """A layer that is called ``steps`` times, with values that shrink: [B, 4] to [B, 4]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, steps: int = 3) -> Tensor:
        for _ in range(steps):
            x = 0.3 * torch.tanh(self.layer(x))
        return x


class Tower(nn.Module):
    """Two inputs through one tower with an attention, whose products and sum have no module of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))

    def tower(self, x: Tensor) -> Tensor:
        scores = torch.matmul(self.query(x), self.key(x).transpose(-1, -2)) / math.sqrt(8)
        return x + self.out(torch.matmul(scores.softmax(-1), self.value(x)))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return self.tower(left), self.tower(right / 10)


def levels(batches: int = 2, seed: int = 0) -> list[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(2, 3, size, size, generator=generator) for size in (8, 6, 4)) for _ in range(batches)]


def rows(batches: int = 2, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator) for _ in range(batches)]


def sqnr(expected: Tensor, found: Tensor) -> float:
    return float(10 * torch.log10(expected.square().sum() / (expected - found).square().sum()))


def of(model: nn.Module, proxy: Callable[..., Any], *inputs: Any) -> list[float]:
    with torch.no_grad():
        return [sqnr(one, other) for one, other in zip(model(*inputs), proxy(*inputs), strict=True)]


def text(view: Any) -> str:
    return " ".join(str(view).split())


def scale_of(q: Quantizer, name: str) -> Tensor:
    (found,) = [scale for path, scale in q.scales().items() if path.endswith(name)]
    return found


@pytest.mark.parametrize("backend", ["openvino", "onnxruntime", "torch"])
@pytest.mark.parametrize("factor", [5.0, 20.0])
def test_each_call_is_as_near_to_float_as_a_copy_of_the_module(backend: str, factor: float) -> None:
    figures = []
    for copies in (False, True):
        model = Pyramid(factor, copies).eval()
        proxy = make_calibrated(model, levels(16), backend=backend, activations=MAX).quantize(model)
        figures.append(of(model, proxy, *levels(1, seed=1)[0]))
    shared, copied = figures
    assert shared == pytest.approx(copied, abs=0.1)
    assert min(shared) > 35


def test_calls_in_uint8_have_zero_points_of_their_own() -> None:
    model = Pyramid(20.0).eval()
    formats = [{"activations": "uint8"}]
    proxy = make_calibrated(model, levels(16), backend="onnxruntime", activations=MAX, formats=formats).quantize(model)
    assert min(of(model, proxy, *levels(1, seed=1)[0])) > 25


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_ranges_of_calls_are_part_of_a_frozen_model(dtype: str) -> None:
    model = Pyramid(20.0).eval()
    formats = [{"activations": dtype}]
    q = make_calibrated(model, levels(), backend="onnxruntime", activations=MAX, formats=formats)
    frozen = q.quantize(model)
    assert is_frozen_by(frozen, q.plan)

    def changed(**fields: Any) -> Plan:
        return {
            path: replace(
                entry,
                operands=tuple(
                    replace(o, calls=tuple(replace(call, **fields) for call in o.calls)) for o in entry.operands
                ),
            )
            for path, entry in q.plan.items()
        }

    assert is_frozen_by(frozen, changed())
    assert not is_frozen_by(frozen, changed(scale=1.0))
    assert not is_frozen_by(frozen, changed(zero_point=3))


def test_ranges_of_calls_do_not_depend_on_the_default_type() -> None:
    model, batches = Pyramid(20.0).eval(), levels()
    q = make_calibrated(model, batches, backend="openvino", activations=MAX)
    expected = q.quantize(model)
    torch.set_default_dtype(torch.float64)
    try:
        found = q.quantize(model)
        assert_same([found(*batch) for batch in batches], [expected(*batch) for batch in batches])
    finally:
        torch.set_default_dtype(torch.float32)
    scales = [call.scale for site in sites_of(found) for each in quantizers_of(site) for call in each.calls]
    assert {scale.dtype for scale in scales if scale is not None} == {torch.float32}


def test_the_coverage_says_which_calls_have_ranges_of_their_own() -> None:
    q = make_calibrated(Pyramid(5.0).eval(), levels(), backend="openvino", activations=MAX)
    (operand,) = [o for entry in q.plan.values() for o in entry.operands if o.calls]
    amax = [call.amax for call in operand.calls]
    wanted = f"each of its 3 calls has its own range, amax {min(amax):.3g} to {max(amax):.3g}"
    assert wanted in text(q.coverage)
    assert "3 calls" in text(q.ranges)


def test_calls_with_alike_ranges_share_one() -> None:
    q = make_calibrated(Pyramid(1.0).eval(), levels(), backend="openvino", activations=MAX)
    assert scale_of(q, ".input").shape == ()
    assert "calls" not in text(q.coverage)


def test_a_number_of_calls_that_varies_leaves_one_range() -> None:
    model = Loop().eval()
    batches = [((x,), {"steps": steps}) for x, steps in zip(rows(2, 8, 4), (3, 4), strict=True)]
    q = Quantizer(preset="plain", backend="openvino", activations=MAX)
    observing = q.calib(model)
    for args, keywords in batches:
        observing(*args, **keywords)
    assert scale_of(q, ".input").shape == ()
    assert "one range for all calls: their number differs between batches" in text(q.coverage)


def test_long_loops_have_one_range_in_bounded_memory() -> None:
    model = Loop().eval()
    q = Quantizer(preset="plain", backend="openvino", activations=MAX)
    q.calib(model)(rows(1, 8, 4)[0], steps=MOST_CALLS + 1)
    assert scale_of(q, ".input").shape == ()
    assert f"a pass has more than {MOST_CALLS} calls" in text(q.coverage)


def test_a_call_outside_of_a_pass_or_beyond_those_seen_has_the_range_of_all() -> None:
    model = Loop().eval()
    batches = rows(2, 8, 4)
    proxy = make_calibrated(model, batches, backend="openvino", activations=MAX).quantize(model)
    x = batches[0] / 20
    with torch.no_grad():
        wide = proxy.layer(batches[0])
        assert sqnr(model.layer(batches[0]), wide) > 30
        alone: list[Tensor] = []
        thread = threading.Thread(target=lambda: alone.append(proxy.layer(batches[0])))
        thread.start()
        thread.join()
        assert torch.equal(alone[0], wide)
        # The fourth call has the range of the first, which is the widest.
        assert sqnr(model(x, steps=4), proxy(x, steps=4)) > 10


def test_threads_count_their_own_calls() -> None:
    model = Pyramid(20.0).eval()
    proxy = make_calibrated(model, levels(), backend="openvino", activations=MAX).quantize(model)
    inputs = levels(8, seed=2)
    with torch.no_grad():
        expected = [proxy(*each) for each in inputs]
    wrong: list[int] = []

    def run(number: int) -> None:
        with torch.no_grad():
            for _ in range(5):
                found = proxy(*inputs[number])
                wrong.extend(number for one, other in zip(found, expected[number], strict=True) if not one.equal(other))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_every_form_of_a_proxy_tells_calls_apart(tmp_path: Path) -> None:
    model = Pyramid(20.0).eval()
    q = make_calibrated(model, levels(), backend="openvino", activations=MAX, bias_correction=True)
    proxy = q.quantize(model)
    inputs = levels(1, seed=1)[0]
    with torch.no_grad():
        expected = proxy(*inputs)
        assert min(of(model, proxy, *inputs)) > 35
        forms: dict[str, Any] = {
            "copied": copy.deepcopy(proxy),
            "exported": torch.export.export(proxy, inputs, strict=False).module(),
            "compiled": torch.compile(proxy, backend="eager", fullgraph=True),
            "saved": Quantizer.load(q.save(tmp_path / "saved")).quantize(model),
        }
        buffer = io.BytesIO()
        torch.save(proxy, buffer)
        buffer.seek(0)
        forms["pickled"] = torch.load(buffer, weights_only=False)
        for name, form in forms.items():
            for one, other in zip(form(*inputs), expected, strict=True):
                assert torch.equal(one, other), name
    lowered = q.lower(model)
    assert of(model, lowered, *inputs) == pytest.approx(of(model, proxy, *inputs), abs=0.2)
    q.export(proxy, tmp_path / "model.onnx", inputs)
    graph = onnx.load(tmp_path / "model.onnx").graph
    constants = {each.name: numpy_helper.to_array(each) for each in graph.initializer}
    given = [float(constants[node.input[1]]) for node in graph.node if node.op_type == "QuantizeLinear"]
    assert sorted(given) == pytest.approx(sorted(scale_of(q, ".input").tolist()))


def test_products_of_functions_and_shared_tensors_are_told_apart() -> None:
    model = Tower().eval()
    batches = [tuple(pair) for pair in zip(rows(2, 2, 5, 8), rows(2, 2, 5, 8), strict=True)]
    q = make_calibrated(model, batches, backend="openvino", activations=MAX, sites={"residual_add": True})
    scales = q.scales()
    shared = [scales[f"{name}.forward.linear_0.input"] for name in ("query", "key", "value")]
    assert all(torch.equal(shared[0], other) for other in shared)
    assert shared[0].shape == (2,)
    assert float(shared[0][0] / shared[0][1]) > 5
    products = {name: scale for name, scale in scales.items() if "matmul" in name and name.endswith("rhs")}
    assert all(scale.shape == (2,) for scale in products.values())
    assert min(of(model, q.quantize(model), *batches[0])) > 33


@pytest.mark.parametrize("backwards", [False, True])
def test_the_order_of_batches_is_nothing_where_operands_part_in_some(backwards: bool) -> None:
    class Parting(nn.Module):
        """Two layers that read one tensor, or two, by the sign of the data."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = x if bool(x.sum() > 0) else x / 100
            for value in (x, x / 100):
                x = x + self.one(value)
            return x + self.other(y)

    model, (x, _) = Parting().eval(), rows(2, 8, 4)
    batches = [x.abs(), -x.abs()]
    q = make_calibrated(model, batches[::-1] if backwards else batches, backend="openvino", activations=MAX)
    other = make_calibrated(model, batches, backend="openvino", activations=MAX)
    assert {name: scale.tolist() for name, scale in q.scales().items()} == {
        name: scale.tolist() for name, scale in other.scales().items()
    }
    assert text(q.coverage) == text(other.coverage)


def test_a_diagnosis_looks_at_each_call_in_its_own_range() -> None:
    plan = make_calibrated(Pyramid(20.0).eval(), levels(), backend="openvino", activations=MAX).plan
    (operand,) = [each for entry in plan.values() for each in entry.operands if each.several_ranges]
    assert [operand.of_call(number).largest_scale for number in range(3)] == [call.scale for call in operand.calls]
    assert operand.of_call(3) is operand


def test_statistics_of_several_processes_and_of_a_folder_are_those_of_one(tmp_path: Path) -> None:
    model, batches = Pyramid(5.0).eval(), levels(4)
    whole = make_calibrated(model, batches, backend="openvino", activations=MAX)
    half = make_calibrated(model, batches[:2], backend="openvino", activations=MAX)
    resumed = Quantizer.load(half.save(tmp_path / "half"))
    resumed.calibrate(model, batches[2:], resume=True, progress=False)
    assert torch.equal(scale_of(resumed, ".input"), scale_of(whole, ".input"))


def test_scales_are_given_for_each_call_or_for_all() -> None:
    model = Pyramid(5.0).eval()
    q = make_calibrated(model, levels(), backend="openvino", activations=MAX)
    name = next(path for path in q.scales() if path.endswith(".input"))
    q.load_scales({name: torch.tensor([0.1, 0.2, 0.3])})
    assert torch.equal(scale_of(q, ".input"), torch.tensor([0.1, 0.2, 0.3]))
    (given,) = [operand for entry in q.plan.values() for operand in entry.operands if operand.calls]
    assert given.largest_scale == pytest.approx(0.3)  # that of calls beyond those of a pass
    q.load_scales({name: torch.tensor(0.25)})
    assert torch.equal(scale_of(q, ".input"), torch.tensor(0.25))
    q = make_calibrated(model, levels(), backend="openvino", activations=MAX)
    with pytest.raises(CalibrationError, match=r"expected \[\] or \[3\] \(its calls\)"):
        q.load_scales({name: torch.tensor([0.1, 0.2])})


@pytest.mark.parametrize("kind", ["learned", "average"])
def test_training_moves_the_scale_of_each_call(kind: Any) -> None:
    model = Pyramid(5.0)
    q = make_calibrated(model.eval(), levels(), backend="openvino", activations=MAX)
    before = scale_of(q, ".input")
    proxy = q.qat(model, scales={"**.input": kind})
    changed = [quantizer for quantizer in quantizers_of(proxy) if quantizer.change is not None or quantizer.watcher]
    assert len(changed) == len(before)
    optimizer = torch.optim.Adam(proxy.parameters(), lr=1e-3)
    proxy.train()
    for batch in levels(2, seed=3):
        sum(output.square().mean() for output in proxy(*(0.5 * each for each in batch))).backward()
        optimizer.step()
        if kind == "average":
            from quantizer.algorithms.qat.scales import step_averages

            step_averages(quantizers_of(proxy))
    frozen = q.quantize(model.eval())
    after = scale_of(q, ".input")
    assert after.shape == before.shape
    assert bool((after != before).all())
    assert min(of(model.eval(), frozen, *levels(1)[0])) > 20


@pytest.mark.parametrize(
    "settings",
    [
        {"activations": {"calibrator": "auto"}},
        {"activations": {"calibrator": "output"}},
        {"activations": {"calibrator": "max", "smoothquant_alpha": 0.5}},
        {"activations": MAX, "weights": {"rounding": "gptq"}},
        {"activations": MAX, "weights": {"rounding": "reconstruct"}},
    ],
    ids=["auto", "output", "smooth", "gptq", "reconstruct"],
)
def test_choices_by_running_batches_are_of_each_call(settings: dict[str, Any]) -> None:
    def stages() -> nn.Module:
        torch.manual_seed(0)
        return net(
            "x = self.first(x); return (self.shared(x), F.normalize(self.shared(x / 20)))",
            first=nn.Linear(8, 8),
            shared=nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)),
        )

    model, batches = stages().eval(), rows(4, 32, 8)
    q = make_calibrated(model, batches, backend="openvino", **settings)
    assert min(of(model, q.quantize(model), batches[0])) > 30
    assert scale_of(q, "shared.0.forward.linear_0.input").shape == (2,)


def test_fallback_leaves_all_calls_of_a_module_in_float() -> None:
    model = Pyramid(5.0).eval()
    q = make_calibrated(model, levels(), backend="openvino", activations=MAX)
    proxy = q.amp(model)
    for batch in levels():
        proxy(*batch)
    q.fallback(proxy, num=1)
    assert min(of(model, q.quantize(model), *levels(1)[0])) > 100


class SharedActivation(nn.Module):
    """Layers with one activation module, as those of ultralytics; the first result is split in halves."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.SiLU()
        self.first, self.second, self.third, self.fourth = (nn.Conv2d(8, 8, 1) for _ in range(4))
        with torch.no_grad():
            self.first.weight[:4] *= 4
            self.second.weight *= 50

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.act(self.first(x)).split(4, dim=1)
        wide = self.act(self.second(torch.cat([left, left], dim=1)))
        return self.third(wide) + self.fourth(torch.cat([right, right], dim=1))


def test_results_of_a_shared_activation_have_ranges_of_their_own(tmp_path: Path) -> None:
    """The parts of one result share its range, because the engine quantizes it once."""
    torch.manual_seed(0)
    model = SharedActivation().eval()
    batches = [torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(at)) for at in range(2)]
    q = make_calibrated(model, batches, backend="onnxruntime", activations=MAX)
    with torch.no_grad():
        first = max(float(model.act(model.first(x)).abs().max()) for x in batches)
    path = next(path for path, entry in q.plan.items() if path.startswith("act.") and entry.kind == "output")
    (operand,) = q.plan[path].operands
    narrow, wide = (call.amax for call in operand.calls)
    assert narrow == pytest.approx(first)
    assert wide > 5 * narrow
    third = next(entry for path, entry in q.plan.items() if path.startswith("third.") and entry.multiply_adds)
    assert float(third.operands[0].amax) == pytest.approx(wide)
    frozen = q.quantize(model)
    with torch.no_grad():
        assert all(sqnr(model(x), frozen(x)) > 25 for x in batches)
    q.save(tmp_path / "saved")
    again = Quantizer.load(tmp_path / "saved").for_backend("onnxruntime-avx2")
    again.quantize(model)
    assert [call.tensor for call in again.plan[path].operands[0].calls] == [call.tensor for call in operand.calls]
