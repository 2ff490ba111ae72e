"""The decisions of a plan as records: all sites, the products that are not quantized, and the range of every
operand."""

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
    """Return the record of a site, with its operands."""
    operands = tuple(Operand(**_facts(operand)) for operand in entry.operands)
    return Site(operands=operands, **{name: getattr(entry, name) for name in _SITE})


def _facts(operand: OperandPlan) -> dict[str, Any]:
    return {name: getattr(operand, source) for name, source in _OPERAND.items()}


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


class UnquantizedProducts(Rows[UnquantizedProduct]):
    """Matrix products and convolutions that are not in low precision, the largest first."""

    look = "products"


class Coverage(Rows[Site]):
    """All sites that ran, quantized or with the reason, and all products that torch computed in float.

    Iteration yields all rows. The table leaves out rows of sites that never ran in calibration, as branches for other
    settings, and ``quiet`` rows: additions that are no candidates, and embeddings whose tables are not quantized by
    ``sites``.
    The title counts what is left out, and ``all`` shows it.

    Attributes:
        share: the share in low precision of the multiply-adds of all matrix products and convolutions that torch
            executed in calibration: 0 to 1; None if none were counted.
        multiply_adds: the number of all these multiply-adds.
        escaped: the products that are not in low precision, by module and operation, each with its reason.
        patches: the operator patches that the rewritten source contains.
        regions: the modules whose values float16 cannot hold; on a float16 target they stay float32.
        shows_all: whether the table has all rows.
    """

    look = "coverage"

    def __init__(
        self,
        plan: Plan,
        skipped: Sequence[UnrewrittenSource],
        products: Sequence[CountedProduct] = (),
        put_back: Collection[str] = (),
        patches: Sequence[OperatorPatch] = (),
        regions: Float32Modules | None = None,
    ) -> None:
        super().__init__([*map(planned_site, plan.values()), *map(unrewritten_site, skipped)])
        self.share = covered_share(products, plan)
        self.multiply_adds = sum(product.multiply_adds for product in products)
        self.not_quantized = UnquantizedProducts(unquantized_products(products, plan, put_back))
        self.patches = tuple(patches)
        self.regions = regions or Float32Modules()
        self.shows_all = False

    @property
    def all(self) -> Coverage:
        """The same coverage, with a table of all rows."""
        made = copy.copy(self)
        made.shows_all = True
        return made

    @property
    def shown(self) -> tuple[Site, ...]:
        """The sites of the table."""
        return tuple(row for row in self.rows if self.shows_all or (row.ran and not row.quiet))

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

    def below(self) -> list[Shown | str]:
        """Return a line on modules that float16 cannot hold, and the products in float."""
        wide = [f"in a rest of float16, {self.regions.text()}"] if self.regions.wide else []
        return [*wide, *([self.not_quantized] if len(self.not_quantized) else [])]


class Ranges(Rows[Range]):
    """The range of every operand that was observed."""

    look = "ranges"

    def __init__(self, plan: Plan) -> None:
        super().__init__(
            [
                Range(**{**_facts(operand), "name": f"{site.name}.{operand.name}"}, smoothing=operand.smoothing)
                for site in plan.values()
                for operand in site.operands
            ]
        )
