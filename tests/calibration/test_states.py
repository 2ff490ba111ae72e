"""What a quantizer goes by after every verb in every state: a table, asked through its public methods."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from quantizer import Quantizer
from quantizer.errors import CalibrationError
from quantizer.plan.saved_folder import load_state
from tests.helpers import Mlp

SITE = "up.forward.linear_0"
FIRST, MORE, FRESH, REPLACED = 1.0, 1e5, 4e5, 7.0
"""The largest input tells the plans apart, and float16 holds the first one alone."""


class Case:
    """A quantizer and its model; the other methods are the verbs of the table."""

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        self._folder = folder
        self._model = Mlp().eval()
        self._q = Quantizer(preset="plain", backend="openvino", activations={"calibrator": "max"})

    def _run(self, largest: float, *, resume: bool, breaks_off: bool = False) -> None:
        def batches() -> Iterator[Tensor]:
            values = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
            yield values / values.abs().max() * largest
            if breaks_off:
                raise KeyboardInterrupt

        self._q.calibrate(self._model, batches(), resume=resume, progress=False)

    def first(self) -> None:
        self._run(FIRST, resume=False)

    def fresh(self) -> None:
        self._run(FRESH, resume=False)

    def broken(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            self._run(FRESH, resume=False, breaks_off=True)

    def start(self) -> None:
        self._q.calib(self._model)

    def resume(self) -> None:
        self._q.calib(self._model, resume=True)

    def more(self) -> None:
        self._run(MORE, resume=True)

    def stopped(self) -> None:
        with pytest.raises(KeyboardInterrupt):
            self._run(MORE, resume=True, breaks_off=True)

    def renew(self) -> None:
        self._model.up.weight = nn.Parameter(self._model.up.weight.detach().clone())
        self._q.calib(self._model, resume=True)

    def bind(self) -> None:
        self._q.quantize(self._model)

    def replace(self) -> None:
        self._q.load_scales({f"{SITE}.input": torch.tensor(REPLACED / 127)})

    def inherit(self) -> None:
        self._q = self._q.for_backend("onnxruntime")

    def reload(self) -> None:
        self._q.save(self._folder)
        self._q = Quantizer.load(self._folder)

    def bare(self) -> None:
        self._q.save(self._folder)
        plan, products, document, _ = load_state(self._folder)
        self._q = Quantizer(document["config"])
        self._q._session.load(plan, products, document)

    def told(self) -> str:
        """Everything that the source of the plan tells, in a line."""
        source = self._q._session
        flags = [name for name in ("has_plan", "scales_replaced") if getattr(source, name)]
        known = [name for name in ("calibration", "fingerprint") if getattr(source, name) is not None]
        counted = [f"{len(source.products())} products", f"{source.regions().wide.get('', 0):.1g}"]
        snapshot = ["snapshot"] * (source.seen() is not None)
        try:
            plan = f"{self._q.plan[SITE].operands[0].largest_amax:.1g}"
        except CalibrationError as error:
            plan = str(error).partition(":")[0]
        return " ".join([f"{plan};", *flags, *known, *counted, *snapshot])


NOT_YET = "nothing was calibrated yet"
EARLY = "this Quantizer has no plan yet, because it does not know the model"
OUTCOMES = {
    "empty": f"{NOT_YET}; 0 products 0",
    "started": f"{NOT_YET}; calibration 0 products 0 snapshot",
    "first": "1; has_plan calibration fingerprint 2 products 0 snapshot",
    "more": "1e+05; has_plan calibration fingerprint 2 products 1e+05 snapshot",
    "fresh": "4e+05; has_plan calibration fingerprint 2 products 4e+05 snapshot",
    "held": "1; has_plan fingerprint 2 products 0 snapshot",
    "held+": "1e+05; has_plan fingerprint 2 products 1e+05 snapshot",
    "bare": "1; has_plan fingerprint 2 products 0",
    "bare+": "1e+05; has_plan fingerprint 2 products 1e+05",
    "first7": "7; has_plan scales_replaced calibration fingerprint 2 products 0 snapshot",
    "more7": "7; has_plan scales_replaced calibration fingerprint 2 products 1e+05 snapshot",
    "held7": "7; has_plan scales_replaced fingerprint 2 products 0 snapshot",
    "bare7": "7; has_plan scales_replaced fingerprint 2 products 0",
    "waits": f"{EARLY}; fingerprint 0 products 0 snapshot",
}
REFUSALS = {
    "!none": NOT_YET,
    "!early": EARLY,
    "!resume": "calib(resume=True) needs an earlier calib() of this Quantizer",
    "!unseen": "for_backend() needs the statistics of calibration",
    "!scales": "the scales of this Quantizer come from load_scales()",
}
# How each state is reached.
STATES = {
    "empty": "",
    "started": "start",
    "calibrated": "first",
    "replaced": "first replace",
    "loaded": "first reload",
    "loaded_bare": "first bare",
    "loaded_replaced": "first reload replace",
    "resuming": "first reload resume",
    "resuming_7": "first replace reload resume",
    "resumed": "first reload more",
    "inherited": "first reload inherit",
    "inherited_bound": "first inherit",
}
# What each verb makes of it; one that is refused leaves everything as it is.
TABLE = """
                is      start   fresh   broken  resume  more    stopped renew   bind    replace inherit reload  bare
empty           empty   started fresh   fresh   !resume !resume !resume !resume !none   !none   !none   !none   !none
started         started started fresh   fresh   started more    more    started !none   !none   !none   !none   !none
calibrated      first   started fresh   first   first   more    more    first   first   first7  first   held    bare
replaced        first7  started fresh   first7  first   more    more    first   first7  first7  !scales held7   bare7
loaded          held    started fresh   held    first   more    more    first   held    held7   waits   held    bare
loaded_bare     bare    started fresh   bare    !resume !resume !resume !resume bare    bare7   !unseen bare    bare
loaded_replaced held7   started fresh   held7   first7  more    more    first7  held7   held7   !scales held7   bare7
resuming        first   started fresh   first   first   more    more    first   first   first7  first   held    bare
resuming_7      first7  started fresh   first7  first   more    more    first   first7  first7  !scales held7   bare7
resumed         more    started fresh   more    more    more    more    more    more    more7   more    held+   bare+
inherited       waits   started fresh   waits   first   more    more    first   first   !early  !early  !early  !early
inherited_bound first   started fresh   first   first   more    more    first   first   first7  first   held    bare
"""
VERBS, *ROWS = (line.split() for line in TABLE.strip().splitlines())


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_every_verb_in_every_state(row: list[str], tmp_path: Path) -> None:
    state, now, *outcomes = row
    for number, (verb, outcome) in enumerate(zip(VERBS, [now, *outcomes], strict=True)):
        case = Case(tmp_path / str(number))
        for earlier in STATES[state].split():
            getattr(case, earlier)()
        if outcome in REFUSALS:
            with pytest.raises(CalibrationError, match=re.escape(REFUSALS[outcome])):
                getattr(case, verb)()
            outcome = now
        elif verb != "is":
            getattr(case, verb)()
        assert case.told() == OUTCOMES[outcome], (state, verb)


def test_the_table_has_every_state() -> None:
    assert [row[0] for row in ROWS] == list(STATES)
