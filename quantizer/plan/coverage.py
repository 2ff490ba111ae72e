"""Coverage: the sites of a plan, the non-quantized operations and the range of each operand, as records."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

from quantizer.observe.completeness import CountedProduct, Reason
from quantizer.observe.float16_modules import Float32Modules
from quantizer.plan.reasons import ReasonCode, RuleKind
from quantizer.plan.site_plan import OperandPlan, Plan, SitePlan
from quantizer.proxy.build import UnrewrittenSource
from quantizer.rewrite.operator_patches import OperatorPatch
from quantizer.utils.display import Rows, Shown
from quantizer.utils.records import Operand, Range, Site, UnquantizedProduct

_SITE = ("name", "kind", "host_type", "file", "line", "quantized", "reason", "rule", "multiply_adds")
_OF_THE_PLAN = {"amax": "largest_amax", "scale": "largest_scale", "channels": "scales"}
_OPERAND = {item.name: _OF_THE_PLAN.get(item.name, item.name) for item in fields(Operand)}


def planned_site(entry: SitePlan) -> Site:
    """Return the coverage record of a site, with its operands."""
    operands = tuple(Operand(**_facts(operand)) for operand in entry.operands)
    return Site(operands=operands, **{name: getattr(entry, name) for name in _SITE})


def _facts(operand: OperandPlan) -> dict[str, Any]:
    return {name: getattr(operand, source) for name, source in _OPERAND.items()}


def unrewritten_site(skipped: UnrewrittenSource) -> Site:
    """Return the coverage record of a call or module whose source could not be rewritten."""
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


_BY_RULE = {RuleKind.TARGET: Reason.TARGET, RuleKind.SWITCH: Reason.SWITCHED_OFF}
_BY_REASON = {ReasonCode.FROM_PARAMETERS: Reason.PARAMETERS, ReasonCode.PARAMETERS_ALONE: Reason.PARAMETERS}


def covered_share(products: Sequence[CountedProduct], plan: Plan) -> float | None:
    """Return the quantized share of multiply-adds; None if there are none."""
    total = sum(product.multiply_adds for product in products)
    covered = sum(product.multiply_adds for product in products if _covered(product, plan))
    return covered / total if total else None


def unquantized_products(
    products: Sequence[CountedProduct], plan: Plan, fallback_sites: Collection[str] = ()
) -> tuple[UnquantizedProduct, ...]:
    """Return the non-quantized matrix multiplications and convolutions, largest first."""
    total = sum(product.multiply_adds for product in products)
    rows = []
    for product in products:
        if _covered(product, plan):
            continue
        reason, detail = product.reason, product.detail
        if reason is None:
            assert product.site is not None
            reason, detail = _reason_of_site(product.site, plan, fallback_sites), plan[product.site].reason
            if detail == reason.value:
                detail = plan[product.site].rule or ""
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


def _reason_of_site(path: str, plan: Plan, fallback_sites: Collection[str]) -> Reason:
    entry = plan[path]
    if path in fallback_sites:
        return Reason.FALLBACK
    if entry.rule is not None:
        return _BY_RULE.get(RuleKind.of(entry.rule), Reason.EXCLUDED)
    return _BY_REASON.get(ReasonCode.of(entry.reason), Reason.UNFIT)


class UnquantizedProducts(Rows[UnquantizedProduct]):
    """Matrix multiplications and convolutions in float, largest first."""

    look = "products"


class Coverage(Rows[Site]):
    """All sites that ran, quantized or with a reason, and all matrix multiplications and convolutions in float.

    Iteration yields all rows. The table omits sites that never ran in calibration. It also omits ``quiet`` rows:
    branches in the code of torch that a module does not take, additions that join no branches, and embeddings whose
    tables ``sites`` does not quantize. The title counts the omitted rows, and ``all`` shows them.

    Attributes:
        share: the share of multiply-adds in low precision, 0 to 1, of all matrix multiplications and convolutions that
            torch executed in calibration; None if none were counted.
        multiply_adds: the number of all these multiply-adds.
        not_quantized: the matrix multiplications and convolutions in float, by module and operation, with a reason
            each.
        patches: the operator patches that the rewritten source contains.
        regions: the modules whose values exceed float16; on a float16 target they stay float32.
        shows_all: whether the table has all rows.
    """

    look = "coverage"

    def __init__(
        self,
        plan: Plan,
        skipped: Sequence[UnrewrittenSource],
        products: Sequence[CountedProduct] = (),
        fallback_sites: Collection[str] = (),
        patches: Sequence[OperatorPatch] = (),
        regions: Float32Modules | None = None,
    ) -> None:
        super().__init__([*map(planned_site, plan.values()), *map(unrewritten_site, skipped)])
        self.share = covered_share(products, plan)
        self.multiply_adds = sum(product.multiply_adds for product in products)
        self.not_quantized = UnquantizedProducts(unquantized_products(products, plan, fallback_sites))
        self.patches = tuple(patches)
        self.regions = regions or Float32Modules()
        self.shows_all = False

    @property
    def all(self) -> Coverage:
        """The same coverage, with a table of all rows."""
        coverage = copy.copy(self)
        coverage.shows_all = True
        return coverage

    @property
    def shown(self) -> tuple[Site, ...]:
        """The sites that the table shows."""
        return tuple(row for row in self.rows if self.shows_all or (row.ran and not row.quiet))

    @property
    def quantized(self) -> tuple[Site, ...]:
        """The quantized sites."""
        return tuple(row for row in self.rows if row.quantized)

    @property
    def skipped(self) -> tuple[Site, ...]:
        """The non-quantized sites without ``quiet`` rows; ``all.skipped`` has those too."""
        return tuple(row for row in self.rows if not row.quantized and (self.shows_all or not row.quiet))

    def by_kind(self) -> dict[str, tuple[int, int]]:
        """Return the number of quantized sites and of sites that ran, by kind, without ``quiet`` rows."""
        shown = [row for row in self.rows if row.ran and not row.quiet]
        total, quantized = Counter(row.kind for row in shown), Counter(row.kind for row in shown if row.quantized)
        return {kind: (quantized[kind], total[kind]) for kind in sorted(total)}

    def below(self) -> list[Shown | str]:
        """Return the blocks below the table: modules with values beyond float16, and non-quantized operations."""
        wide = [f"if non-quantized operations run in float16, {self.regions.text()}"] if self.regions.wide else []
        return [*wide, *([self.not_quantized] if len(self.not_quantized) else [])]


class Ranges(Rows[Range]):
    """The range of each operand that calibration observed."""

    look = "ranges"

    def __init__(self, plan: Plan) -> None:
        super().__init__(
            [
                Range(**{**_facts(operand), "name": f"{site.name}.{operand.name}"}, smoothing=operand.smoothing)
                for site in plan.values()
                for operand in site.operands
            ]
        )
