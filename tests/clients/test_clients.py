"""The layouts of ``deliver``, loaded by the real clients in their own environment: ``make clients``.

OpenVINO computes what our engine computes. ONNX Runtime applies more fusions in the clients, so that some values round
differently: it is held to the limit of the output check.
"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

for _package in ("transformers", "onnx", "openvino", "onnxruntime"):
    pytest.importorskip(_package, reason="layouts need enginequant[hf,onnx,openvino,onnxruntime]")

import transformers
from tiny_audio import tiny_ctc, tiny_recordings, tiny_wav2vec2
from tiny_run import BAD, COMMON, GOOD, tiny_run
from tiny_vision import tiny_images, tiny_segformer, tiny_vit

from quantizer import load_converted
from quantizer.cli.main import main
from quantizer.config.layouts import layout_of
from quantizer.pipeline import benchmark
from quantizer.tasks.outputs import MEAN

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
CLIENTS = Path(os.environ.get("QUANTIZER_CLIENTS", ROOT / ".clients"))
PAGE = (ROOT / "docs" / "how-to" / "serve-with.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^<!-- client: (\w+) (\w+) -->\n```(py|js)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
TEXTS = ["the film was good", "a dull plot"]
LIMITS = {"openvino": 60, "onnxruntime": 30}
"""Minimum SQNR in dB of a client's outputs to those of our engine, by backend."""
WEIGHTS = 15
"""The same for a client that loads the weights alone: attention and residual adds are in floating point there."""
FILES = {"py": "import numpy\n\nnumpy.save('outputs.npy', numpy.asarray(outputs))\n"}
FILES["js"] = "import { writeFileSync } from 'node:fs';\nwriteFileSync('outputs.json', JSON.stringify(outputs));\n"
WORDS = ["--batch-size", "1", "2", "4", "--seq-len", "8", "16", "32"]


def _convert(model: Path, output: Path, *words: str, data: str, backends: Sequence[str] = tuple(LIMITS)) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
        options = ["--quantization", "--calibration", data, "--backend", *backends, "-o", str(output)]
        assert main(["convert", "-m", str(model), *options, *words]) == 0


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the guide is followed, with its two conversions."""
    if not (CLIENTS / "bin" / "python").exists():
        pytest.skip(f"the clients are not installed in {CLIENTS}: run make clients")
    folder = tmp_path_factory.mktemp("clients")
    tiny_run(folder)
    with (folder / "calibration.csv").open(newline="", encoding="utf-8") as rows:
        (folder / "texts.txt").write_text("".join(f"{row['text']}\n" for row in csv.DictReader(rows)), encoding="utf-8")
    data = str(folder / "texts.txt")
    layouts = ["openvino", "onnx", "sentence-transformers", "optimum", "transformers-js", "compressed-tensors"]
    _convert(folder / "model", folder / "converted/my-classifier", *WORDS, "--deliver", *layouts, data=data)
    words = [*WORDS, "--task", "sentence-similarity", "--deliver", "sentence-transformers"]
    _convert(_with_head(folder, "BertModel"), folder / "converted/my-embedder", *words, data=data)
    if (CLIENTS / "node_modules").exists():
        (folder / "node_modules").symlink_to((CLIENTS / "node_modules").resolve())
    return folder


def _with_head(folder: Path, name: str) -> Path:
    """A model of another class with the weights' sizes and the tokenizer of the tiny classifier."""
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    torch.manual_seed(0)
    getattr(transformers, name)(config).save_pretrained(folder / name)
    transformers.AutoTokenizer.from_pretrained(folder / "model").save_pretrained(folder / name)
    return folder / name


def _run(folder: Path, code: str, language: str) -> Any:
    """Run code of a client in its environment, and return its ``outputs``."""
    file = folder / {"py": "client.py", "js": "client.mjs"}[language]
    file.write_text(f"{code}\n{FILES[language]}", encoding="utf-8")
    if language == "js" and not (folder / "node_modules").exists():
        pytest.skip(f"the clients of JavaScript are not installed in {CLIENTS}: install npm, and run make clients")
    program = str(CLIENTS / "bin" / "python") if language == "py" else "node"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [program, str(file)],
        cwd=folder,
        env={**environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    if language == "js":
        return np.array(json.loads((folder / "outputs.json").read_text(encoding="utf-8")))
    return np.load(folder / "outputs.npy")


def _sqnr(right: Any, given: Any) -> float:
    assert right.shape == given.shape
    noise = float(((right.astype(float) - given) ** 2).sum())
    return math.inf if noise == 0 else 10 * math.log10(float((right.astype(float) ** 2).sum()) / noise)


def _tokens(served: Any, texts: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tokens of texts, and what our engine computes of them."""
    encoded = dict(served.processor(texts, padding=True, return_tensors="np"))
    return encoded, served.engine({spec.name: encoded[spec.name].astype(spec.dtype) for spec in served.engine.inputs})


def _expected(folder: Path, kind: str, backend: str) -> Any:
    """What our engine computes of the texts of the guide."""
    name = {"pairs": "my-classifier", "weights": "my-classifier"}.get(kind, f"my-{kind}")
    served = load_converted(folder / "converted" / name / backend)
    encoded, outputs = _tokens(served, [(TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[0])] if kind == "pairs" else TEXTS)
    if kind != "embedder":
        return outputs["logits"]
    hidden, mask = torch.from_numpy(outputs["last_hidden_state"]), torch.from_numpy(encoded["attention_mask"])
    return MEAN.embeddings(hidden, mask).numpy()


@pytest.mark.parametrize(
    ("kind", "backend", "language", "code"),
    SECTIONS,
    ids=[f"{number}-{kind}-{backend}-{language}" for number, (kind, backend, language, _) in enumerate(SECTIONS)],
)
def test_the_code_of_the_guide(here: Path, kind: str, backend: str, language: str, code: str) -> None:
    given = _run(here, code, language)
    assert _sqnr(_expected(here, kind, backend), given) >= (WEIGHTS if kind == "weights" else LIMITS[backend])


def test_the_guide_has_a_section_for_each_client() -> None:
    assert len(SECTIONS) == 9
    assert all(layout in PAGE for layout in ("openvino/model.xml", "onnx/model.onnx", "/optimum", '"transformers-js"'))


NODE = """\
import * as ort from "{package}";
const session = await ort.InferenceSession.create("{path}", {{ executionProviders: ["{provider}"] }});
const given = {given};
const feeds = Object.fromEntries(session.inputNames.map((name) => [
  name, new ort.Tensor("int64", BigInt64Array.from(given[name].flat().map(BigInt)), [given[name].length, {length}]),
]));
const result = (await session.run(feeds)).logits;
const outputs = Array.from({{ length: result.dims[0] }}, (_, row) => Array.from(result.data).slice(
  row * result.dims[1], (row + 1) * result.dims[1]));
"""


@pytest.mark.parametrize(("package", "provider"), [("onnxruntime-node", "cpu"), ("onnxruntime-web", "wasm")])
def test_plain_onnx_runtime_of_javascript(here: Path, package: str, provider: str) -> None:
    folder = here / "converted/my-classifier/onnxruntime"
    encoded, ours = _tokens(load_converted(folder), TEXTS)
    code = NODE.format(
        package=package,
        provider=provider,
        path="converted/my-classifier/onnxruntime/onnx/model.onnx",
        given=json.dumps({name: values.tolist() for name, values in encoded.items()}),
        length=encoded["input_ids"].shape[1],
    )
    assert _sqnr(ours["logits"], _run(here, code, "js")) >= LIMITS["onnxruntime"]


# -- each task of Optimum ----------------------------------------------------------------------------------------------

OPTIMUM = """\
import numpy
import torch
from optimum.{module} import {name}

given = {{name: torch.from_numpy(values) for name, values in numpy.load("given.npz").items()}}
model = {name}.from_pretrained("{folder}"{settings})
outputs = model(**given)["{output}"]
"""
MODULES = {"openvino": "intel", "onnxruntime": "onnxruntime"}
SETTINGS = {"openvino": ', ov_config={"INFERENCE_PRECISION_HINT": "f32"}', "onnxruntime": ""}
HEADS = {
    "fill-mask": ("BertForMaskedLM", "logits"),
    "question-answering": ("BertForQuestionAnswering", "start_logits"),
    "sentence-similarity": ("BertModel", "last_hidden_state"),
    "token-classification": ("BertForTokenClassification", "logits"),
}


def _check_optimum(
    folder: Path,
    done: Path,
    task: str,
    output: str,
    given: Callable[[Any], dict[str, Any]],
    backends: Sequence[str] = tuple(MODULES),
) -> None:
    for backend in backends:
        module = MODULES[backend]
        served = load_converted(done / backend)
        inputs = given(served)
        np.savez(folder / "given.npz", **inputs)
        ours = served.engine({spec.name: inputs[spec.name].astype(spec.dtype) for spec in served.engine.inputs})
        known = layout_of("optimum", backend)
        assert known is not None
        code = OPTIMUM.format(
            module=module,
            name=known.classes[task],
            folder=done / backend / "optimum",
            settings=SETTINGS[backend],
            output=output,
        )
        assert _sqnr(ours[output], _run(folder, code, "py")) >= LIMITS[backend], backend


def _questions(folder: Path) -> str:
    """Questions about texts, in the format of SQuAD."""
    texts = (folder / "texts.txt").read_text(encoding="utf-8").splitlines()
    asked = [
        {"context": text, "qas": [{"question": "was the film good", "answers": [{"text": text, "answer_start": 0}]}]}
        for text in texts
    ]
    (folder / "questions.json").write_text(json.dumps({"data": [{"paragraphs": asked}]}), encoding="utf-8")
    return f"squad-json:{folder / 'questions.json'}"


@pytest.mark.parametrize("task", HEADS)
def test_optimum_on_texts(here: Path, task: str) -> None:
    name, output = HEADS[task]
    done = here / "optimum" / task
    words = [*WORDS, "--task", task, "--deliver", "optimum"]
    data = _questions(here) if task == "question-answering" else str(here / "texts.txt")
    _convert(_with_head(here, name), done, *words, data=data)

    def given(served: Any) -> dict[str, Any]:
        texts = [" ".join([*COMMON[:4], GOOD[0]]), " ".join([*COMMON[4:6], BAD[1]])]
        return dict(served.processor(texts, padding=True, return_tensors="np"))

    _check_optimum(here, done, task, output, given)


@pytest.mark.parametrize(
    ("task", "make"), [("audio-classification", tiny_wav2vec2), ("automatic-speech-recognition", tiny_ctc)]
)
def test_optimum_on_recordings(here: Path, tmp_path: Path, task: str, make: Callable[[Path], Path]) -> None:
    data = str(tiny_recordings(tmp_path / "recordings", 12, seed=1))
    words = ["--batch-size", "1", "2", "4", "--deliver", "optimum"]
    # ONNX Runtime's class has no mask, which this recognizer needs.
    backends = ["openvino"] if make is tiny_ctc else list(MODULES)
    _convert(make(tmp_path / "model"), tmp_path / "done", *words, data=data, backends=backends)
    paths = sorted((tmp_path / "recordings").glob("*/*.wav"))[:2]
    _check_optimum(tmp_path, tmp_path / "done", task, "logits", lambda served: served.inputs(paths), backends)


def test_optimum_on_masks(here: Path, tmp_path: Path) -> None:
    data = str(tiny_images(tmp_path / "images", 12, seed=1))
    words = ["--batch-size", "1", "2", "4", "--deliver", "optimum"]
    _convert(tiny_segformer(tmp_path / "model"), tmp_path / "done", *words, data=data, backends=["onnxruntime"])
    pictures = sorted((tmp_path / "images").glob("*/*.png"))[:2]

    def given(served: Any) -> dict[str, Any]:
        return dict(served.inputs(pictures))

    _check_optimum(tmp_path, tmp_path / "done", "semantic-segmentation", "logits", given, ["onnxruntime"])


def test_images(here: Path, tmp_path: Path) -> None:
    """Optimum, and transformers.js, which prepares an image by itself."""
    data = str(tiny_images(tmp_path / "images", 16, seed=1))
    done = tmp_path / "done"
    layouts = ["--deliver", "optimum", "transformers-js"]
    _convert(tiny_vit(tmp_path / "model"), done, "--batch-size", "1", "2", "4", *layouts, data=data)
    pictures = sorted((tmp_path / "images").glob("*/*.png"))[:2]
    _check_optimum(tmp_path, done, "image-classification", "logits", lambda served: served.inputs(pictures))
    code = f"""\
import {{ AutoModelForImageClassification, AutoProcessor, RawImage, env }} from "@huggingface/transformers";
env.allowRemoteModels = false;
env.localModelPath = "{done}/onnxruntime/";
const processor = await AutoProcessor.from_pretrained("transformers-js");
const model = await AutoModelForImageClassification.from_pretrained("transformers-js", {{ dtype: "q8" }});
const images = await Promise.all({json.dumps(list(map(str, pictures)))}.map((path) => RawImage.read(path)));
const outputs = (await model(await processor(images))).logits.tolist();
"""
    ours = load_converted(done / "onnxruntime")(pictures)["logits"]
    # It resizes images by another library, whose pixels differ.
    assert _sqnr(ours, _run(here, code, "js")) >= 15
