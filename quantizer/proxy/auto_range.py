"""``auto``: of several estimates of an operand's range, the one with which its site's output comes out best.

Legend: y the site's float output, as rows; y_c the output with this operand alone rounded to the range of candidate c.
The error of c is the mean over rows of |y_c - y|^2 / |y|^2. It is relative row by row, because in the absolute error a
few rows with huge values decide for all others. A row is the last axis; of a convolution, one image.

Kept batches are run once more, and every site tries all candidates on its real operands. Operands that read one tensor
share a range, so their errors are added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import nn
from tqdm.auto import tqdm

from quantizer.calibrators import estimates
from quantizer.numerics.qtype import QType
from quantizer.proxy.kept_batches import Batch
from quantizer.proxy.observe import RangeGroup
from quantizer.proxy.observe import padding_mask
from quantizer.proxy.observe import without_padding
from quantizer.proxy.site import Site

__all__ = ["Trial", "choose_ranges"]

_SHARES = tuple(0.9**step for step in range(1, 17))
"""Shares of the largest value that are tried too: down to 0.19, in steps that change the error by little."""

_ROWS = 512
"""Rows of a linear's input that are tried: enough to tell ranges apart, and cheaper than all."""

_BATCHED = 3  # axes of a tensor that has one for the batch

_ITEMS = 4
"""Items of a batch that are tried where rows depend on each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """An operand whose range is chosen: its site, its name, the format it is held in and those it shares a range with.

    ``scale`` gives the scale of an amax as the target holds it.
    """

    site: Site
    operand: str
    group: RangeGroup
    dtype: QType
    scale: Callable[[Tensor], Tensor]


def choose_ranges(proxy: nn.Module, trials: Iterable[Trial], batches: Iterable[Batch]) -> None:
    """Set ``chosen`` of every range group among ``trials``.

    Args:
        proxy: the proxy that was calibrated, its sites inactive.
        trials: the operands to be quantized.
        batches: inputs of the proxy.
    """
    by_site: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        by_site[trial.site.path].append(trial)
    judge = _Judge(by_site)
    sites = [trials[0].site for trials in by_site.values()]
    try:
        for site in sites:
            site.judge = judge
        with torch.no_grad():
            for args, keywords in tqdm(list(batches), "choosing ranges", unit="batch", leave=False, disable=None):
                judge.mask = padding_mask(keywords)
                # Not the module itself: its hooks belong to calibration.
                proxy.forward(*args, **keywords)
    finally:
        for site in sites:
            site.judge = None
    judge.choose()


class _Judge:
    """Tries all candidates at each call of a site.

    Attributes:
        mask: which tokens of the batch are real, [B, S]; None: all.
        errors: by range group, the summed error of each candidate (amax and its name).
    """

    def __init__(self, trials: Mapping[str, list[Trial]]) -> None:
        self.mask: Tensor | None = None
        self.errors: dict[RangeGroup, dict[tuple[float, str], float]] = {}
        self._trials = trials
        for trial in (trial for of_site in trials.values() for trial in of_site):
            if trial.group not in self.errors:
                self.errors[trial.group] = dict.fromkeys(_candidates(trial), 0.0)

    def __call__(self, site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
        some_args, some_keywords, mask = _sample(site, args, keywords, self.mask)
        output = site.rounded(function, some_args, some_keywords)
        if isinstance(output, Tensor):
            by_image = site.operation.kind == "conv"
            expected = _rows(output, mask, by_image)
            for trial in self._trials[site.path]:
                quantizer = site.quantizer_of(trial.operand)
                try:
                    for amax, name in self.errors[trial.group]:
                        scale = trial.scale(torch.tensor(amax, dtype=torch.float32))
                        quantizer.set_scale(scale, trial.dtype.name, None)
                        rows = _rows(site.rounded(function, some_args, some_keywords), mask, by_image)
                        self.errors[trial.group][amax, name] += _relative_error(rows, expected)
                finally:
                    quantizer.reset()
        # In place where the text says so: other names for the tensor must see the result.
        return function(*args, **keywords)

    def choose(self) -> None:
        """Give every group the candidate with the least error, of equal ones the larger range."""
        for group, errors in self.errors.items():
            amax, name = min(errors, key=lambda candidate: (errors[candidate], -candidate[0]))
            group.chosen = (amax, name)


def _candidates(trial: Trial) -> list[tuple[float, str]]:
    found: dict[float, str] = {}
    for name, amax in estimates(trial.group.calibrator, trial.dtype):
        found.setdefault(amax, name)
    for share in _SHARES:
        found.setdefault(trial.group.calibrator.largest * share, f"{share:.2f} of max")
    return list(found.items())


def _sample(
    site: Site, args: list[Any], keywords: dict[str, Any], mask: Tensor | None
) -> tuple[list[Any], dict[str, Any], Tensor | None]:
    """A part of a call's operands that is enough to judge ranges by, and the mask [B, S] that goes with it."""
    if site.operation.name == "linear" and args and isinstance(args[0], Tensor):
        rows = without_padding(args[0], mask).reshape(-1, args[0].shape[-1])
        return [rows[:: max(1, len(rows) // _ROWS)], *args[1:]], keywords, None
    if site.operation.kind == "conv" and args and isinstance(args[0], Tensor):
        return [args[0][:_ITEMS], *args[1:]], keywords, None
    tensors = [value for value in (*args, *keywords.values()) if isinstance(value, Tensor)]
    if any(tensor.dim() < _BATCHED or tensor.shape[0] != tensors[0].shape[0] for tensor in tensors):
        return args, keywords, mask

    def first(value: Any) -> Any:
        return value[:_ITEMS] if isinstance(value, Tensor) else value

    some = {name: first(value) for name, value in keywords.items()}
    return [first(value) for value in args], some, mask if mask is None else mask[:_ITEMS]


def _rows(output: Tensor, mask: Tensor | None, by_image: bool) -> Tensor:
    values = without_padding(output, mask)
    rows = values.flatten(1) if by_image and values.dim() > 1 else values.reshape(-1, values.shape[-1])
    return rows.double()


def _relative_error(rows: Tensor, expected: Tensor) -> float:
    power = expected.square().sum(1)
    error = (rows - expected).square().sum(1)
    return float((error[power > 0] / power[power > 0]).mean()) if bool((power > 0).any()) else 0.0
