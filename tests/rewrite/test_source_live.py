"""Globals of rewritten functions: read where the original has them, and written there."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import imported
from source_tools import source_file
from torch import nn

from quantizer import Quantizer

TEXT = """
import torch
from torch import nn
from torch.nn.functional import linear

SCALE = 1.0
COUNT = 0
TABLE = {"scale": 1.0}


def plain(x):
    return x


def scaled(x):
    return x * SCALE


def twice(x):
    return torch.matmul(x, x) + plain(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        global COUNT, LAST
        COUNT += 1
        LAST = COUNT
        x = scaled(linear(x, self.linear.weight)) * SCALE * TABLE["scale"]
        return plain(twice(x))
"""
X = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
MODES = ["off", "calib", "qat", "frozen"]


@pytest.fixture
def module(tmp_path: Path) -> Iterator[types.ModuleType]:
    torch.manual_seed(0)
    yield imported(tmp_path, "sample_live", TEXT)
    sys.modules.pop("sample_live", None)


@pytest.fixture
def proxies(module: Any) -> dict[str, nn.Module]:
    model = module.Net().eval()
    q = Quantizer(preset="plain", backend="openvino")
    q.calibrate(model, [X], progress=False)
    return {
        "model": model,
        "off": q.proxy(model),
        "frozen": q.quantize(model),
        "qat": Quantizer.qat(q, model),
        "calib": Quantizer(preset="plain", backend="openvino").calib(model),
    }


def agree(proxies: dict[str, nn.Module], mode: str) -> bool:
    with torch.no_grad():
        found, expected = proxies[mode](X), proxies["model"](X)
    if mode in ("off", "calib"):
        return torch.equal(found, expected)
    # Other values than calibration saw are cut off, so only their size is asked.
    return bool((found - expected).norm() < 0.2 * expected.norm() + 1e-6)


def _set(name: str, value: Any) -> Callable[[Any], None]:
    return lambda module: setattr(module, name, value)


CHANGES = {
    "a number": _set("SCALE", 0.5),
    "a function": _set("plain", lambda x: x * 0),
    "a function with products": _set("twice", lambda x: x + 1),
    "an operation": _set("linear", lambda x, weight: torch.nn.functional.linear(x, weight) * 0.5),
    "a table": lambda module: module.TABLE.update(scale=0.5),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_global_that_is_bound_anew_is_seen(
    change: str, mode: str, module: types.ModuleType, proxies: dict[str, nn.Module]
) -> None:
    before = proxies["model"](X)
    assert agree(proxies, mode)
    CHANGES[change](module)
    assert not torch.allclose(proxies["model"](X), before, rtol=0.2)
    assert agree(proxies, mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_global_that_is_written_is_written_in_its_module(
    mode: str, module: Any, proxies: dict[str, nn.Module]
) -> None:
    module.COUNT = 10
    proxies[mode](X)
    proxies[mode](X)
    assert (module.COUNT, module.LAST) == (12, 12)
    proxies["model"](X)
    assert (module.COUNT, module.LAST) == (13, 13)


@pytest.mark.parametrize("mode", MODES)
def test_a_global_that_is_deleted_is_gone(mode: str, module: Any, proxies: dict[str, nn.Module]) -> None:
    del module.SCALE
    with pytest.raises((AttributeError, NameError), match="SCALE"):
        proxies[mode](X)
    module.SCALE = 1.0
    assert agree(proxies, mode)


@pytest.mark.parametrize("mode", ["off", "frozen"])
def test_compiled_proxies_see_it_too(mode: str, module: Any, proxies: dict[str, nn.Module]) -> None:
    compiled = torch.compile(proxies[mode], backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(X)
        module.COUNT, module.SCALE = 10, 0.5
        assert torch.equal(compiled(X), proxies[mode](X))
    assert module.COUNT == 12


def test_a_frozen_proxy_is_exported_and_traced(module: Any, proxies: dict[str, nn.Module]) -> None:
    with torch.no_grad():
        expected = proxies["frozen"](X)
        exported = torch.export.export(proxies["frozen"], (X,)).module()
        assert torch.equal(exported(X), expected)
        with pytest.warns(DeprecationWarning, match="torch.jit"):
            traced = torch.jit.trace(proxies["frozen"], (X,))
        assert torch.equal(traced(X), expected)


def test_a_file_that_is_no_module_keeps_its_globals(module: Any, proxies: dict[str, nn.Module]) -> None:
    """One that was loaded by hand, and is in no table of modules."""
    del sys.modules["sample_live"]
    other = types.ModuleType("sample_live")
    exec(compile(TEXT, module.__file__, "exec"), vars(other))
    model = other.Net().eval()
    proxy = Quantizer(preset="plain").proxy(model)
    other.SCALE = 0.5
    assert torch.equal(proxy(X), model(X))
    assert (other.COUNT, other.LAST) == (2, 2)
    del other.SCALE
    with pytest.raises((AttributeError, NameError), match="'SCALE' is not defined"):
        proxy(X)


def rewritten(tmp_path: Path, text: str) -> str:
    return source_file(tmp_path, text, {"SCALE": 1.0, "plain": CHANGES["a table"], "Block": nn.Linear}).rewritten_text()


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a * SCALE", "return self.site_forward_mul_0(a, _quantizer_live.SCALE)"),
        ("return plain(a)", "return _quantizer_now(_quantizer_live.plain)(a)"),
        ("return later(a)", "return _quantizer_live.later(a)"),
        ("return Block(torch.zeros(len(a)))", "return Block(torch.zeros(len(a)))"),
        ("SCALE = a\n    return SCALE", "return SCALE"),
        ("return [SCALE for SCALE in a]", "return [SCALE for SCALE in a]"),
        ("return f'{SCALE}'", "return f'{SCALE}'"),
        ("global SCALE\n    SCALE += 1\n    del SCALE", "_quantizer_live.SCALE += 1\n    del _quantizer_live.SCALE"),
        ("global plain, Block\n    plain = Block = a", "_quantizer_live.plain = _quantizer_live.Block = a"),
        ("global n\n    for n in a:\n        pass", "for _quantizer_live.n in a:"),
        ("global total\n    total += a", "_quantizer_live.total += a"),
    ],
)
def test_the_text(tmp_path: Path, body: str, expected: str) -> None:
    result = rewritten(tmp_path, f"def forward(self, a, b):\n    {body}\n")
    assert expected in result
    compile(result, "result", "exec")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("global n\n    if (n := a): pass\n    return a @ b", "binds the global n without an assignment"),
        ("global math\n    import math\n    return a @ b", "binds the global math without an assignment"),
        ("def inner():\n        global n\n        n = 1\n    return a @ b", "an inner function declares a global"),
    ],
)
def test_globals_that_cannot_be_written_in_place_are_said(tmp_path: Path, body: str, reason: str) -> None:
    file = source_file(tmp_path, f"def forward(self, a, b):\n    {body}\n")
    ((function,),) = (file.functions.values(),)
    assert reason in str(function.sites[0].reason)
    assert not function.changed


def test_variables_of_a_function_around_a_class_are_no_globals(tmp_path: Path) -> None:
    body = "def forward(self, a, b):\n            return (a @ b) * SCALE\n    return Inner\n"
    text = f"def make(SCALE):\n    class Inner(Module):\n        {body}"
    assert "_quantizer_live" not in rewritten(tmp_path, text)
