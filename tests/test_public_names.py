"""The public surface: what is listed is what is visible, and all of it is documented."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types

import pytest

import quantizer
from quantizer import errors

MODULES = sorted(
    module.name
    for module in pkgutil.walk_packages(quantizer.__path__, "quantizer.")
    if module.name != "quantizer.__main__"
)
# Only those who have transformers import it.
PLUGIN = "quantizer.integrations.transformers.plugin"


def _visible(module: types.ModuleType) -> set[str]:
    """Names without an underscore that are no submodule and come from nowhere else by accident."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType) and name != "annotations"
    }


def test_all_lists_what_is_visible() -> None:
    for name in quantizer.__all__:
        getattr(quantizer, name)
    for_the_import = {"Any", "TYPE_CHECKING", "import_module", "require_supported"}
    assert (_visible(quantizer) | {"functional"}) - for_the_import == set(quantizer.__all__), (
        "list a new name in __all__, or give it an underscore"
    )


def test_the_public_names() -> None:
    assert quantizer.__all__ == [
        "QATCalibrate",
        "QuantizedModel",
        "Quantizer",
        "QuantizerConfig",
        "QuantizerError",
        "compare_runs",
        "from_onnx",
        "functional",
        "load",
        "load_converted",
        "load_pipeline",
        "measure_latency_costs",
        "push_to_hub",
        "quantize_model",
        "write_compressed_tensors",
    ]


@pytest.mark.parametrize("name", quantizer.__all__)
def test_public_names_are_documented(name: str) -> None:
    value = getattr(quantizer, name)
    assert inspect.getdoc(value)
    for member in value.__all__ if inspect.ismodule(value) else vars(value):
        attribute = vars(value)[member]
        if not member.startswith("_") and (callable(attribute) or isinstance(attribute, property | classmethod)):
            assert inspect.getdoc(attribute), f"{name}.{member} has no docstring"


@pytest.mark.parametrize("name", MODULES)
def test_every_module_and_its_names_are_documented(name: str) -> None:
    if name == PLUGIN:
        pytest.importorskip("transformers", reason="a plug-in for transformers: install enginequant[hf]")
    module = importlib.import_module(name)
    assert module.__doc__, "a module starts with a docstring"
    listed = getattr(module, "__all__", [])
    assert len(set(listed)) == len(listed)
    own = {n for n in _visible(module) if getattr(vars(module)[n], "__module__", None) == name}
    for entry in {*listed, *own}:
        value = getattr(module, entry)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{name}.{entry} has no docstring"


def test_every_error_is_one_of_ours() -> None:
    classes = [name for name in errors.__all__ if inspect.isclass(getattr(errors, name))]
    assert len(classes) > 9
    for name in classes:
        assert issubclass(getattr(errors, name), errors.QuantizerError | Warning)
    tree = errors.__doc__ or ""
    assert all(name in tree for name in classes), "the module's docstring draws the tree of errors"
