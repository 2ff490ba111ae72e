"""The sites of a coverage, with the operands of their plan, as records of a report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from quantizer.plan.site_plan import OperandPlan
from quantizer.plan.site_plan import Plan
from quantizer.report.record import Operand
from quantizer.report.record import Site

__all__ = ["site_records"]


def site_records(coverage: Iterable[Site], plan: Plan) -> tuple[Site, ...]:
    """Return a record for each row of a coverage that is not quiet, with its operands in the plan."""
    return tuple(
        replace(row, operands=tuple(map(_operand, plan[row.name].operands)) if row.name in plan else ())
        for row in coverage
        if not row.quiet
    )


def _operand(operand: OperandPlan) -> Operand:
    return Operand(
        name=operand.name,
        role=operand.role,
        quantized=operand.quantized,
        dtype=operand.dtype,
        dynamic=operand.dynamic,
        block_size=operand.block_size,
        zero_point=operand.zero_point,
        minimum=operand.minimum,
        maximum=operand.maximum,
        amax=operand.largest_amax,
        scale=operand.largest_scale,
        channels=operand.scales,
        sqnr_db=operand.sqnr_db,
        clipped=operand.clipped,
        estimate=operand.estimate,
        group=operand.group,
    )
