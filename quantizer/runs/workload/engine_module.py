"""An engine that is called as the module that it was built of, and returns what that returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantizer.common.structure import flattened
from quantizer.engines import Engine
from quantizer.errors import EngineError
from quantizer.runs.run_context import engine_inputs
from quantizer.runs.saved.call_form import CallForm
from quantizer.runs.workload.module_feed import by_name


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
