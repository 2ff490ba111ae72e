"""The statistics of one site over all its calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest

from quantizer.observe.range_group import OperandRecord
from quantizer.operations.catalogue import Kind
from quantizer.proxy.weight import Weight
from quantizer.reasons import ReasonCode


@dataclass(kw_only=True, slots=True)
class SiteStatistics:
    """The statistics of one site over all its calls.

    The dimensions of the product are None before the first call, and 0 if they vary, as a sequence length does.

    Attributes:
        kind: the kind of the site, which depends on its operands (None: no call yet).
        calls: the number of all calls.
        fit: the number of calls whose operands can be rounded.
        reasons: why the operands of other calls cannot.
        reads: the paths of the parameters among its operands.
        depth: K of the product.
        width: N of the product.
        rows: M of the product; 0 also if it includes a batch axis.
        head: the head size, for a product of an attention.
        sequence: the length of the longest sequence, for a product of an attention; else 0.
        multiply_adds: the multiply-adds of all calls together.
        operands: the records of its operands, by name.
        experts: how many rows each expert of a grouped product had; empty for any other product.
        follows: the sites whose operands, or whose results, must be quantized for this one to be: of the result of a
            convolution that one, of an add the outputs among its operands.
        left: why the site is left in float, judged by the model's output (None: it is not).
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
        """Add how many rows each expert had."""
        self.experts = [sum(pair) for pair in zip_longest(self.experts, rows, fillvalue=0)]

    @property
    def unreached(self) -> list[int]:
        """The experts that no row of calibration reached."""
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
    """Merge a GEMM dimension of two calls: None if unseen, 0 if it varies."""
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
    """Return why a site stays float whose operand is not the same weight in all calls."""
    if all(weight is not None and weight.computation is not None for weight in weights):
        return ReasonCode.FROM_PARAMETERS.text(why="and in another way in another call")
    return ReasonCode.VARIES.text()
