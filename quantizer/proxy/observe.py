"""Observing: what calibration sees of each site, and the ranges it collects.

Operands that are one and the same tensor (query, key and value read one) share a ``RangeGroup``: one calibrator, fed
once a batch, one range.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from dataclasses import field
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import nn
from torch.utils import _python_dispatch
from torch.utils.weak import WeakIdKeyDictionary

from quantizer.calibrators import Calibrator
from quantizer.errors import CalibrationError
from quantizer.proxy.build import SkippedSource
from quantizer.proxy.caller import callers
from quantizer.proxy.caller import innermost_frame
from quantizer.proxy.completeness import ProductCounter
from quantizer.proxy.kept_batches import Batch
from quantizer.proxy.kept_batches import KeptBatches
from quantizer.proxy.local_hook import LocalHook
from quantizer.proxy.magnitudes import Magnitudes
from quantizer.proxy.padding import padding_mask
from quantizer.proxy.padding import without_padding
from quantizer.proxy.provenance import Origin
from quantizer.proxy.provenance import Provenance
from quantizer.proxy.range_group import ChannelRange
from quantizer.proxy.range_group import OperandRecord
from quantizer.proxy.range_group import RangeGroup
from quantizer.proxy.site import Site
from quantizer.proxy.weight import Weight
from quantizer.proxy.weight import Weights
from quantizer.proxy.weight import is_transformed
from quantizer.source.catalogue import Kind
from quantizer.source.catalogue import kind_of
from quantizer.source.geometry import Call

__all__ = [
    "EMPTY",
    "OF_PARAMETERS",
    "Observation",
    "TRANSFORMED",
    "VARIES",
    "SiteRecord",
    "one_size",
    "same_weight",
]

EMPTY = "an operand was empty in every call"
OF_PARAMETERS = ("an operand is computed from parameters at each call", "its operands are parameters alone")
TRANSFORMED = "it runs inside torch.vmap or a transform of torch.func"
VARIES = "an operand is a parameter in one call and something else in another"
_NOT_TENSORS = "its operands are not floating-point tensors"
_PRODUCT = 2  # operands of a product
_TORCH = str(Path(torch.__file__).parent)


@dataclass(kw_only=True, slots=True)
class SiteRecord:
    """What was seen of one site.

    ``kind`` is what its operands make it (None: none seen yet). ``calls`` counts all calls and ``fit`` those whose
    operands can be rounded; ``reasons`` says why others cannot. ``reads`` are the paths of the parameters among its
    operands. ``depth`` and ``width`` are K and N of the product (None: not seen yet; 0: they changed from call to call,
    as a sequence length does), and ``rows`` is M (0 also where a batch counts in it); ``multiply_adds`` those of all
    calls together. ``head`` and ``sequence`` are the head size, like K, and the longest sequence, if it is a product of
    an attention.
    """

    kind: Kind | None = None
    calls: int = 0
    fit: int = 0
    reasons: list[str] = field(default_factory=list)
    reads: set[str] = field(default_factory=set)
    depth: int | None = None
    width: int | None = None
    rows: int | None = None
    head: int | None = None
    sequence: int = 0
    multiply_adds: int = 0
    operands: dict[str, OperandRecord] = field(default_factory=dict)


def one_size(first: int | None, second: int | None) -> int | None:
    """K or N of the product in all calls: None where there was none, 0 where it changes."""
    if first is None or second is None:
        return second if first is None else first
    return first if first == second else 0


class Observation:
    """Watches a proxy's sites during calibration.

    Attributes:
        records: by site name.
        batches: forward passes of the whole proxy so far.
        provenance: origins of tensors in the pass that is running.
        counter: the products of all passes.
        magnitudes: how large values became in all passes.
        kept: batches to run again (None: none are kept).
        make: makes a calibrator; its argument asks for a histogram.
        chosen_at: how many batches had been seen when ranges were chosen last.
        read_outside: parameters that something besides sites computes with, by path, each with a place.
    """

    def __init__(
        self,
        sites: Iterable[Site],
        refused: Mapping[str, str],
        make: Callable[[bool], Calibrator],
        off: Collection[str] = (),
        skipped: Iterable[SkippedSource] = (),
        *,
        keep: bool = False,
        channels: bool = False,
    ) -> None:
        """
        Args:
            sites: all sites of the proxy.
            refused: sites (and operands) that rules leave out; they are counted, not observed.
            make: makes a calibrator; its argument asks for a histogram.
            off: kinds of site that are counted, not observed; which kind a site is, its operands say.
            skipped: calls and functions that could not be rewritten.
            keep: keep a few batches.
            channels: keep the range of each channel of what linears read.
        """
        self.records = {site.path: SiteRecord() for site in sites}
        self.batches = 0
        self.counter = ProductCounter(skipped)
        self.magnitudes = Magnitudes()
        self.provenance = Provenance(self.counter, self.magnitudes)
        self.kept = KeptBatches() if keep else None
        self.chosen_at = 0
        self.read_outside: dict[str, str] = {}
        self._refused = refused
        self.make = make
        self._channels = channels
        self._off = off
        self._seen: Any = WeakIdKeyDictionary()
        self._handles: list[Any] = []
        self._call: Call | None = None
        self._weights = Weights()
        self._mask: Tensor | None = None
        self._wanted: tuple[bytes, Batch] | None = None

    def attach(self, proxy: nn.Module, sites: Iterable[Site]) -> None:
        """Start observing."""
        for site in sites:
            site.observer = self
        self._handles = [
            proxy.register_forward_pre_hook(LocalHook(self._begin), with_kwargs=True),
            proxy.register_forward_hook(LocalHook(self._end), always_call=True),
            proxy.register_forward_hook(LocalHook(self._count), with_kwargs=True),
        ]

    def detach(self, sites: Iterable[Site]) -> None:
        """Stop observing; what was seen stays."""
        for site in sites:
            site.observer = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def paused(self, sites: Iterable[Site]) -> Iterator[None]:
        """Let the sites run without being observed; for passes that begin with ``proxy.forward``."""
        watched = [site for site in sites if site.observer is self]
        for site in watched:
            site.observer = None
        try:
            yield
        finally:
            for site in watched:
                site.observer = self

    def forget_choices(self) -> None:
        """Ranges that were chosen by running batches are to be chosen anew."""
        self.chosen_at = 0
        for group in self.groups:
            group.chosen = None

    @property
    def groups(self) -> Iterator[RangeGroup]:
        """Every group of operands that share a range that is used, each once."""
        seen = (record.range for site in self.records.values() for record in site.operands.values())
        yield from dict.fromkeys(group for group in seen if group is not None)

    # -- the whole pass --------------------------------------------------------------------------------------------

    def _begin(self, proxy: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if proxy.training:
            raise CalibrationError(
                "the proxy is in train mode, where dropout would enter the ranges; call .eval() on it first"
            )
        named = {**{f"argument {place}": value for place, value in enumerate(args)}, **keywords}
        for name, value in named.items():
            if isinstance(value, Tensor) and value.is_floating_point() and bool(torch.isnan(value).any()):
                raise CalibrationError(
                    f"batch {self.batches} of the calibration data: {name!r} has NaN values; leave them out of the data"
                )
        # At each pass: a cast gives the proxy parameters of its own.
        self._weights = Weights(proxy.named_parameters())
        self._mask = padding_mask(keywords)
        self._wanted = self.kept.wanted(args, keywords) if self.kept is not None else None
        self.counter.start(proxy)
        self.magnitudes.start(named.values())
        self.provenance = Provenance(self.counter, self.magnitudes, self._read)
        self.provenance.__enter__()  # type: ignore[no-untyped-call]

    def _read(self, value: Tensor) -> None:
        """Note a parameter that something besides a site computes with: frozen, it has to be there as floats too."""
        for path in self._weights.shown_by(value):
            if path not in self.read_outside:
                running = callers(innermost_frame(sys._getframe()))
                outside = (caller for caller in running if not caller.file.startswith(_TORCH))
                place = next(outside, "in torch's own code")
                self.read_outside[path] = str(place)

    def _end(self, proxy: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        # always_call: this also runs after an exception in the pass, and after one in _begin itself.
        self.counter.stop()
        if _python_dispatch._get_current_dispatch_mode() is self.provenance:
            self.provenance.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _count(self, proxy: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any], result: Any) -> None:
        # A pass that fails is not counted: what it saw is no calibration.
        self.batches += 1
        self.magnitudes.returned(result)
        if self.kept is not None and self._wanted is not None:
            self.kept.keep(*self._wanted)

    # -- one site --------------------------------------------------------------------------------------------------

    def before(self, site: Site, values: list[Any], inside: Callable[[], Tensor]) -> None:
        """See the operands of a call.

        Raises:
            CalibrationError: an operand holds NaN or an infinity.
        """
        # What is computed to see them is none of the model's: nobody counts it or asks where it comes from. torch's
        # _disable_current_modes does the same, and knows modes of tracers besides, which takes it three times as long.
        modes = [_python_dispatch._pop_mode() for _ in range(torch._C._len_torch_dispatch_stack())]
        try:
            self._see(site, values, inside)
        finally:
            for mode in reversed(modes):
                _python_dispatch._push_mode(mode)

    def _see(self, site: Site, values: list[Any], inside: Callable[[], Tensor]) -> None:
        record = self.records[site.path]
        self._call = None
        record.calls += 1
        weights = [self._weights.find(value) for value in values]
        record.reads |= {weight.path for weight in weights if weight is not None and weight.path is not None}
        reason = self._unfit(site, values, weights) or self._varies(record, site, weights)
        if reason is not None:
            if reason not in record.reasons:
                record.reasons.append(reason)
            return
        place = next((place for place, weight in enumerate(weights) if weight is not None), None)
        record.kind = kind_of(site.operation, weighted=place is not None)
        shapes = tuple(tuple(value.shape) for value in values)
        self._call = Call(operands=shapes, result=(), weight=place, equation=site.source.equation)
        record.fit += 1
        if site.path in self._refused or record.kind in self._off:
            return
        given = zip(values, weights, strict=True)
        for operand in site.operation.operands:
            value, weight = (inside(), None) if operand.index is None else next(given)
            seen = record.operands.setdefault(operand.name, OperandRecord())
            # The operand that fused attention makes inside is its softmax.
            origin = self.provenance.origin(value)
            seen.softmax = operand.index is None or (origin is not None and origin.kind == "softmax")
            if weight is not None:
                seen.weight = weight
            elif f"{site.path}.{operand.name}" not in self._refused:
                self._observe(site, operand.name, value, seen)
                if self._channels and record.kind == "linear":
                    assert seen.group is not None
                    seen.group.add_channels(ChannelRange.of(without_padding(value, self._mask)))
        if record.kind == "residual_add":
            origins = [self.provenance.origin(value) for value in values]
            direct = [origin is not None and origin.direct for origin in origins]
            for operand, ends in zip(site.operation.operands, direct, strict=True):
                record.operands[operand.name].ends_branch |= ends and not all(direct)

    def after(self, site: Site, result: Any) -> None:
        """Measure the call, and mark what it made."""
        record = self.records[site.path]
        kind = record.kind or site.operation.kind
        if not isinstance(result, Tensor):
            return
        if kind == "residual_add":
            if result.is_floating_point():
                self.provenance.mark(result, Origin("add", site.path))
            return
        if self._call is not None:
            self._measure(site, replace(self._call, result=tuple(result.shape)), record)
        if kind != "embedding":
            made = "product" if kind == "matmul" else "weighted"
            self.provenance.mark(result, Origin(made, site.path, direct=True))

    def _unfit(self, site: Site, values: list[Any], weights: list[Weight | None]) -> str | None:
        if any(map(is_transformed, values)):
            return TRANSFORMED
        tensors = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
        if any(tensor.is_nested for tensor in tensors):
            return "an operand is a nested tensor"
        if len(tensors) != len(values):
            return _NOT_TENSORS
        if any(tensor.numel() == 0 for tensor in tensors):
            return EMPTY
        if site.operation.kind == "residual_add":
            return self._why_not_residual(tensors)
        origins = [self.provenance.origin(tensor) for tensor in tensors]
        if any(
            origin is not None and origin.kind == "parameter" and weight is None
            for origin, weight in zip(origins, weights, strict=True)
        ):
            return OF_PARAMETERS[0]
        if site.operation.kind == "embedding":
            return None if weights[0] is not None else "the table of the embedding is no parameter"
        if all(weight is not None for weight in weights):
            return OF_PARAMETERS[1]
        if len(weights) > _PRODUCT and any(weight is not None for weight in weights):
            return "an operand of the attention is a parameter"
        return None

    def _varies(self, record: SiteRecord, site: Site, weights: list[Weight | None]) -> str | None:
        """Why a site that is called many times cannot hold its weight: it is not always the same."""
        given = (operand for operand in site.operation.operands if operand.index is not None)
        for operand, weight in zip(given, weights, strict=True):
            seen = record.operands.get(operand.name)
            first = seen is None or (seen.weight is None and seen.group is None)
            if seen is not None and not first and not same_weight(seen.weight, weight):
                return VARIES
        return None

    def _why_not_residual(self, tensors: list[Tensor]) -> str | None:
        """Why an add does not join two branches of the network.

        A residual add has two computed operands of one shape, at least one of them made by a weighted product, and
        not both by the same one (a rotary embedding adds two halves of one projection). What a product of two
        activations gives are scores, and what is added to them is a position's bias: an engine that fuses attention
        adds both as floats.
        """
        first, second = (self.provenance.origin(tensor) for tensor in tensors)
        if tensors[0].shape != tensors[1].shape:
            return "the add broadcasts an operand"
        if any(origin is not None and origin.kind == "parameter" for origin in (first, second)):
            return "an operand of the add is a parameter"
        if not any(origin is not None and origin.kind == "weighted" for origin in (first, second)):
            return "no operand of the add comes from a weighted product"
        if first == second:
            return "both operands of the add come from one product"
        if any(origin is not None and origin.kind == "product" for origin in (first, second)):
            return "an operand of the add comes from a product of two activations, as scores do"
        return None

    def _measure(self, site: Site, call: Call, record: SiteRecord) -> None:
        """Note the product's K and N, its multiply-adds, and the axis of its weight's channels."""
        assert site.operation.geometry is not None
        size = site.operation.geometry(call)
        record.depth = one_size(record.depth, size.depth)
        record.width = one_size(record.width, size.width)
        record.rows = one_size(record.rows, size.rows)
        operands = [record.operands.get(operand.name) for operand in site.operation.operands]
        probabilities = (place for place, seen in enumerate(operands) if seen is not None and seen.softmax)
        head, sequence = size.attention(next(probabilities, None))
        record.head, record.sequence = one_size(record.head, head), max(record.sequence, sequence)
        record.multiply_adds += size.multiply_adds
        for seen in record.operands.values():
            if seen.weight is not None:
                seen.axis, seen.inner = size.axis, size.inner

    def _observe(self, site: Site, operand: str, value: Tensor, record: OperandRecord) -> None:
        name = f"{site.path}.{operand}"
        version = 0 if value.is_inference() else value._version
        known = self._seen.get(value)
        residual = site.operation.kind == "residual_add"
        if known is not None and known[0] == version:
            self.join(record, known[1], name)
            if residual:
                known[1].calibrator.start_histogram(without_padding(value, self._mask))
            return
        if record.group is None:
            record.group = RangeGroup(calibrator=self.make(residual), operands=[name])
        try:
            real = without_padding(value, self._mask)
            record.group.calibrator.observe(real)
            if real is value:
                self.magnitudes.at_most(value, record.group.calibrator.largest)
        except CalibrationError as error:
            raise CalibrationError(f"batch {self.batches} of the calibration data: {name}: {error}") from error
        self._seen[value] = (version, record.group)

    def join(self, record: OperandRecord, group: RangeGroup, name: str) -> None:
        """Make an operand one of a group, and its former group too."""
        if record.group is group:
            return
        if record.group is None:
            group.operands.append(name)
            record.group = group
            return
        former = record.group
        group.calibrator.merge(former.calibrator)
        group.operands += former.operands
        if former.channels is not None:
            group.add_channels(former.channels)
        elif former.channels_vary:
            group.channels, group.channels_vary = None, True
        for other in self.records.values():
            for seen in other.operands.values():
                if seen.group is former:
                    seen.group = group
        for tensor, (version, owner) in list(self._seen.items()):
            if owner is former:
                self._seen[tensor] = (version, group)


def same_weight(first: Weight | None, second: Weight | None) -> bool:
    """Whether an operand is the same weight, or none, in both calls."""
    if first is None or second is None:
        return first is second
    # A parameter that no module has registered is known by nothing else across processes.
    unregistered = first.path is None and second.path is None
    return unregistered or (first.parameter is second.parameter and first.view == second.view)
