"""The blocks of a model: modules that are reconstructed one after another, and hold all sites that they call.

A container that lists blocks (``encoder.layer``, the stages of a convolutional network) is taken apart into them; so is
every module that such a container is in. What is left is a block: an encoder layer, an inverted residual, a head.

The calls of blocks, in float and with all that is before them rounded, for some batches.

As in ``staged_passes.py`` what ended before a block is recorded and not computed again for later ones.

The parts that all choices of codes by data share: weights without a choice, and the work before an interrupt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quantizer.calibration.proxied import Proxied
from quantizer.calibration.replay import EndedCalls, Reached
from quantizer.common.batches import copied
from quantizer.common.distributed import alone, get_world_size
from quantizer.common.fingerprint import Fingerprint, tensors_digest
from quantizer.common.torch_modes import Autocast
from quantizer.errors import CalibrationError
from quantizer.numerics.qtype import qtype
from quantizer.observe.range_group import RoundedWeight
from quantizer.observe.replay_batches import Batch, ReplayBatches
from quantizer.observe.site_statistics import floats, is_no_mask, output_without_padding, padding_mask
from quantizer.observe.statistics import RoundingProgress, Seen
from quantizer.plan.site_plan import OperandPlan, Plan
from quantizer.proxy.call_numbers import calls_so_far, numbered
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.restored_state import unmoved
from quantizer.proxy.site import Site, SourceCall

Block = tuple[str, nn.Module, tuple[Site, ...]]
"""The path of a block, the block, and its sites."""


def blocks_of(model: nn.Module, sites: Collection[Site]) -> list[Block]:
    """Return the blocks of a proxy that have some of ``sites``, in the order of its modules.

    Sites that a module calls which is taken apart, such as a residual addition between blocks, are in none.
    """
    wanted = {id(site) for site in sites}

    def inside(module: nn.Module) -> tuple[Site, ...]:
        return tuple(entry for entry in module.modules() if isinstance(entry, Site) and id(entry) in wanted)

    def parts(path: str, module: nn.Module) -> Iterator[Block]:
        if not _lists_blocks_within(module):
            yield path, module, inside(module)
            return
        for name, child in module.named_children():
            if not isinstance(child, SourceCall) and inside(child):
                yield from parts(f"{path}.{name}" if path else name, child)

    return list(parts("", model)) if wanted else []


def _lists_blocks_within(module: nn.Module) -> bool:
    return any(isinstance(entry, nn.Sequential | nn.ModuleList) and _lists_blocks(entry) for entry in module.modules())


def _lists_blocks(container: nn.Module) -> bool:
    """Return whether a container holds modules with modules of their own, and not only layers."""
    return any(_has_modules(child) for child in container.children())


def _has_modules(module: nn.Module) -> bool:
    return any(not isinstance(child, SourceCall | OperandQuantizer) for child in module.children())


class _Given(NamedTuple):
    """The (positional, keyword) arguments of a call, and the state in which it was made."""

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
    """The passes of some batches through a proxy with a plan, block by block."""

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


UNREACHED = "no batch that was kept reaches it"


@contextmanager
def with_all_batches(method: str, kept: ReplayBatches) -> Iterator[None]:
    """Let each process do the block by itself with all kept batches, which gives all of them the same bits."""
    if get_world_size() > 1 and not kept.on_every_rank:
        raise CalibrationError(
            f"weights.rounding: {method} needs all that a weight multiplies, and each process has its own batches: "
            "give all of them the same ones with calibrate(split=True), calibrate in one process, or with rounding: "
            "nearest"
        )
    with alone():
        yield


def progress(proxy: Proxied, observation: Seen, plan: Plan) -> RoundingProgress:
    """Return what is rounded already; what is added to it survives an interrupt."""
    key = _key(proxy, observation, plan)
    if observation.rounding is None or observation.rounding.key != key:
        observation.rounding = RoundingProgress(key=key)
    return observation.rounding


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


def _key(proxy: Proxied, observation: Seen, plan: Plan) -> str:
    """Return a checksum of all that the codes depend on: weights, scales, factors, batches and the configuration."""
    tensors = {
        f"{path}.{operand.name}.{field}": value
        for path, entry in plan.items()
        for operand in entry.operands
        for field, value in (("scale", operand.scale), ("smooth", operand.smooth))
        # The scales of weights follow from what else is in the checksum, or were chosen together with codes.
        if operand.quantized and value is not None and (operand.role, field) != ("weight", "scale")
    }
    assert observation.kept is not None
    weights = Fingerprint.of(proxy.module).plain()
    return tensors_digest(tensors, f"{weights} {observation.kept.digest} {proxy.config.model_dump_json()}")
