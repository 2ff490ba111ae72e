"""A proxy with its quantizers off, or observing, is the model it was made from, to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import ARCHITECTURES, EAGER_ONLY, VISION, Snapshot, assert_same, batch, cast, tiny
from torch import nn

from quantizer import Quantizer
from quantizer.plan.reasons import ReasonCode

pytest.importorskip("transformers", reason="these tests make transformers models: install enginequant[hf]")

MATRIX = [
    pytest.param(architecture, attention, id=f"{architecture}-{attention}")
    for architecture in ARCHITECTURES
    for attention in ("eager", "sdpa")
    if not (attention == "sdpa" and architecture in EAGER_ONLY)
]
DTYPES = [pytest.param(torch.float32, id="f32"), pytest.param(torch.bfloat16, id="bf16")]
CASES = [
    pytest.param(*case.values, padded, id=f"{case.id}-{'padded' if padded else 'full'}")
    for case in MATRIX
    for padded in (False, True)
    if not (padded and case.values[0] in VISION)
]


def _wanted(architecture: str, attention: str) -> dict[str, Any]:
    return {"output_hidden_states": True, "output_attentions": attention == "eager"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("architecture", "attention", "padded"), CASES)
def test_observing_proxy_is_the_eager_model(
    architecture: str, attention: str, dtype: torch.dtype, padded: bool
) -> None:
    model = tiny(architecture, attention).to(dtype)
    eager = tiny(architecture, "eager").to(dtype)
    inputs = cast(batch(architecture, padded=padded), dtype)
    wanted = _wanted(architecture, "eager")
    before = Snapshot.of(model)
    with torch.no_grad():
        calib = Quantizer(preset="plain").calib(model)
        assert_same(calib(**inputs), eager(**inputs))
        result = calib(**inputs, **wanted)
        assert_same(result, eager(**inputs, **wanted))
    assert len(result.hidden_states) == 3
    assert len(result.attentions) == 2
    before.assert_unchanged(model)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_matrix_is_covered(architecture: str) -> None:
    """Both attention products and every linear that a forward pass runs are sites that ran."""
    model = tiny(architecture, "eager" if architecture in EAGER_ONLY else "sdpa")
    q = Quantizer(preset="plain", backend="openvino", sites={"residual_add": False})
    with torch.no_grad():
        q.calib(model)(**batch(architecture, padded=True))
    rows = [row for row in q.coverage if row.kind not in ("residual_add", "embedding")]
    idle = (ReasonCode.NEVER_RAN, ReasonCode.OTHER_BRANCH)
    ran = [row for row in rows if ReasonCode.of(row.reason) not in idle]
    assert all(row.quantized for row in ran), [row for row in ran if not row.quantized]
    assert sum(row.kind == "matmul" for row in ran) == 2 * 2
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert {row.name.rpartition(".forward")[0] for row in rows if row.kind == "linear"} == set(linears)
    assert {name.rpartition(".forward")[0] for name in [row.name for row in ran if row.kind == "linear"]} >= {
        name for name in linears if "pooler" not in name
    }
