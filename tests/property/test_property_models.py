"""Random small models, all of which keep what is promised of any model.

``make property`` draws 2,000 of them with a seed of its own, which it prints.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from drawn_models import DrawnModel, drawn_models
from hypothesis import HealthCheck, assume, given, settings
from invariants import INVARIANTS, Invariant, a_half_file_has_one_type, engine_follows_the_frozen_proxy, is_finite

NIGHTLY = settings.default == settings.get_profile("nightly")
MODELS = settings.get_profile("nightly").max_examples if NIGHTLY else 8
ENGINES = max(2, MODELS // 10)  # exporting and building take seconds
QUICK = settings(
    max_examples=MODELS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)

# What is said of random data, such as that nothing was quantized, is no fault of a model.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def _hold(drawn: DrawnModel, *invariants: Invariant) -> None:
    assume(is_finite(drawn))
    for invariant in invariants:
        with tempfile.TemporaryDirectory() as folder:
            invariant(drawn, Path(folder))


@QUICK
@given(drawn_models())
def test_every_invariant_holds(drawn: DrawnModel) -> None:
    _hold(drawn, *INVARIANTS)


@pytest.mark.usefixtures("exact_byte_products")
@settings(QUICK, max_examples=ENGINES)
@given(drawn_models())
def test_an_engine_computes_what_the_frozen_proxy_computes(drawn: DrawnModel) -> None:
    # Which expert gets a row is decided at a border that any rounding may cross; the others torch does not export.
    assume(not any(block in drawn.text for block in ("Experts", "Checkpointed", "Mapped")))
    _hold(drawn, engine_follows_the_frozen_proxy)


@settings(QUICK, max_examples=ENGINES)
@given(drawn_models())
def test_a_half_file_has_one_type(drawn: DrawnModel) -> None:
    assume(not any(block in drawn.text for block in ("Experts", "Checkpointed", "Mapped")))
    _hold(drawn, a_half_file_has_one_type)
