"""Rules of ``quantizer check``, one file per family. Importing this package registers them."""

from __future__ import annotations

from quantizer.check.rules import attention, formats, operators, pairs, placement

__all__ = ["attention", "formats", "operators", "pairs", "placement"]
