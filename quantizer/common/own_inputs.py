"""Copies of what a model is given: a forward may write into its inputs, and the data is the user's."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from quantizer.common.structure import flattened
from quantizer.common.tensor_stamp import tensor_version


def own(value: Any) -> Any:
    """Return a structure with copies of its leaves, without their gradients; one leaf in two places stays one."""
    found, rebuilt = flattened(value)
    memo: dict[int, Any] = {}
    for leaf in found:
        if isinstance(leaf, Tensor) and id(leaf) not in memo:
            memo[id(leaf)] = leaf.detach().clone()
    return rebuilt([copy.deepcopy(leaf, memo) for leaf in found])


def own_tensors(value: Any) -> Any:
    """Return a structure with copies of its tensors, of which gradients reach the originals.

    Objects that a model is given to be filled, such as caches, are the same ones.
    """
    found, rebuilt = flattened(value)
    copies = {id(leaf): leaf.clone() for leaf in found if isinstance(leaf, Tensor)}
    return rebuilt([copies.get(id(leaf), leaf) for leaf in found])


def on_own_tensors(run: partial[Any]) -> partial[Any]:
    """Return the call of a module, ``run(module, *args, **keywords)``, with copies of the tensors among its inputs."""
    args, keywords = own_tensors((run.args[1:], run.keywords))
    return partial(run.func, run.args[0], *args, **keywords)


def written_by(run: partial[Any]) -> list[str]:
    """Return the names of the inputs that a call which ``on_own_tensors`` returned has written into."""
    named = {**{f"argument {place}": value for place, value in enumerate(run.args[1:])}, **run.keywords}

    def is_written(leaf: Any) -> bool:
        # A copy is of version 0.
        return isinstance(leaf, Tensor) and tensor_version(leaf) > 0

    return [name for name, value in named.items() if any(map(is_written, flattened(value)[0]))]


@contextmanager
def given_copies(model: nn.Module) -> Iterator[None]:
    """Give a model copies of the tensors that it is called with in the block: its forward may write into them."""
    handle = model.register_forward_pre_hook(_copy_inputs, prepend=True, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _copy_inputs(model: nn.Module, args: Any, keywords: Any) -> Any:
    return own_tensors((args, keywords))


def copied(args: tuple[Any, ...], keywords: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a copy of the inputs: a loader may reuse the tensors, and a model may write into them."""
    made: tuple[tuple[Any, ...], Mapping[str, Any]] = own((args, dict(keywords)))
    return made
