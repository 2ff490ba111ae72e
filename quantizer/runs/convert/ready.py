"""Checks of ``quantizer convert`` before the model is loaded."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from quantizer.config.load import quantizer_config
from quantizer.files import require_writable
from quantizer.runs.convert.data import Samples, read_calibration, read_labelled
from quantizer.runs.convert.inputs import ConversionInputs, conversion_inputs
from quantizer.runs.convert.request import ConversionRequest
from quantizer.runs.convert.stages import earlier_conversion
from quantizer.runs.preflight.estimate import FORMS, calibration_passes, estimate
from quantizer.runs.preflight.faults import Faults
from quantizer.runs.preflight.packages import check_packages


def ready_to_convert(asked: ConversionRequest, folder: Path) -> tuple[Samples | None, ConversionInputs, str | None]:
    """Check all that a conversion needs besides the loaded model; return its data, its inputs, and what it takes."""
    faults = Faults()
    check_packages(faults, asked.task)
    source = asked.calibration
    data = None if source is None else faults.of(lambda: read_calibration(source, asked.rows, asked.column))
    tuning, evaluation = (
        faults.of(partial(read_labelled, labelled, option)) or []
        for labelled, option in ((asked.tuning, "--tuning"), (asked.evaluation, "--evaluation"))
    )
    facts = faults.of(lambda: conversion_inputs(asked, folder.name))
    faults.of(lambda: require_writable(folder))
    faults.raise_all("the conversion cannot start")
    assert facts is not None
    calibration = [] if data is None else data.calibration
    passes = calibration_passes(quantizer_config(asked.config).preset, len(calibration)) + FORMS * len(evaluation)
    longest = 0 if facts.sequence is None else facts.sequence[2]
    rows = [*calibration, *tuning, *evaluation]
    return data, facts, estimate(asked.model, rows, passes, longest, earlier_conversion(asked, facts, folder))
