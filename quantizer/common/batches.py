"""Functions that run batches of data through a model, in any of the usual forms of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from quantizer.common.data.batches_of import batches_of, length_of
from quantizer.common.data.doubts import doubts_of_batch, warn_user
from quantizer.common.inference_mode import as_ordinary
from quantizer.common.out_of_memory import is_out_of_memory
from quantizer.common.progress import counted
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
    """Run calibration data through a proxy, without gradients, and return the number of batches that there are.

    Args:
        data: what ``batches_of`` takes.
        progress: show a progress bar; None: only in a terminal.
        rows: at most so many rows, see ``batches_of``.
        doubt: warn of a first batch that looks wrong.
        is_mine: returns whether this process runs the next batch.

    Raises:
        CalibrationError: the data is not what ``batches_of`` takes, or a batch does not run through the model.
    """
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
