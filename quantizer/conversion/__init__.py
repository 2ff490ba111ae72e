"""From a checkpoint to folders that a server takes, in one command: see ``convert`` and ``load_converted``."""

from __future__ import annotations

from quantizer.conversion.data import data_source
from quantizer.conversion.folder import Converted
from quantizer.conversion.folder import load_converted
from quantizer.conversion.run import convert
from quantizer.conversion.settings import Conversion

__all__ = ["Conversion", "Converted", "convert", "data_source", "load_converted"]
