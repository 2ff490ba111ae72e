"""Programs of the clients, and the processes that run them: the outputs of one call, and the time of further ones."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

import numpy as np
import pytest
from client_environment import CLIENTS
from client_models import (
    BACKENDS,
    CASES,
    MADE,
    PAIRS,
    ROOT,
    SESSION,
    TEXTS,
    Arrays,
    begin,
    converted,
    float_outputs,
    layouts_of,
    ours,
    reference,
)

from quantizer import load_converted
from quantizer.config.layouts import layout_of
from quantizer.plan.targets.clients import OPTIMUM

LIMITS = {"openvino": 60.0, "onnxruntime": 30.0}
"""Minimum SQNR in dB of a client's outputs to those of our engine, by backend."""

PYTHON_END = """
import numpy

numpy.save("outputs.npy", numpy.asarray(outputs))
print("ready", flush=True)
"""
JAVASCRIPT_END = """
const { writeFileSync } = await import("node:fs");
writeFileSync("outputs.json", JSON.stringify(outputs));
console.log("ready");
"""
"""The ends of programs, which write their outputs."""

_PYTHON = """\
import sys
import time

import numpy

given = dict(numpy.load("given.npz"))
{setup}

def call():
    return {call}

outputs = call()
{end}
for _ in sys.stdin:
    began = time.perf_counter()
    call()
    print("seconds", time.perf_counter() - began, flush=True)
"""

_JAVASCRIPT = """\
import {{ readFileSync }} from "node:fs";
import {{ createInterface }} from "node:readline";
{setup}
const KINDS = {{ float32: Float32Array, int64: BigInt64Array }};
const given = Object.fromEntries(Object.entries(JSON.parse(readFileSync("given.json"))).map(
  ([name, {{ dtype, dims, data }}]) =>
    [name, new Tensor(dtype, KINDS[dtype].from(dtype === "int64" ? data.map(BigInt) : data), dims)]));
{more}
const call = async () => {call};
const {{ data, dims }} = await call();
const outputs = {{ data: Array.from(data), dims }};
{end}
for await (const _ of createInterface({{ input: process.stdin }})) {{
  const began = performance.now();
  await call();
  console.log("seconds", (performance.now() - began) / 1000);
}}
"""

_OPENVINO = """\
import openvino

core, settings = openvino.Core(), {{"INFERENCE_PRECISION_HINT": "f32"}}
models = {{name: core.compile_model(f"{folder}/{{name}}.xml", "CPU", settings) for name in {graphs}}}


def run(name, values):
    model = models[name]
    outputs = model({{port.any_name: values[port.any_name] for port in model.inputs}})
    return {{port.any_name: outputs[port] for port in model.outputs}}

"""

_ONNXRUNTIME = """\
import onnxruntime

models = {{name: onnxruntime.InferenceSession(f"{folder}/{{name}}.onnx") for name in {graphs}}}


def run(name, values):
    model = models[name]
    outputs = model.run(None, {{node.name: values[node.name] for node in model.get_inputs()}})
    return dict(zip((node.name for node in model.get_outputs()), outputs))

"""

_IN_STEPS = """\

def two_steps():
    hidden = run("encoder_model", given)["last_hidden_state"]
    more = {"encoder_hidden_states": hidden, "encoder_attention_mask": given.get("attention_mask")}
    tokens = given["decoder_input_ids"]
    first = run("decoder_model", {"input_ids": tokens[:, :1], **more})
    past = {name.replace("present", "past_key_values"): first[name] for name in first if name != "logits"}
    second = run("decoder_with_past_model", {"input_ids": tokens[:, 1:], **more, **past})
    return numpy.concatenate([first["logits"], second["logits"]], axis=1)

"""

_OPTIMUM = """\
import torch
from optimum.{module} import {name}

model = {name}.from_pretrained("{folder}"{settings})
batch = {{name: torch.from_numpy(values) for name, values in given.items()}}
"""

_OPTIMUM_PAST = """\
past = {name: values for name, values in given.items() if name.startswith("past_key_values")}
layers = range(len(past) // 2)
keep = (lambda values: values) if "intel" in type(model).__module__ else torch.from_numpy
cache = tuple(tuple(keep(past[f"past_key_values.{n}.{kind}"]) for kind in ("key", "value")) for n in layers)
batch = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "past_key_values": cache}
"""

_OPTIMUM_STEPS = """\
tokens = batch.pop("decoder_input_ids")


def two_steps():
    first = model(**batch, decoder_input_ids=tokens[:, :1], use_cache=True)
    past = {"past_key_values": first.past_key_values, "use_cache": True}
    second = model(**batch, decoder_input_ids=tokens[:, 1:], **past)
    return torch.cat([first.logits, second.logits], dim=1)

"""

_SENTENCES = """\
from sentence_transformers import {name}

options = {{"file_name": "{file}"{settings}}}
model = {name}("{folder}", backend="{library}", model_kwargs=options)
"""

_NODE = """\
import * as ort from "{package}";
const {{ Tensor }} = ort;
{more}const options = {{ executionProviders: ["{provider}"] }};
const session = await ort.InferenceSession.create("{folder}/model.onnx", options);
"""

_TRANSFORMERS_JS = """\
{before}const {{ {name}, Tensor, env }} = await import("@huggingface/transformers");
env.allowRemoteModels = false;
env.localModelPath = "{parent}/";
{after}const model = await {name}.from_pretrained("transformers-js", {{ dtype: "q8"{device} }});
"""

_WASM = """\
const ort = await import("onnxruntime-web");
ort.env.wasm.numThreads = 1;
globalThis[Symbol.for("onnxruntime")] = ort;
"""
_WASM_FILES = 'ort.env.wasm.wasmPaths = new URL("./", import.meta.resolve("onnxruntime-web")).href;\n'

# Node has its own library for the device "cpu", which a page in a browser lacks.
_WASM_DEVICE = ', device: "auto", session_options: { executionProviders: ["wasm"] }'

_JS_PAST = """\
const past_key_values = {};
for (const name of Object.keys(given).filter((name) => name.startsWith("past"))) {
  past_key_values[name] = given[name];
  delete given[name];
}
given.past_key_values = past_key_values;
"""

_GRAPHS = ("encoder_model", "decoder_model", "decoder_with_past_model")

_CALLS = 30


@dataclass(frozen=True)
class Client:
    """A client of a layout.

    Attributes:
        name: its name in the table.
        layout: the layout that it loads.
        backends: the backends whose layout it loads.
        code: returns its program for a task, a backend and the layout's folder.
        language: py or js.
        tasks: the tasks that it loads; None: all of the layout.
    """

    name: str
    layout: str
    backends: tuple[str, ...]
    code: Callable[[str, str, Path], str]
    language: str = "py"
    tasks: tuple[str, ...] | None = None

    def loads(self, task: str, backend: str) -> bool:
        """Return whether it loads the model of a task of a backend."""
        among = self.tasks is None or task in self.tasks
        return among and backend in self.backends and self.layout in layouts_of(task, backend)


def _plain(task: str, backend: str, folder: Path) -> str:
    template = {"openvino": _OPENVINO, "onnxruntime": _ONNXRUNTIME}[backend]
    several = CASES[task].graphs > 1
    setup = template.format(folder=folder, graphs=_GRAPHS if several else ("model",))
    call = "two_steps()" if several else f'run("model", given)["{CASES[task].output}"]'
    return _PYTHON.format(end=PYTHON_END, setup=setup + (_IN_STEPS if several else ""), call=call)


def _optimum(task: str, backend: str, folder: Path) -> str:
    known = layout_of("optimum", backend)
    assert known is not None
    settings = ', ov_config={"INFERENCE_PRECISION_HINT": "f32"}' if backend == "openvino" else ""
    setup = _OPTIMUM.format(
        module={"openvino": "intel", "onnxruntime": "onnxruntime"}[backend],
        name=known.classes[task],
        folder=folder,
        settings=settings + (", use_cache=False" if task == "text-generation" else ""),
    )
    more = _OPTIMUM_PAST if task.endswith("with-past") else _OPTIMUM_STEPS if CASES[task].graphs > 1 else ""
    call = "two_steps()" if CASES[task].graphs > 1 else f'model(**batch)["{CASES[task].output}"]'
    return _PYTHON.format(end=PYTHON_END, setup=setup + more, call=call)


def _sentences(task: str, backend: str, folder: Path) -> str:
    known = layout_of("sentence-transformers", backend)
    assert known is not None
    name = known.classes[task]
    settings = ', "ov_config": {"INFERENCE_PRECISION_HINT": "f32"}' if backend == "openvino" else ""
    setup = _SENTENCES.format(
        name=name,
        folder=folder,
        file=known.file.format(graph="model"),
        settings=settings,
        library={"openvino": "openvino", "onnxruntime": "onnx"}[backend],
    )
    call = f"model.encode({TEXTS!r})" if name == "SentenceTransformer" else f"model.predict({PAIRS!r})"
    return _PYTHON.format(end=PYTHON_END, setup=setup, call=call)


def _onnx_in_javascript(package: str, provider: str, more: str = "") -> Callable[[str, str, Path], str]:
    def code(task: str, backend: str, folder: Path) -> str:
        setup = _NODE.format(package=package, provider=provider, folder=folder, more=more)
        return _JAVASCRIPT.format(
            end=JAVASCRIPT_END, setup=setup, more="", call=f"(await session.run(given)).{CASES[task].output}"
        )

    return code


def _transformers_js(before: str = "", after: str = "", device: str = "") -> Callable[[str, str, Path], str]:
    def code(task: str, backend: str, folder: Path) -> str:
        end = OPTIMUM[task]
        name = "AutoModel" if end == "FeatureExtraction" else f"AutoModelFor{end}"
        setup = _TRANSFORMERS_JS.format(before=before, after=after, name=name, parent=folder.parent, device=device)
        more = _JS_PAST if task.endswith("with-past") else ""
        return _JAVASCRIPT.format(
            end=JAVASCRIPT_END, setup=setup, more=more, call=f"(await model(given)).{CASES[task].output}"
        )

    return code


_ONE_GRAPH = tuple(task for task, case in CASES.items() if case.graphs == 1)
_THREAD = "ort.env.wasm.numThreads = 1;\n"

ALL = (
    Client("OpenVINO", "openvino", ("openvino",), _plain),
    Client("ONNX Runtime", "onnx", ("onnxruntime",), _plain),
    Client(
        "onnxruntime-node", "onnx", ("onnxruntime",), _onnx_in_javascript("onnxruntime-node", "cpu"), "js", _ONE_GRAPH
    ),
    Client(
        "onnxruntime-web (WASM)",
        "onnx",
        ("onnxruntime",),
        _onnx_in_javascript("onnxruntime-web", "wasm", _THREAD),
        "js",
        _ONE_GRAPH,
    ),
    Client("sentence-transformers", "sentence-transformers", BACKENDS, _sentences),
    Client("Optimum", "optimum", BACKENDS, _optimum),
    Client("transformers.js (native)", "transformers-js", ("onnxruntime",), _transformers_js(), "js"),
    Client(
        "transformers.js (WASM)",
        "transformers-js",
        ("onnxruntime",),
        _transformers_js(_WASM, _WASM_FILES, _WASM_DEVICE),
        "js",
    ),
)


def write_inputs(folder: Path, given: Arrays) -> None:
    """Write the inputs of a call where the programs read them."""
    np.savez(folder / "given.npz", **given)
    tensors = {
        name: {"dtype": str(array.dtype), "dims": list(array.shape), "data": array.ravel().tolist()}
        for name, array in given.items()
    }
    (folder / "given.json").write_text(json.dumps(tensors), encoding="utf-8")


class Program:
    """A running program of a client, which has computed its outputs and waits for further calls."""

    def __init__(self, process: subprocess.Popen[str], outputs: Any) -> None:
        self._process = process
        self.outputs = outputs

    def seconds(self) -> float:
        """The time of one more call."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(_answer(self._process, "seconds").split()[1])


def _answer(process: subprocess.Popen[str], start: str) -> str:
    output: IO[str] | None = process.stdout
    assert output is not None
    for line in output:
        if line.startswith(start):
            return line
    process.wait()
    raise AssertionError("the client ended without an answer")


@contextmanager
def started(
    folder: Path, code: str, language: str, python: Path | None = None, *, outputs: bool = True
) -> Iterator[Program]:
    """Start the program of a client in a folder with its inputs.

    The process has one CPU core, because the clients have no common setting for the number of threads.
    """
    file = folder / {"py": "client.py", "js": "client.mjs"}[language]
    file.write_text(code, encoding="utf-8")
    program = [str(python or CLIENTS / "bin" / "python")] if language == "py" else ["node"]
    names = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if python is not None:
        names["PYTHONPATH"] = str(ROOT)
    core = min(os.sched_getaffinity(0))
    log = folder / "stderr.txt"
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", _ON_ONE_CORE, str(core), *program, str(file)],
            cwd=folder,
            env={**names, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        try:
            _answer(process, "ready")
        except AssertionError:
            raise AssertionError(log.read_text(encoding="utf-8")[-3000:]) from None
        yield Program(process, _outputs(folder, language) if outputs else None)
    finally:
        process.communicate()


_ON_ONE_CORE = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])}); os.execvp(sys.argv[2], sys.argv[2:])"


def _outputs(folder: Path, language: str) -> Any:
    if language == "py":
        return np.load(folder / "outputs.npy")
    result = json.loads((folder / "outputs.json").read_text(encoding="utf-8"))
    return np.array(result["data"]).reshape(result["dims"]) if isinstance(result, dict) else np.array(result)


def sqnr(right: Any, given: Any) -> float:
    """The SQNR in dB of outputs to the right ones."""
    assert right.shape == given.shape
    noise = float(((right.astype(float) - given) ** 2).sum())
    return math.inf if noise == 0 else 10 * math.log10(float((right.astype(float) ** 2).sum()) / noise)


def require(language: str) -> None:
    """Skip if the clients of a language are not installed."""
    if not (CLIENTS / "bin" / "python").exists():
        pytest.skip(f"the clients are not installed in {CLIENTS}: run make clients")
    if language == "js" and not (CLIENTS / "node_modules").exists():
        pytest.skip(f"the clients of JavaScript are not installed in {CLIENTS}: install npm, and run make clients")


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a client computes, and how long it takes.

    Attributes:
        sqnr: the SQNR in dB of its outputs to those of our engine.
        engine: the SQNR in dB of our engine's outputs to those of the float model.
        ours: the median time of a call of our engine in seconds.
        its: the same of the client.
    """

    client: str
    task: str
    backend: str
    sqnr: float
    engine: float
    ours: float
    its: float

    @property
    def key(self) -> tuple[str, str, str]:
        return self.client, self.task, self.backend


ROWS = MADE / "rows"


def measure(client: Client, task: str, backend: str, place: Path) -> Row:
    """Run a client on the tiny model of a task in interleaved calls with our engine, and keep the row."""
    done = converted(task, backend)
    served, sentences = load_converted(done), client.layout == "sentence-transformers"
    given, right = reference(task, served, sentences=sentences)
    raw = ours(task, served, given)
    write_inputs(place, given)
    ours_took, its = [], []
    with started(place, client.code(task, backend, done / client.layout), client.language) as program:
        for _ in range(_CALLS):
            began = time.perf_counter()
            # sentence-transformers is given texts, the others are given arrays.
            reference(task, served, sentences=True) if sentences else ours(task, served, given)
            ours_took.append(time.perf_counter() - began)
            its.append(program.seconds())
    row = Row(
        client=client.name,
        task=task,
        backend=backend,
        sqnr=sqnr(right, program.outputs),
        engine=sqnr(float_outputs(task, given), raw),
        ours=median(ours_took),
        its=median(its),
    )
    keep(row)
    return row


def keep(row: Row) -> None:
    """Keep a row for the page."""
    begin(MADE, SESSION)
    ROWS.mkdir(exist_ok=True)
    path = ROWS / f"{row.task} {row.backend} {row.client}.json"
    path.write_text(json.dumps(asdict(row)), encoding="utf-8")


def kept_rows() -> dict[tuple[str, str, str], Row]:
    """The rows of the last run."""
    rows = [Row(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(ROWS.glob("*.json"))]
    return {row.key: row for row in rows}
