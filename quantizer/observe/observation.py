"""The observation of a proxy: every pass adds its statistics to those of the calibration once it is complete.

A pass that fails, is refused or is interrupted adds nothing. Passes may run in several threads: each is observed
separately, and they are added one after the other.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import CalibrationError
from quantizer.observe.batch_pass import Pass, Watched, show_all_experts
from quantizer.observe.calibrators import Calibrator
from quantizer.observe.completeness import Explanations
from quantizer.observe.replay_batches import Enough, ReplayBatches
from quantizer.observe.statistics import Seen, read_mask
from quantizer.proxy.build import UnrewrittenSource, places_of
from quantizer.proxy.generated_classes import called_through
from quantizer.proxy.model_sharing import LocalHook
from quantizer.proxy.site import Place, Site, SourceCall
from quantizer.rewrite.product_sizes import recurrent
from quantizer.utils.batches import on_own_tensors, row_count, warn_user, written_by
from quantizer.utils.sizes import input_shapes
from quantizer.utils.structure import leaves

_COPIES_GIVEN = "writes into its inputs ({names}): it was given copies, so that your data stays as it is"


class Observation:
    """The observation of a proxy's sites during calibration.

    Its copies and pickles are None, so that a copy of a proxy does not observe.

    Attributes:
        seen: the statistics of all complete passes so far.
        make: makes a calibrator; its argument asks for a histogram.
    """

    def __init__(
        self,
        sites: Iterable[Site],
        refused: Mapping[str, str],
        make: Callable[[bool], Calibrator],
        off: Collection[str] = (),
        skipped: Iterable[UnrewrittenSource] = (),
        *,
        keep: Enough | None = None,
        channels: Collection[str] = (),
        all_experts: bool = False,
    ) -> None:
        """
        Args:
            sites: all sites of the proxy.
            refused: sites (and operands) that rules exclude, with the rule; they are counted, not observed.
            make: makes a calibrator; its argument asks for a histogram.
            off: kinds of site that are counted, not observed; the kind of a site depends on its operands.
            skipped: calls and functions that could not be rewritten.
            keep: how many batches to keep to run again (None: none).
            channels: kinds of site for whose inputs the range of each channel is kept.
            all_experts: run each mixture with all of its experts, and not only with those that its router chose.
        """
        self._all_experts = all_experts
        sites = list(sites)
        self.seen = Seen.of_sites((site.path for site in sites), None if keep is None else ReplayBatches(enough=keep))
        self.make = make
        self._watched = Watched(
            make=make,
            refused=refused,
            off=off,
            channels=channels,
            together=_together(sites, all_experts),
            explanations=Explanations(skipped),
        )
        self._thread = threading.local()
        self._running: list[Pass] = []
        self._places: list[Place] = []
        self._lock = threading.Lock()
        self._detach: list[Callable[[], None]] = []
        self._prepare: Callable[[], None] | None = None
        self._doubted = False
        self._told_written = False

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    def attach(self, proxy: nn.Module, sites: Iterable[Site], prepare: Callable[[], None] | None = None) -> None:
        """Start observing; ``prepare`` is called before each pass."""
        self._prepare = prepare
        for site in sites:
            site.observer = self
        self._places = [place for place in places_of(proxy) if place.result_site is not None]
        for place in self._places:
            place.observer = self
        # A hook alone is not enough: after an interrupt torch calls none.
        self._detach = [
            called_through(proxy, self._call),
            proxy.register_forward_pre_hook(LocalHook(self._begin), with_kwargs=True).remove,
            *(show_all_experts(proxy, sites) if self._all_experts else ()),
        ]

    def detach(self, sites: Iterable[Site]) -> None:
        """Stop observing; the statistics stay."""
        for site in sites:
            site.observer = None
        for place in self._places:
            place.observer = None
        for detach in self._detach:
            detach()
        self._detach = []

    @contextmanager
    def paused(self, sites: Iterable[Site]) -> Iterator[None]:
        """Stop observing the sites inside the block, whose passes must begin with ``proxy.forward``."""
        watched = [site for site in sites if site.observer is self]
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
            # A proxy that calls itself is still in the same pass.
            return run()
        if self._prepare is not None:
            self._prepare()
        run = on_own_tensors(run)
        current = Pass(self._watched, self.seen.batches)
        self._thread.current = current
        self._running.append(current)
        try:
            result = run()
            if not current.has_begun:
                raise CalibrationError(
                    f"{type(proxy).__name__}.__call__ does not run forward as torch runs it, so that nothing of it is "
                    "seen: let it call super().__call__(...), or write what it does into forward"
                )
        finally:
            current.end()
            self._running.remove(current)
            self._thread.current = None
        if not self._told_written and (names := written_by(run)):
            self._told_written = True
            warn_user([f"{type(proxy).__name__}.forward {_COPIES_GIVEN.format(names=', '.join(names))}"])
        added = current.whole(result)
        with self._lock:
            self._add(current, added)
        return result

    def _begin(self, proxy: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Check and record the inputs of the pass that runs."""
        current = self._of_thread()
        if current is None or current.has_begun:
            return
        if proxy.training:
            raise CalibrationError(
                "the proxy is in train mode, where dropout would enter the ranges; call .eval() on it first"
            )
        named = {**{f"argument {place}": value for place, value in enumerate(args)}, **keywords}
        for name, value in named.items():
            if isinstance(value, Tensor) and value.is_floating_point() and bool(torch.isnan(value).any()):
                raise CalibrationError(
                    f"batch {current.number} of the calibration data: {name!r} has NaN values; leave them out of the "
                    "data"
                )
        current.seen.rows = row_count({**dict(enumerate(args)), **keywords})
        current.seen.inputs = (input_shapes(proxy.forward, args, keywords),)
        # After a batch with other values, the inputs need not be checked for zeros any more.
        current.seen.only_zeros = self.seen.only_zeros and _only_zeros([args, keywords])
        if self.seen.kept is not None:
            current.kept = self.seen.kept.wanted(args, keywords)
        mask, doubt = read_mask(keywords, args)
        if doubt is not None and not self._doubted:
            self._doubted = True
            warnings.warn(doubt, stacklevel=2)
        current.begin(proxy, list(named.values()), mask)

    def _add(self, current: Pass, added: Seen) -> None:
        whole = self.seen.with_added(added)
        if whole.kept is not None and current.kept is not None:
            whole.kept.keep(*current.kept)
        # This one assignment adds the batch: before it nothing counts, after it everything.
        self.seen = whole

    def _of_thread(self) -> Pass | None:
        found: Pass | None = getattr(self._thread, "current", None)
        return found

    # -- one site --------------------------------------------------------------------------------------------------

    def before(self, site: Site, values: list[Any], inside: Callable[[], Tensor], ends: Tensor | None = None) -> None:
        """Observe the operands of a call, and the ends of its groups of rows."""
        current = self._pass_of(site)
        if current is not None:
            current.before(site, values, inside, ends)

    def after(self, site: Site, result: Any) -> None:
        """Observe the result of a call."""
        current = self._pass_of(site)
        if current is not None:
            current.after(site, result)

    def enter(self, place: Place, values: list[Any]) -> None:
        """Observe what a call of a place computes with."""
        current = self._pass_of(place)
        if current is not None:
            current.enter(place, values)

    def _pass_of(self, site: SourceCall) -> Pass | None:
        """Return the pass that a call is part of; None if a part of the model runs alone, which is no batch."""
        running = self._of_thread()
        if running is not None or not self._running:
            return running
        # The model runs the site in a thread that it has started.
        try:
            (only,) = self._running
        except ValueError:
            raise CalibrationError(
                f"{site.path} runs in a thread that the model has started, while several threads calibrate: of which "
                "batch it is part cannot be told; calibrate from one thread"
            ) from None
        return only


def _together(sites: Iterable[Site], all_experts: bool) -> set[str]:
    """Return the sites whose calls share one range: the steps of a recurrent layer, and mixtures that run again."""
    mixtures = {site.host_path for site in sites if all_experts and site.operation.grouped is not None}
    return {
        site.path
        for site in sites
        if site.operation.geometry is recurrent
        or any(site.path == path or site.path.startswith(f"{path}.") for path in mixtures)
    }


def _only_zeros(inputs: Any) -> bool:
    """Return whether there are values in the inputs, and all of them are zeros."""
    tensors = [leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor)]
    if any(tensor.is_nested or tensor.layout is not torch.strided for tensor in tensors):
        return False
    filled = [tensor for tensor in tensors if tensor.numel()]
    return bool(filled) and not any(bool(tensor.any()) for tensor in filled)
