"""The request for the engines of a model in parts, whichever command asks for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quantizer.config import QuantizerConfig
from quantizer.engines.candidates import Variant
from quantizer.quantizer import Quantizer


@dataclass(frozen=True, kw_only=True)
class PartsRequest:
    """A request for the engines of a model in parts.

    Attributes:
        backends: the backends; a choice is made of ``variants``, and the first of these is calibrated for.
        variants: the engines to choose from; empty: each backend has its own.
        missing: backends for this CPU that are not installed, and what installs them.
        dtype: the number format of quantized operands; None: the float model is converted.
        settings: returns the settings of the quantizer for a backend.
        described: returns the configuration for the report of an engine, from how it is built and its quantizer.
        calibration: the calibration data, in words.
        evaluation: the labelled rows, in words; None: there are none.
        inference_precision: the precision of what is not quantized; None: that of the file.
        compiled: as in ``BuildOptions``, of engines that are asked for by their backend.
        capability: as ``compute_capability`` in ``BuildOptions``, where a backend builds for GPUs ahead of time.
        tolerance: the least SQNR in dB of outputs against PyTorch's; None: the default for their types.
        opset: the ONNX opset; None: that of the target.
        threads: the number of CPU threads of engines and PyTorch.
        needs_quantized: whether a quantized engine is wanted, also where one in float is faster.
        serves: whether files for servers are written.
        resamples: the resamples behind each interval of a score.
    """

    backends: Sequence[str]
    variants: Sequence[Variant] = ()
    missing: tuple[str, ...] = ()
    dtype: str | None
    settings: Callable[[str], QuantizerConfig]
    described: Callable[[Variant, Quantizer], dict[str, Any]]
    calibration: str
    evaluation: str | None
    inference_precision: str | None = None
    compiled: bool | None = None
    capability: str | Sequence[str] | None = None
    tolerance: float | None = None
    opset: int | None = None
    threads: int = 1
    needs_quantized: bool = False
    serves: bool = False
    resamples: int = 1000
