"""Encoders and encoder-decoders of text go all the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import ENCODER_DECODERS
from architectures import TEXT_ENCODERS
from architectures import Architecture
from zoo_steps import all_the_way

pytest.importorskip("transformers", reason="these tests make transformers models: install quantizer[hf]")


@pytest.mark.parametrize("architecture", TEXT_ENCODERS + ENCODER_DECODERS, ids=lambda architecture: architecture.name)
def test_architecture(architecture: Architecture, tmp_path: Path) -> None:
    all_the_way(architecture, tmp_path)
