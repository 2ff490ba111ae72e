"""Code that loads a layout with its client, for the card in its folder; the same as in docs/how-to/serve-with.md."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantizer.config.layouts import layout_of
from quantizer.pipeline.load import CACHED, processor_folder
from quantizer.pipeline.model_graphs import QUANTIZED_STEM
from quantizer.plan.targets.clients import GRAPH_CLIENTS, OPTIMUM
from quantizer.tasks import tasks
from quantizer.tasks.seq2seq.parts import PARTS


@dataclass(frozen=True, kw_only=True)
class ClientCode:
    """Code of a client.

    Attributes:
        library: the name of the client on the hub.
        needs: the packages, in words.
        language: that of the code.
        code: loads the layout, runs it, and prints its outputs.
    """

    library: str
    needs: str
    language: str
    code: str


@dataclass(frozen=True, kw_only=True)
class _Samples:
    """Code that reads samples.

    Attributes:
        before: imports of other libraries.
        loader: the class of transformers.
        name: the variable of the processor.
        call: the arguments of its call, without the type of tensors.
        package: the package that reads the files; empty for texts.
    """

    before: str
    loader: str
    name: str
    call: str
    package: str = ""


_SAMPLES = {
    "text": _Samples(
        before="",
        loader="AutoTokenizer",
        name="tokenizer",
        call='["the film was good", "a dull plot"], padding=True',
    ),
    "image": _Samples(
        before="from PIL import Image\n",
        loader="AutoImageProcessor",
        name="processor",
        call='[Image.open("an-image.png")]',
        package="`pillow`",
    ),
    "audio": _Samples(
        before="import soundfile\n",
        loader="AutoFeatureExtractor",
        name="extractor",
        call='[soundfile.read("a-recording.wav")[0]], sampling_rate=16000, padding=True',
        package="`soundfile`",
    ),
}
_SPEECH = _Samples(
    before="import soundfile\n",
    loader="AutoProcessor",
    name="processor",
    call='soundfile.read("a-recording.wav")[0], sampling_rate=16000',
    package="`soundfile`",
)
"""For a model that generates texts: an extractor with a tokenizer, which pads recordings to the length of the model."""
_PROMPT = '["the film was good"]'
"""One text, because a graph with a cache has no positions for padded texts."""
_OPENVINO = """\
import openvino
{before}from transformers import {loader}

folder = "{folder}"
{name} = {loader}.from_pretrained(f"{{folder}}/{processor}")
model = openvino.Core().compile_model(f"{{folder}}/model.xml", "CPU", {{"INFERENCE_PRECISION_HINT": "f32"}})
encoded = {name}({call}, return_tensors="np")
outputs = model({{port.any_name: encoded[port.any_name] for port in model.inputs}})["{output}"]
print(outputs)
"""
_ONNX = """\
import onnxruntime
{before}from transformers import {loader}

folder = "{folder}"
{name} = {loader}.from_pretrained(f"{{folder}}/{processor}")
session = onnxruntime.InferenceSession(f"{{folder}}/model.onnx")
encoded = {name}({call}, return_tensors="np")
inputs = {{node.name: encoded[node.name].astype("{dtype}") for node in session.get_inputs()}}
(outputs,) = session.run(["{output}"], inputs)
print(outputs)
"""
_RUN_OPENVINO = """\
import numpy
import openvino
{before}from transformers import {loader}

folder = "{folder}"
{name} = {loader}.from_pretrained(f"{{folder}}/{processor}")
core, settings = openvino.Core(), {{"INFERENCE_PRECISION_HINT": "f32"}}
graphs = {{name: core.compile_model(f"{{folder}}/{{name}}.xml", "CPU", settings) for name in {graphs}}}


def run(name, values):
    outputs = graphs[name]({{port.any_name: values[port.any_name] for port in graphs[name].inputs}})
    return {{port.any_name: outputs[port] for port in graphs[name].outputs}}


"""
_RUN_ONNX = """\
import numpy
import onnxruntime
{before}from transformers import {loader}

folder = "{folder}"
{name} = {loader}.from_pretrained(f"{{folder}}/{processor}")
graphs = {{name: onnxruntime.InferenceSession(f"{{folder}}/{{name}}.onnx") for name in {graphs}}}


def run(name, values):
    outputs = graphs[name].run(None, {{node.name: values[node.name] for node in graphs[name].get_inputs()}})
    return dict(zip([node.name for node in graphs[name].get_outputs()], outputs))


"""
_EMPTY_OPENVINO = """\
for port in graphs["model"].inputs:
    if port.any_name.startswith("past_key_values"):
        heads, width = (port.partial_shape[axis].get_length() for axis in (1, 3))
        values[port.any_name] = numpy.zeros((1, heads, 0, width), "float32")
"""
_EMPTY_ONNX = """\
for node in graphs["model"].get_inputs():
    if node.name.startswith("past_key_values"):
        values[node.name] = numpy.zeros((1, node.shape[1], 0, node.shape[3]), "float32")
"""
_CONTINUE = """\
encoded = {name}({call}, return_tensors="np")
values = {{"input_ids": encoded["input_ids"], "attention_mask": encoded["attention_mask"]}}
{empty}tokens = []
for _ in range({tokens}):
    outputs = run("model", values)
    tokens.append(outputs["logits"][:, -1:].argmax(-1))
    if tokens[-1] == {name}.eos_token_id:
        break
    values.update({{name.replace("present", "past_key_values"): outputs[name] for name in outputs if name != "logits"}})
    mask = numpy.concatenate([values["attention_mask"], numpy.ones((1, 1), "int64")], axis=1)
    values.update(input_ids=tokens[-1], attention_mask=mask)
outputs = {name}.batch_decode(numpy.concatenate([encoded["input_ids"], *tokens], axis=1), skip_special_tokens=True)
print(outputs)
"""
_WRITE = """\
# Greedy decoding, without the settings of the model's generation_config.json.
encoded = {name}({call}, return_tensors="np")
hidden = run("encoder_model", encoded)["last_hidden_state"]
values = {{"encoder_hidden_states": hidden, "encoder_attention_mask": encoded.get("attention_mask")}}
tokens = [numpy.full((len(hidden), 1), {start})]
for step in range({tokens}):
    outputs = run("decoder_with_past_model" if step else "decoder_model", {{**values, "input_ids": tokens[-1]}})
    tokens.append(outputs["logits"][:, -1:].argmax(-1))
    values.update({{name.replace("present", "past_key_values"): outputs[name] for name in outputs if name != "logits"}})
ids = numpy.concatenate(tokens[1:], axis=1)
ended = numpy.cumsum(ids == {words}.eos_token_id, axis=1) > 0
outputs = {words}.batch_decode([row[~after] for row, after in zip(ids, ended)], skip_special_tokens=True)
print(outputs)
"""
_GENERATE = """\
{before}{imports}

folder = "{folder}"
{name} = {loader}.from_pretrained(folder)
model = {client}.from_pretrained(folder{settings})
encoded = {name}({call}, return_tensors="pt")
tokens = model.generate({inputs}, max_new_tokens={tokens})
outputs = {name}.batch_decode(tokens, skip_special_tokens=True)
print(outputs)
"""
_TOKENS = 6
"""Number of generated tokens."""
_CLASS = """\
{before}{imports}

folder = "{folder}"
{name} = {loader}.from_pretrained(folder)
model = {client}.from_pretrained(folder{settings})
encoded = {name}({call}, return_tensors="pt")
outputs = model(**encoded).{output}{after}
print(outputs)
"""
_SENTENCES = """\
from sentence_transformers import {client}

model = {client}(
    "{folder}",
    backend="{backend}",
    model_kwargs={settings},
)
"""
_EMBED = """\
outputs = model.encode(["the film was good", "a dull plot"])
print(model.similarity(outputs, outputs))
"""
_PAIRS = """\
outputs = model.predict([("the film was good", "a dull plot"), ("a dull plot", "the film was good")])
print(outputs)
"""
_JAVASCRIPT = """\
import {{ {client}, AutoTokenizer, env }} from "@huggingface/transformers";

env.allowRemoteModels = false;
env.localModelPath = "{folder}/";
const tokenizer = await AutoTokenizer.from_pretrained("transformers-js");
const model = await {client}.from_pretrained("transformers-js", {{ dtype: "{dtype}" }});
const encoded = tokenizer(["the film was good", "a dull plot"], {{ padding: true }});
const outputs = (await model(encoded)).{output}.tolist();
console.log(outputs);
"""
_JAVASCRIPT_IMAGE = """\
import {{ env, pipeline }} from "@huggingface/transformers";

env.allowRemoteModels = false;
env.localModelPath = "{folder}/";
const run = await pipeline("{client}", "transformers-js", {{ dtype: "{dtype}" }});
console.log(await run("an-image.png"));
"""


_YOLO = """\
from ultralytics import YOLO

model = YOLO("{graph}")
(result,) = model("an-image.png")
print({outputs})
"""
_YOLO_OUTPUTS = {
    "classify": "result.probs.top5, result.probs.top5conf",
    "detect": "result.boxes.xyxy, result.boxes.conf, result.boxes.cls",
    "obb": "result.obb.xyxyxyxy, result.obb.conf, result.obb.cls",
    "pose": "result.keypoints.xy, result.keypoints.conf",
    # An image without objects has no masks.
    "segment": "result.masks.xy if result.masks else []",
}
"""Outputs of a model of ultralytics, by its task."""


def yolo_code(graph: str, task: str) -> ClientCode:
    """Return code for the layout of ultralytics.

    Args:
        graph: the name of the file or folder that YOLO loads. The name of a folder may contain dots.
        task: the task of the model in the words of ultralytics.
    """
    library = GRAPH_CLIENTS[".onnx" if graph.endswith(".onnx") else ".xml"].package
    code = _YOLO.format(graph=graph, outputs=_YOLO_OUTPUTS.get(task, "result"))
    return _python("ultralytics", f"`ultralytics` and `{library}`", code)


def client_code(
    layout: str, backend: str, task: str, folder: str, *, quantized: bool = True, start: int | None = None
) -> ClientCode | None:
    """Return code for a layout in ``folder``; None for a layout without a class for the task.

    For transformers.js, ``folder`` is the folder above. ``start`` is the first token of a decoder with an encoder.
    """
    known = layout_of(layout, backend)
    if known is None or (known.classes and task not in known.classes):
        return None
    kind, client, cached = tasks[task], known.classes.get(task, ""), task == CACHED
    samples = _SPEECH if kind.in_parts and kind.reads == "audio" else _SAMPLES[kind.reads]
    values: dict[str, Any] = {
        "folder": folder,
        "client": client,
        "processor": processor_folder(task),
        "before": samples.before,
        "loader": samples.loader,
        "name": samples.name,
        "call": _PROMPT if cached else samples.call,
        "output": kind.output_name,
        "tokens": _TOKENS,
    }
    reader = [samples.package] if samples.package else []
    if layout == "compressed-tensors":
        imports = f"from transformers import {', '.join(sorted((client, samples.loader)))}"
        code = _CLASS.format(**values, imports=imports, settings=', dtype="float32"', after=".detach()")
        return _python("transformers", _in_words("`transformers`", "`compressed-tensors`", *reader), code)
    suffix = Path(known.file).suffix
    graph, file = GRAPH_CLIENTS[suffix], known.file.format(graph=QUANTIZED_STEM)
    if not known.classes:
        needs = _in_words(f"`{graph.package}`", "`transformers`", *reader)
        if kind.in_parts or cached:
            run, empty = {".xml": (_RUN_OPENVINO, _EMPTY_OPENVINO), ".onnx": (_RUN_ONNX, _EMPTY_ONNX)}[suffix]
            names = PARTS if kind.in_parts else (QUANTIZED_STEM,)
            words = f"{samples.name}.tokenizer" if samples is _SPEECH else samples.name
            values |= {"graphs": json.dumps(names), "empty": empty, "start": start, "words": words}
            return _python(graph.library, needs, (run + (_WRITE if kind.in_parts else _CONTINUE)).format(**values))
        dtype = "int64" if kind.reads == "text" else "float32"
        code = {".xml": _OPENVINO, ".onnx": _ONNX}[suffix].format(**values, dtype=dtype)
        return _python(graph.library, needs, code)
    package = f"`{graph.optimum}` with `{graph.package}`"
    if layout == "optimum":
        imports = f"from optimum.{graph.module} import {client}\nfrom transformers import {samples.loader}"
        settings = f", ov_config={graph.config}" if graph.config else ""
        # Its graph reads a whole text at once.
        settings += ", use_cache=False" if task == "text-generation" else ""
        values |= {"imports": imports, "settings": settings}
        if kind.in_parts or cached:
            # A tokenizer may return inputs that the model does not have.
            inputs = "**encoded"
            if kind.reads == "text":
                inputs = "input_ids=encoded.input_ids, attention_mask=encoded.attention_mask"
            code = _GENERATE.format(**values, inputs=inputs)
        else:
            code = _CLASS.format(**values, after="")
        return _python("optimum", _in_words(package, *reader), code)
    if layout == "sentence-transformers":
        settings = f'{{"file_name": "{file}"}}'
        if graph.config:
            settings = f'{{\n        "file_name": "{file}",\n        "ov_config": {graph.config},\n    }}'
        code = _SENTENCES.format(**values, backend=graph.backend, settings=settings)
        code += _PAIRS if client == "CrossEncoder" else _EMBED
        return _python("sentence-transformers", f"`sentence-transformers` and {package}", code)
    if layout == "transformers-js":
        dtype = "q8" if quantized else "fp32"
        if kind.reads == "text":
            end = OPTIMUM[task]
            values["client"] = "AutoModel" if end == "FeatureExtraction" else f"AutoModelFor{end}"
        template = _JAVASCRIPT if kind.reads == "text" else _JAVASCRIPT_IMAGE
        code = template.format(**values, dtype=dtype)
        return ClientCode(library="transformers.js", needs="`@huggingface/transformers`", language="js", code=code)
    return None


def _in_words(*packages: str) -> str:
    *others, last = packages
    return f"{', '.join(others)} and {last}" if others else last


def _python(library: str, needs: str, code: str) -> ClientCode:
    return ClientCode(library=library, needs=needs, language="python", code=code)
