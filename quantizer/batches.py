"""Running batches of data through a model, as people write them."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from tqdm.auto import tqdm

from quantizer.errors import CalibrationError
from quantizer.errors import QuantizerError

__all__ = ["call", "run_batches"]


def run_batches(proxy: nn.Module, batches: Iterable[Any], progress: bool | None = None) -> int:
    """Run calibration data through a proxy, without gradients; how many batches there were.

    Args:
        proxy: the proxy that observes.
        batches: each as ``call`` takes it.
        progress: show a progress bar; None: only in a terminal.

    Raises:
        CalibrationError: a batch does not run through the model.
    """
    count = 0
    disable = None if progress is None else not progress
    with torch.no_grad():
        for batch in tqdm(batches, "calibration", unit="batch", leave=False, disable=disable):
            _run(proxy, batch, count)
            count += 1
    return count


def call(model: nn.Module, batch: Any) -> Any:
    """Run a batch as people write them: a mapping, a tuple or list, or one tensor."""
    if isinstance(batch, Mapping) or hasattr(batch, "keys"):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def _run(proxy: nn.Module, batch: Any, number: int) -> None:
    try:
        call(proxy, batch)
    except QuantizerError:
        raise
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        keys = f"inputs {sorted(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise CalibrationError(
            f"batch {number} of the calibration data ({keys}) does not run through "
            f"{type(proxy).__name__}.forward: {error}"
        ) from error
