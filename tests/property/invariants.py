"""What holds for every model: functions of a drawn model, which fail where it does not.

Each makes its own model and quantizer. ``folder`` is an empty one.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drawn_models import DrawnModel
from hypothesis import currently_in_test_context, event
from threads import in_threads
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from quantizer import Quantizer
from quantizer.check import check_file
from quantizer.engines import BuildOptions, Engine, build_engine, load_engine
from quantizer.errors import ExportError
from quantizer.export.exporter import export_onnx
from quantizer.pipeline.compare_outputs import LEAST_SAMPLES, check_engine, reference_outputs, tolerance
from quantizer.pipeline.context import engine_inputs
from quantizer.plan.site_plan import Plan
from quantizer.tasks import rows_at
from quantizer.utils.sizes import BATCH, DataSizes
from tests.helpers import Snapshot, assert_same

Invariant = Callable[[DrawnModel, Path], None]


def _quantizer(drawn: DrawnModel, backend: str | None = None) -> Quantizer:
    backend = backend or drawn.backend
    # torch has no kernel for weights of 4 bits.
    options = {key: value for key, value in drawn.options.items() if (backend, key) != ("torch", "formats")}
    return Quantizer(preset="plain", backend=backend, **options)


def _calibrated(drawn: DrawnModel, model: nn.Module, backend: str | None = None) -> Quantizer:
    quantizer = _quantizer(drawn, backend)
    quantizer.calibrate(model, drawn.batches())
    return quantizer


def has_engines(drawn: DrawnModel) -> bool:
    """Whether an engine of a model can be held to it: all but what torch does not export, and a choice of experts.

    Which expert gets a row is decided at a border that any rounding may cross.
    """
    return not any(block in drawn.text for block in ("Experts", "Checkpointed", "Mapped"))


def is_finite(drawn: DrawnModel) -> bool:
    """Whether the float model runs and gives numbers, whatever its type."""
    try:
        outputs = float_outputs(drawn)
    except RuntimeError as error:
        # Where gradients are wanted, torch refuses to change a part of a split in place.
        if "is being modified inplace" not in str(error):
            raise
        return False
    return all(bool(leaf.isfinite().all()) for leaf in _floats(outputs))


def _is_measurable(drawn: DrawnModel) -> bool:
    """Whether no output is all zeros: of such a one, no relative error can be taken."""
    return all(any(leaf.any() for leaf in _floats(output)) for output in float_outputs(drawn))


def _floats(output: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _has_script(drawn: DrawnModel) -> bool:
    """Whether a part is of TorchScript, which torch itself does not pickle."""
    return "torch.jit" in drawn.text


def _has_parameters(model: nn.Module) -> bool:
    return any(True for _ in model.parameters())


def _outputs(drawn: DrawnModel, model: nn.Module) -> list[Any]:
    """What a model gives for all batches, without gradients."""
    with torch.no_grad():
        return [drawn.run(model, number) for number in range(len(drawn.rows))]


def float_outputs(drawn: DrawnModel) -> list[Any]:
    """What the float model gives for all batches in eval mode, in Python alone.

    Where gradients are wanted, torch runs none of its fused layers.
    """
    model = drawn.model().eval()
    found = [drawn.run(model, number) for number in range(len(drawn.rows))]
    return pytree.tree_map_only(Tensor, Tensor.detach, found)


def _step(drawn: DrawnModel, model: nn.Module, proxy: nn.Module) -> Any:
    """Output, gradients and state after a step of training; the error where one is raised."""
    model.zero_grad()
    try:
        output = drawn.run(proxy)
        floats = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        torch.stack([leaf.double().square().mean() for leaf in floats]).sum().backward()
    except (RuntimeError, ValueError) as error:
        # In-place changes may leave no gradient, and statistics of one row none to normalize by: in the original too.
        return type(error).__name__
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return pytree.tree_map_only(Tensor, Tensor.clone, (output, gradients, dict(proxy.state_dict())))


def off_equals_float(drawn: DrawnModel, folder: Path) -> None:
    """A proxy that is off gives outputs, gradients and state of the model, in either mode."""
    for mode in (False, True):
        twin, model = drawn.model().train(mode), drawn.model().train(mode)
        proxy = _quantizer(drawn).proxy(model)
        assert proxy.training == mode
        assert_same(_step(drawn, model, proxy), _step(drawn, twin, twin))
        assert list(proxy.state_dict()) == list(twin.state_dict())
        assert [id(parameter) for parameter in proxy.parameters()] == [
            id(parameter) for parameter in model.parameters()
        ]
        for path, module in model.named_modules():
            # A copy that torch makes of a traced module is of another class of TorchScript.
            kind = type(copy.deepcopy(module) if isinstance(module, torch.jit.ScriptModule) else module)
            stands_for_it = proxy.get_submodule(path)
            assert isinstance(stands_for_it, kind)
            assert str(type(stands_for_it)) == str(kind)


def _plain_attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    kinds = (bool, int, float, str, tuple)
    return {
        path: {name: value for name, value in vars(module).items() if isinstance(value, kinds)}
        for path, module in model.named_modules()
    }


def model_is_untouched(drawn: DrawnModel, folder: Path) -> None:
    """No stage leaves anything behind in the user's model."""
    model = drawn.model()
    before, attributes = Snapshot.of(model), _plain_attributes(model)
    quantizer = _quantizer(drawn)

    def check(stage: str) -> None:
        try:
            before.assert_unchanged(model)
            assert _plain_attributes(model) == attributes
        except AssertionError as error:
            raise AssertionError(f"{stage} changed the model: {error}") from error

    quantizer.inspect(model)
    quantizer.diff(model)
    quantizer.proxy(model)
    check("proxy()")
    quantizer.calibrate(model, drawn.batches())
    check("calibrate()")
    if not _is_measurable(drawn):
        return
    amp = quantizer.amp(model)
    drawn.run(amp)
    check("amp()")
    if any(entry.quantized for entry in quantizer.plan.values()):
        quantizer.fallback(amp, num=1)
    drawn.run(quantizer.quantize(model))
    check("quantize()")
    quantizer.save(folder / "saved")
    drawn.run(Quantizer.load(folder / "saved").quantize(model))
    check("load()")
    if not _has_parameters(model):
        return
    proxy = quantizer.qat(model, copy=True)
    _step(drawn, proxy, proxy)
    torch.optim.SGD(proxy.parameters(), lr=0.1).step()
    drawn.run(quantizer.quantize(model))
    check("qat(copy=True)")


def stages_give_the_float_outputs(drawn: DrawnModel, folder: Path) -> None:
    """Calibrating and measuring give the float outputs, and so does a frozen model with everything kept in float."""
    expected, model = float_outputs(drawn), drawn.model()
    quantizer = _quantizer(drawn)
    assert_same(_outputs(drawn, quantizer.calib(model)), expected)
    if not _is_measurable(drawn):
        return
    amp = quantizer.amp(model)
    assert_same(_outputs(drawn, amp), expected)
    if any(entry.quantized for entry in quantizer.plan.values()):
        quantizer.fallback(amp, ratio=1.0)
    assert not any(entry.quantized for entry in quantizer.plan.values())
    assert_same(_outputs(drawn, quantizer.quantize(model)), expected)


def _assert_same_plan(first: Plan, second: Plan) -> None:
    assert list(first) == list(second)
    for path, one in first.items():
        two = second[path]
        assert (one.quantized, one.reason) == (two.quantized, two.reason), path
        for a, b in zip(one.operands, two.operands, strict=True):
            for field in ("quantized", "dtype", "axis", "zero_point", "scale", "amax", "minimum", "maximum", "calls"):
                x, y = getattr(a, field), getattr(b, field)
                same = torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x == y
                assert same, f"{path}.{a.name}.{field}: {x} against {y}"


def order_of_batches_is_nothing(drawn: DrawnModel, folder: Path) -> None:
    """Batches in another order give the same ranges."""
    quantizer, other = _calibrated(drawn, drawn.model()), _quantizer(drawn)
    other.calibrate(drawn.model(), drawn.batches()[::-1])
    _assert_same_plan(quantizer.plan, other.plan)


def resuming_is_nothing(drawn: DrawnModel, folder: Path) -> None:
    """A calibration that was saved and goes on gives the ranges of one that saw all at once."""
    if drawn.options.get("activations", {}).get("calibrator") == "auto":
        return  # what is tried on batches is tried on those that come after the load
    model, first = drawn.model(), _quantizer(drawn)
    first.calibrate(model, drawn.batches()[:1])
    first.save(folder / "half")
    second = Quantizer.load(folder / "half")
    if drawn.batches()[1:]:
        second.calibrate(model, drawn.batches()[1:], resume=True)
    _assert_same_plan(_calibrated(drawn, drawn.model()).plan, second.plan)


def saved_is_the_same(drawn: DrawnModel, folder: Path) -> None:
    """What is loaded gives the same model, bit for bit, and says the same."""
    model = drawn.model()
    quantizer = _calibrated(drawn, model)
    quantizer.save(folder / "saved")
    loaded = Quantizer.load(folder / "saved")
    assert_same(_outputs(drawn, loaded.quantize(model)), _outputs(drawn, quantizer.quantize(model)))
    _assert_same_plan(loaded.plan, quantizer.plan)
    assert str(loaded.coverage) == str(quantizer.coverage)


def copies_are_the_same(drawn: DrawnModel, folder: Path) -> None:
    """Every proxy can be copied, pickled and saved by torch, and the copies compute the same."""
    if _has_script(drawn):
        return
    model = drawn.model().eval()
    quantizer = _quantizer(drawn)
    proxies = {"proxy": quantizer.proxy(model), "calib": quantizer.calib(model)}
    _outputs(drawn, proxies["calib"])
    proxies["quantize"] = quantizer.quantize(model)
    if _is_measurable(drawn):
        proxies["amp"] = quantizer.amp(model)
    if _has_parameters(model):
        proxies["qat"] = quantizer.qat(model, copy=True).eval()
    for name, proxy in proxies.items():
        # Before a call, so that a copy of what observes observes once more.
        copies = (copy.deepcopy(proxy), pickle.loads(pickle.dumps(proxy)), _through_torch(proxy))
        expected = _outputs(drawn, proxy)
        for one in copies:
            try:
                assert_same(_outputs(drawn, one), expected)
            except AssertionError as error:
                raise AssertionError(f"a copy of {name}() differs: {error}") from error
            assert not {id(parameter) for parameter in one.parameters()} & {id(own) for own in model.parameters()}
        state = {key: value.clone() for key, value in proxy.state_dict().items()}
        for parameter in one.parameters():
            parameter.data.zero_()
        one.load_state_dict(state)
        assert_same(_outputs(drawn, one), expected)


def _output_or_error(drawn: DrawnModel, model: nn.Module) -> Any:
    try:
        return _outputs(drawn, model)
    except (RuntimeError, ValueError) as error:
        # A type that forward writes out does not go with another one, in the original either; nor does a batch norm in
        # train mode with one value per channel.
        return type(error).__name__


def casts_are_the_proxys_own(drawn: DrawnModel, folder: Path) -> None:
    """A cast or a mode of a proxy, or of any part of it, does not reach the model, and the cast model is computed."""
    model = drawn.model()
    quantizer, before = _calibrated(drawn, model), Snapshot.of(model)
    other = torch.float32 if drawn.dtype is torch.float64 else torch.float64
    for make in (quantizer.proxy, quantizer.quantize):
        for part in ("", *(name for name, _ in model.named_children())):
            proxy = make(model)
            assert proxy.to(drawn.dtype) is proxy
            proxy.train(not model.training).get_submodule(part).to(other)
            if _has_parameters(proxy.get_submodule(part)):
                for parameter in proxy.parameters():
                    parameter.data.zero_()
            before.assert_unchanged(model)
    cast, its_data = copy.deepcopy(model).to(other), replace(drawn, dtype=other)
    assert_same(_output_or_error(its_data, quantizer.proxy(model).to(other)), _output_or_error(its_data, cast))


def _through_torch(proxy: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(proxy, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def qat_equals_quantize(drawn: DrawnModel, folder: Path) -> None:
    """A proxy of ``qat`` with fixed scales computes in eval mode what ``quantize`` does, bit for bit."""
    model = drawn.model()
    if not _has_parameters(model):
        return
    quantizer = _calibrated(drawn, model)
    expected = _outputs(drawn, quantizer.quantize(model))
    assert_same(_outputs(drawn, quantizer.qat(model, copy=True).eval()), expected)
    assert_same(_outputs(drawn, quantizer.quantize(model)), expected)
    trained = quantizer.qat(model).eval()
    assert_same(_outputs(drawn, trained), expected)
    assert_same(_outputs(drawn, quantizer.quantize(model)), expected)


def _attention(query: Any, key: Any, value: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


_NOT_COUNTED = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}
"""What torch's counter leaves out: the fused attention of a CPU, whose siblings for GPUs it counts."""


def coverage_counts_all_products(drawn: DrawnModel, folder: Path) -> None:
    """The multiply-adds of the coverage are half of the operations that torch's own counter counts."""
    model, quantizer = drawn.model().eval(), _quantizer(drawn)
    with FlopCounterMode(display=False, custom_mapping=_NOT_COUNTED) as counter:
        drawn.run(model)
    quantizer.calibrate(drawn.model(), [drawn.batch(0)])
    assert 2 * quantizer.coverage.multiply_adds == counter.get_total_flops()


def another_backend_is_one_of_its_own(drawn: DrawnModel, folder: Path) -> None:
    """A quantizer for another backend is what a calibration for it gives."""
    # ONNX Runtime needs results of convolutions, which a calibration for another backend does not observe.
    other = "tensorrt" if drawn.backend != "tensorrt" else "openvino"
    model = drawn.model()
    derived, own = _calibrated(drawn, model).for_backend(other), _calibrated(drawn, model, other)
    _assert_same_plan(derived.plan, own.plan)
    assert_same(_outputs(drawn, derived.quantize(model)), _outputs(drawn, own.quantize(model)))


def inference_mode_is_nothing(drawn: DrawnModel, folder: Path) -> None:
    """What is calibrated and quantized in inference mode is the same, and can be called with gradients enabled."""
    quantizer, other = (_quantizer(drawn) for _ in range(2))
    quantizer.calibrate(drawn.model(), drawn.batches())
    # Parameters made in inference mode need no gradient, and torch's linear rounds differently for such weights.
    model = drawn.model()
    with torch.inference_mode():
        other.calibrate(model, drawn.batches())
        frozen = other.quantize(model)
    _assert_same_plan(quantizer.plan, other.plan)
    found, right = drawn.run(frozen), drawn.run(quantizer.quantize(drawn.model()))
    assert_same(*(pytree.tree_map_only(Tensor, Tensor.detach, output) for output in (found, right)))


def data_is_untouched(drawn: DrawnModel, folder: Path) -> None:
    """A calibration leaves the batches as they are, whatever forward writes into."""
    batches = drawn.batches()
    _quantizer(drawn).calibrate(drawn.model(), batches)
    assert_same(batches, drawn.batches())


INVARIANTS: tuple[Invariant, ...] = (
    off_equals_float,
    model_is_untouched,
    data_is_untouched,
    stages_give_the_float_outputs,
    order_of_batches_is_nothing,
    resuming_is_nothing,
    saved_is_the_same,
    copies_are_the_same,
    casts_are_the_proxys_own,
    qat_equals_quantize,
    coverage_counts_all_products,
    another_backend_is_one_of_its_own,
    inference_mode_is_nothing,
)
"""Those that every draw is held to."""


ENGINES = ("openvino", "onnxruntime", "torch")
"""Backends whose engines run on any machine."""

ROWS = (1, 2, 3, 5, 8)
"""Batch sizes at which engines are compared; 3 is the usual one."""

LONGER = (0, 1, 5)
"""How much longer than drawn open axes are."""

_USUAL_ROWS = 3
_THREADS = 4

_FOUR_AXES = "only 4D query, key, and value are supported"


def engine_follows_the_frozen_proxy(drawn: DrawnModel, folder: Path) -> None:
    """An engine of the drawn backend, or of torch in place of TensorRT; see ``engine_follows``."""
    engine_follows(drawn, drawn.backend if drawn.backend in ENGINES else "torch", folder)


def engine_follows(drawn: DrawnModel, backend: str, folder: Path) -> None:
    """An engine keeps to the rule of the product at each size, whether one thread calls it or several do."""
    model = drawn.model().eval()
    quantizer = _calibrated(drawn, model, backend)
    frozen = quantizer.quantize(model)
    file = folder / "model.onnx"
    example = drawn.batch(0, rows=_USUAL_ROWS)
    try:
        quantizer.export(frozen, file, example)
    except ExportError as refused:
        if _FOUR_AXES not in str(refused):
            raise
        # One that is not quantized is torch's to translate, and the float model has it too.
        with pytest.raises(ExportError, match=_FOUR_AXES):
            export_onnx(model, file, example, opset=20, dtype=torch.float32)
        _count("torch exports no fused attention of three axes")
        return
    found = [str(finding) for finding in check_file(file, backend) if finding.severity == "error"]
    assert not found, found
    sizes = DataSizes.of([drawn.tensors(number, rows) for number, rows in enumerate(drawn.rows)]).ranges
    # Inductor takes half a minute, and computes the same graph.
    options = BuildOptions(dynamic={**sizes, BATCH: (ROWS[0], _USUAL_ROWS, ROWS[-1])}, compiled=False)
    engine = load_engine(backend, build_engine(backend, file, folder / "model.engine", options).path)
    batches = list(_batches_for(drawn, engine))
    plain, expected = (reference_outputs(one, batches, engine.output_names, apart=False) for one in (model, frozen))
    if any(not values.any() for reference in plain for values in reference.outputs.values()):
        _count("an output is zero for all samples, so that rounding is all that an engine has in it")
    else:
        check_engine(engine, expected, plain, tolerance(None, quantized=True, float_dtype=torch.float32))
    _threads_get_their_own(engine, batches)


def _count(what: str) -> None:
    """Let Hypothesis say how often something happened, or say it here."""
    if currently_in_test_context():
        event(what)
    else:
        print(f"({what})", flush=True)


def _batches_for(drawn: DrawnModel, engine: Engine) -> Iterator[dict[str, Tensor]]:
    """Yield batches of all sizes that an engine takes, as many of each as the product compares."""
    takes = {spec.name: spec.shape for spec in engine.inputs}
    axes = [takes[name][axis + 1] for name, opened in drawn.open_axes.items() for axis in opened if name in takes]
    lengths = LONGER if axes and all(size is None for size in axes) else LONGER[:1]
    if axes and len(lengths) == 1:
        _count("the file fixes a length")
    is_any = all(shape[0] is None for shape in takes.values())
    if not is_any:
        _count("the file fixes the batch")
    for longer in lengths:
        samples = drawn.tensors(0, LEAST_SAMPLES, longer)
        for rows in ROWS if is_any else (_USUAL_ROWS,):
            for start in range(0, LEAST_SAMPLES, rows):
                yield rows_at(samples, [row % LEAST_SAMPLES for row in range(start, start + rows)])


def _threads_get_their_own(engine: Engine, batches: Sequence[dict[str, Tensor]]) -> None:
    """Threads that call an engine with different inputs get what one gets alone."""
    some = batches[:: max(1, len(batches) // 20)]
    given = [engine_inputs(engine, batch) for batch in some]
    alone = [engine(inputs) for inputs in given]

    def work(number: int) -> None:
        for call in range(len(given)):
            place = (call + number) % len(given)
            for name, value in engine(given[place]).items():
                np.testing.assert_array_equal(value, alone[place][name])

    in_threads(_THREADS, work)


def a_half_file_has_one_type(drawn: DrawnModel, folder: Path) -> None:
    """A file of half floats has no operator with operands of several types, whatever forward casts or makes."""
    model = drawn.model()
    quantizer = _calibrated(drawn, model, "tensorrt")
    file = folder / "model.onnx"
    try:
        quantizer.export(quantizer.quantize(model), file, drawn.batch(0, rows=3))
    except ExportError as refused:
        if _FOUR_AXES not in str(refused):
            raise
        return
    wrong = [found for found in check_file(file, "tensorrt") if found.rule in ("mixed-types", "onnx-checker")]
    assert not wrong, wrong
