"""The batches of a module that somebody gave in Python: each as the keyword arguments of its ``forward``.

A row, to the parts of a run that speak of rows, is one whole batch, since batches may differ in their lengths.

The sizes of a run on batches: what its configuration does not set is taken from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from quantizer.config import RunConfig
from quantizer.errors import CalibrationError, QuantizerError
from quantizer.tasks import Batch
from quantizer.utils.batches import WITHOUT_VALUES
from quantizer.utils.sizes import BATCH, SEQUENCE, Axes, DataSizes


def named_batches(model: nn.Module, batches: Iterable[Any]) -> list[Batch]:
    """Return batches as tensors by the names of the arguments of ``forward``, without gradients and on the CPU."""
    name, signature = type(model).__name__, inspect.signature(model.forward)
    named = []
    for number, batch in enumerate(batches):
        keywords = dict(batch) if hasattr(batch, "keys") else {}
        args: Sequence[Any] = () if keywords else batch if isinstance(batch, tuple | list) else (batch,)
        named.append(by_name(f"batch {number}", name, signature, args, keywords))
    if not named:
        raise CalibrationError("the calibration data is empty: at least one batch is needed")
    return named


def by_name(
    what: str,
    model: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    error: type[QuantizerError] = CalibrationError,
) -> Batch:
    """Return the arguments of a call as tensors by name, without gradients and on the CPU."""
    where = f"{what} does not fit {model}.forward{signature}"
    try:
        bound = signature.bind(*args, **keywords)
    except TypeError as refused:
        raise error(f"{where}: {refused}") from refused
    given: dict[str, Any] = {}
    for key, value in bound.arguments.items():
        kind = signature.parameters[key].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            given |= value
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise error(
                f"{where}: {kind.description} arguments have no names, which an engine's inputs need; wrap the module "
                "in one whose forward names them"
            )
        else:
            given[key] = value
    for key, value in given.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise error(f"{where}: {key} is {WITHOUT_VALUES}")
        if isinstance(value, np.ndarray):
            raise error(f"{where}: {key} is a numpy array; expected a tensor, as torch.from_numpy makes of it")
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) == 0:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise error(
                f"{where}: {key} is {what}; expected a tensor with the rows of the batch along axis 0. Leave out what "
                "is None, and give what never changes to the module itself"
            )
    return {key: value.detach().cpu() for key, value in given.items()}


class ModuleFeed:
    """The batches of a module.

    Attributes:
        in_data: the axes that would be open by the data, and the sizes in it.
        sizes: the same without the axes that the model fixes.
        samples_independent: whether the model computes each row of a batch for itself, so that a batch may be cut.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = list(batches)
        self.names = tuple(self._batches[0])
        self.in_data = self.sizes = DataSizes.of(self._batches)
        self.samples_independent = False

    @property
    def inputs(self) -> ModuleFeed:
        """The batches, which this object makes itself."""
        return self

    def keep_open(self, axes: Axes) -> None:
        """Let no other axes than these be open: the model fixes the others, at their size in the first batch."""
        self.sizes = self.in_data.only(axes)

    # As the data of a run

    def all_samples(self, mixed: Sequence[Batch]) -> list[Batch]:
        """Return the batches as they are."""
        return list(mixed)

    def batches(self, rows: Sequence[Batch], limit: int | None = None) -> list[Batch]:
        """Return at most ``limit`` of the batches, as they are."""
        return list(rows[:limit])

    def random_batch(self, batch: int, sequence: int | None = None, seed: int = 0) -> Batch:
        """Return the first batch at this size, its entries again and again where it has fewer."""
        return self.filled(self._batches, batch, sequence)

    def compared(self, samples: Sequence[Batch], batch: int, sequence: int | None) -> Batch:
        """Return the first sample at this size; see ``filled``."""
        return self.filled(samples, batch, sequence)

    # As the inputs of a model

    def order(self, samples: Sequence[Batch]) -> list[int]:
        """Return the order of the batches, which is their own."""
        return list(range(len(samples)))

    def batch(self, samples: Sequence[Batch]) -> Batch:
        """Return the batch of one sample, which is the sample."""
        (only,) = samples
        return only

    def filled(self, samples: Sequence[Batch], rows: int, sequence: int | None) -> Batch:
        """Return the first sample at this size, as far as the axes are open; its entries come again and again."""
        wanted = {BATCH: rows} if sequence is None else {BATCH: rows, SEQUENCE: sequence}
        return self.sizes.resized((samples or self._batches)[0], wanted)

    def check(self, samples: Sequence[Batch]) -> None:
        """Do nothing: ``named_batches`` has checked them."""

    def random(self, rows: int, sequence: int | None, seed: int = 0) -> Batch:
        """Return a batch of this size; see ``random_batch``."""
        return self.random_batch(rows, sequence)

    def example(self, samples: Sequence[Batch] = ()) -> Batch:
        """Return the first batch, for export: a model may fix what the example has."""
        return dict((samples or self._batches)[0])


_LARGEST_BATCH = 32


def fitted(config: RunConfig, sizes: DataSizes) -> RunConfig:
    """Return a configuration with the sizes of dynamic axes and of the shape for latency that it does not set.

    Latency is measured at the shape of the first batch, or next to it where an axis that is set does not reach there.
    """
    dynamic, report = config.export.dynamic, config.report
    told = {BATCH: report.latency_batch, SEQUENCE: report.latency_sequence}
    axes, shape = {}, {}
    for axis, latency in told.items():
        # A model without such an axis has its inputs at one size.
        seen = sizes.seen.get(axis, (1,))
        key = f"latency_{axis}"
        asked = latency if key in report.model_fields_set else seen[0]
        if not sizes.is_open(axis):
            axes[axis] = (seen[0], asked := seen[0], seen[0])
        elif axis in dynamic.model_fields_set:
            axes[axis] = getattr(dynamic, axis)
        elif axis == BATCH:
            axes[axis] = (1, asked, max(_LARGEST_BATCH, asked, *seen))
        else:
            axes[axis] = (min(asked, *seen), asked, max(asked, *seen))
        low, _, high = axes[axis]
        shape[key] = min(max(asked, low), high)
    export = config.export.model_copy(update={"dynamic": dynamic.model_copy(update=axes)})
    return config.model_copy(update={"export": export, "report": report.model_copy(update=shape)})
