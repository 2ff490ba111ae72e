"""Quantized checkpoints of transformers: hooks of ``from_pretrained`` and ``save_pretrained``."""

from __future__ import annotations

from quantizer.errors import require_supported

# Before the modules of this package import it: another version may lack what they take from it.
require_supported("transformers")
