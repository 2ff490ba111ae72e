"""Measure the error of each group whenever the AMP proxy is called, averaged over batches.

A measure is a function of the proxy, its groups and one batch; only ``metric`` needs no batch. All errors are relative,
so neither the order nor the size of batches matters.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from quantizer.algorithms.replay import run
from quantizer.algorithms.sensitivity.gradient import Loss, gradient
from quantizer.algorithms.sensitivity.groups import Group
from quantizer.algorithms.sensitivity.metric import Metric, local, output
from quantizer.errors import SensitivityError
from quantizer.proxy.eager_attention import as_recorded
from quantizer.proxy.generated_classes import called_through
from quantizer.proxy.model_sharing import LocalHook
from quantizer.proxy.restored_state import SavedState, unmoved
from quantizer.utils.batches import copied, on_own_tensors
from quantizer.utils.distributed import all_gather_bytes, all_reduce_sum, get_world_size
from quantizer.utils.progress import counted
from quantizer.utils.records import GroupSensitivity
from quantizer.utils.structure import mapped

MEASURES = ("gradient", "local", "output", "metric")

_Measure = Callable[[nn.Module, Sequence[Group], tuple[Any, ...], Mapping[str, Any], Any], dict[str, float]]

_OF_A_BATCH: dict[str, _Measure] = {"gradient": gradient, "local": local, "output": output}


class Measurement:
    """A measure that runs whenever the user calls an AMP proxy, and the sums of its errors.

    Attributes:
        batches: the number of batches that this process measured.
        groups: the groups that are measured.
    """

    def __init__(
        self, proxy: nn.Module, groups: Sequence[Group], measure: str, loss: Loss | None, metric: Metric | None
    ) -> None:
        if measure not in MEASURES:
            raise SensitivityError(f"measure={measure!r}: expected one of {', '.join(MEASURES)}")
        if (metric is not None) != (measure == "metric"):
            takes = "needs" if metric is None else "does not take"
            raise SensitivityError(f"measure={measure!r} {takes} metric=; use measure='metric' and metric= together")
        if loss is not None and measure != "gradient":
            raise SensitivityError(f"measure={measure!r} does not take loss=; only measure='gradient' does")
        self.batches = 0
        self.groups = tuple(groups)
        self.measure = measure
        self._proxy = proxy
        self._metric = metric
        self._errors: dict[str, list[float]] = defaultdict(list)
        self._gathered: tuple[int, int, dict[str, list[float]]] | None = None
        self._lock = threading.Lock()
        self._thread = 0
        self._inputs: tuple[tuple[Any, ...], Mapping[str, Any]] | None = None
        if measure != "metric":
            self._of_batch = partial(gradient, loss=loss) if measure == "gradient" else _OF_A_BATCH[measure]
            proxy.register_forward_pre_hook(LocalHook(self._note), with_kwargs=True)
            called_through(proxy, self._call)

    def ranking(self) -> list[GroupSensitivity]:
        """Return all groups, highest error first; all processes must call this."""
        if self._metric is not None and not self._errors:
            self._errors.update({name: [drop] for name, drop in self._by_metric(self._metric).items()})
            self.batches = 1
        names = [group.name for group in self.groups]
        batches, measured = self._everywhere(names)
        if batches == 0:
            raise SensitivityError("nothing was measured yet; run data through the proxy that amp() returned")
        errors = {name: _mean(of_group, batches) for name, of_group in measured.items()}
        # Equal errors are ordered by name, so that the same data gives the same ranking.
        ordered = sorted(self.groups, key=lambda group: (-errors[group.name], group.name))
        positions = {name: position for position, name in enumerate(names)}
        return [
            GroupSensitivity(
                rank=rank,
                group=group.name,
                kind=group.kind,
                error=errors[group.name],
                sites=tuple(site.path for site in group.sites),
                block=group.block,
                position=positions[group.name],
                parts=group.parts,
                activations=group.activations,
                multiply_adds=group.multiply_adds,
            )
            for rank, group in enumerate(ordered, start=1)
        ]

    def batches_of_all(self) -> int:
        """Return how many batches all processes measured; all processes must call this."""
        return self._everywhere([group.name for group in self.groups])[0]

    def _everywhere(self, names: Sequence[str]) -> tuple[int, dict[str, list[float]]]:
        """Return the number of batches of all processes, and the errors of each group."""
        if self._gathered is not None and get_world_size() == 1 and self._gathered[0] == self.batches:
            # One process continues alone with the errors of all processes.
            return self._gathered[1:]
        (batches,) = map(int, all_reduce_sum([self.batches]))
        mine = np.array([self._errors[name] for name in names], dtype=np.float64)
        parts = [np.frombuffer(part) for part in all_gather_bytes(mine.tobytes())]
        by_group = [part.reshape(len(names), -1) for part in parts if part.size]
        errors = {name: [float(error) for part in by_group for error in part[at]] for at, name in enumerate(names)}
        self._gathered = self.batches, batches, errors
        return batches, errors

    def _call(self, proxy: nn.Module, run: partial[Any]) -> Any:
        if self._thread == threading.get_ident():
            # The proxy calls itself: only the outer call measures.
            return run()
        # Sites are quantized during the measurement, so passes of other threads must wait.
        with self._lock:
            self._thread, self._inputs = threading.get_ident(), None
            try:
                return self._measured(proxy, run)
            finally:
                # Before the lock is released: the next owner is not this thread.
                self._thread = 0

    def _measured(self, proxy: nn.Module, run: partial[Any]) -> Any:
        before = SavedState(proxy)
        # Copies, because the model may write into its inputs.
        result = on_own_tensors(run)()
        if self._inputs is not None:
            after = SavedState(proxy)
            try:
                before.restore()
                self._measure(proxy, *self._inputs, result)
            finally:
                after.restore()
                self._inputs = None
        return result

    def _note(self, proxy: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if self._inputs is None:
            # A copy, since the model may change its inputs.
            self._inputs = copied(args, keywords)

    def _measure(self, proxy: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any], result: Any) -> None:
        if proxy.training:
            raise SensitivityError("the proxy is in train mode, so dropout would hide the errors; call .eval() first")
        # Tensors from the user's inference mode have no gradients. Some layers compute differently when gradients are
        # recorded; all passes here compute as the pass of the result did, whatever the measure records.
        with as_recorded(proxy, torch.is_grad_enabled()), torch.inference_mode(False):
            args, keywords = mapped(_ordinary, (args, keywords))
            if _has_hooks_of_others(proxy):
                # Passes of a measure run no hooks, so the float output to compare with must come from such a pass.
                with torch.no_grad():
                    result = run(proxy, (args, keywords))
            with unmoved(proxy):
                errors = self._of_batch(proxy, self.groups, args, keywords, result)
            unreached = [group for group in self.groups if group.name not in errors]
            if unreached:
                errors |= output(proxy, unreached, args, keywords, result)
        wrong = [name for name, error in errors.items() if not math.isfinite(error)]
        if wrong:
            raise SensitivityError(
                f"the error of {wrong[0]} on this batch is not finite, because the output has NaN or inf"
            )
        # Errors are added after the complete batch is measured, so an interrupted one does not count.
        for name, error in errors.items():
            self._errors[name].append(error)
        self.batches += 1

    def _by_metric(self, metric: Metric) -> dict[str, float]:
        """Return how much worse the metric is with one quantized group at a time, by group."""
        with unmoved(self._proxy):
            float_score = metric.score(self._proxy, "the float model")
        drops = {}
        with counted(self.groups, "metric", unit="group") as steps:
            for group in steps:
                with group.rounding(), unmoved(self._proxy):
                    drops[group.name] = metric.drop(float_score, metric.score(self._proxy, group.name))
        return drops


def _mean(errors: Sequence[float], batches: int) -> float:
    """Return the mean error of a group, with equal bits for one and for several processes.

    Processes that compute one score together each have it once, and their sum divided by their number may be rounded.
    Otherwise the sum is exact and rounded once.
    """
    if len(errors) == batches and len(set(errors)) == 1:
        return errors[0]
    return math.fsum(errors) / batches


def _has_hooks_of_others(proxy: nn.Module) -> bool:
    """Return whether the user added hooks to the model that may change its inputs or output."""
    hooks = (*proxy._forward_pre_hooks.values(), *proxy._forward_hooks.values())
    return not all(isinstance(hook, LocalHook) for hook in hooks)


def _ordinary(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value
