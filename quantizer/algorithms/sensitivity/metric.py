"""The user's metric, and the measures ``output`` and ``local``.

``Metric`` is a function from a model to its score. ``Divergence`` compares a model's output with its float output:

Legend: y the float output, z another output, p and q the softmax of logits y and z, [.., C].

- Logits: the Kullback-Leibler divergence, the mean over positions of sum p (log p - log q).
- Any other output: the inverse of the SQNR, |z - y|^2 / |y|^2, over all floating tensors of the output together.

Both are relative, so batches can be averaged. If an ``attention_mask`` [B, S] certainly marks padding, padded positions
of outputs [B, S, ..] do not count: on short texts they can be most of the output.

``output`` is the divergence with one quantized group at a time. It is exact on these batches and costs a pass for each
group, without the part before the group. ``local`` is the relative error |d|^2 / |y|^2 at the outputs of a group's
sites, the mean over calls, where y is a site's float output and d its change. It takes two to three float passes in
total and ignores the effect on the rest of the network.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.algorithms.replay import run
from quantizer.algorithms.sensitivity.groups import Group, Pending, watched
from quantizer.errors import LostRankError, SensitivityError
from quantizer.observe.statistics import (
    flat_output,
    floats,
    has_padding,
    output_without_padding,
    padding_mask,
    without_padding,
)
from quantizer.plan.site_plan import SitePlan, plan_digest
from quantizer.proxy.build import sites_of
from quantizer.proxy.recorded_calls import RecordedCalls
from quantizer.proxy.restored_state import untouched
from quantizer.proxy.site import Site
from quantizer.utils.content import code_parts
from quantizer.utils.fingerprint import Fingerprint
from quantizer.utils.progress import counted

Score = Callable[[nn.Module], float]
"""A function from a model, called like the user's own, to a number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """A score, and whether higher is better."""

    function: Score
    higher_is_better: bool = True

    def score(self, model: nn.Module, which: str) -> float:
        """Return the score of a model, without gradients; ``which`` names the model in errors."""
        try:
            with torch.no_grad(), untouched(model):
                value = self.function(model)
        except LostRankError:
            raise
        except Exception as error:
            raise SensitivityError(f"the metric raised {type(error).__name__} for {which}: {error}") from error
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        # NumPy scalars are also numbers.
        if isinstance(number, bool | Tensor) or not hasattr(number, "__float__"):
            raise SensitivityError(f"the metric returned {type(value).__name__} for {which}; expected one number")
        if not math.isfinite(number):
            raise SensitivityError(f"the metric returned {float(number)} for {which}; expected a finite number")
        return float(number)

    def drop(self, float_score: float, score: float) -> float:
        """Return the drop from the float model's score to ``score``; negative for a gain."""
        return float_score - score if self.higher_is_better else score - float_score


def fingerprint(plan: Mapping[str, SitePlan], metric: Callable[..., object], weights: Fingerprint) -> str:
    """Return a checksum of a plan and its groups, of the weights and of the metric's code.

    The data that a metric reads is not included: another data set needs another folder, unless the metric names its
    data in an attribute ``reads`` (a text).
    """
    groups = [str(operand.group) for site in plan.values() for operand in site.operands]
    parts = [*_of_function(metric), json.dumps(weights.plain()), plan_digest(plan), *groups]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _of_function(function: Callable[..., object]) -> list[str]:
    if isinstance(function, partial):
        return ["partial", *_of_function(function.func), repr(function.args), repr(sorted(function.keywords.items()))]
    name = getattr(function, "__qualname__", type(function).__qualname__)
    code = getattr(function, "__code__", None)
    defaults = repr(getattr(function, "__defaults__", None))
    wrapped = getattr(function, "__wrapped__", None)
    inner = [] if wrapped is None else _of_function(wrapped)
    return [name, str(getattr(function, "reads", "")), defaults, *([] if code is None else code_parts(code)), *inner]


_AT_ONCE = 2**20
"""The number of logits that are compared at once."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Probe:
    """Random directions at an output.

    For a small change d of ``tensors``, the divergence is the expectation of ``factor`` (directions . d)^2.
    """

    tensors: list[Tensor]
    directions: list[Tensor]
    factor: float


class Divergence:
    """The float output of one batch, with which other outputs of the same batch are compared.

    Args:
        reference: the float output, of any structure.
        mask: the real tokens, [B, S]; None: all are real.
    """

    def __init__(self, reference: Any, mask: Tensor | None) -> None:
        self._mask = mask
        logits = _logits(reference)
        self._log_p = None if logits is None else [*map(_log_softmax, _parts(logits, mask))]
        self._y = flat_output(reference, mask) if logits is None else None
        self._power = 1.0 if self._y is None else float(self._y.square().sum())
        if self._power == 0:
            raise SensitivityError(
                "the model's output is all zeros on this batch, so no relative error exists; use other data"
            )

    def of(self, output: Any) -> float:
        """Return the divergence of another output of the same batch; 0 if the two are equal."""
        if self._log_p is None:
            assert self._y is not None
            return float((flat_output(output, self._mask) - self._y).square().sum()) / self._power
        logits = _logits(output)
        assert logits is not None
        pairs = zip(self._log_p, _parts(logits, self._mask), strict=True)
        return float(torch.cat([_of_rows(log_p, part) for log_p, part in pairs]).mean())

    def probe(self, output: Any) -> Probe:
        """Return random directions for a differentiable output; equal for equal shapes.

        For logits their covariance is H = diag(p) - p p^T, the Hessian of the Kullback-Leibler divergence, which to
        second order is d^T H d / 2. For any other output they are normal.
        """
        logits = _logits(output)
        if logits is not None:
            root = logits.detach().softmax(-1).sqrt()
            xi = _normal(root)
            direction = root * xi - root.square() * (root * xi).sum(-1, keepdim=True)
            positions = len(_rows(direction, self._mask))
            return Probe(tensors=[logits], directions=[_zero_padding(direction, self._mask)], factor=0.5 / positions)
        tensors = floats(output)
        directions = [_zero_padding(_normal(tensor.detach()), self._mask) for tensor in tensors]
        return Probe(tensors=tensors, directions=directions, factor=1 / self._power)


def _logits(output: Any) -> Tensor | None:
    """Return the ``logits`` of an output, [.., C] with two or more classes; None if there are none."""
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    usable = isinstance(logits, Tensor) and logits.is_floating_point() and logits.dim() > 1 and logits.shape[-1] > 1
    return logits if usable else None


def _parts(logits: Tensor, mask: Tensor | None) -> tuple[Tensor, ...]:
    """Return the rows [N, C] in parts that fit into a processor's cache; a decoder's are 200 MB per batch."""
    rows = _rows(logits.detach(), mask)
    return torch.split(rows, max(1, _AT_ONCE // rows.shape[-1]))


def _log_softmax(rows: Tensor) -> Tensor:
    return rows.double().log_softmax(-1)


def _of_rows(log_p: Tensor, logits: Tensor) -> Tensor:
    """Return the divergence of each row."""
    log_q, p = _log_softmax(logits), log_p.exp()
    # A logit of -inf in one output is also -inf in the other, and -inf - -inf is NaN.
    return torch.where(p > 0, p * (log_p - log_q), 0).sum(-1)


def _rows(logits: Tensor, mask: Tensor | None) -> Tensor:
    return output_without_padding(logits, mask).reshape(-1, logits.shape[-1])


def _zero_padding(value: Tensor, mask: Tensor | None) -> Tensor:
    if not has_padding(value, mask):
        return value
    assert mask is not None
    return value * mask.reshape(*mask.shape, *[1] * (value.dim() - 2))


def _normal(like: Tensor) -> Tensor:
    """Return normal numbers, equal at each call, so that the order of batches does not change the result."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(like.shape, generator=generator).to(like)


def output(
    proxy: nn.Module, groups: Sequence[Group], args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any
) -> dict[str, float]:
    """Return the divergence due to each group on one batch, by name; ``result`` is the float output."""
    divergence, batch = Divergence(result, padding_mask(keywords, args)), (args, keywords)
    errors: dict[str, float] = {}
    reached: dict[Site, int] = {}

    def note(site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        reached.setdefault(site, calls.time)
        calls.time += 1
        return function(*args, **keywords)

    with torch.no_grad(), RecordedCalls(proxy) as calls:
        run(proxy, batch, note, list(sites_of(proxy)))
        with counted(groups, "sensitivity", unit="group") as steps:
            for group in steps:
                calls.begin(records=False)
                calls.until = min((reached[site] for site in group.sites if site in reached), default=0)
                with group.rounding():
                    errors[group.name] = divergence.of(run(proxy, batch))
    return errors


def local(
    proxy: nn.Module, groups: Sequence[Group], args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any
) -> dict[str, float]:
    """Return the error of each group on one batch, by name."""
    del result
    mask = padding_mask(keywords, args)
    errors: dict[str, list[float]] = defaultdict(list)

    def visit(site: Site, output: Tensor, pending: Pending) -> Tensor:
        last = site.operation.name == "linear"
        power = float(without_padding(output, mask, channels_last=last).double().square().sum())
        for name, change in pending.changes().by_group.items():
            error = float(without_padding(change, mask, channels_last=last).double().square().sum())
            errors[name].append(error / power if power > 0 else 0.0)
        return output

    with torch.no_grad(), watched(groups, visit):
        run(proxy, (args, keywords))
    return {name: sum(values) / len(values) for name, values in errors.items()}
