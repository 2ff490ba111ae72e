"""Batches of a Python module, as the keyword arguments of its ``forward``, and the sizes of a run on them.

Other parts of a run speak of samples: here, a sample is one batch, because batches may differ in length.
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
from quantizer.tasks.inputs import EXAMPLE_BATCH_SIZE
from quantizer.utils.batches import WITHOUT_VALUES
from quantizer.utils.signatures import signature_of
from quantizer.utils.sizes import BATCH, SEQUENCE, Axes, DataSizes

LABELS = ("label", "labels")
"""Arguments from which transformers models compute a loss; an engine does not have them."""


def named_batches(model: nn.Module, batches: Iterable[Any]) -> list[Batch]:
    """Return batches as CPU tensors by the argument names of ``forward``."""
    name, signature = type(model).__name__, signature_of(model.forward)
    result = []
    for number, batch in enumerate(batches):
        keywords = dict(batch) if hasattr(batch, "keys") else {}
        args: Sequence[Any] = () if keywords else batch if isinstance(batch, tuple | list) else (batch,)
        result.append(by_name(f"batch {number}", name, signature, args, keywords))
    if not result:
        raise CalibrationError("the calibration data is empty: at least one batch is needed")
    return result


def by_name(
    what: str,
    model: str,
    signature: inspect.Signature,
    args: Sequence[Any],
    keywords: Mapping[str, Any],
    error: type[QuantizerError] = CalibrationError,
) -> Batch:
    """Return the arguments of a call as CPU tensors by name, without arguments that are None as by default."""

    def problem() -> str:
        return f"{what} does not fit {model}.forward{signature}"

    try:
        bound = signature.bind(*args, **keywords)
    except TypeError as mismatch:
        raise error(f"{problem()}: {mismatch}") from mismatch
    arguments: dict[str, Any] = {}
    for key, value in bound.arguments.items():
        kind = signature.parameters[key].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments |= value
        elif kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY):
            raise error(
                f"{problem()}: {kind.description} arguments have no names, but an engine's inputs need names; wrap the "
                "module in another module whose forward names them"
            )
        else:
            arguments[key] = value
    defaults = {key: parameter.default for key, parameter in signature.parameters.items()}
    arguments = {
        key: value for key, value in arguments.items() if value is not None or defaults.get(key, 0) is not None
    }
    for key, value in arguments.items():
        if isinstance(value, Tensor) and value.is_meta:
            raise error(f"{problem()}: {key} is {WITHOUT_VALUES}")
        if isinstance(value, np.ndarray):
            raise error(f"{problem()}: {key} is a numpy array; expected a tensor: convert it with torch.from_numpy")
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) == 0:
            what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise error(
                f"{problem()}: {key} is {what}; expected a tensor with the samples of the batch along axis 0. Omit "
                "arguments that are None, and store constants in the module"
            )
    return {key: value.detach().cpu() for key, value in arguments.items()}


class ModuleFeed:
    """The batches of a Python module.

    Attributes:
        in_data: axes that vary in the data, and their sizes.
        sizes: the same without axes that the model fixes.
        samples_independent: the model computes each sample independently, so that batches may be split.
    """

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = list(batches)
        self.names = tuple(self._batches[0])
        self.in_data = self.sizes = DataSizes.of(self._batches)
        self.samples_independent = False

    @property
    def inputs(self) -> ModuleFeed:
        """The feed itself, which makes the batches."""
        return self

    def keep_open(self, axes: Axes) -> None:
        """Keep only these axes dynamic; the model fixes the others at their size in the first batch."""
        self.sizes = self.in_data.only(axes)

    # As the data of a run

    def all_samples(self, mixed: Sequence[Batch]) -> list[Batch]:
        """Return the batches unchanged."""
        return list(mixed)

    def batches(self, rows: Sequence[Batch], limit: int | None = None) -> list[Batch]:
        """Return at most ``limit`` of the batches, unchanged."""
        return list(rows[:limit])

    def random_batch(self, batch: int, sequence: int | None = None, seed: int = 0) -> Batch:
        """Return the first batch at this size; its samples repeat if necessary."""
        return self.filled(self._batches, batch, sequence)

    def compared(self, samples: Sequence[Batch], batch: int, sequence: int | None) -> Batch:
        """Return the first batch at this size; see ``filled``."""
        return self.filled(samples, batch, sequence)

    # As the inputs of a model

    def order(self, samples: Sequence[Batch]) -> list[int]:
        """Return the original order of the batches."""
        return list(range(len(samples)))

    def batch(self, samples: Sequence[Batch]) -> Batch:
        """Return the single batch in ``samples``."""
        (batch,) = samples
        return batch

    def filled(self, samples: Sequence[Batch], rows: int, sequence: int | None) -> Batch:
        """Return the first batch at this size as far as its axes are dynamic; its samples repeat if necessary."""
        requested = {BATCH: rows} if sequence is None else {BATCH: rows, SEQUENCE: sequence}
        return self.sizes.resized((samples or self._batches)[0], requested)

    def check(self, samples: Sequence[Batch]) -> None:
        """Do nothing; ``named_batches`` has checked the batches."""

    def random(self, rows: int, sequence: int | None, seed: int = 0) -> Batch:
        """Return a batch of this size; see ``random_batch``."""
        return self.random_batch(rows, sequence)

    def example(self, samples: Sequence[Batch] = ()) -> Batch:
        """Return the first batch, for export; its first two samples if samples do not influence each other."""
        batch = dict((samples or self._batches)[0])
        if not self.samples_independent:
            return batch
        return self.sizes.resized(batch, {BATCH: EXAMPLE_BATCH_SIZE})


_LARGEST_BATCH = 32


def fitted(config: RunConfig, sizes: DataSizes, dimensions: Sequence[str] = (BATCH, SEQUENCE)) -> RunConfig:
    """Return a configuration with the default sizes of these axes and of its benchmarks taken from the data.

    Latency is measured at the size of the first batch, or at the nearest size in a configured range.
    """
    dynamic, report = config.export.dynamic, config.report
    latency_sizes = {BATCH: report.latency_batch, SEQUENCE: report.latency_sequence}
    axes, shape = {}, {}
    for axis in dimensions:
        # A model without such an axis has inputs of one size.
        data_sizes = sizes.seen.get(axis, (1,))
        key = f"latency_{axis}"
        usual = latency_sizes[axis] if key in report.model_fields_set else data_sizes[0]
        if not sizes.is_open(axis):
            axes[axis] = (data_sizes[0], usual := data_sizes[0], data_sizes[0])
        elif axis in dynamic.model_fields_set:
            axes[axis] = getattr(dynamic, axis)
        elif axis == BATCH:
            axes[axis] = (1, usual, max(_LARGEST_BATCH, usual, *data_sizes))
        else:
            axes[axis] = (min(usual, *data_sizes), usual, max(usual, *data_sizes))
        low, _, high = axes[axis]
        shape[key] = min(max(usual, low), high)
    export = config.export.model_copy(update={"dynamic": dynamic.model_copy(update=axes)})
    return config.model_copy(update={"export": export, "report": report.model_copy(update=shape)})
