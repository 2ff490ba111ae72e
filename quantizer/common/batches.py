"""Functions that run batches of data through a model, in any of the usual forms of a batch.

Copies of what a model is given: a forward may write into its inputs, and the data is the user's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.common.data.batches_of import batches_of, doubts_of_batch, length_of, warn_user
from quantizer.common.fingerprint import tensor_version
from quantizer.common.out_of_memory import is_out_of_memory
from quantizer.common.progress import counted
from quantizer.common.structure import flattened
from quantizer.common.torch_modes import as_ordinary
from quantizer.errors import CalibrationError, QuantizerError


def run_batches(
    proxy: nn.Module,
    data: Any,
    progress: bool | None = None,
    *,
    rows: int | None = None,
    doubt: bool = False,
    is_mine: Callable[[Any], bool] = lambda batch: True,
) -> int:
    """Run calibration data through a proxy, without gradients, and return the number of batches that there are."""
    count = 0
    batches, total = batches_of(proxy, data, rows), length_of(data, rows)
    with torch.no_grad(), counted(batches, "calibration", unit="batch", total=total, show=progress) as steps:
        for batch in steps:
            if is_mine(batch):
                _run(proxy, batch, count)
            if doubt and count == 0:
                warn_user(doubts_of_batch(batch))
            count += 1
    return count


def call(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch: a mapping of keywords, a tuple or list of arguments, or one tensor."""
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def _run(proxy: nn.Module, batch: Any, number: int) -> None:
    try:
        call(proxy, as_ordinary(batch))
    except QuantizerError:
        raise
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise _refused(proxy, batch, number, error) from error
        raise CalibrationError(
            f"there is too little memory for batch {number} of the calibration data: give smaller batches, or shorter "
            f"texts ({str(error).splitlines()[0] if str(error) else type(error).__name__})"
        ) from error
    except (TypeError, ValueError, KeyError, IndexError) as error:
        raise _refused(proxy, batch, number, error) from error


def _refused(proxy: nn.Module, batch: Any, number: int, error: Exception) -> CalibrationError:
    keys = f"inputs {sorted(map(str, batch))}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    return CalibrationError(
        f"batch {number} of the calibration data ({keys}) does not run through {type(proxy).__name__}.forward: {error}"
    )


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
