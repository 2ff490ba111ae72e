"""A drawn model with all that is needed to make it, and its data, again: text, seed, types, sizes, backend."""

from __future__ import annotations

import hashlib
import sys
import tempfile
import types
import warnings
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import model_branches as _branches
import model_habits as _habits
import model_types as _types
import torch
from hypothesis import strategies as st
from model_blocks import Answer
from model_steps import IMAGE, SEQUENCE, SIZES, add_step
from model_text import ModelText
from torch import Tensor, nn

from quantizer.plan.targets import profiles
from tests.helpers import imported

# Importing the files registers their steps.
del _branches, _habits, _types

_FOLDER = tempfile.TemporaryDirectory(prefix="drawn-models-")
_MOST_STEPS = 6


@dataclass(frozen=True, repr=False)
class DrawnModel:
    """One draw.

    Attributes:
        text: the file of the model, whose class is ``Made``.
        inputs: the shape of one row of each input.
        vocabulary: the number of ids where the first input is one of ids.
        seed: of weights and of data.
        dtype: of the model and of its inputs.
        rows: of each batch.
        style: how inputs are passed: ``tensor``, ``tuple`` or ``mapping``.
        backend: of the quantizer.
        training: the model is in train mode when it is handed over.
        longer: by how much the open axes of each batch are longer than ``inputs`` says.
        open_axes: the axes of a row of each input that may be longer; none: the model holds its sizes as numbers.
    """

    text: str
    inputs: dict[str, tuple[int, ...]]
    vocabulary: int | None
    seed: int
    dtype: torch.dtype
    rows: tuple[int, ...]
    style: str
    backend: str
    training: bool
    longer: tuple[int, ...] = (0,)
    open_axes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def module(self) -> types.ModuleType:
        """The imported file."""
        name = f"drawn_{hashlib.sha256(self.text.encode()).hexdigest()[:16]}"
        return sys.modules.get(name) or imported(Path(_FOLDER.name), name, self.text)

    def model(self) -> nn.Module:
        """A new model, the same at every call."""
        torch.manual_seed(self.seed)
        with warnings.catch_warnings():
            # Models of users are still traced and scripted.
            warnings.filterwarnings("ignore", message="`torch.jit", category=DeprecationWarning)
            made: nn.Module = self.module.Made()
        vars(made)["kind"] = self.dtype
        with torch.no_grad():
            for name, buffer in made.named_buffers():
                # Those of a trained model are not 0 and 1.
                if name.endswith(("running_mean", "running_var")):
                    buffer.add_(torch.rand_like(buffer) * 0.5)
        return made.to(self.dtype).train(self.training)

    def tensors(self, number: int, rows: int, longer: int | None = None) -> dict[str, Tensor]:
        """The inputs of a batch by name, new ones at every call; ``longer`` stands for that of the batch."""
        generator = torch.Generator().manual_seed(1000 * self.seed + number)
        more = self.longer[number % len(self.longer)] if longer is None else longer
        found = {}
        for name, shape in self.inputs.items():
            opened = self.open_axes.get(name, ())
            sizes = (rows, *(size + more * (axis in opened) for axis, size in enumerate(shape)))
            if name == "x" and self.vocabulary is not None:
                found[name] = torch.randint(self.vocabulary, sizes, generator=generator)
            else:
                found[name] = torch.randn(sizes, generator=generator).to(self.dtype)
        return found

    def batch(self, number: int, rows: int | None = None) -> Any:
        """A batch as ``calibrate`` takes it, with its own rows or so many."""
        tensors = self.tensors(number, rows or self.rows[number])
        if self.style == "mapping":
            return tensors
        return tuple(tensors.values()) if self.style == "tuple" or len(tensors) > 1 else tensors["x"]

    def batches(self) -> list[Any]:
        """All batches."""
        return [self.batch(number) for number in range(len(self.rows))]

    def run(self, model: nn.Module, number: int = 0, rows: int | None = None) -> Any:
        """What a model gives for a batch, from one random state."""
        batch = self.batch(number, rows)
        torch.manual_seed(self.seed)
        if isinstance(batch, dict):
            result = model(**batch)
        else:
            result = model(*batch) if isinstance(batch, tuple) else model(batch)
        # torch looks into all other outputs by itself.
        return {"Answer": vars(result)} if isinstance(result, Answer) else result

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """What Hypothesis shows: the source with its line breaks."""
        printer.text(repr(self))

    def __repr__(self) -> str:
        facts = (
            f"# seed {self.seed}, {self.dtype}, rows {self.rows}, inputs {self.inputs}, passed as {self.style}",
            f"# vocabulary {self.vocabulary}, {self.backend}, {self.options}, training={self.training}",
            f"# open axes {self.open_axes}, longer by {self.longer}",
        )
        return "\n".join(("", *facts, self.text))


def _start(draw: st.DrawFn) -> ModelText:
    kind = draw(st.sampled_from(("row", "sequence", "image", "ids")))
    width = draw(SIZES)
    if kind == "row":
        return ModelText((width,))
    tokens = draw(st.sampled_from((6, 1, 3, 17)))
    if kind == "sequence":
        return ModelText((tokens, width))
    if kind == "image":
        return ModelText((min(width, 17), tokens % 8 + 1, tokens % 5 + 3))
    model = ModelText((tokens,), vocabulary=11)
    table = model.part("table", f"nn.Embedding(11, {width}, padding_idx={draw(st.sampled_from((None, 0)))})")
    model.do(f"x = {draw(st.sampled_from((f'{table}(x)', f'F.embedding(x, {table}.weight)')))}")
    model.shape = (tokens, width)
    if draw(st.booleans()):
        model.do(f"x = {model.part('linear', f'nn.Linear({width}, {width})')}(x)")
        model.do(f"x = F.linear(x, {table}.weight)")
        model.width = 11
    return model


@st.composite
def drawn_models(draw: st.DrawFn) -> DrawnModel:
    """A strategy for small models with their data."""
    model = _start(draw)
    for _ in range(draw(st.integers(1, _MOST_STEPS))):
        add_step(model, draw)
    model.result = draw(
        st.sampled_from(
            (
                "x",
                "(x, x.mean())",
                "{'out': x, 'more': [x * 2]}",
                "x, None",
                "{'last': (x,)}",
                "blocks.Answer(x, more=[x * 2])",
                "blocks.Registered(x)",
            )
        )
    )
    rows = draw(st.sampled_from(((2, 3), (1, 1), (16, 4, 1), (5,), (3, 8))))
    mixed = model.varies and draw(st.booleans())
    return DrawnModel(
        text=model.text(),
        inputs=model.inputs,
        vocabulary=model.vocabulary,
        seed=draw(st.integers(0, 99)),
        dtype=draw(
            st.sampled_from((torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64))
        ),
        rows=rows,
        style=draw(st.sampled_from(("tensor", "mapping", "tuple"))),
        backend=draw(st.sampled_from(("openvino", "tensorrt", "onnxruntime"))),
        training=draw(st.booleans()),
        longer=(0, 3, 1) if mixed else (0,),
        open_axes={name: _open_axes(name, shape, model.vocabulary) for name, shape in model.inputs.items()}
        if mixed
        else {},
        options=draw(st.sampled_from(OPTIONS)),
    )


def _open_axes(name: str, shape: tuple[int, ...], vocabulary: int | None) -> tuple[int, ...]:
    """Return the axes of a row of an input that are not its width."""
    if name == "x" and vocabulary is not None:
        return (0,)
    return (1, 2) if len(shape) == IMAGE else (0,) if len(shape) == SEQUENCE else ()


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"activations": {"calibrator": "max"}, "sites": {"residual_add": True, "embedding": True}},
    {"weights": {"granularity": "per_tensor"}, "activations": {"calibrator": "mse"}},
    {"activations": {"calibrator": "auto", "smoothquant_alpha": 0.5}},
    {"sites": {"residual_add": False}, "formats": [{"weights": "int4", "activations": "float"}]},
)
"""Configurations beside the default."""

assert set(profiles.names()) >= {"openvino", "tensorrt", "onnxruntime"}
