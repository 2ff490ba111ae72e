"""Every section of the schema: frozen, strict, described; defaults and bounds as documented."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import quantizer.config as config
from quantizer.config.describe import Slot
from quantizer.config.quantizer_section import Section


def _sections(section: type[Section] = config.RunConfig) -> Iterator[type[Section]]:
    yield section
    for name in section.model_fields:
        slot = Slot(section).child(name)
        if slot is not None and slot.section is not None:
            yield from _sections(slot.section)


SECTIONS = sorted(set(_sections()), key=lambda section: section.__name__)
DATA: dict[str, Any] = {"calibration": {"name": "a"}, "evaluation": {"name": "b"}}
RUN: dict[str, Any] = {"model": {"source": "m", "task": "sentence-similarity"}, "data": DATA}


def test_every_section_is_exported() -> None:
    assert {section.__name__ for section in SECTIONS} == {name for name in config.__all__ if name.endswith("Config")}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_sections_are_frozen_strict_and_closed(section: type[Section]) -> None:
    assert section.model_config["frozen"] is True
    assert section.model_config["strict"] is True
    assert section.model_config["extra"] == "forbid"


@pytest.mark.parametrize(
    ("section", "name"),
    [(section, name) for section in SECTIONS for name in section.model_fields],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_field_is_described(section: type[Section], name: str) -> None:
    description = section.model_fields[name].description
    assert description.endswith(".")


def test_a_config_cannot_change() -> None:
    settings = config.QuantizerConfig()
    with pytest.raises(ValidationError, match="frozen"):
        settings.backend = "openvino"
    assert isinstance(settings.exclude.names, tuple)
    assert hash(settings) == hash(config.QuantizerConfig())


def test_defaults() -> None:
    run = config.RunConfig.model_validate(RUN)
    assert run.quantizer.backend == "tensorrt"
    assert run.quantizer.activations.percentile == 99.99
    assert run.quantizer.sites.residual_add == "auto"
    assert run.quantizer.fallback_dtype is None
    assert run.amp is None
    assert run.fallback is None
    assert run.export.dynamic.sequence == (16, 128, 512)
    assert run.report.formats == ("json", "html")
    assert run.data.batch_size == 32


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("output", "auto", True)),
        ({"preset": "plain"}, ("percentile", None, False)),
        ({"preset": "fast"}, ("max", 0.8, True)),
        ({"activations": {"calibrator": "max"}}, ("max", "auto", True)),
        ({"activations": {"percentile": 99.9}}, ("percentile", "auto", True)),
        ({"activations": {"smoothquant_alpha": None}}, ("output", None, True)),
        ({"preset": "plain", "activations": {"smoothquant_alpha": 0.5, "zero_point": True}}, ("percentile", 0.5, True)),
    ],
)
def test_a_preset_fills_what_is_not_set(given: dict[str, Any], expected: tuple[object, ...]) -> None:
    found = config.QuantizerConfig.model_validate(given)
    activations = found.activations
    assert (activations.calibrator, activations.smoothquant_alpha, activations.zero_point) == expected
    assert found.bias_correction == (given.get("preset") not in ("fast", "plain"))
    # The values are explicit, so that what is saved does not depend on what a preset means later.
    assert (
        config.QuantizerConfig.model_validate({**found.model_dump(), "preset": "balanced"}).activations == activations
    )


@pytest.mark.parametrize("value", [True, False, "auto"])
def test_residual_add_keeps_its_kind(value: object) -> None:
    assert config.SitesConfig.model_validate({"residual_add": value}).residual_add is value


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"fallback": {"num": 1, "ratio": 0.5}, "amp": {}}, "num is 1 and ratio is 0.5"),
        ({"fallback": {}, "amp": {}}, "none of num, ratio, names, max_drop and min_speedup is set"),
        ({"fallback": {"max_drop": 0.1}, "amp": {}}, "data.tuning: is missing; expected labelled samples"),
        ({"data": {**DATA, "tuning": {"name": "c"}}}, "data.tuning: is only used by fallback.max_drop, "),
        ({"data": {**DATA, "tuning": {"name": "b"}}, "amp": {"measure": "metric"}}, "tuning: shares samples with"),
        ({"fallback": {"num": 1}}, "expected an amp section"),
        ({"report": {"latency_batch": 64}}, "latency_batch: got 64; expected 1 to 32"),
        ({"report": {"latency_sequence": 8}}, "latency_sequence: got 8; expected 16 to 512"),
        (
            {"export": {"dynamic": {"batch": [1, 1, 4]}}, "data": {**DATA, "batch_size": 5}},
            "dynamic.batch: the maximum is 4",
        ),
        ({"export": {"dynamic": {"batch": [1, 1, 4]}}, "report": {"latency_batch": 8}}, "latency_batch: got 8"),
        (
            {"export": {"dynamic": {"sequence": [16, 32, 64]}}, "model": {**RUN["model"], "max_length": 65}},
            "dynamic.sequence: the maximum is 64; expected at least model.max_length, 65",
        ),
        (
            {"model": {**RUN["model"], "max_length": 600}},
            "dynamic.sequence: the maximum is 512; expected at least model.max",
        ),
        ({"data": {**DATA, "head": {"name": "c"}}}, "head: is not used by model.task 'sentence-similarity'"),
        ({"model": {"source": "m", "task": "embedding-classification"}}, "head: is missing"),
    ],
)
def test_values_that_do_not_fit_together(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ValidationError, match=match):
        config.RunConfig.model_validate({**RUN, **changes})


@pytest.mark.parametrize(
    ("dynamic", "batch_size", "max_length", "latency"),
    [
        ({}, 32, 128, (8, 128)),
        ({"batch": [1, 4, 8]}, 8, 128, (8, 128)),
        ({"batch": [1, 2, 4]}, 4, 128, (2, 128)),
        ({"batch": [16, 32, 64]}, 32, 128, (32, 128)),
        ({"sequence": [8, 16, 64]}, 32, 64, (8, 16)),
        ({"sequence": [256, 384, 512]}, 32, 128, (8, 384)),
        ({"batch": [1, 1, 1], "sequence": [16, 128, 128]}, 1, 128, (1, 128)),
    ],
    ids=str,
)
def test_sizes_that_are_not_set_fit_those_of_the_engine(
    dynamic: dict[str, Any], batch_size: int, max_length: int, latency: tuple[int, int]
) -> None:
    run = config.RunConfig.model_validate({**RUN, "export": {"dynamic": dynamic}})
    assert (run.data.batch_size, run.model.max_length) == (batch_size, max_length)
    assert (run.report.latency_batch, run.report.latency_sequence) == latency
    assert config.RunConfig.model_validate(run.model_dump(mode="json")) == run


@pytest.mark.parametrize(
    "dynamic", ["a", {"batch": 4}, {"batch": [1, 2]}, {"batch": [1, "2", 3]}, {"batch": [1, True, 3]}]
)
def test_sizes_of_a_wrong_type_are_told(dynamic: Any) -> None:
    with pytest.raises(ValidationError, match="dynamic"):
        config.RunConfig.model_validate({**RUN, "export": {"dynamic": dynamic}})


@pytest.mark.parametrize("percentile", [1e-6, 50, 99.9, 100])
def test_percentile_in_range(percentile: float) -> None:
    assert config.ActivationsConfig(percentile=percentile).percentile == percentile


def test_defaults_of_a_measurement_and_a_search() -> None:
    assert config.AmpConfig() == config.AmpConfig(measure="gradient", granularity="group", batches=4)
    assert config.FallbackConfig(max_drop=0).evaluations == 25
    assert config.FallbackConfig(max_drop=0, max_evaluations=9).evaluations == 9
    assert config.FallbackConfig(names=("a",)).costs is None


@pytest.mark.parametrize("ratio", [0.001, 1])
def test_ratio_in_range(ratio: float) -> None:
    assert config.FallbackConfig(ratio=ratio).ratio == ratio


def test_a_seed_is_one_that_torch_takes() -> None:
    largest = config.QatConfig(seed=2**47 - 1).seed
    torch.Generator().manual_seed(largest * 2**16 + 2**16 - 1)
    with pytest.raises(ValidationError, match="less than 140737488355328"):
        config.QatConfig(seed=2**47)
