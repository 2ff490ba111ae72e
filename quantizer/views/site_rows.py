"""The sites of a plan, and what could not be rewritten, as rows of a coverage."""

from __future__ import annotations

from quantizer.plan.site_plan import OperandPlan, SitePlan
from quantizer.proxy.build import UnrewrittenSource
from quantizer.report.site_record import Operand, Site


def planned_site(entry: SitePlan) -> Site:
    """Return the row of a site, with its operands."""
    return Site(
        name=entry.name,
        kind=entry.kind,
        host_type=entry.host_type,
        file=entry.file,
        line=entry.line,
        quantized=entry.quantized,
        reason=entry.reason,
        rule=entry.rule,
        multiply_adds=entry.multiply_adds,
        operands=tuple(map(_operand, entry.operands)),
    )


def unrewritten_site(skipped: UnrewrittenSource) -> Site:
    """Return the row of a call or a module whose text could not be rewritten."""
    source = skipped.source
    return Site(
        name=skipped.path or "(the model)",
        kind=skipped.kind,
        host_type=skipped.host_type,
        file=source.file if source else "",
        line=source.line if source else 0,
        quantized=False,
        reason=skipped.reason,
        rule=None,
        multiply_adds=0,
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
