"""Runs from a model and its data to engines and reports, as in ``quantizer run``, ``convert`` and
``quantize_model``.
"""

from __future__ import annotations
