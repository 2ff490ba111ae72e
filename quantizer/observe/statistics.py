"""The statistics of a proxy: of one pass, of a whole calibration, of another process or of an earlier calibration.

They can be added in any order: those of a pass to a calibration in the same way as those of another process.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from quantizer.common.data.sizes import InputShapes
from quantizer.float16.float32_modules import Float32Modules
from quantizer.observe.completeness.product_counter import CountedProduct
from quantizer.observe.range_group import OperandRecord, RangeGroup, RoundedWeight
from quantizer.observe.replay_batches import ReplayBatches
from quantizer.observe.site_statistics import SiteStatistics


@dataclass(frozen=True, kw_only=True, slots=True)
class BiasShifts:
    """Shifts of the biases of sites, against the mean error of their outputs.

    Attributes:
        shifts: float32 [C], by site.
        notes: a text for each quantized site: that it has a shift, or why not.
    """

    shifts: Mapping[str, Tensor]
    notes: Mapping[str, str]


@dataclass(kw_only=True, slots=True, eq=False)
class RoundingProgress:
    """Weights that are rounded already, of a model whose weights are rounded one after another.

    Attributes:
        key: a checksum of all that the result depends on.
        weights: the weights that were rounded for their own products, by ``SITE.OPERAND``.
        reconstructed: those that were rounded for the outputs of blocks after that.
        ranges: the amax of the ranges that were chosen with these, by the first operand of their groups.
    """

    key: str
    weights: dict[str, RoundedWeight] = field(default_factory=dict)
    reconstructed: dict[str, RoundedWeight] = field(default_factory=dict)
    ranges: dict[str, float] = field(default_factory=dict)


@dataclass(kw_only=True, slots=True)
class Seen:
    """The statistics of all sites, range groups and products.

    Attributes:
        records: by site name.
        batches: the number of whole forward passes.
        rows: the number of rows in these.
        chosen_at: the number of batches when ranges were last chosen by running batches.
        products: the products that torch computed, with their multiply-adds.
        regions: modules with values beyond the range of float16.
        kept: batches to run again (None: none are kept).
        only_zeros: whether all inputs were all zeros.
        read_outside: where code outside of sites computes with a parameter, by the parameter's path.
        bias_shifts: the shifts of biases, and the number of batches when they were measured (None: they were not).
        inputs: the shapes of the inputs, each set of them once, in the order in which they came.
        rounding: the weights that are rounded already, if a choice of codes was interrupted (None: none was).
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

    @classmethod
    def of_sites(cls, paths: Iterable[str], kept: ReplayBatches | None = None) -> Seen:
        """Return empty statistics of these sites."""
        return cls(records={path: SiteStatistics() for path in paths}, kept=kept)

    @property
    def groups(self) -> Iterator[RangeGroup]:
        """The groups whose ranges are used, each once."""
        seen = (record.range for site in self.records.values() for record in site.operands.values())
        yield from dict.fromkeys(group for group in seen if group is not None)

    def counted(self) -> tuple[CountedProduct, ...]:
        """Return the products that torch computed, each with its multiply-adds."""
        return tuple(replace(product, multiply_adds=number) for product, number in self.products.items())

    def constant_operands(self) -> dict[float, list[str]]:
        """Return the activations (``SITE.OPERAND``) of which all values so far were one number, by that number."""
        found: dict[float, list[str]] = {}
        for path, record in self.records.items():
            for name, operand in record.operands.items():
                calibrator = None if operand.group is None else operand.group.calibrator
                if calibrator is not None and calibrator.count > 1 and calibrator.minimum == calibrator.maximum:
                    found.setdefault(calibrator.minimum + 0.0, []).append(f"{path}.{name}")
        return found

    def forget_choices(self) -> None:
        """Discard all that was chosen by running batches: ranges, migration of outliers, codes, shifts."""
        self.chosen_at = 0
        self.bias_shifts = None
        for site in self.records.values():
            site.left = None
            for record in site.operands.values():
                record.smoothed = record.left = record.rounded = record.spread = None
        # Those of groups that had a migration too: without it they are in use again.
        for group in self.groups:
            for each in (group, *group.parts):
                each.chosen = None

    def take_choices(self, other: Seen) -> None:
        """Take all that was chosen by running batches from equal statistics, and share nothing that changes."""
        self.bias_shifts = other.bias_shifts
        migrated: dict[RangeGroup, RangeGroup] = {}
        for path, site in other.records.items():
            if path not in self.records:
                # A result that nothing followed, of a target that follows some.
                continue
            self.records[path].left = site.left
            for name, record in site.operands.items():
                mine = self.records[path].operands[name]
                mine.left, mine.rounded, mine.spread = record.left, record.rounded, record.spread
                if mine.group is not None and record.group is not None:
                    mine.group.chosen = record.group.chosen
                    for own, theirs in zip(mine.group.parts, record.group.parts, strict=True):
                        own.chosen = theirs.chosen
                if record.smoothed is not None:
                    mine.smoothed = migrated.setdefault(record.smoothed, record.smoothed.copy())

    def with_added(self, other: Seen) -> Seen:
        """Return the sum of these statistics and others, and change neither.

        So a batch counts as a whole or not at all, wherever this is interrupted.
        """
        whole = self.copy()
        whole.add(other)
        return whole

    def copy(self) -> Seen:
        """Return a copy; adding to it does not change the original."""
        groups: dict[RangeGroup, RangeGroup] = {}

        def operand(record: OperandRecord) -> OperandRecord:
            group = record.group
            if group is not None and group not in groups:
                groups[group] = group.copy()
            return replace(record, group=None if group is None else groups[group])

        def site(record: SiteStatistics) -> SiteStatistics:
            operands = {name: operand(seen) for name, seen in record.operands.items()}
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
        )

    def add(self, other: Seen) -> None:
        """Add other statistics, which must not change any more.

        Kept batches are not added: which ones to keep depends on those of all batches, see ``ReplayBatches``.
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
        every = (operand.group for record in other.records.values() for operand in record.operands.values())
        for group in dict.fromkeys(group for group in every if group is not None):
            self._add_group(group, other)

    def join(self, record: OperandRecord, group: RangeGroup, name: str) -> int:
        """Add an operand to a group, together with the operand's former group; return how far its tensors move up."""
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
            for seen in other.operands.values():
                if seen.group is former:
                    seen.group = group
                    seen.tensors = seen.tensors and tuple(-1 if n < 0 else n + moved for n in seen.tensors)
        return moved

    def _add_group(self, added: RangeGroup, other: Seen) -> None:
        named = [(name, self._operand(name)) for name in added.operands]
        # An operand that is a weight in other calls needs no range: it varies, which is the reason of its site.
        members = [(name, record) for name, record in named if record.weight is None]
        group = next((record.group for _, record in members if record.group is not None), None)
        if group is None:
            group = replace(added.copy(), operands=[])
        else:
            group.add(added)
            # Operands that read one tensor in some batches, and others elsewhere, number them in other ways.
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
