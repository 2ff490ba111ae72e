"""Imported by the server that forks processes, see ``outside.py``: what each would do again is done here once."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import torch
from quick_start import collect_seldom

from quantizer.export.quick_exporter import exporter_cache

# The server has found this module; the programs that a script starts need not.
places = os.environ["PYTHONPATH"].split(os.pathsep)
places.remove(str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join(places)

if find_spec("onnxscript") is not None:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with exporter_cache():
        ONNXRegistry.from_torchlib(opset_version=20)  # the default of exports
    # Imports the 400 modules that torch first needs for an export.
    torch.export.export(torch.nn.Identity(), (torch.zeros(1),))
collect_seldom()
