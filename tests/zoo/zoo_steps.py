"""What every architecture of the zoo goes through: off, calibrated, quantized, saved, loaded, quantized again."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ALL_THE_WAY, Architecture, TorchArchitecture
from helpers import Snapshot
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from quantizer import Quantizer
from quantizer.plan.coverage import Coverage
from quantizer.plan.reasons import ReasonCode

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

_TORN = frozenset({"paligemma"})
"""Architectures whose own attention gives other values by separate products, see docs/zoo.md."""


def tensors(output: Any, place: str = "output") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a model's output by their place, those of caches and other objects included."""
    if isinstance(output, Tensor):
        yield place, output
    elif isinstance(output, dict):
        for name, value in output.items():
            yield from tensors(value, f"{place}.{name}")
    elif isinstance(output, list | tuple):
        for number, value in enumerate(output):
            yield from tensors(value, f"{place}[{number}]")
    elif hasattr(output, "__dict__") and not isinstance(output, type):
        yield from tensors(vars(output), place)


def run(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """One pass without gradients and with the same random numbers each time, for those who draw some in eval mode."""
    torch.manual_seed(2)
    with torch.no_grad():
        return dict(tensors(model(**batch)))


def unequal(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    """Places where two outputs differ, be it in one bit."""
    if list(first) != list(second):
        return [f"other tensors: {sorted(set(first) ^ set(second))}"]
    return [
        name
        for name, value in first.items()
        if value.dtype != second[name].dtype or not torch.equal(value, second[name])
    ]


def unequal_observed(observed: dict[str, Tensor], eager: dict[str, Tensor], model: nn.Module) -> list[str]:
    """Places where an observing proxy differs from ``run_eager``, in one bit; with recurrent layers by more than 1e-6.

    Recurrent layers run step by step in Python there, and add in another order than torch's kernel.
    """
    if not any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules()):
        return unequal(observed, eager)
    return [
        name
        for name in unequal(observed, eager)
        if name not in eager or not torch.allclose(observed[name].float(), eager[name].float(), rtol=1e-4, atol=1e-6)
    ]


def run_eager(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """One pass of a copy that computes its attention as an observing proxy does: in Python, product by product."""
    copied = copy.deepcopy(model)
    for module in copied.modules():
        # set_attn_implementation leaves a backbone of another architecture as it is.
        if hasattr(config := getattr(module, "config", None), "_attn_implementation"):
            config._attn_implementation = "eager"
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        return run(copied, batch)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


@contextmanager
def layers_that_run(model: nn.Module) -> Iterator[set[str]]:
    """Paths of the linears and convolutions of ``model`` that are called meanwhile."""
    paths = {id(module): path for path, module in model.named_modules() if isinstance(module, LAYERS)}
    ran: set[str] = set()

    def note(module: nn.Module, args: Any, result: Any) -> None:
        if id(module) in paths:
            ran.add(paths[id(module)])

    handle = register_module_forward_hook(note)
    yield ran
    handle.remove()


def hosts_that_ran(coverage: Coverage) -> set[str]:
    """Paths of the modules with a product that coverage has seen."""
    rows = [row for row in coverage if row.kind != "residual_add"]
    rows = [row for row in rows if ReasonCode.of(row.reason) is not ReasonCode.NEVER_RAN]
    return {re.sub(r"\.\w+\.\w+$", "", row.name) for row in rows}


def each_pattern(architectures: Iterable[Architecture]) -> list[Any]:
    """Parameters of a test that goes all the way: those that repeat a pattern are left to the night."""
    return [
        pytest.param(one, id=one.name, marks=[] if one.name in ALL_THE_WAY else pytest.mark.nightly)
        for one in architectures
    ]


def repeated_patterns(architectures: Iterable[Architecture]) -> list[Architecture]:
    """Each twelfth one of those that go all the way at night alone, where each begins with a proxy that is off."""
    return [one for one in architectures if one.name not in ALL_THE_WAY][::12]


def off_is_identical(architecture: Architecture) -> None:
    """A proxy that is off gives the model's outputs, and the model is the same before and after."""
    model = architecture.build()
    batch = architecture.batch(0)
    expected = run(model, batch)
    before = Snapshot.of(model)
    assert unequal(run(Quantizer(preset="plain").proxy(model), batch), expected) == []
    assert unequal(run(model, batch), expected) == []
    before.assert_unchanged(model)


def all_the_way(architecture: Architecture | TorchArchitecture, folder: Path) -> Coverage:
    """Off, calibrated, quantized, saved, loaded, quantized again; the model is the same before and after."""
    model = architecture.build()
    batches = [architecture.batch(seed) for seed in (0, 1)]
    with layers_that_run(model) as ran:
        expected = run(model, batches[0])
    before = Snapshot.of(model)  # now: transformers adds hooks of its own when it first runs

    assert unequal(run(Quantizer(preset="plain").proxy(model), batches[0]), expected) == []

    q = Quantizer(preset="plain", backend="openvino")
    calib = q.calib(model)
    assert unequal_observed(run(calib, batches[0]), run_eager(model, batches[0]), model) == []
    run(calib, batches[1])
    told = pytest.warns(UserWarning, match="gives other outputs than") if architecture.name in _TORN else nullcontext()
    with told:
        quantized = run(q.quantize(model), batches[0])
    assert [name for name, value in quantized.items() if not value.isfinite().all()] == []
    assert unequal(quantized, expected) != []

    assert sorted(ran - hosts_that_ran(q.coverage)) == []
    assert any(row.quantized for row in q.coverage)

    q.save(folder / "quantizer")
    again = Quantizer.load(folder / "quantizer").quantize(model)
    assert unequal(run(again, batches[0]), quantized) == []

    assert unequal(run(model, batches[0]), expected) == []
    before.assert_unchanged(model)
    return q.coverage
