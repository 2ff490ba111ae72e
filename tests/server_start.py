"""Imported by the server that forks processes, see ``outside.py``: what each would do again is done here once."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import torch
from quick_start import collect_seldom, keep_tables

from quantizer.export.quick_exporter import quick_exporter

# The server has found this module; the programs that a script starts need not.
places = os.environ["PYTHONPATH"].split(os.pathsep)
places.remove(str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join(places)

if find_spec("onnxscript") is not None:
    keep_tables()
    # Imports what torch first needs for an export, and reads the signatures of operators.
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.LayerNorm(8))
    given = {"opset_version": 20, "dynamic_shapes": [{0: "rows"}], "optimize": False, "verbose": False}
    with quick_exporter():
        torch.onnx.export(layers.eval(), (torch.zeros(3, 8),), dynamo=True, **given)
collect_seldom()
