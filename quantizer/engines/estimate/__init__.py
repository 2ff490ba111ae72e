"""Times of the layers of an engine that cannot be run here, by a model of its GPU."""

from __future__ import annotations

from quantizer.engines.estimate.gpu import DEFAULT, Gpu, gpu_of, least
from quantizer.engines.estimate.layer_times import estimated_inspection

__all__ = ["DEFAULT", "Gpu", "estimated_inspection", "gpu_of", "least"]
