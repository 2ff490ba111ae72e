"""The parts that all choices of codes by data share: weights without a choice, and the work before an interrupt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from quantizer.algorithms.algorithm import Work
from quantizer.errors import CalibrationError
from quantizer.numerics.formats import qtype
from quantizer.observe.range_group import RoundedWeight
from quantizer.observe.statistics import RoundingProgress, Seen
from quantizer.plan.site_plan import OperandPlan, Plan
from quantizer.utils.distributed import alone, get_world_size
from quantizer.utils.fingerprint import Fingerprint, tensors_digest

UNREACHED = "no batch that was kept reaches it"


@contextmanager
def with_all_batches(work: Work) -> Iterator[None]:
    """Let each process do the block by itself with all kept batches, which gives all of them the same bits."""
    if get_world_size() > 1 and not work.kept.on_every_rank:
        raise CalibrationError(
            f"weights.rounding: {work.settings.rounding} needs all that a weight multiplies, and each process has its "
            "own batches: give all of them the same ones with calibrate(split=True), calibrate in one process, or with "
            "rounding: nearest"
        )
    with alone():
        yield


def progress(plan: Plan, work: Work) -> RoundingProgress:
    """Return what is rounded already; what is added to it survives an interrupt."""
    key, known = _key(plan, work), work.observed.rounding
    if known is None or known.key != key:
        known = work.observed.rounding = RoundingProgress(key=key)
    return known


def record(observation: Seen, chosen: Mapping[str, RoundedWeight]) -> None:
    """Set ``rounded`` of the records of weights, by ``SITE.OPERAND``."""
    for name, rounded in chosen.items():
        path, _, operand = name.rpartition(".")
        observation.records[path].operands[operand].rounded = rounded


def nearest(why: str) -> RoundedWeight:
    """Return the nearest codes, with the reason."""
    return RoundedWeight(codes=None, text=f"rounded to nearest: {why}")


def stored_weights(plan: Plan) -> Counter[tuple[object, object, object]]:
    """Return how many sites store each weight of a plan."""
    operands = (o for entry in plan.values() for o in entry.operands if o.quantized and o.role == "weight")
    return Counter((operand.parameter, operand.view, operand.computation) for operand in operands)


def why_nearest(weight: OperandPlan, stored: Counter[tuple[object, object, object]], method: str) -> str | None:
    """Return why a weight keeps the nearest codes whatever the data is; None if its codes can be chosen."""
    kind = qtype(weight.dtype)
    if kind.is_float:
        return f"{method} chooses whole numbers, and those of {kind.name} are none"
    if stored[weight.parameter, weight.view, weight.computation] > 1:
        return "other sites store the same weight, and a file holds it once"
    return None


def _key(plan: Plan, work: Work) -> str:
    """Return a checksum of all that the codes depend on: weights, scales, factors, batches and the configuration."""
    tensors = {
        f"{path}.{operand.name}.{field}": value
        for path, entry in plan.items()
        for operand in entry.operands
        for field, value in (("scale", operand.scale), ("smooth", operand.smooth))
        # The scales of weights follow from what else is in the checksum, or were chosen together with codes.
        if operand.quantized and value is not None and (operand.role, field) != ("weight", "scale")
    }
    weights = Fingerprint.of(work.proxy.module).plain()
    return tensors_digest(tensors, f"{weights} {work.kept.digest} {work.settings.text}")
