"""The sizes of a run on batches: what its configuration does not set is taken from them."""

from __future__ import annotations

from quantizer.common.data.sizes import BATCH, SEQUENCE, DataSizes
from quantizer.config import RunConfig

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
