"""``CallForm``: the arguments and the output of a model, so that an engine is called as the model is, also when loaded.

The file holds names and plain values alone. An output of transformers, a dataclass or a class of
attrs becomes a mapping, a named tuple a tuple.

An engine that is called as the module that it was built of, and returns what that returns.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.engines import Engine
from quantizer.errors import EngineError, QuantizerError
from quantizer.pipeline.context import engine_inputs
from quantizer.pipeline.module_feed import by_name
from quantizer.report.record import write_text_atomic
from quantizer.utils.paths import regular_file
from quantizer.utils.plain_values import json_values
from quantizer.utils.structure import fields_of, flattened

CALL = "call.json"
"""The name of the file in the folder of a run."""

_FORMAT = 1
_KINDS = {kind.name: kind for kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)} | {
    inspect.Parameter.VAR_KEYWORD.name: inspect.Parameter.VAR_KEYWORD
}
"""The kinds of arguments that an engine has inputs for: those with names."""


@dataclass(frozen=True)
class CallForm:
    """The arguments of a model and its output.

    Attributes:
        model: the name of its class.
        signature: that of its ``forward``.
        output: what it returned for some batch; tensors stand for the outputs of an engine, in their order.
    """

    model: str
    signature: inspect.Signature
    output: Any

    @classmethod
    def of(cls, model: nn.Module, output: Any) -> CallForm:
        """Return the form of a model that returned ``output``; no reference to the model is kept."""
        return cls(type(model).__name__, inspect.signature(model.forward), output)

    @classmethod
    def by_names(cls, model: str, inputs: Sequence[str], outputs: Sequence[str]) -> CallForm:
        """Return the form of an engine by itself: its inputs in order, and a mapping of its outputs."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in inputs])
        return cls(model, signature, {name: torch.empty(0) for name in outputs})

    def write(self, folder: Path) -> None:
        """Write the file into a folder; none for an output with a part that is no plain value."""
        try:
            output = _described(self.output)
        except TypeError:
            return
        arguments = [
            {"name": one.name, "kind": one.kind.name, "optional": one.default is not one.empty}
            for one in self.signature.parameters.values()
        ]
        told = {"format": _FORMAT, "model": self.model, "arguments": arguments, "output": output}
        write_text_atomic(folder / CALL, json.dumps(told, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> CallForm | None:
        """Return what ``write`` wrote; None: there is no file."""
        path = folder / CALL
        if not path.exists():
            return None
        try:
            told = json_values(regular_file(path).read_bytes())
            if told["format"] != _FORMAT:
                raise ValueError(f"its format is {told['format']!r}, expected {_FORMAT}")
            return cls(str(told["model"]), _signature(told["arguments"]), _example(told["output"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise QuantizerError(
                f"{path} is damaged ({type(error).__name__}: {error}); expected what a run wrote there: save it again, "
                "or remove the file, and the engine is called by the names of its inputs"
            ) from error


def _signature(arguments: Any) -> inspect.Signature:
    parameters = [
        inspect.Parameter(
            one["name"], _KINDS[one["kind"]], default=None if one["optional"] is True else inspect.Parameter.empty
        )
        for one in arguments
    ]
    return inspect.Signature(parameters)


def _described(value: Any) -> Any:
    """Return an output as plain values."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [_described(part) for part in value]}
    fields = fields_of(value)
    if fields is not None:
        return {"mapping": {key: _described(part) for key, part in fields.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"a {type(value).__name__} is no plain value")


def _example(described: Any) -> Any:
    """Return an output of this description, with empty tensors."""
    if described == "tensor":
        return torch.empty(0)
    ((kind, inside),) = described.items()
    if kind == "mapping":
        return {key: _example(part) for key, part in inside.items()}
    if kind in ("tuple", "list"):
        parts = [_example(part) for part in inside]
        return tuple(parts) if kind == "tuple" else parts
    if kind != "value" or isinstance(inside, dict | list):
        raise ValueError(f"{kind!r} is no part of an output")
    return inside


class EngineModule(nn.Module):
    """A module that runs an engine: the arguments of the float model go in, and its kind of output comes out.

    It has no parameters; their place is in the engine.
    """

    def __init__(self, engine: Engine, call: CallForm) -> None:
        super().__init__()
        self.engine = engine
        self._call_form = call
        # The exporter writes the tensors of an output in this order.
        found, self._rebuilt = flattened(call.output)
        tensors = [leaf for leaf in found if isinstance(leaf, Tensor)]
        if len(tensors) != len(engine.output_names):
            raise EngineError(
                f"{call.model} returns a {type(call.output).__name__} with {len(tensors)} tensors, and the engine has "
                f"{len(engine.output_names)} outputs; expected tensors, alone or in a structure"
            )
        self._leaves = [None if isinstance(leaf, Tensor) else _Kept(leaf) for leaf in found]
        self.eval()

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Run the engine on the arguments of the float model."""
        batch = by_name("the input", self._call_form.model, self._call_form.signature, args, keywords, EngineError)
        given = self.engine(engine_inputs(self.engine, batch))
        values = iter([torch.as_tensor(given[name]) for name in self.engine.output_names])
        return self._rebuilt([next(values) if leaf is None else leaf.value for leaf in self._leaves])

    def extra_repr(self) -> str:
        """Return what the engine is."""
        return f"{self.engine.name}: {', '.join(map(str, self.engine.inputs))} -> {', '.join(self.engine.output_names)}"


class _Kept:
    """A part of an output that is no tensor, which is returned as it was."""

    def __init__(self, value: Any) -> None:
        self.value = value
