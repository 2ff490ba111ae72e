"""A tiny model of each task with data and inputs, converted once for all clients into ``runs/clients``."""

from __future__ import annotations

import csv
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_audio import tiny_ctc, tiny_recordings, tiny_wav2vec2
from tiny_run import tiny_run
from tiny_seq2seq import tiny_t5, tiny_whisper
from tiny_vision import SIZE, tiny_detector, tiny_dinov2, tiny_images, tiny_segformer, tiny_vit

from quantizer.cli.main import main
from quantizer.pipeline import benchmark
from quantizer.pipeline.load import empty_cache
from quantizer.plan.targets import profile
from quantizer.plan.targets.clients import OF_ANY_BACKEND
from quantizer.tasks import load_model
from quantizer.tasks.outputs import MEAN
from quantizer.tasks.text_generation import next_cache

ROOT = Path(__file__).parents[2]
BACKENDS = ("openvino", "onnxruntime")
TEXTS = ["the film was good", "a dull plot"]
PAIRS = [(TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[0])]
MADE = ROOT / "runs" / "clients"
SESSION = os.environ.get("PYTEST_XDIST_TESTRUNUID", uuid.uuid4().hex)
"""The session of tests, of which pytest-xdist may have several processes."""
_TOKENS = 6
"""Number of generated tokens."""

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A task with a tiny model of it.

    Attributes:
        make: makes the model's folder.
        data: makes the calibration data, and returns its name for ``--calibration``.
        words: further options of the conversion.
        output: the compared output of the graph.
        graphs: the number of graphs.
    """

    make: Callable[[Path], Path]
    data: Callable[[Path], str]
    words: Sequence[str] = ()
    output: str = "logits"
    graphs: int = 1


def _classifier(folder: Path) -> Path:
    tiny_run(folder.parent)
    shutil.copytree(folder.parent / "model", folder)
    return folder


def _bert(folder: Path, name: str) -> Path:
    """A model with another head than that of the tiny classifier, with its sizes and tokenizer."""
    tiny_run(folder.parent)
    config = transformers.AutoConfig.from_pretrained(folder.parent / "model")
    torch.manual_seed(0)
    getattr(transformers, name)(config).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(folder.parent / "model").save_pretrained(folder)
    return folder


def _llama(folder: Path) -> Path:
    """A decoder whose heads share keys."""
    _bert(folder, "BertModel")
    (folder / "model.safetensors").unlink()
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.LlamaConfig(
        vocab_size=25, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, **sizes, **ids
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _clip(folder: Path) -> Path:
    """Two towers, of images and of the names of classes."""
    _bert(folder, "BertModel")
    (folder / "model.safetensors").unlink()
    tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.CLIPConfig(
        text_config={**tower, "vocab_size": 25, "eos_token_id": 3, "initializer_range": 0.2},
        vision_config={**tower, "image_size": SIZE, "patch_size": 8, "initializer_range": 0.2},
        projection_dim=24,
    )
    torch.manual_seed(0)
    transformers.CLIPModel(config).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return folder


def _glpn(folder: Path) -> Path:
    """A model of distances."""
    sizes = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 1, 2, 2]}
    torch.manual_seed(0)
    transformers.GLPNForDepthEstimation(transformers.GLPNConfig(decoder_hidden_size=8, **sizes)).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return folder


def _texts(folder: Path) -> str:
    tiny_run(folder)
    with (folder / "calibration.csv").open(newline="", encoding="utf-8") as rows:
        (folder / "texts.txt").write_text("".join(f"{row['text']}\n" for row in csv.DictReader(rows)), encoding="utf-8")
    return str(folder / "texts.txt")


def _lines(folder: Path) -> list[str]:
    return Path(_texts(folder)).read_text(encoding="utf-8").splitlines()


def _questions(folder: Path) -> str:
    """Questions about texts, in the format of SQuAD."""
    asked = [
        {"context": text, "qas": [{"question": "was the film good", "answers": [{"text": text, "answer_start": 0}]}]}
        for text in _lines(folder)
    ]
    (folder / "questions.json").write_text(json.dumps({"data": [{"paragraphs": asked}]}), encoding="utf-8")
    return f"squad-json:{folder / 'questions.json'}"


def _choices(folder: Path) -> str:
    rows = [{"question": text, "choices": ["good", "a dull plot"], "label": 0} for text in _lines(folder)]
    (folder / "choices.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return f"choices-jsonl:{folder / 'choices.jsonl'}"


def _images(folder: Path) -> str:
    return str(tiny_images(folder / "images", 12, seed=1))


def _recordings(folder: Path) -> str:
    return str(tiny_recordings(folder / "recordings", 12, seed=1))


_LENGTHS = ("--seq-len", "8", "16", "32")
_WRITES = ("--new-tokens", str(_TOKENS))
_PLAIN_BERT = partial(_bert, name="BertModel")

CASES: Mapping[str, Case] = {
    "sequence-classification": Case(_classifier, _texts, _LENGTHS),
    "token-classification": Case(partial(_bert, name="BertForTokenClassification"), _texts, _LENGTHS),
    "question-answering": Case(partial(_bert, name="BertForQuestionAnswering"), _questions, _LENGTHS, "start_logits"),
    "fill-mask": Case(partial(_bert, name="BertForMaskedLM"), _texts, _LENGTHS),
    "sentence-similarity": Case(_PLAIN_BERT, _texts, _LENGTHS, "last_hidden_state"),
    "multiple-choice": Case(partial(_bert, name="BertForMultipleChoice"), _choices, _LENGTHS),
    "text-generation": Case(_llama, _texts, _LENGTHS),
    "text-generation-with-past": Case(_llama, _texts, _LENGTHS),
    "text-to-text": Case(tiny_t5, _texts, (*_LENGTHS, *_WRITES), graphs=3),
    "image-classification": Case(tiny_vit, _images),
    "image-feature-extraction": Case(tiny_dinov2, _images, output="last_hidden_state"),
    "zero-shot-image-classification": Case(_clip, _images, ("--labels", "good", "bad", "--template", "a {}")),
    "semantic-segmentation": Case(tiny_segformer, _images),
    "depth-estimation": Case(_glpn, _images, output="predicted_depth"),
    "object-detection": Case(partial(tiny_detector, kind="yolos"), _images),
    "audio-classification": Case(tiny_wav2vec2, _recordings),
    "automatic-speech-recognition": Case(tiny_ctc, _recordings),
    "speech-to-text": Case(tiny_whisper, _recordings, _WRITES, graphs=3),
}
"""By task. Models of ``retrieval`` and ``embedding-classification`` are those of ``sentence-similarity``."""


def convert(model: Path, output: Path, *words: str) -> None:
    """Convert a model, with short latency benchmarks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark, "_LATENCY_SECONDS", 0.05)
        assert main(["convert", "-m", str(model), "--quantization", "-o", str(output), *words]) == 0


def layouts_of(task: str, backend: str) -> list[str]:
    """The layouts of a backend for the tiny model of a task."""
    # The weights alone have no factors of SmoothQuant; the guide uses them with one model.
    weights = {} if task != "sequence-classification" else OF_ANY_BACKEND
    known = {**profile(backend).layouts, **weights}
    # The recognizer of letters needs a mask.
    masked = {"automatic-speech-recognition"} & {task}
    return [
        name
        for name, layout in known.items()
        if not layout.classes or (task in layout.classes and not masked & layout.unmasked)
    ]


def begin(made: Path, session: str) -> None:
    """Remove models and rows that another session made: the code may have changed since."""
    stamp = made / "session"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != session:
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
        stamp.write_text(session, encoding="utf-8")


def converted(task: str, backend: str) -> Path:
    """The folder of a converted model; it is made if this session did not make it yet."""
    begin(MADE, SESSION)
    done = MADE / task / backend
    if not done.exists():
        case = CASES[task]
        done.parent.mkdir(parents=True, exist_ok=True)
        data, model = case.data(done.parent), done.parent / "checkpoint"
        if not model.exists():
            case.make(model)
        sizes = ["--batch-size", "1", "2", "4", "--task", task, "--backend", backend, "--calibration", data]
        convert(model, done, *sizes, *case.words, "--deliver", *layouts_of(task, backend))
    return done / backend


def samples(task: str) -> list[Any]:
    """Two texts, pairs of texts, images or recordings, in the format of the processor."""
    if CASES[task].data in (_images, _recordings):
        return sorted(path for kind in ("png", "wav") for path in (MADE / task).glob(f"*/*/*.{kind}"))[:2]
    return PAIRS if task in ("multiple-choice", "question-answering") else TEXTS


def inputs_of(task: str, served: Any, texts: Sequence[Any] | None = None) -> Arrays:
    """The inputs of the graph, or of the encoder and the decoder of several graphs."""
    given = samples(task) if texts is None else texts
    if isinstance(given[0], Path) or CASES[task].graphs > 1:
        arrays = dict(served.inputs(given))
    else:
        arrays = dict(served.processor(given, padding=True, return_tensors="np"))
    if CASES[task].graphs > 1:
        start = served.model.config.decoder_start_token_id
        return {**arrays, "decoder_input_ids": np.array([[start, 5], [start, 6]])}
    if task == "text-generation-with-past":
        del arrays["token_type_ids"]
        arrays = _with_past(served, arrays)
    specs = {spec.name: spec for spec in served.engine.inputs}
    return {name: arrays[name].astype(spec.dtype) for name, spec in specs.items()}


def _with_past(served: Any, arrays: Arrays) -> Arrays:
    """The last token of each text, and the cache of the others."""
    ids, mask = arrays["input_ids"].astype(np.int64), arrays["attention_mask"].astype(np.int64)
    first = {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1], **empty_cache(served.engine.inputs, len(ids))}
    return {"input_ids": ids[:, -1:], "attention_mask": mask, **_numpy(next_cache(served.engine(first)))}


def _numpy(tensors: Mapping[str, torch.Tensor]) -> Arrays:
    return {name: tensor.numpy() for name, tensor in tensors.items()}


def ours(task: str, served: Any, given: Arrays) -> Any:
    """What our engines compute of the inputs."""
    case = CASES[task]
    return served.engine(given)[case.output] if case.graphs == 1 else two_steps(served.model, given)


def float_outputs(task: str, given: Arrays) -> Any:
    """What the float model computes of the inputs."""
    case = CASES[task]
    texts = {"texts": {"good": "a good", "bad": "a bad"}} if task.startswith("zero-shot") else {}
    model = load_model(str(MADE / task / "checkpoint"), task, **texts)
    with torch.no_grad():
        if case.graphs > 1:
            return two_steps(model, given)
        return model(**{name: torch.from_numpy(array) for name, array in given.items()})[case.output].numpy()


def two_steps(model: Any, given: Arrays) -> Any:
    """The logits of two tokens [2 x 2 x V], of which the second one is read with a cache."""
    batch = {name: torch.from_numpy(array) for name, array in given.items()}
    tokens = batch.pop("decoder_input_ids")
    first = model(**batch, decoder_input_ids=tokens[:, :1], use_cache=True)
    past = {"past_key_values": first.past_key_values, "use_cache": True}
    second = model(**batch, decoder_input_ids=tokens[:, 1:], **past)
    return torch.cat([first.logits, second.logits], dim=1).detach().numpy()


def embeddings(served: Any, given: Arrays) -> Any:
    """The embeddings of texts, which sentence-transformers computes of the graph's output."""
    hidden = torch.from_numpy(served.engine(given)["last_hidden_state"])
    return MEAN.embeddings(hidden, torch.from_numpy(given["attention_mask"])).numpy()


def reference(task: str, served: Any, *, sentences: bool = False) -> tuple[Arrays, Any]:
    """The inputs of a call, and what our engine gives for them; as sentence-transformers does if ``sentences``."""
    if sentences and task == "sentence-similarity":
        given = inputs_of(task, served)
        return given, embeddings(served, given)
    given = inputs_of(task, served, PAIRS if sentences else None)
    return given, ours(task, served, given)
