"""The sites of a plan, and what could not be rewritten, as rows of a coverage.

The counted products that a plan leaves in float, each with its reason.

Views of coverage and ranges, as a table in a terminal and as HTML in a notebook.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from quantizer.float16.float32_modules import Float32Modules
from quantizer.observe.completeness.product_counter import CountedProduct, Reason
from quantizer.plan.site_plan import OperandPlan, Plan, SitePlan
from quantizer.proxy.build import UnrewrittenSource
from quantizer.reasons import ReasonCode, RuleKind
from quantizer.report.run_records import Operand, Site, UnquantizedProduct
from quantizer.report.tables.tables import Column
from quantizer.report.tables.text import counted, decibels, format_name, granularity, percent
from quantizer.rewrite.operator_patches import OperatorPatch
from quantizer.views.table_view import View


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


_BY_RULE = {RuleKind.TARGET: Reason.TARGET, RuleKind.SWITCH: Reason.SWITCHED_OFF}
_BY_REASON = {ReasonCode.FROM_PARAMETERS: Reason.PARAMETERS, ReasonCode.PARAMETERS_ALONE: Reason.PARAMETERS}


def covered_share(products: Sequence[CountedProduct], plan: Plan) -> float | None:
    """Return the share of the multiply-adds in sites that the plan quantizes; None if none were counted."""
    total = sum(product.multiply_adds for product in products)
    covered = sum(product.multiply_adds for product in products if _covered(product, plan))
    return covered / total if total else None


def unquantized_products(
    products: Sequence[CountedProduct], plan: Plan, put_back: Collection[str] = ()
) -> tuple[UnquantizedProduct, ...]:
    """Return the products that the plan leaves in float, largest first; ``put_back`` are the sites of fallback."""
    total = sum(product.multiply_adds for product in products)
    rows = []
    for product in products:
        if _covered(product, plan):
            continue
        reason, detail = product.reason, product.detail
        if reason is None:
            assert product.site is not None
            reason, detail = _reason_of_site(product.site, plan, put_back), plan[product.site].reason
        rows.append(
            UnquantizedProduct(
                path=product.path,
                site=product.site,
                operation=product.operation,
                multiply_adds=product.multiply_adds,
                share=product.multiply_adds / total,
                reason=reason.value,
                detail=detail,
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.multiply_adds))


def _covered(product: CountedProduct, plan: Plan) -> bool:
    return product.site is not None and plan[product.site].quantized


def _reason_of_site(path: str, plan: Plan, put_back: Collection[str]) -> Reason:
    entry = plan[path]
    if path in put_back:
        return Reason.FALLBACK
    if entry.rule is not None:
        return _BY_RULE.get(RuleKind.of(entry.rule), Reason.EXCLUDED)
    return _BY_REASON.get(ReasonCode.of(entry.reason), Reason.UNFIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class RangeRow:
    """The range of one operand; with several scales, ``amax`` and ``scale`` are the largest.

    ``format`` and ``granularity`` are text; ``estimate`` is the calibrator that was chosen among several.
    """

    name: str
    role: str
    quantized: bool
    format: str
    granularity: str
    minimum: float | None
    maximum: float | None
    amax: float | None
    scale: float | None
    clipped: float | None
    sqnr_db: float | None
    smoothing: str | None
    estimate: str | None

    @property
    def shown_format(self) -> str:
        """The format of the operand, with the migration of its outliers if there was one; ``float`` if unquantized."""
        if not self.quantized:
            return "float"
        # The reason why not is in the coverage: here it would leave no room for numbers.
        return self.format if self.smoothing is None else f"{self.format}, {self.smoothing.partition(':')[0]}"


class Coverage(View[Site]):
    """All sites that ran, quantized or with the reason, and all products that torch computed in float.

    Iteration yields all rows. The table leaves out rows of sites that never ran in calibration, as branches for other
    settings, and ``quiet`` rows: additions that are no candidates, and embeddings whose tables stay float by ``sites``.
    The title counts what is left out, and ``all`` shows it.

    Attributes:
        share: the share in low precision of the multiply-adds of all matrix products and convolutions that torch
            executed in calibration: 0 to 1; None if none were counted.
        multiply_adds: the number of all these multiply-adds.
        escaped: the products that are not in low precision, by module and operation, each with its reason.
        patches: the operator patches that the rewritten source contains.
        regions: the modules whose values float16 cannot hold; on a float16 target they stay float32.
    """

    columns = (
        Column(title="site", mono=True),
        "kind",
        Column(title="place", mono=True),
        "quantized",
        "why",
    )

    shortened = True

    def __init__(self, rows: Sequence[Site], products: Sequence[UnquantizedProduct] = ()) -> None:
        super().__init__(rows)
        self._shows_all = False
        self.share: float | None = None
        self.multiply_adds = 0
        self.escaped = UnquantizedProducts(products)
        self.patches: tuple[OperatorPatch, ...] = ()
        self.regions = Float32Modules()

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        skipped: Sequence[UnrewrittenSource],
        products: Sequence[CountedProduct] = (),
        put_back: Collection[str] = (),
        patches: Sequence[OperatorPatch] = (),
        regions: Float32Modules | None = None,
    ) -> Coverage:
        """Return the coverage of a plan."""
        rows = [*map(planned_site, plan.values()), *map(unrewritten_site, skipped)]
        made = cls(rows, unquantized_products(products, plan, put_back))
        made.share = covered_share(products, plan)
        made.patches = tuple(patches)
        made.regions = regions or made.regions
        made.multiply_adds = sum(product.multiply_adds for product in products)
        return made

    @property
    def all(self) -> Coverage:
        """The same coverage, with a table of all rows."""
        made = copy.copy(self)
        made._shows_all = True
        return made

    @property
    def quantized(self) -> tuple[Site, ...]:
        """The sites that are quantized."""
        return tuple(row for row in self.rows if row.quantized)

    @property
    def skipped(self) -> tuple[Site, ...]:
        """The sites that are not quantized."""
        return tuple(row for row in self.rows if not row.quantized)

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Return the numbers of quantized sites and of sites that ran, of each kind, without ``quiet`` rows."""
        shown = [row for row in self.rows if row.ran and not row.quiet]
        total, held = Counter(row.kind for row in shown), Counter(row.kind for row in shown if row.quantized)
        return {kind: (held[kind], total[kind]) for kind in sorted(total)}

    def title(self) -> str:
        named = ", ".join(f"{patch.name} (for {patch.target})" for patch in self.patches)
        patched = f"; operator patches: {named}" if named else ""
        if any(ReasonCode.of(row.reason) is ReasonCode.NOT_CALIBRATED for row in self.rows):
            totals = ", ".join(f"{kind} {total}" for kind, (_, total) in self.by_kind().items())
            return f"sites found: {totals}; calibration decides which of them are quantized{patched}"
        parts = [f"{kind} {held} of {total}" for kind, (held, total) in self.by_kind().items()]
        tail = ""
        if self.share is not None:
            tail = f"; {_percent(self.share)} of {_count(self.multiply_adds)} multiply-adds in low precision"
        return f"sites quantized: {', '.join(parts) or 'none found'}{tail}{self._left_out()}{patched}"

    def _left_out(self) -> str:
        """Return how many rows the table leaves out, and what shows them, as the tail of the title."""
        never = sum(not row.ran for row in self.rows)
        quiet = Counter(row.kind for row in self.rows if row.quiet and row.ran)
        adds, tables = quiet["residual_add"], quiet["embedding"]
        counts = [
            *([counted(never, "site") + " that never ran"] if never else []),
            *([counted(adds, "addition") + f" that join{'s' if adds == 1 else ''} no branches"] if adds else []),
            *([counted(tables, "table") + f" that stay{'s' if tables == 1 else ''} float"] if tables else []),
        ]
        told = " and ".join(filter(None, [", ".join(counts[:-1]), *counts[-1:]]))
        return f"; print .all for {told}" if told and not self._shows_all else ""

    def text(self, limit: int | None = None) -> str:
        """Return the table as plain text, followed by the products that are not in low precision."""
        wide = [f"in a rest of float16, {self.regions.text()}"] if self.regions.wide else []
        return "\n\n".join([super().text(limit), *wide, *([self.escaped.text(limit)] if len(self.escaped) else [])])

    def _repr_html_(self) -> str:
        return super()._repr_html_() + (self.escaped._repr_html_() if len(self.escaped) else "")

    def cells(self) -> list[list[Any]]:
        """Return the cells, unquantized sites first, so that a table with a limit leaves out quantized ones."""
        return [
            [row.name, row.kind, row.place, "yes" if row.quantized else "no", _why(row)]
            for row in sorted(self.rows, key=lambda row: row.quantized)
            if self._shows_all or (row.ran and not row.quiet)
        ]


class UnquantizedProducts(View[UnquantizedProduct]):
    """Matrix products and convolutions that are not in low precision, the largest first."""

    columns = (
        Column(title="module", mono=True),
        "operation",
        Column(title="multiply-adds", show=lambda value: _count(value)),
        Column(title="share", show=lambda value: _percent(value)),
        "why",
        "evidence",
    )

    def title(self) -> str:
        return f"{_percent(sum(row.share for row in self.rows))} of the multiply-adds in float"

    def cells(self) -> list[list[Any]]:
        return [
            [row.site or row.path or "(the model)", row.operation, row.multiply_adds, row.share, row.reason, row.detail]
            for row in self.rows
        ]


class Ranges(View[RangeRow]):
    """The range of every operand that was observed."""

    columns: Sequence[Column | str] = (
        Column(title="site", mono=True),
        Column(title="operand", mono=True),
        "format",
        "granularity",
        "min",
        "max",
        "amax",
        "scale",
        Column(title="clipped", show=percent),
        Column(title="SQNR dB", show=decibels),
        "estimate",
    )
    grouped = True

    def __init__(self, rows: Sequence[RangeRow]) -> None:
        super().__init__(rows)
        if not any(row.estimate for row in self.rows):
            # Without a choice all ranges have the calibrator of the configuration.
            self.columns = Ranges.columns[:-1]

    @classmethod
    def from_plan(cls, plan: Plan) -> Ranges:
        """Return the ranges of a plan."""
        return cls([_range_row(site, operand) for site in plan.values() for operand in site.operands])

    def title(self) -> str:
        used = sum(row.quantized for row in self.rows)
        return f"{len(self.rows)} ranges, {used} of them used; clipped is the share of values beyond amax"

    def cells(self) -> list[list[Any]]:
        return [
            [
                *row.name.rpartition(".")[::2],
                row.shown_format,
                row.granularity if row.amax is not None else None,
                row.minimum,
                row.maximum,
                row.amax,
                row.scale,
                row.clipped,
                row.sqnr_db,
                row.estimate,
            ][: len(self.columns)]
            for row in self.rows
        ]


def _percent(share: float) -> str:
    """Return a share in percent; a share below 1 never reads as 100%, nor one above 0 as 0%."""
    if 0.9995 <= share < 1:
        return f"{share:.4%}" if share < 0.999999 else "just under 100%"
    return f"{share:.1%}" if share == 0 or share >= 0.001 else f"{100 * share:.2g}%"


def _count(number: int) -> str:
    for unit, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)


def _why(row: Site) -> str:
    return f"{row.reason} ({row.rule})" if row.rule else row.reason


def _range_row(site: SitePlan, operand: OperandPlan) -> RangeRow:
    return RangeRow(
        name=f"{site.name}.{operand.name}",
        role=operand.role,
        quantized=operand.quantized,
        format=format_name(operand.dtype, operand.block_size, operand.zero_point, dynamic=operand.dynamic),
        granularity=granularity(operand.scales, operand.block_size, calls=operand.several_ranges),
        minimum=operand.minimum,
        maximum=operand.maximum,
        amax=operand.largest_amax,
        scale=operand.largest_scale,
        clipped=operand.clipped,
        sqnr_db=operand.sqnr_db,
        smoothing=operand.smoothing,
        estimate=operand.estimate,
    )
