"""Observe a proxy: every complete pass adds its statistics to the calibration.

A pass that fails or is interrupted adds nothing. Passes may run in several threads: each is observed separately, and
their statistics are added one after the other.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import CalibrationError
from quantizer.observe.batch_pass import Pass, Watched, show_all_experts
from quantizer.observe.replay_batches import ReplayBatches
from quantizer.observe.statistics import Seen, read_mask
from quantizer.proxy.build import places_of
from quantizer.proxy.generated_classes import called_through
from quantizer.proxy.model_sharing import LocalHook
from quantizer.proxy.site import Site, SourceCall
from quantizer.utils.batches import on_own_tensors, row_count, warn_user, written_by
from quantizer.utils.sizes import input_shapes
from quantizer.utils.structure import leaves

_COPIES_PASSED = "writes into its inputs ({names}); it receives copies, so your data does not change"


class Observation:
    """The observation of a proxy's sites during calibration.

    Its copies and pickles are None, so a copy of a proxy does not observe.

    Attributes:
        seen: the statistics of all complete passes so far.
        watched: the settings of the observation.
    """

    def __init__(self, sites: Sequence[Site], watched: Watched, kept: ReplayBatches | None) -> None:
        """Observe all sites of a proxy; ``kept`` stores batches to run again (None: no batches are stored)."""
        self.seen = Seen.of_sites((site.path for site in sites), kept)
        # Created once before any data runs: later, an error of a calibrator would look like an error of the model.
        watched.make(False)
        self.watched = watched
        self._sites = sites
        self._calls: list[SourceCall] = []
        self._thread = threading.local()
        self._running: list[Pass] = []
        self._lock = threading.Lock()
        self._detach: list[Callable[[], None]] = []
        self._prepare: Callable[[], None] | None = None
        self._warned_of_mask = False
        self._warned_of_writes = False

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def attach(self, proxy: nn.Module, prepare: Callable[[], None] | None = None) -> None:
        """Start observing; ``prepare`` is called before each pass."""
        self._prepare = prepare
        self._calls = [*self._sites, *(place for place in places_of(proxy) if place.result_site is not None)]
        for call in self._calls:
            call.observer = self
        # A hook is not enough, because torch calls none after an interrupt.
        self._detach = [
            called_through(proxy, self._call),
            proxy.register_forward_pre_hook(LocalHook(self._begin), with_kwargs=True).remove,
            *(show_all_experts(proxy, self._sites) if self.watched.all_experts else ()),
        ]

    def detach(self) -> None:
        """Stop observing; the statistics stay."""
        for call in self._calls:
            call.observer = None
        for detach in self._detach:
            detach()
        self._detach = []

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop observing the sites inside the block, whose passes must begin with ``proxy.forward``."""
        watched = [site for site in self._sites if site.observer is self]
        for site in watched:
            site.observer = None
        try:
            yield
        finally:
            for site in watched:
                site.observer = self

    # -- the whole pass --------------------------------------------------------------------------------------------

    def _call(self, proxy: nn.Module, run: partial[Any]) -> Any:
        """Run the proxy once, and add the statistics of the pass."""
        if self._of_thread() is not None:
            # A recursive call of the proxy belongs to the same pass.
            return run()
        if self._prepare is not None:
            self._prepare()
        run = on_own_tensors(run)
        current = Pass(self.watched, self.seen.batches)
        self._thread.current = current
        self._running.append(current)
        try:
            result = run()
            if not current.has_begun:
                raise CalibrationError(
                    f"{type(proxy).__name__}.__call__ does not call forward through nn.Module.__call__, so it cannot "
                    "be observed; call super().__call__(...) in it, or move its code into forward"
                )
        finally:
            current.end()
            self._running.remove(current)
            self._thread.current = None
        if not self._warned_of_writes and (names := written_by(run)):
            self._warned_of_writes = True
            warn_user([f"{type(proxy).__name__}.forward {_COPIES_PASSED.format(names=', '.join(names))}"])
        added = current.whole(result)
        with self._lock:
            self._add(current, added)
        return result

    def _begin(self, proxy: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Check and record the inputs of the current pass."""
        current = self._of_thread()
        if current is None or current.has_begun:
            return
        if proxy.training:
            raise CalibrationError(
                "the proxy is in train mode, so dropout would affect the ranges; call .eval() on it first"
            )
        named = {**{f"argument {place}": value for place, value in enumerate(args)}, **keywords}
        for name, value in named.items():
            if isinstance(value, Tensor) and value.is_floating_point() and bool(torch.isnan(value).any()):
                raise CalibrationError(
                    f"batch {current.number} of the calibration data: {name!r} has NaN values; remove them from the "
                    "data"
                )
        current.seen.rows = row_count({**dict(enumerate(args)), **keywords})
        current.seen.inputs = (input_shapes(proxy.forward, args, keywords),)
        # After a batch with other values, the check for zeros is unnecessary.
        current.seen.only_zeros = self.seen.only_zeros and _only_zeros([args, keywords])
        if self.seen.kept is not None:
            current.kept = self.seen.kept.wanted(args, keywords)
        mask, doubt = read_mask(keywords, args)
        if doubt is not None and not self._warned_of_mask:
            self._warned_of_mask = True
            warnings.warn(doubt, stacklevel=2)
        current.begin(proxy, list(named.values()), mask)

    def _add(self, current: Pass, added: Seen) -> None:
        total = self.seen.with_added(added)
        if total.kept is not None and current.kept is not None:
            total.kept.keep(*current.kept)
        # This single assignment adds the batch, so an interrupt cannot add a part of it.
        self.seen = total

    def _of_thread(self) -> Pass | None:
        current: Pass | None = getattr(self._thread, "current", None)
        return current

    def pass_of(self, call: SourceCall) -> Pass | None:
        """Return the pass that a call is part of; None if a part of the model runs outside of a pass."""
        running = self._of_thread()
        if running is not None or not self._running:
            return running
        # The model runs the site in a thread that it started.
        try:
            (only,) = self._running
        except ValueError:
            raise CalibrationError(
                f"{call.path} runs in a thread that the model started while several threads calibrate, so its batch is "
                "unknown; calibrate from one thread"
            ) from None
        return only


def _only_zeros(inputs: Any) -> bool:
    """Return whether the inputs contain values, and all of them are zeros."""
    tensors = [leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor)]
    if any(tensor.is_nested or tensor.layout is not torch.strided for tensor in tensors):
        return False
    filled = [tensor for tensor in tensors if tensor.numel()]
    return bool(filled) and not any(bool(tensor.any()) for tensor in filled)
