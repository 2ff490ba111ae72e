"""The conversion of a checkpoint to folders for a server, in one command: see ``convert`` and ``load_converted``."""

from __future__ import annotations

from quantizer.runs.convert.data import data_source
from quantizer.runs.convert.folder import Converted, load_converted
from quantizer.runs.convert.request import ConversionRequest
from quantizer.runs.convert.run import convert

__all__ = ["ConversionRequest", "Converted", "convert", "data_source", "load_converted"]
