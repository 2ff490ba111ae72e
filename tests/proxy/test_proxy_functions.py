"""Every kind of function: nets written in one way each, and source that cannot be rewritten."""

from __future__ import annotations

import copy
import functools
import importlib.util
import linecache
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import net_helpers
import nets
import pytest
import torch
from helpers import Snapshot
from helpers import assert_same
from nets import NETS
from torch import Tensor
from torch import nn

from quantizer import Quantizer
from quantizer.errors import ProxyError

X = torch.randn(20, 32, generator=torch.Generator().manual_seed(0))
IDS = [name for name, *_ in NETS]

# Names of the products that are quantized, by net.
SITES = {
    "closures": "linear.forward.linear_0 mix.matmul_0 mix.matmul_1",
    "super": "SuperBase.forward.matmul_0 SuperBase.gram.matmul_0 forward.matmul_0 gram.matmul_0 gram.matmul_1 linear.forward.linear_0",
    "properties": "linear.forward.linear_0 mix.matmul_0",
    "expressions": "linear.forward.linear_0 mix.matmul_0 mix.matmul_2",
    "products": "linear.forward.linear_0 mix.matmul_0 mix.matmul_1 mix.matmul_2 mix.matmul_3 mix.matmul_4",
    "comprehensions": "linear.forward.linear_0 mix.matmul_0 mix.matmul_1 mix.matmul_2",
    "lambdas": "linear.forward.linear_0 mix.matmul_0 mix.matmul_1 scores.matmul_0",
    "partials": "linear.forward.linear_0 mix.matmul_0 mix.matmul_1 product.matmul_0 product.matmul_1 product.matmul_2 scores.matmul_0",
    "left-alone": "linear.forward.linear_0 mix.matmul_1",
    "imported": "attend.matmul_0 linear.forward.linear_0 scores.matmul_0",
    "recursion": "linear.forward.linear_0 odd.matmul_0 odd.matmul_1 power.matmul_0 power.matmul_1",
    "signatures": "keywords.matmul_0 keywords.matmul_1 linear.forward.linear_0 nothing.matmul_0 nothing.matmul_1 positional.matmul_0 positional.matmul_1 starred.matmul_0 starred.matmul_1",
    "statics": "linear.forward.linear_0 outside.matmul_0 outside.matmul_1 static.matmul_0 static.matmul_1 through.matmul_0 through.matmul_1",
    "template-static": "linear.forward.linear_0 mix.matmul_0 step.matmul_0 step.matmul_1",
    "template-method": "TemplateStatic.step.matmul_0 TemplateStatic.step.matmul_1 linear.forward.linear_0 mix.matmul_0 step.matmul_0",
    "decorated": "decorated.matmul_0 decorated.matmul_1 ignored.matmul_0 last.matmul_0 last.matmul_1 linear.forward.linear_0 mix.matmul_0 mix.matmul_1",
    "checkpointed": "attend.matmul_0 block.matmul_0 linear.forward.linear_0 scores.matmul_0",
    "tied": "first.forward.linear_0 forward.matmul_0 second.forward.linear_0",
    "hooked": "linear.forward.linear_0 mix.matmul_0 mix.matmul_1 mix.matmul_2 mix.matmul_3 mix.matmul_4",
    "lora": "base_layer.forward.linear_0 lora_A.default.forward.linear_0 lora_B.default.forward.linear_0",
    "children": "first.forward.linear_0 forward.matmul_0 forward.matmul_1 second.forward.linear_0",
    "registry": "_module_first.matmul_0 _module_first.matmul_1 linear.forward.linear_0 mix.matmul_0 mix.matmul_1 scores.matmul_0",
    "passed-on": "linear.forward.linear_0 mix.matmul_0",
    "namesakes": "Namesakes.scores.matmul_0 Namesakes.scores.matmul_1 linear.forward.linear_0 mix.matmul_0 net_helpers.scores.matmul_0 nets.scores.matmul_0",
    "generators": "linear.forward.linear_0 mix.matmul_0 mix.matmul_1 mix.matmul_2 mix.matmul_3 mix.matmul_4 rows.matmul_0",
}
_VALUE = "the function is passed on as a value here and not called, so no module can be lent to it"
# Products that stay float, with the reason.
SKIPPED = {
    "properties": {"square.matmul_0": "an operand is computed from parameters at each call"},
    "expressions": {"mix.matmul_1": "never ran in calibration"},
    "left-alone": {"mix.matmul_0": "inside an f-string: positions are not reliable there"},
    "registry": {"power.matmul_0": _VALUE, "power.matmul_1": _VALUE},
    "passed-on": dict.fromkeys(("power.matmul_0", "power.matmul_1", "attend.matmul_0", "scores.matmul_0"), _VALUE),
}


def _make(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().eval()


def _quantizer() -> Quantizer:
    return Quantizer(backend="openvino", sites={"residual_add": False})


def _check(model: nn.Module, *expected: str, inputs: tuple[Tensor, ...] = (X,)) -> Quantizer:
    """A proxy is exact, ``expected`` are quantized, and that makes a difference."""
    before = Snapshot.of(model.eval())
    q = _quantizer()
    with torch.no_grad():
        output = model(*inputs)
        assert_same(q.proxy(model)(*inputs), output)
        calib = q.calib(model)
        assert_same(calib(*inputs), output)
        frozen = q.quantize(model)(*inputs)
    assert frozen.isfinite().all()
    assert {row.name for row in q.coverage.quantized} == set(expected)
    assert torch.equal(frozen, output) == (not expected)
    before.assert_unchanged(model)
    return q


@pytest.mark.parametrize(("name", "make", "inputs"), NETS, ids=IDS)
def test_nets(name: str, make: Callable[[], nn.Module], inputs: tuple[Tensor, ...]) -> None:
    functions = {module: dict(vars(module)) for module in (nets, net_helpers)}
    q = _check(_make(make), *SITES[name].split(), inputs=inputs)
    rows = [row for row in q.coverage if not row.quantized and row.kind != "residual_add"]
    assert {row.name: row.reason for row in rows} == SKIPPED.get(name, {})
    for module, before in functions.items():
        assert {key: value for key, value in vars(module).items() if key in before} == before


@pytest.mark.parametrize(("name", "make", "inputs"), NETS, ids=IDS)
def test_gradients_in_train_mode(name: str, make: Callable[[], nn.Module], inputs: tuple[Tensor, ...]) -> None:
    model = _make(make).train()
    proxy = Quantizer().proxy(model)
    results = []
    for net in (model, proxy):
        net.zero_grad()
        torch.manual_seed(7)
        net(*inputs).square().sum().backward()
        results.append({key: None if p.grad is None else p.grad.clone() for key, p in net.named_parameters()})
    assert any(gradient is not None for gradient in results[0].values())
    assert_same(results[0], results[1])


@pytest.mark.parametrize("name", ["imported", "statics", "template-method", "registry", "partials", "super"])
def test_copies_and_compiled_proxies_lend_as_well(name: str) -> None:
    (_, make, inputs) = NETS[IDS.index(name)]
    model = _make(make)
    q = _quantizer()
    with torch.no_grad():
        q.calibrate(model, [inputs[0]])
        frozen = q.quantize(model)
        expected = frozen(*inputs)
        assert not torch.equal(expected, model(*inputs))
        assert_same(copy.deepcopy(frozen)(*inputs), expected)
        assert_same(pickle.loads(pickle.dumps(frozen))(*inputs), expected)
        assert_same(torch.compile(frozen, fullgraph=True, backend="eager")(*inputs), expected)
        for strict in (False, True):
            assert_same(torch.export.export(frozen, inputs, strict=strict).module()(*inputs), expected)
        assert_same(torch.jit.trace(frozen, inputs)(*inputs), expected)
