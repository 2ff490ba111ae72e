"""Inputs and outputs of unusual forms: ``*args``, dictionaries and lists of tensors, keys that are no names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx_graphs import plain_session
from torch import Tensor, nn
from torch.utils import _pytree

from quantizer import Quantizer
from quantizer.engines import BuildOptions, build_engine, load_engine
from quantizer.errors import ExportError
from quantizer.utils.structure import leaves

pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")
ort = pytest.importorskip("onnxruntime", reason="running ONNX needs enginequant[onnxruntime]")


# In half a value at a border may be rounded to the next step.
_BOUNDS = {False: {"rtol": 1e-5, "atol": 1e-5}, True: {"rtol": 0.1, "atol": 0.1}}


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(16, 16)


class Several(_Net):
    """Takes any number of tensors."""

    def forward(self, x: Tensor, *others: Tensor, flag: bool = True) -> Tensor:
        """Add them."""
        return self.linear(x) + sum(others)


class All(_Net):
    """Takes nothing by name."""

    def forward(self, *xs: Tensor) -> Tensor:
        """Add them."""
        return self.linear(xs[0]) + xs[1]


class Rest(_Net):
    """Takes further arguments that no caller passes, as models of ultralytics do."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Compute the layer."""
        return self.linear(x)

    def _apply(self, fn: Callable[[Tensor], Tensor]) -> Rest:  # type: ignore[override]
        super()._apply(fn)
        return self


class Nested(_Net):
    """Takes a dictionary with a list in it."""

    def forward(self, x: dict[str, Any]) -> Tensor:
        """Add them."""
        return self.linear(x["a"]) + x["b"][0]


class Last(_Net):
    """Takes a dictionary in the last place."""

    def forward(self, y: Tensor, x: dict[str, Tensor]) -> Tensor:
        """Add them."""
        return self.linear(x["a"]) + y


class Keyed(_Net):
    """Gives a dictionary."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__()
        self.keys = first, second

    def forward(self, x: Tensor) -> dict[Any, Tensor]:
        """Compute both."""
        return {self.keys[0]: self.linear(x), self.keys[1]: x * 2}


def a(rows: int = 6) -> Tensor:
    return torch.randn(rows, 16)


def _agrees(model: nn.Module, example: tuple[Any, ...], others: tuple[Any, ...], folder: Path, backend: str) -> Any:
    """Export at one batch and compare at two; the session."""
    quantizer, path = Quantizer(preset="plain", backend=backend), folder / "model.onnx"
    quantizer.calibrate(model.eval(), [example], progress=False)
    proxy = quantizer.quantize(model)
    quantizer.export(proxy, path, example)
    session = plain_session(path)
    half = backend == "tensorrt"
    for inputs in (example, others):
        leaves = [leaf.half() if half else leaf for leaf in _pytree.tree_leaves(inputs)]
        fed = {node.name: leaf.numpy() for node, leaf in zip(session.get_inputs(), leaves, strict=True)}
        with torch.no_grad():
            expected = _pytree.tree_leaves(proxy(*inputs))
        for found, right in zip(session.run(None, fed), expected, strict=True):
            np.testing.assert_allclose(found, right.numpy(), **_BOUNDS[half])
    return session


@pytest.mark.parametrize("backend", ["openvino", "tensorrt"])
@pytest.mark.parametrize(
    ("make", "inputs", "names"),
    [
        (Several, lambda rows: (a(rows), a(rows), a(rows)), ["x", "others_0", "others_1"]),
        (All, lambda rows: (a(rows), a(rows)), ["xs_0", "xs_1"]),
        (Nested, lambda rows: ({"a": a(rows), "b": [a(rows)]},), None),
        (Last, lambda rows: (a(rows), {"a": a(rows)}), None),
    ],
    ids=["args", "args alone", "nested", "a dictionary last"],
)
def test_inputs(make: Any, inputs: Callable[[int], Any], names: list[str] | None, backend: str, tmp_path: Path) -> None:
    session = _agrees(make(), inputs(6), inputs(3), tmp_path, backend)
    if names is not None:
        assert [node.name for node in session.get_inputs()] == names
    assert {node.shape[0] for node in session.get_inputs()} == {"batch"}


def test_an_input_by_name_before_args(tmp_path: Path) -> None:
    model, path = Rest().eval(), tmp_path / "model.onnx"
    quantizer = Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, [{"x": a()}], progress=False)
    proxy = quantizer.quantize(model)
    quantizer.export(proxy, path, {"x": a()})
    session, other = plain_session(path), a(3)
    with torch.no_grad():
        expected = proxy(x=other)
    np.testing.assert_allclose(session.run(None, {"x": other.numpy()})[0], expected.numpy(), **_BOUNDS[False])


@pytest.mark.parametrize("keys", [(0, 1), ((1, "a"), "y"), ("z", "y")])
def test_outputs_are_named_by_their_keys(keys: Any, tmp_path: Path) -> None:
    session = _agrees(Keyed(*keys), (a(),), (a(3),), tmp_path, "openvino")
    assert [node.name for node in session.get_outputs()] == [str(key) for key in keys]


@dataclass
class Pair:
    """A result beside the input."""

    result: Any
    given: Any


class Returned(_Net):
    """Returns its input, and a result twice, in a form that is given."""

    def __init__(self, form: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        """Compute one of them."""
        return self.form(x, self.linear(x).relu())


_FORMS: dict[str, tuple[Callable[[Tensor, Tensor], Any], list[str]]] = {
    "a tuple": (lambda x, y: (y, x), ["relu", "x_output"]),
    "first, and each twice": (lambda x, y: (x, y, y, x), ["x_output", "relu", "relu_alias_2", "x_alias_3"]),
    "a dictionary": (lambda x, y: {"a": y, "given": x, "b": y, "more": x}, ["a", "given", "b", "more"]),
    "a dataclass": (lambda x, y: Pair(y, x), ["result", "given"]),
}


@pytest.mark.parametrize(("form", "outputs"), _FORMS.values(), ids=_FORMS)
def test_an_input_that_is_returned_keeps_its_name(form: Any, outputs: list[str], tmp_path: Path) -> None:
    quantizer, model, path = Quantizer(preset="plain", backend="openvino"), Returned(form).eval(), tmp_path / "m.onnx"
    quantizer.calibrate(model, [a()], progress=False)
    quantizer.export(quantizer.quantize(model), path, a())
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [node.name for node in session.get_inputs()] == ["x"]
    assert [node.name for node in session.get_outputs()] == outputs
    x = a(3)
    for backend in ("openvino", "onnxruntime", "torch"):
        built = build_engine(backend, path, tmp_path / backend, BuildOptions(compiled=False))
        engine = load_engine(backend, built.path)
        assert engine.output_names == tuple(outputs)
        given, is_input = engine({"x": x.numpy()}), leaves(form(True, False))
        for name, is_it in zip(outputs, is_input, strict=True):
            assert np.array_equal(given[name], x.numpy()) == is_it, (backend, name)


@pytest.mark.parametrize(
    ("keys", "what"), [(("x", "y"), "has the name of an input"), ((1, "1"), "has the name of another out")]
)
def test_names_that_a_graph_cannot_tell_apart(keys: Any, what: str, tmp_path: Path) -> None:
    model, quantizer = Keyed(*keys).eval(), Quantizer(preset="plain", backend="openvino")
    quantizer.calibrate(model, [a()], progress=False)
    with pytest.raises(ExportError, match=rf"output .* of the model {what}.*: rename the key"):
        quantizer.export(quantizer.quantize(model), tmp_path / "model.onnx", a())
    assert not list(tmp_path.iterdir())
