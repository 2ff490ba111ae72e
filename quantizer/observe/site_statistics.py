"""The statistics of one site over all its calls."""

from __future__ import annotations

from dataclasses import dataclass
from dataclasses import field

from quantizer.observe.range_group import OperandRecord
from quantizer.operations.catalogue import Kind
from quantizer.proxy.weight import Weight
from quantizer.reasons import ReasonCode

__all__ = ["SiteStatistics", "merge_dimension", "same_weight"]


@dataclass(kw_only=True, slots=True)
class SiteStatistics:
    """The statistics of one site over all its calls.

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

    def add(self, other: SiteStatistics) -> None:
        """Take in what was seen elsewhere; the groups of operands are joined by who knows all of them."""
        self.kind = self.kind or other.kind
        self.calls += other.calls
        self.fit += other.fit
        self.multiply_adds += other.multiply_adds
        self.reads |= other.reads
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
                reasons.append(ReasonCode.VARIES.text())
            mine.add(operand)
        self.reasons += [reason for reason in dict.fromkeys(reasons) if reason not in self.reasons]


def merge_dimension(first: int | None, second: int | None) -> int | None:
    """K or N of the product in all calls: None where there was none, 0 where it changes."""
    if first is None or second is None:
        return second if first is None else first
    return first if first == second else 0


def same_weight(first: Weight | None, second: Weight | None) -> bool:
    """Return whether an operand is the same weight, or none, in both calls."""
    if first is None or second is None:
        return first is second
    # A parameter that no module has registered is known by nothing else across processes.
    unregistered = first.path is None and second.path is None
    return unregistered or (first.parameter is second.parameter and first.view == second.view)
