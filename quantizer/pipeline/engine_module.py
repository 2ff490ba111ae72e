"""``EngineModule``: calls an engine like the module of which it was built, and returns the same structure.

``CallForm`` describes the arguments and the output of the module. Its file contains only names and plain values: an
output of transformers, a dataclass or an attrs class becomes a mapping, and a named tuple a tuple.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.engines import Engine
from quantizer.engines.base import Array, arrays_without_copies
from quantizer.errors import EngineError, QuantizerError
from quantizer.pipeline.context import engine_inputs
from quantizer.pipeline.module_feed import LABELS, by_name
from quantizer.pipeline.optional_inputs import Omitted
from quantizer.report.record import write_text_atomic
from quantizer.tasks import Batch
from quantizer.utils.paths import regular_file
from quantizer.utils.plain_values import decoded, json_values
from quantizer.utils.signatures import signature_of
from quantizer.utils.structure import fields_of, flattened

CALL = "call.json"
"""The name of the call form's file in the folder of a run."""

_FORMAT = 1
_KINDS = {kind.name: kind for kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)} | {
    inspect.Parameter.VAR_KEYWORD.name: inspect.Parameter.VAR_KEYWORD
}
"""The kinds of arguments that can be inputs of an engine: named ones."""


@dataclass(frozen=True)
class CallForm:
    """The arguments of a model and the structure of its output.

    Attributes:
        model: the name of the class.
        signature: the signature of ``forward``.
        output: an example of the output; its tensors stand for the outputs of the engine, in order.
        inputs: the arguments that the calibration batches passed.
        omitted: tensors in place of arguments that a call omits.
    """

    model: str
    signature: inspect.Signature
    output: Any
    inputs: tuple[str, ...]
    omitted: Mapping[str, Omitted] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: nn.Module, output: Any, inputs: Iterable[str], omitted: Mapping[str, Omitted] | None = None
    ) -> CallForm:
        """Return the form of a model that returned ``output`` for ``inputs``, without a reference to the model."""
        return cls(type(model).__name__, signature_of(model.forward), output, tuple(inputs), omitted or {})

    @classmethod
    def by_names(cls, model: str, inputs: Sequence[str], outputs: Sequence[str]) -> CallForm:
        """Return the form of an engine without a module: inputs in order, and a mapping of outputs."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in inputs])
        return cls(model, signature, {name: torch.empty(0) for name in outputs}, tuple(inputs))

    def write(self, folder: Path) -> None:
        """Write the file into a folder; do nothing if the output contains other than plain values."""
        try:
            output = _described(self.output)
        except TypeError:
            return
        arguments = [
            {"name": parameter.name, "kind": parameter.kind.name, "optional": parameter.default is not parameter.empty}
            for parameter in self.signature.parameters.values()
        ]
        document: dict[str, Any] = {"format": _FORMAT, "model": self.model, "arguments": arguments}
        document |= {"inputs": self.inputs, "omitted": {name: asdict(one) for name, one in self.omitted.items()}}
        document["output"] = output
        write_text_atomic(folder / CALL, json.dumps(document, indent=2, ensure_ascii=False) + "\n")

    @classmethod
    def read(cls, folder: Path) -> CallForm | None:
        """Return the form in a folder; None without a file."""
        path = folder / CALL
        if not path.exists():
            return None
        try:
            document = json_values(regular_file(path).read_bytes())
            if document["format"] != _FORMAT:
                raise ValueError(f"its format is {document['format']!r}, expected {_FORMAT}")
            signature, inputs = _signature(document["arguments"]), tuple(map(str, document["inputs"]))
            omitted = {name: decoded(Omitted, one, f"omitted.{name}") for name, one in document["omitted"].items()}
            if any(
                source[0] not in inputs for one in omitted.values() for source in one.shape if isinstance(source, tuple)
            ):
                raise ValueError("omitted names an argument that is not among the inputs")
            return cls(str(document["model"]), signature, _example(document["output"]), inputs, omitted)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise QuantizerError(
                f"{path} is damaged ({type(error).__name__}: {error}); restore the file of the run, or remove it to "
                "call the engine by the names of its inputs"
            ) from error

    def bound(self, args: Sequence[Any], keywords: Mapping[str, Any], engine_names: Iterable[str]) -> Batch:
        """Return the arguments of a call as the inputs of the engine.

        Raises:
            EngineError: the call does not fit the signature, passes an argument that the calibration batches did not
                have, or omits one that no tensor replaces.
        """
        batch = by_name("the input", self.model, self.signature, args, keywords, EngineError)
        extra = sorted(batch.keys() - {*self.inputs, *LABELS})
        if extra:
            raise EngineError(
                f"the engine of {self.model} has no input {extra[0]!r}, because no calibration batch passed it: omit "
                "it, or quantize the model with batches that pass it"
            )
        for name in (name for name in engine_names if name not in batch):
            if name not in self.omitted:
                raise EngineError(
                    f"the input omits {name!r}, which every calibration batch of {self.model} passed, and no tensor of "
                    "zeros or ones in its place gives the same output: pass it, or quantize the model without it"
                )
            batch[name] = self.omitted[name].tensor(batch)
        return batch


def _signature(arguments: Any) -> inspect.Signature:
    parameters = [
        inspect.Parameter(
            one["name"], _KINDS[one["kind"]], default=None if one["optional"] is True else inspect.Parameter.empty
        )
        for one in arguments
    ]
    return inspect.Signature(parameters)


def _described(value: Any) -> Any:
    """Return the structure of an output as plain values."""
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, tuple | list):
        return {"tuple" if isinstance(value, tuple) else "list": [_described(part) for part in value]}
    fields = fields_of(value)
    if fields is not None:
        return {"mapping": {key: _described(part) for key, part in fields.items()}}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    raise TypeError(f"a {type(value).__name__} is not a plain value")


def _example(described: Any) -> Any:
    """Return an output of a described structure, with empty tensors."""
    if described == "tensor":
        return torch.empty(0)
    ((kind, content),) = described.items()
    if kind == "mapping":
        return {key: _example(part) for key, part in content.items()}
    if kind in ("tuple", "list"):
        parts = [_example(part) for part in content]
        return tuple(parts) if kind == "tuple" else parts
    if kind != "value" or isinstance(content, dict | list):
        raise ValueError(f"{kind!r} is not part of an output")
    return content


class EngineModule(nn.Module):
    """A module that runs an engine, with the arguments and the output structure of the float model.

    It has no parameters, because the weights are in the engine.
    """

    def __init__(self, engine: Engine, call: CallForm) -> None:
        super().__init__()
        self.engine = engine
        self._call_form = call
        # Outputs of the exported graph have this order.
        output_leaves, self._rebuilt = flattened(call.output)
        tensors = [leaf for leaf in output_leaves if isinstance(leaf, Tensor)]
        if len(tensors) != len(engine.output_names):
            raise EngineError(
                f"{call.model} returns a {type(call.output).__name__} with {len(tensors)} tensors, but the engine has "
                f"{len(engine.output_names)} outputs; expected one tensor per output, alone or in a structure"
            )
        self._types = {spec.name: spec.dtype for spec in engine.inputs}
        self._leaves = [None if isinstance(leaf, Tensor) else _Constant(leaf) for leaf in output_leaves]
        self.eval()

    def forward(self, *args: Any, **keywords: Any) -> Any:
        """Run the engine with the arguments of the float model."""
        arrays = {} if args else self._as_they_are(keywords)
        if not arrays:
            arrays = engine_inputs(self.engine, self._call_form.bound(args, keywords, self.engine.input_names))
        outputs = self.engine(arrays)
        values = iter([torch.from_numpy(outputs[name]) for name in self.engine.output_names])
        return self._rebuilt([next(values) if leaf is None else leaf.value for leaf in self._leaves])

    def _as_they_are(self, keywords: Mapping[str, Any]) -> dict[str, Array]:
        """Return the arguments as arrays, if they are the engine's inputs; empty if ``bound`` must look at them."""
        if not all(type(value) is Tensor for value in keywords.values()):
            return {}
        arrays = arrays_without_copies(self._types, keywords)
        fits = all(
            array.dtype == self._types[name] and array.ndim > 0 and len(array) > 0 for name, array in arrays.items()
        )
        return arrays if fits else {}

    def extra_repr(self) -> str:
        """Return the name, inputs and outputs of the engine."""
        return f"{self.engine.name}: {', '.join(map(str, self.engine.inputs))} -> {', '.join(self.engine.output_names)}"


class _Constant:
    """A constant part of an output, such as a number."""

    def __init__(self, value: Any) -> None:
        self.value = value
