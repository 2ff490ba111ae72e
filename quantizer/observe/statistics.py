"""The statistics of a proxy: of a site, of one pass, of a calibration, of several processes.

They can be added in any order, for passes and for processes. ``read_mask`` finds the padding of a batch. The meaning of
an ``attention_mask`` depends on the model: 1 for a token and 0 for padding, as tokenizers write it; booleans of the
opposite meaning; numbers to be added to scores; or a mask per pair of tokens. Positions are left out only if the first
meaning is certain: leaving out real tokens would spoil ranges, keeping padding costs little.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from quantizer.errors import SensitivityError
from quantizer.observe.completeness import CountedProduct
from quantizer.observe.float16_modules import Float32Modules
from quantizer.observe.range_group import OperandRecord, RangeGroup, RoundedWeight
from quantizer.observe.replay_batches import ReplayBatches
from quantizer.plan.reasons import ReasonCode
from quantizer.proxy.site import OUTPUT
from quantizer.proxy.weight import Weight
from quantizer.rewrite.operations import Kind
from quantizer.utils.sizes import InputShapes
from quantizer.utils.structure import leaves


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasShifts:
    """Shifts of the biases of sites, which cancel the mean error of their outputs.

    Attributes:
        shifts: float32 [C], by site.
        notes: a note for each quantized site: that it has a shift, or why not.
    """

    shifts: Mapping[str, Tensor]
    notes: Mapping[str, str]


@dataclass(kw_only=True, slots=True, eq=False)
class RoundingProgress:
    """Weights already rounded when an interrupt stopped the rounding of a model.

    Attributes:
        key: a checksum of all inputs of the result.
        weights: the weights that were rounded layer by layer, by ``SITE.OPERAND``.
        reconstructed: the weights that were then rounded for the outputs of blocks.
        ranges: the amax of the ranges that were learned with them, by the first operand of their groups.
    """

    key: str
    weights: dict[str, RoundedWeight] = field(default_factory=dict)
    reconstructed: dict[str, RoundedWeight] = field(default_factory=dict)
    ranges: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Seen:
    """The statistics of all sites, range groups and counted operations.

    Attributes:
        records: by site name.
        batches: the number of complete forward passes.
        rows: the number of samples in these.
        chosen_at: the number of batches when ranges were last chosen by running batches.
        products: the matrix multiplications and convolutions that torch computed, with their multiply-adds.
        regions: modules with values beyond the range of float16.
        kept: batches to run again (None: none are stored).
        only_zeros: whether all inputs were all zeros.
        read_outside: the place outside of sites that reads a parameter, by the parameter's path.
        bias_shifts: the shifts of biases, and the number of batches when they were measured (None: not measured).
        inputs: the shapes of the inputs, without duplicates, in order of appearance.
        rounding: the weights that are already rounded, if the choice of their integers was interrupted (None: it was
            not).
        replayed: the number of stored batches that ran again for the choices of the plan, those of several passes
            counted several times.
    """

    records: dict[str, SiteStatistics]
    batches: int = 0
    rows: int = 0
    chosen_at: int = 0
    products: Counter[CountedProduct] = field(default_factory=Counter)
    regions: Float32Modules = field(default_factory=Float32Modules)
    kept: ReplayBatches | None = None
    only_zeros: bool = True
    read_outside: dict[str, str] = field(default_factory=dict)
    bias_shifts: tuple[int, BiasShifts] | None = None
    inputs: tuple[InputShapes, ...] = ()
    rounding: RoundingProgress | None = None
    replayed: int = 0

    @classmethod
    def of_sites(cls, paths: Iterable[str], kept: ReplayBatches | None = None) -> Seen:
        """Return empty statistics of these sites."""
        return cls(records={path: SiteStatistics() for path in paths}, kept=kept)

    @property
    def groups(self) -> Iterator[RangeGroup]:
        """The groups whose ranges are used, each once."""
        ranges = (record.range for site in self.records.values() for record in site.operands.values())
        yield from dict.fromkeys(group for group in ranges if group is not None)

    def counted(self) -> tuple[CountedProduct, ...]:
        """Return the matrix multiplications and convolutions that torch computed, with their multiply-adds."""
        return tuple(replace(product, multiply_adds=number) for product, number in self.products.items())

    def constant_operands(self) -> dict[float, list[str]]:
        """Return the activations (``SITE.OPERAND``) with a single value so far, by that value."""
        constants: dict[float, list[str]] = {}
        for path, record in self.records.items():
            for name, operand in record.operands.items():
                calibrator = None if operand.group is None else operand.group.calibrator
                if calibrator is not None and calibrator.count > 1 and calibrator.minimum == calibrator.maximum:
                    constants.setdefault(calibrator.minimum + 0.0, []).append(f"{path}.{name}")
        return constants

    def forget_choices(self) -> None:
        """Discard all choices made by running batches: ranges, SmoothQuant factors, integers, shifts."""
        self.chosen_at = 0
        self.bias_shifts = None
        for site in self.records.values():
            site.left = None
            for record in site.operands.values():
                record.smoothed = record.left = record.rounded = record.spread = None
        # Also for groups that were smoothed: without smoothing they are in use again.
        for group in self.groups:
            for each in (group, *group.parts):
                each.chosen = None

    def take_choices(self, other: Seen) -> None:
        """Copy all choices made by running batches from equal statistics; mutable objects are not shared."""
        self.bias_shifts = other.bias_shifts
        migrated: dict[RangeGroup, RangeGroup] = {}
        for path, site in other.records.items():
            if path not in self.records:
                # An output site that exists only for another target.
                continue
            self.records[path].left = site.left
            for name, record in site.operands.items():
                mine = self.records[path].operands[name]
                mine.left, mine.rounded, mine.spread = record.left, record.rounded, record.spread
                if mine.group is not None and record.group is not None:
                    mine.group.chosen = record.group.chosen
                    for own, theirs in zip(mine.group.parts, record.group.parts, strict=False):
                        own.chosen = theirs.chosen
                if record.smoothed is not None:
                    mine.smoothed = migrated.setdefault(record.smoothed, record.smoothed.copy())

    def with_added(self, other: Seen) -> Seen:
        """Return the sum of these statistics and others; both stay unchanged.

        An interrupt therefore never adds a part of a batch.
        """
        total = self.copy()
        total.add(other)
        return total

    def copy(self) -> Seen:
        """Return a copy; adding to it does not change the original."""
        groups: dict[RangeGroup, RangeGroup] = {}

        def operand(record: OperandRecord) -> OperandRecord:
            group = record.group
            if group is not None and group not in groups:
                groups[group] = group.copy()
            return replace(record, group=None if group is None else groups[group])

        def site(record: SiteStatistics) -> SiteStatistics:
            operands = {name: operand(operand_record) for name, operand_record in record.operands.items()}
            return replace(
                record,
                reasons=list(record.reasons),
                reads=set(record.reads),
                follows=set(record.follows),
                operands=operands,
            )

        return replace(
            self,
            records={path: site(record) for path, record in self.records.items()},
            products=copy.copy(self.products),
            read_outside=dict(self.read_outside),
            kept=None if self.kept is None else self.kept.copy(),
            replayed=0,
        )

    def add(self, other: Seen) -> None:
        """Add other statistics, which must not change afterwards.

        Stored batches are not added, because the choice depends on all batches, see ``ReplayBatches``.
        """
        self.batches += other.batches
        self.rows += other.rows
        self.chosen_at = max(self.chosen_at, other.chosen_at)
        self.products.update(other.products)
        self.regions = self.regions.joined(other.regions)
        self.only_zeros = self.only_zeros and other.only_zeros
        self.inputs = tuple(dict.fromkeys((*self.inputs, *other.inputs)))
        self.read_outside = {**other.read_outside, **self.read_outside}
        for path, record in other.records.items():
            self.records[path].add(record)
        groups = (operand.group for record in other.records.values() for operand in record.operands.values())
        for group in dict.fromkeys(group for group in groups if group is not None):
            self._add_group(group, other)

    def join(self, record: OperandRecord, group: RangeGroup, name: str) -> int:
        """Add an operand and its former group to a group; return the index offset of the former group's tensors."""
        if record.group is group:
            return 0
        if record.group is None:
            group.operands.append(name)
            record.group = group
            return 0
        former = record.group
        moved = group.append(former)
        group.operands += former.operands
        for other in self.records.values():
            for operand in other.operands.values():
                if operand.group is former:
                    operand.group = group
                    operand.tensors = operand.tensors and tuple(-1 if n < 0 else n + moved for n in operand.tensors)
        return moved

    def separate_groups(self) -> None:
        """Renumber the tensors of each group in the order of its operands, and split groups without common tensors.

        Results of convolutions are last. A target that observes none has the same numbers then: its groups are split
        where only a result joined them, and lose the tensors that only a result read.
        """
        readers: dict[RangeGroup, list[_Reader]] = {}
        for path, site in self.records.items():
            for name, record in site.operands.items():
                if record.group is not None and record.group.parts:
                    reader = _Reader(path.endswith(f".{OUTPUT}"), f"{path}.{name}", record)
                    readers.setdefault(record.group, []).append(reader)
        for group, operands in readers.items():
            if any(reader.record.smoothed is not None for reader in operands):
                # A saved choice without batches to repeat it: its ranges have the numbers of these tensors.
                continue
            _separate(group, sorted(operands, key=lambda reader: (reader.is_result, reader.name)))

    def _add_group(self, added: RangeGroup, other: Seen) -> None:
        named = [(name, self._operand(name)) for name in added.operands]
        # An operand that is a weight in other calls needs no range, because its site is not quantized.
        members = [(name, record) for name, record in named if record.weight is None]
        group = next((record.group for _, record in members if record.group is not None), None)
        if group is None:
            group = replace(added.copy(), operands=[])
        else:
            group.add(added)
            # Operands that read one tensor in some batches, but not in others, number their tensors differently.
            if any(other.has_range(name) for name in group.operands if name not in added.operands):
                group.keep_together("")
        for name, record in members:
            if record.group not in (None, group):
                group.keep_together("")
            if record.tensors == ():
                group.keep_together("their number differs between batches")
            self.join(record, group, name)

    def has_range(self, name: str) -> bool:
        """Return whether an operand was observed."""
        path, _, operand = name.rpartition(".")
        site = self.records.get(path)
        return site is not None and operand in site.operands and site.operands[operand].group is not None

    def _operand(self, name: str) -> OperandRecord:
        path, _, operand = name.rpartition(".")
        return self.records[path].operands[operand]


@dataclass(frozen=True, slots=True)
class _Reader:
    """An operand of a range group: whether it is the result of a convolution, its name and its record."""

    is_result: bool
    name: str
    record: OperandRecord

    @property
    def tensors(self) -> list[int]:
        return [number for number in self.record.tensors or () if number >= 0]


def _separate(group: RangeGroup, operands: list[_Reader]) -> None:
    """Split a group into operands with common tensors, numbered in the order of their operands."""
    every = range(len(group.parts))
    order = list(dict.fromkeys([number for reader in operands for number in reader.tensors]))
    has_results = any(reader.is_result for reader in operands)
    parts = [(operands, {*every})] if has_results else _connected(operands)
    for readers, tensors in parts:
        numbers = [*(number for number in order if number in tensors), *sorted(tensors.difference(order))]
        if not numbers or numbers == [*every]:
            continue
        names = {reader.name for reader in readers}
        new = group.selected(numbers, [name for name in group.operands if name in names], has_results=has_results)
        for reader in readers:
            reader.record.group = new
            reader.record.tensors = tuple(
                numbers.index(number) if number >= 0 else -1 for number in reader.record.tensors or ()
            )


def _connected(operands: Iterable[_Reader]) -> list[tuple[list[_Reader], set[int]]]:
    """Return the operands that directly or indirectly have tensors in common, with these tensors."""
    found: list[tuple[list[_Reader], set[int]]] = []
    for reader in operands:
        tensors = set(reader.tensors)
        joined = [one for one in found if one[1] & tensors]
        found = [one for one in found if not one[1] & tensors]
        found.append(
            (
                [*(other for readers, _ in joined for other in readers), reader],
                tensors.union(*(numbers for _, numbers in joined)),
            )
        )
    return found


@dataclass(kw_only=True, slots=True)
class SiteStatistics:
    """The statistics of one site over all its calls.

    GEMM dimensions are None before the first call, and 0 if they vary, as a sequence length does.

    Attributes:
        kind: the kind of the site, which depends on its operands (None: no call yet).
        calls: the number of all calls.
        fit: the number of calls whose operands can be quantized.
        reasons: why the operands of other calls cannot be quantized.
        reads: the paths of the parameters among its operands.
        depth: the GEMM dimension K.
        width: the GEMM dimension N.
        rows: the GEMM dimension M; 0 also if it includes a batch axis.
        head: the head size, for a MatMul of an attention.
        sequence: the length of the longest sequence, for a MatMul of an attention; else 0.
        multiply_adds: the multiply-adds of all calls together.
        operands: the records of its operands, by name.
        experts: the number of rows of each expert of a grouped MatMul; empty for any other operation.
        follows: the sites that must be quantized for this one to be: for the output of a convolution that convolution,
            for an add the outputs among its operands.
        left: why the site is not quantized, judged by the model's output (None: it may be quantized).
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
    experts: list[int] = field(default_factory=list)
    left: str | None = None
    follows: set[str] = field(default_factory=set)

    def add_experts(self, rows: list[int]) -> None:
        self.experts = [sum(pair) for pair in zip_longest(self.experts, rows, fillvalue=0)]

    @property
    def unreached(self) -> list[int]:
        """The experts that no calibration sample reached."""
        return [number for number, rows in enumerate(self.experts) if rows == 0]

    def add(self, other: SiteStatistics) -> None:
        """Add other statistics of the site, except for the groups of operands, which ``Seen`` joins."""
        self.kind = self.kind or other.kind
        self.left = self.left or other.left
        self.calls += other.calls
        self.fit += other.fit
        self.multiply_adds += other.multiply_adds
        self.reads |= other.reads
        self.follows |= other.follows
        self.add_experts(other.experts)
        self.depth = merge_dimension(self.depth, other.depth)
        self.width = merge_dimension(self.width, other.width)
        self.rows = merge_dimension(self.rows, other.rows)
        self.head = merge_dimension(self.head, other.head)
        self.sequence = max(self.sequence, other.sequence)
        reasons = list(other.reasons)
        for name, operand in other.operands.items():
            mine = self.operands.setdefault(name, OperandRecord())
            if operand.weight is None and operand.group is None:
                continue
            if mine.weight is None and mine.group is None:
                mine.weight = operand.weight
            elif not same_weight(mine.weight, operand.weight):
                reasons.append(why_varies(mine.weight, operand.weight))
            mine.add(operand)
        self.reasons += [reason for reason in dict.fromkeys(reasons) if reason not in self.reasons]


def merge_dimension(first: int | None, second: int | None) -> int | None:
    """Merge a GEMM dimension of two calls: None if unknown, 0 if it varies."""
    if first is None or second is None:
        return second if first is None else first
    return first if first == second else 0


def same_weight(first: Weight | None, second: Weight | None) -> bool:
    """Return whether an operand is the same weight, or no weight, in both calls."""
    if first is None or second is None:
        return first is second
    # An unregistered parameter has no path by which it could be compared across processes.
    return (first.path is None and second.path is None) or first.is_same(second)


def why_varies(*weights: Weight | None) -> str:
    """Return why a site is not quantized if its operand is not the same weight in all calls."""
    if all(weight is not None and weight.computation is not None for weight in weights):
        return ReasonCode.FROM_PARAMETERS.text(why="but differently in different calls")
    return ReasonCode.VARIES.text()


_NAME = "attention_mask"
_AXES = 2  # of a mask [B, S]


def padding_mask(keywords: Mapping[str, Any], args: tuple[Any, ...] = ()) -> Tensor | None:
    """Return the mask [B, S] among a model's inputs, True for real tokens; None if no padding is certain."""
    return read_mask(keywords, args)[0]


def read_mask(keywords: Mapping[str, Any], args: tuple[Any, ...] = ()) -> tuple[Tensor | None, str | None]:
    """Return the result of ``padding_mask``, and a warning if an ``attention_mask`` is ignored (else None)."""
    mask = keywords.get(_NAME)
    if not isinstance(mask, Tensor) or mask.numel() == 0 or bool((mask == mask.flatten()[0]).all()):
        # All values are equal: nothing is masked, because every batch has a token.
        return None, None
    others = {**{str(place): value for place, value in enumerate(args)}, **keywords}
    doubt = _doubt(mask, {name: value for name, value in others.items() if isinstance(value, Tensor)})
    if doubt is None:
        return mask.bool(), None
    kind = str(mask.dtype).removeprefix("torch.")
    return None, (
        f"{_NAME} ({kind} {list(mask.shape)}) may not be 1 for tokens and 0 for padding: {doubt}. It is ignored, so "
        "padding counts as tokens; pass integers [batch, sequence], or batches without padding"
    )


def without_padding(value: Tensor, mask: Tensor | None, *, channels_last: bool = False) -> Tensor:
    """Return the real positions of an operand [B, .., S, ..]; all positions unless exactly one axis has the length S.

    The model does not use values at padding, yet they can determine the range.

    Args:
        value: the operand.
        mask: [B, S], True for real tokens; None: all are real.
        channels_last: whether the last axis is known to be the channel axis.
    """
    axis = _token_axis(value, mask, channels_last)
    return value if mask is None or axis is None else value.movedim(axis, 1)[_positions(mask)]


def with_zeroed_padding(value: Tensor, mask: Tensor | None, *, channels_last: bool = False) -> Tensor:
    """Return an operand [B, .., S, ..] with zeros at its padding; arguments as in ``without_padding``."""
    axis = _token_axis(value, mask, channels_last)
    if mask is None or axis is None:
        return value
    hidden = ~mask.to(value.device)
    return value.masked_fill(hidden.reshape([*hidden.shape, *[1] * (value.dim() - _AXES)]).movedim(1, axis), 0.0)


def _token_axis(value: Tensor, mask: Tensor | None, channels_last: bool) -> int | None:
    """Return the axis of the tokens of a mask [B, S] in a value; None without a mask or with several candidates."""
    if mask is None or value.dim() < _AXES + 1 or value.shape[0] != mask.shape[0]:
        return None
    axes = [axis for axis in range(1, value.dim() - channels_last) if value.shape[axis] == mask.shape[1]]
    return axes[0] if len(axes) == 1 else None


def has_padding(output: Tensor, mask: Tensor | None) -> bool:
    """Return whether an output [B, S, ..] has a position for each token of the mask [B, S].

    Logits [B, C] have none, even if there are as many classes as tokens.
    """
    return mask is not None and output.dim() > _AXES and output.shape[:2] == mask.shape


def output_without_padding(output: Tensor, mask: Tensor | None) -> Tensor:
    """Return the real positions of an output [B, S, ..]; outputs of another shape are unchanged."""
    return output[_positions(mask)] if mask is not None and has_padding(output, mask) else output


_POSITIONS: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakTensorKeyDictionary()
"""The indices of the real tokens by mask, for as long as the mask exists."""


def _positions(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices [R] and [R] of a mask [B, S] of ``padding_mask``, which does not change.

    An index by the mask itself would wait for a GPU at each operand of a pass.
    """
    if mask not in _POSITIONS:
        samples, tokens = mask.nonzero(as_tuple=True)
        _POSITIONS[mask] = samples, tokens
    return _POSITIONS[mask]


def _doubt(mask: Tensor, inputs: Mapping[str, Tensor]) -> str | None:
    """Return why a mask may have another meaning; None if it cannot. ``inputs`` are the model's tensors, by name."""
    if mask.dtype == torch.bool:
        return "booleans may be True for tokens or for padding"
    if mask.is_floating_point() or mask.is_complex():
        return "its numbers may be added to scores"
    if mask.dim() != _AXES:
        return f"it has {mask.dim()} axes"
    real = mask.bool()
    changes = (real[:, 1:] != real[:, :-1]).sum(1)
    # One copy, because each copy waits for a GPU.
    is_binary, is_left, is_right, is_torn = torch.stack(
        (((mask == 0) | (mask == 1)).all(), real[:, 0].all(), real[:, -1].all(), (changes > 1).any())
    ).tolist()
    if not is_binary:
        return "it has values other than 0 and 1"
    if not (is_left or is_right) or is_torn:
        return "the tokens are not contiguous on the same side in all samples"
    return _doubt_beside(real, {name: value for name, value in inputs.items() if not name.endswith("mask")})


def _doubt_beside(real: Tensor, inputs: Mapping[str, Tensor]) -> str | None:
    """Return why the other inputs leave it unclear that ``real`` [B, S] marks real tokens; None if they do not."""
    same_shape = {name: value for name, value in inputs.items() if value.shape[:_AXES] == real.shape}
    if not same_shape:
        return "no other input has the same batch and sequence axes"
    if any(name.startswith("decoder") for name in same_shape):
        return "the decoder's inputs have the same length, so the mask may belong to either"
    values = [value for value in same_shape.values() if value.shape == real.shape and not value.is_floating_point()]
    flags = [_constant(value, part) for value in values for part in (real, ~real)]
    constant = torch.stack(flags).tolist() if flags else []
    pairs = list(zip(constant[::2], constant[1::2], strict=True))
    if any(real_is_constant and not padding_is_constant for real_is_constant, padding_is_constant in pairs):
        return "all positions with 1 have the same token, as padding has"
    if real.shape[0] == real.shape[1] and not any(
        padding_is_constant and not real_is_constant for real_is_constant, padding_is_constant in pairs
    ):
        return "it is square and may be a mask per pair of tokens"
    return None


def _constant(value: Tensor, part: Tensor) -> Tensor:
    """Return whether all values [B, S] where ``part`` [B, S] is True are equal: bool []."""
    first = value.flatten().gather(0, part.flatten().int().argmax()[None])
    return ((value == first) | ~part).all()


_MASK = 1e18
"""Values of at least this magnitude are masks, such as suppressed logits; the square is finite in float32."""


def floats(output: Any) -> list[Tensor]:
    """Return all floating tensors of an output."""
    return [leaf for leaf in leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def is_no_mask(values: Tensor) -> Tensor:
    """Return which values, bool [*], are results rather than masks or infinities."""
    return values.abs() < _MASK


def flat_output(output: Any, mask: Tensor | None) -> Tensor:
    """Return all floating tensors of an output as one float64 vector without padding."""
    tensors = floats(output)
    if not tensors:
        raise SensitivityError(f"the model's output ({type(output).__name__}) contains no floating-point tensor")
    parts = [output_without_padding(tensor.detach(), mask).double().flatten() for tensor in tensors]
    # ``double`` copied the tensor already, unless it was float64.
    return parts[0] if len(parts) == 1 and tensors[0].dtype != torch.float64 else torch.cat(parts)
