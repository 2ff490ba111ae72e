"""Encoders and encoder-decoders of text, off and all the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from architectures import ENCODER_DECODERS, TEXT_ENCODERS, Architecture
from zoo_steps import all_the_way, each_pattern, off_is_identical, repeated_patterns

pytest.importorskip("transformers", reason="these tests make transformers models: install enginequant[hf]")


FOUND = TEXT_ENCODERS + ENCODER_DECODERS


@pytest.mark.parametrize("architecture", repeated_patterns(FOUND), ids=lambda architecture: architecture.name)
def test_off_is_identical(architecture: Architecture) -> None:
    off_is_identical(architecture)


@pytest.mark.parametrize("architecture", each_pattern(FOUND))
def test_all_the_way(architecture: Architecture, tmp_path: Path) -> None:
    all_the_way(architecture, tmp_path)
