"""Decoders of text and mixtures of experts go all the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import DECODERS
from architectures import MIXTURES_OF_EXPERTS
from architectures import Architecture
from zoo_steps import all_the_way

pytest.importorskip("transformers", reason="these tests make transformers models: install quantizer[hf]")


@pytest.mark.parametrize("architecture", DECODERS + MIXTURES_OF_EXPERTS, ids=lambda architecture: architecture.name)
def test_architecture(architecture: Architecture, tmp_path: Path) -> None:
    all_the_way(architecture, tmp_path)
