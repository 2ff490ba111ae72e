"""The counted products that a plan leaves in float, each with its reason."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from quantizer.observe.completeness.product_counter import CountedProduct, Reason
from quantizer.plan.site_plan import Plan
from quantizer.reasons import ReasonCode, RuleKind
from quantizer.report.site_record import UnquantizedProduct

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
