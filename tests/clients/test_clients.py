"""The layouts of ``deliver``, loaded by the real clients in their own environment: ``make clients``.

OpenVINO computes what our engine computes. ONNX Runtime applies more fusions in the clients, so that some values round
differently: it is held to the limit of the output check.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

for _package in ("transformers", "onnx", "openvino", "onnxruntime", "PIL", "scipy"):
    pytest.importorskip(_package, reason="layouts need enginequant[hf,onnx,openvino,onnxruntime]")

from client_code import ALL, JAVASCRIPT_END, LIMITS, PYTHON_END, Client, Row, measure, require, sqnr, started
from client_environment import CLIENTS
from client_models import (
    BACKENDS,
    CASES,
    PAIRS,
    TEXTS,
    converted,
    embeddings,
    inputs_of,
    ours,
    samples,
)
from client_page import page

from quantizer import load_converted, load_pipeline
from quantizer.pipeline.load import greedy
from quantizer.plan.targets.clients import PIPELINES

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "serve-with.md").read_text(encoding="utf-8")
SECTIONS = re.findall(r"^<!-- client: (\w+) (\w+) -->\n```(py|js)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder to run programs in."""
    if (CLIENTS / "node_modules").exists():
        (tmp_path / "node_modules").symlink_to((CLIENTS / "node_modules").resolve())
    return tmp_path


# -- the guide ---------------------------------------------------------------------------------------------------------

MODELS = {
    "classifier": "sequence-classification",
    "pairs": "sequence-classification",
    "weights": "sequence-classification",
    "embedder": "sentence-similarity",
    "translator": "text-to-text",
    "writer": "text-generation-with-past",
}
"""The tasks of the models of the guide."""
WEIGHTS = 15
"""Minimum SQNR in dB of a client that loads the weights alone: attention and residual adds are in floating point."""


def _expected(kind: str, backend: str) -> Any:
    """What our engine computes of the texts of the guide."""
    task = MODELS[kind]
    served = load_converted(converted(task, backend))
    if kind == "translator":
        return np.array(served.generate(TEXTS, tokens=6))
    if kind == "writer":
        return np.array([_words(served.generate(TEXTS[0], tokens=6))])
    given = inputs_of(task, served, PAIRS if kind == "pairs" else TEXTS)
    return embeddings(served, given) if kind == "embedder" else ours(task, served, given)


def _words(text: str) -> str:
    """A text without special tokens."""
    return " ".join(word for word in text.split() if not word.startswith("["))


@pytest.mark.parametrize(
    ("kind", "backend", "language", "code"),
    SECTIONS,
    ids=[f"{number}-{kind}-{backend}-{language}" for number, (kind, backend, language, _) in enumerate(SECTIONS)],
)
def test_the_code_of_the_guide(place: Path, kind: str, backend: str, language: str, code: str) -> None:
    require(language)
    name = place / "converted" / f"my-{'classifier' if MODELS[kind] == MODELS['classifier'] else kind}"
    name.mkdir(parents=True)
    (name / backend).symlink_to(converted(MODELS[kind], backend))
    with started(place, code + {"py": PYTHON_END, "js": JAVASCRIPT_END}[language], language) as program:
        given, expected = program.outputs, _expected(kind, backend)
    if expected.dtype.kind == "U":
        assert given.tolist() == expected.tolist()
    else:
        assert sqnr(expected, given) >= (WEIGHTS if kind == "weights" else LIMITS[backend])


def test_the_guide_has_a_section_for_each_client() -> None:
    assert len(SECTIONS) == 11
    assert all(layout in PAGE for layout in ("openvino/model.xml", "onnx/model.onnx", "/optimum", '"transformers-js"'))


# -- the model cards --------------------------------------------------------------------------------------------------

GRAPHS = {"openvino": "openvino", "onnxruntime": "onnx"}
"""The layouts of graphs alone, whose libraries these tests have themselves."""


def printed(task: str, backend: str, place: Path) -> str:
    """What the code of a card prints, in a copy of the folder of its layout, as after an upload."""
    folder = converted(task, backend) / GRAPHS[backend]
    card = (folder / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```$", card, flags=re.MULTILINE | re.DOTALL)
    for path in folder.iterdir():
        (place / path.name).symlink_to(path)
    if "an-image.png" in code:
        (place / "an-image.png").symlink_to(samples(task)[0])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_card_of_an_encoder_decoder_writes_what_our_engines_write(backend: str, tmp_path: Path) -> None:
    served = load_converted(converted("text-to-text", backend))
    inputs = {name: torch.from_numpy(value) for name, value in served.inputs(TEXTS).items()}
    # The model's own config forbids repeated tokens.
    tokens = served.model.generate(**inputs, max_new_tokens=6, no_repeat_ngram_size=0)
    expected = served.processor.batch_decode(tokens, skip_special_tokens=True)
    assert printed("text-to-text", backend, tmp_path) == str(expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_card_of_a_decoder_with_a_cache_continues_as_our_engine_does(backend: str, tmp_path: Path) -> None:
    task = "text-generation-with-past"
    expected = load_converted(converted(task, backend)).generate(TEXTS[0], tokens=6)
    words = [word for word in expected.split() if not word.startswith("[")]
    assert printed(task, backend, tmp_path) == str([" ".join(words)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_card_of_images_runs(backend: str, tmp_path: Path) -> None:
    assert printed("image-classification", backend, tmp_path).startswith("[[")


# -- each task of each client ------------------------------------------------------------------------------------------

USES = [
    pytest.param(client, task, backend, id=f"{client.name}-{task}-{backend}")
    for task in CASES
    for client in ALL
    for backend in BACKENDS
    if client.loads(task, backend)
]


@pytest.mark.parametrize(("client", "task", "backend"), USES)
def test_outputs_of_a_client(place: Path, client: Client, task: str, backend: str) -> None:
    """Each row is kept for the page, which ``python tests/clients`` writes."""
    require(client.language)
    row = measure(client, task, backend, place)
    assert row.sqnr >= max(LIMITS[backend], row.engine if backend != "openvino" else 0)


def test_the_page_names_what_there_is() -> None:
    """Each task of each layout has a cell or a reason, with or without rows."""
    text = page({})
    for client in ALL:
        assert client.name in text
    # And two of YOLO.
    assert text.count("not run |") == len(USES) + 2
    row = Row(client=ALL[0].name, task="fill-mask", backend="openvino", sqnr=math.inf, engine=31.0, ours=2e-3, its=3e-3)
    assert "| `fill-mask` | 31.0 dB | equal, 1.50x |" in page({row.key: row})


# -- pipelines of transformers.js --------------------------------------------------------------------------------------

PIPELINE = """\
import {{ env, pipeline }} from "@huggingface/transformers";
env.allowRemoteModels = false;
env.localModelPath = "{folder}/";
const pipe = await pipeline("{name}", "transformers-js", {{ dtype: "q8" }});
const outputs = await pipe({arguments});
"""
MASKED = "the film was [MASK]"


def _answer(served: Any) -> Any:
    """The best answer to a question: the likeliest pair of a first and a last token of the context."""
    encoded = dict(served.processor([PAIRS[0]], return_tensors="np"))
    outputs = served.engine({spec.name: encoded[spec.name].astype(spec.dtype) for spec in served.engine.inputs})
    ids = encoded["input_ids"][0]
    allowed = np.where(encoded["token_type_ids"][0] * (ids != served.processor.sep_token_id), 0, -np.inf)
    # The first token stands for no answer. It has a probability, but is not chosen.
    allowed[0] = 0
    first, last = (torch.from_numpy(outputs[f"{end}_logits"][0] + allowed).softmax(0) for end in ("start", "end"))
    spans = (first[:, None] * last).triu()
    spans[0], spans[:, 0] = 0, 0
    start, end = divmod(int(spans.argmax()), len(ids))
    return [{"answer": served.processor.decode(ids[start : end + 1]), "score": float(spans.max())}]


def _by_pipeline(task: str, text: Any, **options: Any) -> Callable[[Any], Any]:
    def call(served: Any) -> Any:
        results = load_pipeline(converted(task, "onnxruntime"), **options)([text])
        # Of one text, the pipeline for fill-mask returns the results without a list around them.
        return results[0] if isinstance(results[0], list) else results

    return call


CALLS: dict[str, tuple[str, Callable[[Any], Any], tuple[str, ...]]] = {
    "sequence-classification": (
        f'"{TEXTS[0]}", {{ top_k: null }}',
        _by_pipeline("sequence-classification", TEXTS[0], top_k=None),
        ("label",),
    ),
    "token-classification": (
        f'"{TEXTS[0]}", {{ ignore_labels: [] }}',
        _by_pipeline("token-classification", TEXTS[0], ignore_labels=[]),
        ("entity", "word", "index"),
    ),
    "question-answering": (f'"{PAIRS[0][0]}", "{PAIRS[0][1]}"', _answer, ("answer",)),
    "fill-mask": (f'"{MASKED}"', _by_pipeline("fill-mask", MASKED), ("token_str",)),
}
"""The arguments of a pipeline by task, what our engine gives, and the names in each of its results."""


@pytest.mark.parametrize("task", CALLS)
def test_scores_of_pipelines(place: Path, task: str) -> None:
    arguments, expected, names = CALLS[task]
    given = _piped(place, task, arguments)
    right = expected(load_converted(converted(task, "onnxruntime")))
    given = given if isinstance(given, list) else [given]
    assert [[row[name] for name in names] for row in given] == [[row[name] for name in names] for row in right]
    assert sqnr(*(np.array([row["score"] for row in rows]) for rows in (right, given))) >= LIMITS["onnxruntime"]


def _piped(place: Path, task: str, arguments: str) -> Any:
    require("js")
    code = PIPELINE.format(folder=converted(task, "onnxruntime"), name=PIPELINES[task], arguments=arguments)
    end = "import { writeFileSync } from 'node:fs';\nwriteFileSync('result.json', JSON.stringify(outputs.tolist?.() "
    end += "?? outputs));\nconsole.log('ready');\n"
    with started(place, code + end, "js", outputs=False):
        return json.loads((place / "result.json").read_text(encoding="utf-8"))


def test_embeddings_of_a_pipeline(place: Path) -> None:
    task = "sentence-similarity"
    given = _piped(place, task, f"{json.dumps(TEXTS)}, {{ pooling: 'mean', normalize: true }}")
    served = load_converted(converted(task, "onnxruntime"))
    assert sqnr(embeddings(served, inputs_of(task, served)), np.array(given)) >= LIMITS["onnxruntime"]


def test_the_text_of_a_pipeline(place: Path) -> None:
    task = "text-generation-with-past"
    (result,) = _piped(place, task, f'"{TEXTS[0]}", {{ max_new_tokens: 6, do_sample: false }}')
    served = load_converted(converted(task, "onnxruntime"))
    # It leaves out special tokens.
    ids = served.processor(TEXTS[0], add_special_tokens=False)["input_ids"]
    tokens = greedy(served.engine, ids, 6, served.processor.eos_token_id)
    assert result["generated_text"] == served.processor.decode(tokens, skip_special_tokens=True)


def test_images_that_a_pipeline_resizes(place: Path) -> None:
    task = "image-classification"
    converted(task, "onnxruntime")
    paths = list(map(str, samples(task)))
    given = _piped(place, task, f"{json.dumps(paths)}, {{ top_k: 3 }}")
    right = load_pipeline(converted(task, "onnxruntime"), top_k=3)(paths)
    # It resizes images by another library, whose pixels differ.
    scores = [[{row["label"]: row["score"] for row in rows} for rows in results] for results in (right, given)]
    assert sqnr(*(np.array([[row[label] for label in scores[0][0]] for row in rows]) for rows in scores)) >= 15
