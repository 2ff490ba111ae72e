"""Code that loads a layout with its client, for the card in its folder; the same as in docs/how-to/serve-with.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from quantizer.config.layouts import layout_of
from quantizer.pipeline.load import processor_folder
from quantizer.pipeline.model_graphs import QUANTIZED_STEM
from quantizer.plan.targets.clients import GRAPH_CLIENTS, OPTIMUM
from quantizer.tasks import tasks


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
    """

    before: str
    loader: str
    name: str
    call: str


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
    ),
    "audio": _Samples(
        before="import soundfile\n",
        loader="AutoFeatureExtractor",
        name="extractor",
        call='[soundfile.read("a-recording.wav")[0]], sampling_rate=16000, padding=True',
    ),
}
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
print(result.boxes.xyxy, result.boxes.conf, result.boxes.cls)
"""


def yolo_code(graph: str) -> ClientCode:
    """Return code for the layout of ultralytics, with the file or folder that YOLO loads."""
    library = GRAPH_CLIENTS[Path(graph).suffix or ".xml"].package
    return _python("ultralytics", f"`ultralytics` and `{library}`", _YOLO.format(graph=graph))


def client_code(layout: str, backend: str, task: str, folder: str, *, quantized: bool = True) -> ClientCode | None:
    """Return code for a layout in ``folder``; None for a layout or task without code here.

    For transformers.js, ``folder`` is the folder above.
    """
    known, kind = layout_of(layout, backend), tasks[task]
    if known is None or kind.in_parts or (known.classes and task not in known.classes):
        return None
    samples, client = _SAMPLES[kind.reads], known.classes.get(task, "")
    values = {
        "folder": folder,
        "client": client,
        "processor": processor_folder(task),
        "before": samples.before,
        "loader": samples.loader,
        "name": samples.name,
        "call": samples.call,
        "output": kind.output_name,
    }
    if layout == "compressed-tensors":
        imports = f"from transformers import {', '.join(sorted((client, samples.loader)))}"
        code = _CLASS.format(**values, imports=imports, settings=', dtype="float32"', after=".detach()")
        return _python("transformers", "`transformers` and `compressed-tensors`", code)
    suffix = Path(known.file).suffix
    graph, file = GRAPH_CLIENTS[suffix], known.file.format(graph=QUANTIZED_STEM)
    if not known.classes:
        if task == "text-generation-with-past":
            # A call needs an empty cache, whose sizes depend on the model.
            return None
        dtype = "int64" if kind.reads == "text" else "float32"
        code = {".xml": _OPENVINO, ".onnx": _ONNX}[suffix].format(**values, dtype=dtype)
        return _python(graph.library, f"`{graph.package}` and `transformers`", code)
    package = f"`{graph.optimum}` with `{graph.package}`"
    if layout == "optimum":
        imports = f"from optimum.{graph.module} import {client}\nfrom transformers import {samples.loader}"
        settings = f", ov_config={graph.config}" if graph.config else ""
        # Its graph reads a whole text at once.
        settings += ", use_cache=False" if task == "text-generation" else ""
        return _python("optimum", package, _CLASS.format(**values, imports=imports, settings=settings, after=""))
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


def _python(library: str, needs: str, code: str) -> ClientCode:
    return ClientCode(library=library, needs=needs, language="python", code=code)
