"""The sizes of a run on batches: what its configuration does not set is taken from them."""

from __future__ import annotations

from collections.abc import Sequence

from quantizer.config import RunConfig
from quantizer.tasks import Batch
from quantizer.tasks import batch_shape

__all__ = ["fitted"]

_LARGEST_BATCH = 32


def fitted(config: RunConfig, batches: Sequence[Batch]) -> RunConfig:
    """Return a configuration with the sizes of dynamic axes and of the shape for latency that it does not set.

    Latency is measured at the shape of the first batch, or next to it where an axis that is set does not reach there.
    """
    dynamic, report = config.export.dynamic, config.report
    sizes, lengths = zip(*(batch_shape(batch) for batch in batches), strict=True)
    tokens = [length for length in lengths if length is not None] or [1]
    told = {"batch": (sizes, report.latency_batch), "sequence": (tokens, report.latency_sequence)}
    axes, shape = {}, {}
    for axis, (seen, latency) in told.items():
        key = f"latency_{axis}"
        asked = latency if key in report.model_fields_set else seen[0]
        if axis in dynamic.model_fields_set:
            axes[axis] = getattr(dynamic, axis)
        elif axis == "batch":
            axes[axis] = (1, asked, max(_LARGEST_BATCH, asked, *seen))
        else:
            axes[axis] = (min(asked, *seen), asked, max(asked, *seen))
        low, _, high = axes[axis]
        shape[key] = min(max(asked, low), high)
    export = config.export.model_copy(update={"dynamic": dynamic.model_copy(update=axes)})
    return config.model_copy(update={"export": export, "report": report.model_copy(update=shape)})
