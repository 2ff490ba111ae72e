"""The commands ``quantizer run`` and ``quantizer convert``: all stages on a task, timed, resumable and reported."""

from __future__ import annotations
