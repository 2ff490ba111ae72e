"""Observe one batch in a proxy: the operands of each site, and which of them are weights.

Operands that are the same tensor (the inputs of query, key and value) share a ``RangeGroup`` with one calibrator, which
observes the tensor once per batch. Parameters with NaN or infinite values are reported by name before any site runs.

With ``all_experts``, a mixture of experts runs again with other experts until all experts have seen all tokens. These
results are dropped, so the model continues with the routed result.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _python_dispatch, _pytree
from torch.utils.weak import WeakIdKeyDictionary

from quantizer.errors import CalibrationError
from quantizer.observe.calibrators import Calibrator
from quantizer.observe.completeness import Explanations, ProductCounter, callers, innermost_frame
from quantizer.observe.float16_overflow import OverflowTracker, ParameterMagnitudes
from quantizer.observe.range_group import ChannelRange, OperandRecord, RangeGroup
from quantizer.observe.replay_batches import Batch
from quantizer.observe.statistics import Seen, SiteStatistics, merge_dimension, same_weight, why_varies, without_padding
from quantizer.observe.tensor_origin import Origin, OriginTracker, OutputReaders
from quantizer.plan.reasons import ReasonCode
from quantizer.proxy.model_sharing import LocalHook
from quantizer.proxy.site import OUTPUT, Place, Site
from quantizer.proxy.weight import RANDOM, Computation, Weight, Weights, is_transformed, named_tensors, non_finite
from quantizer.rewrite.operations import group_sizes, kind_of
from quantizer.rewrite.product_sizes import Call, labels, recurrent
from quantizer.utils.fingerprint import tensor_version


class FiniteParameters:
    """A check that parameters are finite, repeated only for parameters that changed."""

    def __init__(self) -> None:
        self._problems: dict[int, tuple[Tensor, int, str | None]] = {}

    def check(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Raise a CalibrationError if a parameter has NaN or inf values; -inf may be a mask."""
        for name, parameter in parameters:
            if self._problem(parameter) not in (None, "-inf"):
                raise self._error(name, parameter)

    def check_weight(self, name: str, parameter: Tensor) -> None:
        """Raise a CalibrationError if a weight has NaN, inf or -inf values."""
        if self._problem(parameter) is not None:
            raise self._error(name, parameter)

    def _problem(self, parameter: Tensor) -> str | None:
        version = tensor_version(parameter)
        known = self._problems.get(id(parameter))
        if known is None or known[0] is not parameter or known[1] != version:
            known = self._problems[id(parameter)] = (parameter, version, non_finite(parameter))
        return known[2]

    def _error(self, name: str, parameter: Tensor) -> CalibrationError:
        return CalibrationError(
            f"the weight {name!r}, shape {tuple(parameter.shape)}, contains {self._problem(parameter)}, so the outputs "
            "of the model are invalid; load its weights again, or check its training"
        )


_ROUTED = 2  # axes of the expert indices of each token


def show_all_experts(proxy: nn.Module, sites: Iterable[Site]) -> list[Callable[[], None]]:
    """Run each mixture of experts with all of its experts in every pass; return functions that undo this.

    Mixtures are the modules with grouped matrix multiplications. ``forward`` receives the expert indices as integers
    [T, k], for T tokens with k experts each, and ``num_experts`` is their number.
    """
    hosts = dict.fromkeys(site.host_path for site in sites if site.operation.grouped is not None)
    mixtures = ((path, proxy.get_submodule(path)) for path in hosts)
    return [
        mixture.register_forward_hook(LocalHook(_of_all(path)), with_kwargs=True).remove for path, mixture in mixtures
    ]


def _of_all(path: str) -> Callable[..., None]:
    def run_again(mixture: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        arguments: dict[Any, Any] = {**dict(enumerate(args)), **keywords}
        routed = [place for place, value in arguments.items() if _is_routing(value)]
        experts = getattr(mixture, "num_experts", None)
        if len(routed) != 1 or not isinstance(experts, int):
            raise CalibrationError(
                f"{path}: expected one argument with expert indices, integers [tokens, experts per token], and "
                f"num_experts, got {len(routed)} such arguments and num_experts {experts!r}; "
                "set activations.all_experts to false"
            )
        index = arguments[routed[0]]
        for first in range(0, experts, index.shape[1]):
            indices = (torch.arange(index.shape[1], device=index.device) + first) % experts
            replaced = {**arguments, routed[0]: indices.to(index.dtype).expand_as(index).contiguous()}
            mixture.forward(
                *(replaced[place] for place in range(len(args))), **{name: replaced[name] for name in keywords}
            )

    return run_again


def _is_routing(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dim() == _ROUTED
        and not value.is_floating_point()
        and value.dtype != torch.bool
    )


_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """The settings of all passes, and results that later passes reuse.

    Attributes:
        make: creates a calibrator; the argument requests a histogram.
        refused: sites and operands that rules exclude, with the rule; they are counted, but not observed.
        off: kinds of site that are counted, but not observed.
        channels: kinds of site whose inputs have a range per channel.
        all_experts: whether each mixture runs with all of its experts instead of the routed ones only.
        together: sites whose calls always share one range.
        explanations: the reasons why operations are outside of sites.
        measured: the magnitudes of parameters.
        finite: the check that parameters are finite.
    """

    make: Callable[[bool], Calibrator]
    refused: Mapping[str, str]
    off: Collection[str]
    channels: Collection[str]
    all_experts: bool
    together: Collection[str]
    explanations: Explanations
    measured: ParameterMagnitudes = field(default_factory=ParameterMagnitudes)
    finite: FiniteParameters = field(default_factory=FiniteParameters)


def calls_together(sites: Iterable[Site], all_experts: bool) -> set[str]:
    """Return the sites whose calls share one range: steps of a recurrent layer, and repeated mixtures."""
    mixtures = {site.host_path for site in sites if all_experts and site.operation.grouped is not None}
    return {
        site.path
        for site in sites
        if site.operation.geometry is recurrent
        or any(site.path == path or site.path.startswith(f"{path}.") for path in mixtures)
    }


class Pass:
    """The observation of a proxy's sites while one batch runs.

    Attributes:
        seen: the statistics so far.
        number: the number of the batch, from 0.
        kept: the hash and a copy of the batch, if it is stored for replay.
        has_begun: whether ``begin`` was called.
    """

    def __init__(self, watched: Watched, number: int) -> None:
        self.seen = Seen(records={})
        self.number = number
        self.kept: tuple[bytes, Batch] | None = None
        self.has_begun = False
        self._watched = watched
        self._counter = ProductCounter(watched.explanations)
        self._magnitudes = OverflowTracker(watched.measured)
        self._outputs = OutputReaders(self._see_output)
        self._provenance = OriginTracker(self._counter, self._magnitudes)
        self._groups: Any = WeakIdKeyDictionary()
        self._calls: dict[int, Call | None] = {}
        self._weights = Weights()
        self._operands = CallOperands(self._weights, {}, self._provenance)
        self._made_of: dict[int, tuple[str, set[str] | None]] = {}
        self._mask: Tensor | None = None
        # A model may run parts of itself in its own threads.
        self._lock = threading.RLock()
        self._ident = threading.get_ident()

    def begin(self, proxy: nn.Module, inputs: Sequence[Any], mask: Tensor | None) -> None:
        """Start to track the model's operations; ``mask`` [B, S] is True for real tokens (None: all are real)."""
        self.has_begun = True
        # Listed in each pass, because a cast replaces the parameters of the proxy.
        parameters = list(proxy.named_parameters())
        self._watched.finite.check(parameters)
        self._weights = Weights(parameters)
        self._mask = mask
        self._counter.start(proxy)
        self._magnitudes = OverflowTracker(self._watched.measured, inputs)
        self._provenance = OriginTracker(self._counter, self._magnitudes, self._read, self._outputs)
        self._provenance.mark_constants(parameters, list(proxy.named_buffers()))
        self._operands = CallOperands(self._weights, named_tensors(proxy), self._provenance)
        self._provenance.__enter__()  # type: ignore[no-untyped-call]

    def _read(self, value: Tensor) -> None:
        """Record a parameter that code outside of sites reads, so that a frozen proxy keeps it in float."""
        for path in self._weights.shown_by(value):
            if path not in self.seen.read_outside:
                running = callers(innermost_frame(sys._getframe()))
                outside = (caller for caller in running if not caller.file.startswith(_TORCH))
                self.seen.read_outside[path] = str(next(outside, "in torch's own code"))

    def end(self) -> None:
        """Stop tracking, also after an exception or interrupt."""
        self._counter.stop()
        if _python_dispatch._get_current_dispatch_mode() is self._provenance:
            self._provenance.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def whole(self, result: Any) -> Seen:
        """Return the statistics of the pass; ``result`` is the model's output."""
        self._magnitudes.returned(result)
        for leaf in _pytree.tree_leaves(result):
            self._outputs.read(leaf)
        self.seen.separate_groups()
        return replace(self.seen, batches=1, products=self._counter.products(), regions=self._magnitudes.regions())

    # -- one site --------------------------------------------------------------------------------------------------

    def before(self, site: Site, values: list[Any], inside: Callable[[], Tensor], ends: Tensor | None = None) -> None:
        """Observe the operands of a call, and the row boundaries of its groups, if any."""
        # The operations of the observation itself must not be counted or tracked. torch's _disable_current_modes does
        # the same, also for modes of tracers, and takes three times as long.
        modes = [_python_dispatch._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
        try:
            with self._lock:
                self._see(site, values, inside)
                if ends is not None:
                    self._record(site).add_experts(group_sizes(ends))
        finally:
            for mode in reversed(modes):
                _python_dispatch._push_mode(mode)

    def enter(self, place: Place, values: list[Any]) -> None:
        """Record which output sites a call reads, or which convolution a batch norm follows."""
        followed: set[str] | None = None
        with self._lock:
            tensors = [value for value in _pytree.tree_leaves(values) if isinstance(value, Tensor)]
            outputs = [self._outputs.site_of(tensor) for tensor in tensors]
            if place.operation.name == "batch_norm":
                # The engine fuses it into the convolution, whose output is quantized after it.
                origin, site = self._provenance.origin(tensors[0]), outputs[0]
                if origin is not None and origin.direct and site is not None and site.path == f"{origin.name}.{OUTPUT}":
                    followed = None if self._outputs.take(tensors[0]) is None else {origin.name}
            elif outputs and len(tensors) == _operands_of(place.operation.name, values):
                # The engine would have to quantize a float operand first.
                paths = {site.path for site in outputs if site is not None}
                followed = paths if None not in outputs else None
        self._made_of[threading.get_ident()] = place.operation.name, followed

    def _see_result(self, site: Site, value: Any, record: SiteStatistics) -> None:
        """Follow the result of a call to its readers, if the engine computes the call in integers."""
        operation, followed = self._made_of.pop(threading.get_ident(), ("", None))
        record.calls += 1
        if operation == "interpolate" and self._outputs.site_of(value) is not None:
            # Repeated values have the integers of the original values.
            followed = None
        if followed is None or not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
            if ReasonCode.NOT_OF_CONVOLUTION.text() not in record.reasons:
                record.reasons.append(ReasonCode.NOT_OF_CONVOLUTION.text())
            return
        record.kind = "output"
        record.fit += 1
        record.follows |= followed
        if site.path not in self._watched.refused:
            self._outputs.begin(value, site, record.calls - 1)

    def _see_output(self, site: Site, value: Tensor, call: int) -> None:
        """Observe the result of call ``call`` of a pass at its first read."""
        record = self._record(site).operands.setdefault(site.operation.operands[0].name, OperandRecord())
        modes = [_python_dispatch._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
        try:
            with self._lock:
                group, number = record.group, record.tensor_of(call)
                if group is not None and number >= 0:
                    known = self._groups.get(value)
                    same = known is not None and known[:2] == (self._provenance.version(value), group)
                    if same and group.range_of(known[2]) == group.range_of(number):
                        return
                self._observe(site, site.operation.operands[0].name, value, record, call)
                if number >= 0:
                    self._join_result(record, value, call)
        finally:
            for mode in reversed(modes):
                _python_dispatch._push_mode(mode)

    def _join_result(self, record: OperandRecord, value: Tensor, call: int) -> None:
        """Let a tensor that derives from the result of call ``call`` share the range of the whole result."""
        _, group, tensor = self._groups[value]
        if group.parts:
            whole = group.join_result(record.tensor_of(call), tensor)
            tensors = list(record.tensors or ())
            tensors[call] = whole
            record.tensors = tuple(tensors)

    def _see(self, site: Site, values: list[Any], inside: Callable[[], Tensor]) -> None:
        record = self._record(site)
        if site.operation.name == OUTPUT:
            self._see_result(site, values[0], record)
            return
        followed = {output.path for value in values if (output := self._outputs.site_of(value)) is not None}
        for value in values:
            self._outputs.read(value)
        # The next result belongs to this call.
        begins = site.operation.kind == "conv" or (site.operation.kind == "residual_add" and followed)
        self._made_of[threading.get_ident()] = site.operation.name, {site.path} if begins else None
        self._calls[threading.get_ident()] = None
        record.calls += 1
        weights, lost = self._operands.weights(site, values)
        for weight in weights:
            # An operand of an add may be a mask with -inf.
            if weight is not None and weight.computation is None and site.operation.kind != "residual_add":
                for path, parameter in zip(weight.paths, weight.parameters, strict=False):
                    self._watched.finite.check_weight(path, parameter)
        record.reads.update(path for weight in weights if weight is not None for path in weight.paths)
        reason = self._operands.unfit(site, values, weights) or lost or self._varies(record, site, weights)
        if reason is not None:
            if reason not in record.reasons:
                record.reasons.append(reason)
            return
        position = next((position for position, weight in enumerate(weights) if weight is not None), None)
        record.kind = kind_of(site.operation, weighted=position is not None)
        shapes = tuple(tuple(value.shape) for value in values)
        self._calls[threading.get_ident()] = Call(
            operands=shapes, result=(), weight=position, equation=site.source.equation
        )
        record.fit += 1
        if site.path in self._watched.refused or record.kind in self._watched.off:
            return
        operands = zip(values, weights, strict=True)
        for operand in site.operation.operands:
            value, weight = (inside(), None) if operand.index is None else next(operands)
            operand_record = record.operands.setdefault(operand.name, OperandRecord())
            # The operand inside fused attention is its softmax.
            origin = self._provenance.origin(value)
            operand_record.saw_softmax(operand.index is None or (origin is not None and origin.kind == "softmax"))
            if weight is not None:
                operand_record.weight = weight
            elif f"{site.path}.{operand.name}" not in self._watched.refused:
                tensor = self._observe(site, operand.name, value, operand_record, record.calls - 1)
                if record.kind in self._watched.channels:
                    assert operand_record.group is not None
                    if record.kind == "conv":
                        operand_record.add_layer_before(
                            origin.name if origin is not None and origin.channelwise else ""
                        )
                    axis = -1 if record.kind == "linear" else 1 - max(tensor.dim() for tensor in values)
                    operand_record.group.add_channels(ChannelRange.of(self._real(site, value), axis), tensor)
        if record.kind == "residual_add":
            record.follows |= followed
            origins = [self._provenance.origin(value) for value in values]
            direct = [origin is not None and origin.direct for origin in origins]
            for operand, ends in zip(site.operation.operands, direct, strict=True):
                record.operands[operand.name].ends_branch |= ends and not all(direct)

    def after(self, site: Site, result: Any) -> None:
        """Record the dimensions of the call, and the origin of its result."""
        record = self._record(site)
        kind = record.kind or site.operation.kind
        if not isinstance(result, Tensor) or site.operation.name == OUTPUT:
            return
        if kind == "residual_add":
            if result.is_floating_point():
                self._provenance.mark(result, Origin("add", site.path))
            return
        call = self._calls.get(threading.get_ident())
        if call is not None:
            with self._lock:
                self._measure(site, replace(call, result=tuple(result.shape)), record)
        if kind != "embedding":
            origin_kind = "product" if kind == "matmul" else "weighted"
            self._provenance.mark(result, Origin(origin_kind, site.path, direct=True, channelwise=kind == "conv"))

    def _varies(self, record: SiteStatistics, site: Site, weights: list[Weight | None]) -> str | None:
        """Return why a site cannot store a weight because it differs between calls; None if it does not."""
        operands = (operand for operand in site.operation.operands if operand.index is not None)
        for operand, weight in zip(operands, weights, strict=True):
            record_of_operand = record.operands.get(operand.name)
            first = record_of_operand is None or (record_of_operand.weight is None and record_of_operand.group is None)
            if record_of_operand is not None and not first and not same_weight(record_of_operand.weight, weight):
                return why_varies(record_of_operand.weight, weight)
        return None

    def _measure(self, site: Site, call: Call, record: SiteStatistics) -> None:
        """Record the GEMM dimensions and multiply-adds of a call, and the axes of its weight."""
        assert site.operation.geometry is not None
        size = site.operation.geometry(call)
        record.depth = merge_dimension(record.depth, size.depth)
        record.width = merge_dimension(record.width, size.width)
        record.rows = merge_dimension(record.rows, size.rows)
        operands = [record.operands.get(operand.name) for operand in site.operation.operands]
        probabilities = (place for place, operand in enumerate(operands) if operand is not None and operand.softmax)
        head, sequence = size.attention(next(probabilities, None))
        record.head, record.sequence = merge_dimension(record.head, head), max(record.sequence, sequence)
        record.multiply_adds += size.multiply_adds
        for operand in record.operands.values():
            if operand.weight is not None:
                operand.axis, operand.inner = size.axis, size.inner

    def _observe(self, site: Site, operand: str, value: Tensor, record: OperandRecord, call: int) -> int:
        name = f"{site.path}.{operand}"
        version = self._provenance.version(value)
        observed = self._groups.get(value)
        residual = site.operation.kind == "residual_add"
        if observed is not None and observed[0] == version:
            group: RangeGroup = observed[1]
            tensor: int = observed[2]
            self._join(record, group, name)
            self._keep_together(site, group)
            self._note(record, group, call, tensor)
            if residual:
                for each in (group, *group.parts[tensor : tensor + 1]):
                    each.calibrator.start_histogram(self._real(site, value))
            return tensor
        histogram = residual if record.group is None else record.group.calibrator.histogram is not None
        calibrator = self._watched.make(histogram)
        tensor = 0
        try:
            real = self._real(site, value)
            calibrator.observe(real)
            if record.group is None:
                record.group = RangeGroup(calibrator=calibrator, operands=[name])
            else:
                tensor = record.group.add_tensor(calibrator)
            self._keep_together(site, record.group)
            if real is value:
                self._magnitudes.at_most(value, record.group.calibrator.largest)
        except CalibrationError as error:
            raise CalibrationError(f"batch {self.number} of the calibration data: {name}: {error}") from error
        self._note(record, record.group, call, tensor)
        self._groups[value] = (version, record.group, tensor)
        return tensor

    @staticmethod
    def _note(record: OperandRecord, group: RangeGroup, call: int, tensor: int) -> None:
        # A loop may have many calls; their tensors need no indices if they share a range.
        if group.together is None:
            record.read(call, tensor)

    def _keep_together(self, site: Site, group: RangeGroup) -> None:
        """Let the calls of a site share a range if later passes cannot distinguish them."""
        if site.path in self._watched.together:
            group.keep_together("")
        if threading.get_ident() != self._ident:
            group.keep_together("a thread that the model starts makes some")

    def _real(self, site: Site, value: Tensor) -> Tensor:
        return without_padding(value, self._mask, channels_last=site.operation.name == "linear")

    def _join(self, record: OperandRecord, group: RangeGroup, name: str) -> None:
        former = record.group
        moved = self.seen.join(record, group, name)
        if former is not None and former is not group:
            for tensor, (version, owner, number) in list(self._groups.items()):
                if owner is former:
                    self._groups[tensor] = (version, group, number + moved)

    def _record(self, site: Site) -> SiteStatistics:
        return self.seen.records.setdefault(site.path, SiteStatistics())


def _operands_of(name: str, values: Sequence[Any]) -> int:
    """Return the number of tensor operands of an operation without scalar operands."""
    return len(values[0]) if name == "cat" else 2 if name == "mul" else 1


_PRODUCT = 2  # operands of a matrix multiplication
_MATRIX = 2  # axes of a weight that is multiplied by ``@``


class CallOperands:
    """The operands of the calls of one pass."""

    def __init__(self, weights: Weights, named: Mapping[str, Tensor], tracker: OriginTracker) -> None:
        self._weights = weights
        self._named = named
        self._tracker = tracker
        self._repeated: set[tuple[str, int]] = set()

    def weights(self, site: Site, values: Sequence[Any]) -> tuple[list[Weight | None], str | None]:
        """Return the weights among the operands (None for others), and why a call has no weight that can be stored.

        A tensor computed from parameters only is a weight in the weight position, or as an operand of a MatMul before
        it is expanded over the batch. Otherwise it counts as an activation, because it may grow with the batch. A
        parameter that is the input of a layer also counts as an activation.
        """
        weights = [self._weights.find(value) for value in values]
        kind = site.operation.kind
        if kind == "residual_add" or any(map(is_transformed, values)):
            return weights, None
        names = [operand.name for operand in site.operation.operands if operand.index is not None]
        own = names.index("weight") if "weight" in names else None
        for place, value in enumerate(values):
            if weights[place] is not None or not isinstance(value, Tensor) or value.layout is not torch.strided:
                continue
            origin = self._tracker.origin(value)
            alone = origin is not None and origin.kind == "parameter"
            if place == own or (alone and own is None):
                computed = self._computed(site, values, place)
                if isinstance(computed, Weight):
                    weights[place] = computed
                elif computed is not None and (alone or computed == RANDOM):
                    return weights, ReasonCode.FROM_PARAMETERS.text(why=computed)
        if own is not None and weights[own] is not None:
            weights = [weight if place == own else None for place, weight in enumerate(weights)]
        return weights, None

    def _computed(self, site: Site, values: Sequence[Any], place: int) -> Weight | str | None:
        """Return a weight computed from parameters, or why it cannot be stored; None for other operands."""
        value: Tensor = values[place]
        computation = self._tracker.computation(value, site.host_path)
        if computation is None or isinstance(computation, str):
            return computation
        if not computation.inputs:
            return None
        inputs = [self._named[path] for path in computation.inputs]
        weight: Weight | None = Weight.computed(computation, inputs)
        if site.operation.kind == "matmul":
            weight = self._before_spreading(site, values, place, computation)
        if weight is None or (site.path, place) in self._repeated:
            return weight
        problem = non_finite(value)
        if problem is not None:
            raise CalibrationError(
                f"{site.path}: the weight that is computed from {', '.join(computation.inputs)}, shape "
                f"{tuple(value.shape)}, contains {problem}; check these parameters"
            )
        repeated = weight.tensor()
        if repeated.dtype != value.dtype or not torch.equal(repeated.expand_as(value), value.detach()):
            return "and gives other values when the computation is repeated"
        self._repeated.add((site.path, place))
        return weight

    def _before_spreading(
        self, site: Site, values: Sequence[Any], place: int, computation: Computation
    ) -> Weight | None:
        """Return an operand of a MatMul before its expansion over a batch, as in ``w.expand(len(x), -1, -1)``.

        None: it is expanded in another way, which may depend on the batch.
        """
        value: Tensor = values[place]
        inputs = [self._named[path] for path in computation.inputs]
        try:
            core = computation.without_copies(inputs)
            unexpanded = core.of(inputs)
        except ValueError:
            return None
        if core == computation:
            return Weight.computed(computation, inputs)
        expanded = (
            [axis for axis, size in enumerate(unexpanded.shape) if size != value.shape[axis]]
            if unexpanded.dim()
            else []
        )
        if unexpanded.dim() != value.dim() or any(unexpanded.shape[axis] != 1 for axis in expanded):
            return None
        if not expanded:
            return Weight.computed(computation, inputs)
        if not set(expanded) <= _batch_axes(site, values, place):
            return None
        # For a batch of one sample it may be a view.
        return self._weights.find(unexpanded) or Weight.computed(core, inputs)

    def unfit(self, site: Site, values: Sequence[Any], weights: Sequence[Weight | None]) -> str | None:
        """Return why the operands of a call cannot be quantized; None if they can."""
        if any(map(is_transformed, values)):
            return ReasonCode.TRANSFORMED.text()
        tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
        if any(tensor.is_nested for tensor in tensors):
            return ReasonCode.NESTED.text()
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return ReasonCode.SPARSE.text()
        if len(tensors) != len(values):
            return ReasonCode.NOT_TENSORS.text()
        if any(tensor.numel() == 0 for tensor in tensors):
            return ReasonCode.EMPTY.text()
        origins = [self._tracker.origin(tensor) for tensor in tensors]
        if site.operation.kind == "residual_add":
            return _why_not_residual(tensors, origins)
        if site.operation.kind == "embedding":
            return None if weights[0] is not None else ReasonCode.TABLE.text()
        alone = all(origin is not None and origin.kind == "parameter" for origin in origins)
        if all(weight is not None for weight in weights) or (alone and not any(weights)):
            return ReasonCode.PARAMETERS_ALONE.text()
        if len(weights) > _PRODUCT and any(weight is not None for weight in weights):
            return ReasonCode.ATTENTION_PARAMETER.text()
        return None


def _batch_axes(site: Site, values: Sequence[Any], place: int) -> set[int]:
    if not site.source.equation:
        return set(range(values[place].dim() - _MATRIX))
    equation_labels = labels(site.source.equation, [value.dim() for value in values])
    shared = set(equation_labels.operands[1 - place]) & equation_labels.output
    return {axis for axis, label in enumerate(equation_labels.operands[place]) if label in shared}


def _why_not_residual(tensors: Sequence[Tensor], origins: Sequence[Origin | None]) -> str | None:
    """Return why an add does not join two branches of the network; None if it does.

    A residual add has two computed operands of the same shape. At least one comes from a layer with weights, and not
    both from the same layer (a rotary embedding adds two halves of one projection). A MatMul of two activations gives
    attention scores, to which a position bias is added; engines that fuse attention add both in float.
    """
    first, second = origins
    if tensors[0].shape != tensors[1].shape:
        return ReasonCode.ADD_BROADCASTS.text()
    if any(origin is not None and origin.kind == "parameter" for origin in (first, second)):
        return ReasonCode.ADD_PARAMETER.text()
    if not any(origin is not None and origin.kind == "weighted" for origin in (first, second)):
        return ReasonCode.ADD_UNWEIGHTED.text()
    if first == second:
        return ReasonCode.ADD_ONE_PRODUCT.text()
    if any(origin is not None and origin.kind == "product" for origin in (first, second)):
        return ReasonCode.ADD_SCORES.text()
    if 0 < tensors[0].dim() <= _MAX_ROWS_DIM and tensors[0].shape[-1] <= _COORDINATES:
        # Its two adds cost RT-DETRv2 0.4 points of mAP; see benchmarks/results/detectors.md.
        return ReasonCode.ADD_COORDINATES.text()
    return None


_MAX_ROWS_DIM, _COORDINATES = 3, 4
"""Most dimensions of a tensor whose last one has the values of a row, and most values of a row that may be a box."""
