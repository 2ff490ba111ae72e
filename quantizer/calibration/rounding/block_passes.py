"""The calls of blocks, in float and with all that is before them rounded, for some batches.

As in ``staged_passes.py`` what ended before a block is recorded and not computed again for later ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantizer.calibration.staged_passes import EndedCalls, Reached
from quantizer.common.autocast import Autocast
from quantizer.common.own_inputs import copied
from quantizer.observe.outputs import floats, is_no_mask
from quantizer.observe.padding import output_without_padding, padding_mask
from quantizer.observe.replay_batches import Batch
from quantizer.proxy.call_numbers import calls_so_far, numbered
from quantizer.proxy.restored_state import unmoved
from quantizer.proxy.site import Site


class _Given(NamedTuple):
    """The (positional, keyword) arguments of a call, and the state in which it was made.

    Attributes:
        autocast: that of autocast.
        before: the calls of sites before it in its pass, by path.
    """

    arguments: Batch
    autocast: Autocast
    before: Mapping[str, int]

    @classmethod
    def now(cls, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> _Given:
        """Return copies of the arguments of a call that is made now."""
        return cls(copied(args, keywords), Autocast.now(), calls_so_far() or {})


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockCall:
    """One call of a block.

    Attributes:
        given: its arguments with all that is before it rounded.
        mask: the real tokens of the batch, [B, S]; None: all are real.
        expected: the floating tensors of its output without padding, all being float.
        power: the sum of their squares, which is not 0, without values that are masks.
    """

    given: _Given
    mask: Tensor | None
    expected: list[Tensor]
    power: float

    def error(self, run: Callable[..., Any]) -> Tensor:
        """Return the error of the block's output |z - y|^2 / |y|^2; ``run`` computes the block."""
        found = _outputs(run, self.given, self.mask)
        squares = [
            (one - other)[is_no_mask(other)].float().square().sum()
            for one, other in zip(found, self.expected, strict=True)
        ]
        return torch.stack(squares).sum() / self.power


class BlockPasses:
    """The passes of some batches through a proxy with a plan, block by block.

    Args:
        proxy: a proxy whose sites are active.
        sites: all its sites.
        batches: inputs of the proxy.
    """

    def __init__(self, proxy: nn.Module, sites: Collection[Site], batches: Iterable[Batch]) -> None:
        self._proxy = proxy
        self._sites = sites
        self._batches = list(batches)
        self._rounded = [EndedCalls(proxy) for _ in self._batches]
        self._full = [EndedCalls(proxy) for _ in self._batches]
        self._calls: list[Counter[nn.Module]] = []

    def in_order(self, blocks: Collection[nn.Module]) -> list[nn.Module]:
        """Return those blocks that the batches call, in the order of their first calls in float."""
        order: dict[nn.Module, None] = {}
        for batch in self._batches:
            # The proxy itself is not called: its hooks are for calibration.
            called = [block for block in blocks if block is self._proxy]
            with _watched(blocks, lambda block, *_, called=called: called.append(block)), self._in_float():
                self._run(batch)
            self._calls.append(Counter(called))
            order |= dict.fromkeys(called)
        return list(order)

    def runs(self, block: nn.Module) -> Callable[..., Any]:
        """Return a function that computes a block."""
        return block.forward if block is self._proxy else block

    def calls(self, block: nn.Module) -> Iterator[BlockCall]:
        """Yield the calls of a block, of the batches that call it equally often rounded and in float.

        Call ``in_order`` first, and then this in that order. Whatever the block depends on must not change any more.
        """
        for place, batch in enumerate(self._batches):
            number = self._calls[place][block]
            if number == 0:
                continue
            mask = padding_mask(batch[1], batch[0])
            with self._in_float():
                full = self._given(batch, block, number, self._full[place])
                expected = [_outputs(self.runs(block), given, mask) for given in full]
            rounded = self._given(batch, block, number, self._rounded[place])
            for given, tensors in zip(rounded, expected, strict=False) if len(rounded) == number else ():
                power = sum(float(tensor[is_no_mask(tensor)].double().square().sum()) for tensor in tensors)
                if power > 0:
                    yield BlockCall(given=given, mask=mask, expected=tensors, power=power)

    def _given(self, batch: Batch, block: nn.Module, number: int, ended: EndedCalls) -> list[_Given]:
        """Return the arguments of a block's calls, up to ``number`` of them."""
        if block is self._proxy:
            return [_Given.now(*batch)]
        found: list[_Given] = []

        def note(block: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
            ended.reached = True
            found.append(_Given.now(args, keywords))
            if len(found) == number:
                raise Reached

        with ended, _watched([block], note), suppress(Reached):
            self._run(batch)
        return found

    def _run(self, batch: Batch) -> None:
        args, keywords = copied(*batch)
        with unmoved(self._proxy), numbered(self._proxy):
            self._proxy.forward(*args, **keywords)

    @contextmanager
    def _in_float(self) -> Iterator[None]:
        active = {site: site.active for site in self._sites}
        try:
            for site in self._sites:
                site.active = False
            yield
        finally:
            for site, was in active.items():
                site.active = was


def _outputs(run: Callable[..., Any], given: _Given, mask: Tensor | None) -> list[Tensor]:
    args, keywords = copied(*given.arguments)
    with given.autocast.restored(), numbered(given, given.before):
        return [output_without_padding(tensor, mask) for tensor in floats(run(*args, **keywords))]


@contextmanager
def _watched(blocks: Iterable[nn.Module], note: Any) -> Iterator[None]:
    """Pass the arguments of every call of some modules to ``note`` before it is computed."""
    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
