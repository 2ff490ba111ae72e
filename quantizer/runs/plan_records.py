"""A quantizer's coverage and ranges as records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from quantizer.plan.site_plan import OperandPlan
from quantizer.plan.site_plan import Plan
from quantizer.plan.unquantized import UnquantizedProduct as EscapedRow
from quantizer.report.record import Operand
from quantizer.report.record import Site
from quantizer.report.record import UnquantizedProduct
from quantizer.views.coverage import CoverageRow

__all__ = ["escaped_records", "site_records"]


def site_records(coverage: Iterable[CoverageRow], plan: Plan) -> tuple[Site, ...]:
    """Return every row of a coverage, with its operands in the plan; additions that are no candidates left out."""
    return tuple(
        Site(
            name=row.name,
            kind=row.kind,
            host_type=row.host_type,
            file=row.file,
            line=row.line,
            quantized=row.quantized,
            reason=row.reason,
            rule=row.rule,
            multiply_adds=row.multiply_adds,
            operands=tuple(map(_operand, plan[row.name].operands)) if row.name in plan else (),
        )
        for row in coverage
        if not row.quiet
    )


def escaped_records(products: Iterable[EscapedRow]) -> tuple[UnquantizedProduct, ...]:
    """Return the products of a coverage that are not in low precision."""
    return tuple(UnquantizedProduct(**asdict(product)) for product in products)


def _operand(operand: OperandPlan) -> Operand:
    return Operand(
        name=operand.name,
        role=operand.role,
        quantized=operand.quantized,
        dtype=operand.dtype,
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
