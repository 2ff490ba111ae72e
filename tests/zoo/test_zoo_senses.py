"""Models of images, sound, several modalities and series go all the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import AUDIO
from architectures import MULTIMODAL
from architectures import SERIES
from architectures import VISION
from architectures import Architecture
from zoo_steps import all_the_way

pytest.importorskip("transformers", reason="these tests make transformers models: install quantizer[hf]")


@pytest.mark.parametrize(
    "architecture", VISION + AUDIO + MULTIMODAL + SERIES, ids=lambda architecture: architecture.name
)
def test_architecture(architecture: Architecture, tmp_path: Path) -> None:
    all_the_way(architecture, tmp_path)
