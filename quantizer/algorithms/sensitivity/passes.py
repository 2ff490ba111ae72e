"""Calls that the backward pass repeats, so that autograd keeps their inputs only."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint, set_checkpoint_early_stop

from quantizer.proxy.call_numbers import calls_so_far, numbered
from quantizer.utils.structure import leaves

_PLAIN = (Tensor, bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def overwritten(error: BaseException) -> bool:
    """Return whether autograd says that the model changed in place what the backward pass needs."""
    return isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error)


class RepeatedCalls:
    """Calls of modules of which autograd keeps the inputs only: the backward pass repeats each call once.

    A call whose arguments are more than tensors and plain values, such as a cache that it fills, is not repeated. An
    error of a repeated call ends the block without an error: the call depends on what it changed, or others did.

    Attributes:
        held: whether every repeated call gave what it gave first, bit for bit.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._kept: list[tuple[nn.Module, dict[str, Any]]] = []
        self._repeating = False
        self.held = True

    def __enter__(self) -> Self:
        for module in self._modules:
            self._kept.append((module, {name: value for name, value in vars(module).items() if name == "forward"}))
            vars(module)["forward"] = partial(self._call, module.forward)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        for module, own in self._kept:
            del vars(module)["forward"]
            vars(module).update(own)
        self._kept.clear()
        if not isinstance(error, Exception):
            return False
        ended = self._repeating or isinstance(error, CheckpointError) or overwritten(error)
        self.held = self.held and not ended
        return ended

    def _call(self, forward: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        if not all(isinstance(value, _PLAIN) for value in leaves((args, keywords))):
            return forward(*args, **keywords)
        first: list[Any] = []
        before = calls_so_far()

        def run(*args: Any, **keywords: Any) -> Any:
            self._repeating = bool(first)
            with numbered(self, before) if first and before is not None else nullcontext():
                result = forward(*args, **keywords)
            found = [value.detach() if isinstance(value, Tensor) else value for value in leaves(result)]
            if first:
                self.held = self.held and all(map(_same, first, found)) and len(first) == len(found)
                self._repeating = False
            first[:] = found
            return result

        # Otherwise a repeated call would end before its result is there.
        with set_checkpoint_early_stop(False):
            return checkpoint(run, *args, use_reentrant=False, **keywords)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and (one is other or not isinstance(one, _PLAIN) or bool(one == other))
