"""What users get of ``run``, ``convert``, ``quantize_model`` and a sweep stays as it is: see ``README.md``."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from golden_record import machine
from helpers import needs_exact_byte_products
from product_cases import CASES, NIGHTLY
from product_record import differences, produced, recorded

for _package in ("transformers", "torchmetrics", "sklearn", "onnx", "onnxscript", "openvino", "onnxruntime", "jinja2"):
    pytest.importorskip(_package, reason="the cases need enginequant[hf,onnx,openvino,onnxruntime,report]")

_MARKS = {name: [pytest.mark.nightly] if name in NIGHTLY else [] for name in CASES}


@needs_exact_byte_products
@pytest.mark.skipif(torch.cuda.is_available(), reason="recorded without a GPU")
@pytest.mark.usefixtures("translated_once")
@pytest.mark.parametrize("name", [pytest.param(name, marks=_MARKS[name]) for name in CASES])
def test_what_users_get(name: str) -> None:
    where, expected = recorded(name)
    found = differences(expected, produced(CASES[name]), figures=where == machine())
    assert not found, f"{name}: after a change that is meant, make goldens records this anew\n{found}"


def _renamed_key(text: str) -> str:
    return text.replace('"covered_share"', '"share_covered"', 1)


def _dropped_line(text: str) -> str:
    return text.replace("[5/13] export\n", "", 1)


def _missing_file(text: str) -> str:
    return text.replace("out/report.html\n", "", 1)


def _other_exit_code(text: str) -> str:
    return text.replace("exit code 0", "exit code 1", 1)


def _other_figure(text: str) -> str:
    return re.sub(r'(?<="sqnr_db": )\d+\.\d+', lambda found: str(float(found[0]) + 0.3), text, count=1)


def _fewer_nodes(text: str) -> str:
    return text.replace("3 QuantizeLinear", "2 QuantizeLinear", 1)


@pytest.mark.parametrize(
    "change", [_renamed_key, _dropped_line, _missing_file, _other_exit_code, _other_figure, _fewer_nodes]
)
def test_a_change_is_seen(change: Callable[[str], str]) -> None:
    _, text = recorded("run_module")
    changed = change(text)
    assert changed != text
    found = differences(text, changed)
    assert 0 < len(found.splitlines()) < 15
    assert not differences(text, text)


def test_figures_may_differ_a_little() -> None:
    assert not differences('"sqnr_db": 31.42, 1.00x', '"sqnr_db": 31.45, 1.01x')
    assert differences('"sqnr_db": 31.42', '"sqnr_db": 31.62') == (
        '--- recorded\n+++ now\n@@ -1 +1 @@\n-"sqnr_db": 31.42\n+"sqnr_db": 31.62'
    )
    assert not differences('"sqnr_db": 31.42', '"sqnr_db": 11.62', figures=False)
    assert differences("3 layers", "4 layers", figures=False)
