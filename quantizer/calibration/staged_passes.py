"""Passes of batches through a quantized proxy in stages: each stage goes on to the calls of one more site.

What ended before these calls is recorded and not computed again in later stages, so that all stages together cost
little more than one pass. In memory are the outputs of the outermost modules that have ended, of every batch; a model
that hands objects from module to module, such as a cache, has those of the innermost ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import Tensor, nn

from quantizer.calibration.replay import run_judged
from quantizer.common.own_inputs import copied
from quantizer.observe.padding import padding_mask
from quantizer.observe.replay_batches import Batch
from quantizer.proxy.recorded_calls import RecordedCall, RecordedCalls
from quantizer.proxy.site import Site

Visit = Callable[[Site, list[Any], dict[str, Any], Tensor | None], None]
"""A function of a call: its site, its arguments, and the mask [B, S] of real tokens of the batch (None: all)."""


class StagedPasses:
    """The passes of some batches.

    Args:
        proxy: a proxy whose sites are active.
        batches: inputs of the proxy.
    """

    def __init__(self, proxy: nn.Module, batches: Iterable[Batch]) -> None:
        self._proxy = proxy
        self._batches = list(batches)
        self._calls: list[Counter[Site]] = []
        self._ended = [EndedCalls(proxy) for _ in self._batches]

    def in_order(self, sites: Collection[Site]) -> list[Site]:
        """Return those sites that the batches call, in the order of their first calls."""
        order: list[Site] = []
        for batch in self._batches:
            called = self._called(batch, sites)
            self._calls.append(Counter(called))
            # A site that no earlier batch reached follows the one that was called before it.
            place = 0
            for site in dict.fromkeys(called):
                if site not in order:
                    order.insert(place, site)
                place = order.index(site) + 1
        return order

    def visit(self, site: Site, visit: Visit) -> None:
        """Call ``visit`` with every call of a site; call ``in_order`` first, and then this in that order.

        Whatever the site depends on must not change any more.
        """
        for batch, calls, ended in zip(self._batches, self._calls, self._ended, strict=True):
            if calls[site]:
                with ended:
                    self._until_last(batch, site, calls[site], ended, visit)

    def _until_last(self, batch: Batch, site: Site, calls: int, ended: EndedCalls, visit: Visit) -> None:
        left = calls

        def counted(site: Site, args: list[Any], keywords: dict[str, Any], mask: Tensor | None) -> None:
            nonlocal left
            ended.reached = True
            visit(site, args, keywords, mask)
            left -= 1
            if left == 0:
                raise Reached

        try:
            self._run(batch, [site], counted)
        except Reached:
            return

    def _called(self, batch: Batch, sites: Collection[Site]) -> list[Site]:
        """Return the sites that a batch calls, in order."""
        called: list[Site] = []
        self._run(batch, sites, lambda site, *_: called.append(site))
        return called

    def _run(self, batch: Batch, sites: Collection[Site], visit: Visit) -> None:
        args, keywords = copied(*batch)
        mask = padding_mask(keywords, args)

        def judge(site: Site, function: Callable[..., Any], args: list[Any], keywords: dict[str, Any]) -> Any:
            visit(site, args, keywords, mask)
            return site.rounded(function, args, keywords)

        run_judged(self._proxy, sites, (args, keywords), judge)


class Reached(BaseException):
    """The end of a pass that needs to go no further; no error, so that a model that catches errors lets it through."""


class EndedCalls(RecordedCalls):
    """The module calls of one batch that ended before the last stage.

    Attributes:
        reached: whether this pass has reached its stage, so that what ends from now on is not final.
    """

    def __init__(self, proxy: nn.Module) -> None:
        super().__init__(proxy)
        self.reached = False
        self._calls: dict[tuple[nn.Module, int], RecordedCall] = {}

    def __enter__(self) -> EndedCalls:
        super().__enter__()
        self.reached = False
        self._number.clear()
        return self

    @property
    def _records(self) -> bool:
        return not self.reached

    def _recorded(self, module: nn.Module, number: int) -> RecordedCall | None:
        call = self._calls.get((module, number))
        return call if call is not None and call.holds else None

    def _keep(self, module: nn.Module, number: int, call: RecordedCall) -> None:
        if self.reached or not call.usable:
            return
        for inner, count in call.inside.items():
            after = self._number[inner]
            for place in range(after - count, after):
                # This call is taken as a whole.
                self._calls.pop((inner, place), None)
        self._calls[module, number] = call
