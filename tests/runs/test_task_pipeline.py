"""``load_pipeline``: results of each task beside those of transformers' own pipeline, and padding of inputs.

Texts, images and recordings in the fast suite: test_convert.py, test_convert_images.py and test_convert_audio.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

for _package in ("transformers", "PIL", "scipy", "onnx", "onnxscript", "openvino"):
    pytest.importorskip(_package, reason="a pipeline needs enginequant[hf,onnx,openvino]")

import transformers
from tiny_audio import tiny_ctc, tiny_recordings
from tiny_run import BAD, COMMON, GOOD
from tiny_seq2seq import tiny_whisper
from tiny_vision import tiny_dinov2, tiny_images

import quantizer
from quantizer.cli.main import main
from quantizer.errors import QuantizerError
from quantizer.pipeline import benchmark
from quantizer.pipeline.engine_sizes import EngineSizes
from quantizer.pipeline.load import Converted
from quantizer.pipeline.task_pipeline import _padded
from quantizer.tasks import Recordings, load_processor, tasks

WIDTHS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
WORDS = [*COMMON, *GOOD, *BAD]
TEXTS = [
    "good film",
    "the plot was dull and slow and bad",
    "warm",
    "a good plot and a bad film the film was dull",
    "bad",
]


def test_pipelines_are_those_of_transformers() -> None:
    without = {"multiple-choice", "question-answering", "text-generation", "text-generation-with-past", "text-to-text"}
    assert {name for name in tasks.names() if tasks[name].pipeline_class is None} == without
    for name in set(tasks.names()) - without:
        assert issubclass(getattr(transformers, tasks[name].pipeline_class or ""), transformers.Pipeline)


def _text_engine(side: str) -> Converted:
    """A converted engine for texts of 8 to 16 tokens, as far as padding needs it."""
    shapes: list[dict[str, Any]] = [{"name": "input_ids", "shape": ["batch", "sequence"]}]
    config = {"task": "token-classification", "inputs": shapes, "dimensions": {"batch": (1, 2, 4)}}
    sizes = EngineSizes({"batch": (1, 2, 4), "sequence": (8, 8, 16)})
    processor = SimpleNamespace(pad_token_id=9, padding_side=side)
    return SimpleNamespace(config=config, sizes=sizes, processor=processor)  # type: ignore[return-value]


@pytest.mark.parametrize(("side", "row"), [("right", [1, 2, 3, 9, 9, 9, 9, 9]), ("left", [9, 9, 9, 9, 9, 1, 2, 3])])
def test_texts_are_padded_on_the_side_of_the_tokenizer(side: str, row: list[int]) -> None:
    arrays, cut = _padded(_text_engine(side), {"input_ids": np.array([[1, 2, 3]])})
    assert arrays["input_ids"].tolist() == [row]
    assert arrays["input_ids"][:, cut].tolist() == [[1, 2, 3]]
    exact = np.ones((1, 12), np.int64)
    arrays, cut = _padded(_text_engine(side), {"input_ids": exact})
    assert arrays["input_ids"][:, cut].shape == exact.shape
    with pytest.raises(QuantizerError, match="input_ids has the length 17, but the engine was built for at most 16"):
        _padded(_text_engine(side), {"input_ids": np.ones((1, 17), np.int64)})
    with pytest.raises(
        QuantizerError, match="returned token_type_ids, but the engine also needs input_ids: the folder"
    ):
        _padded(_text_engine(side), {"token_type_ids": exact})


# -- each task, nightly ------------------------------------------------------------------------------------------------


def _bert(kind: str, folder: Path, **options: Any) -> None:
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    config = transformers.BertConfig(
        vocab_size=len(WORDS) + 5, max_position_embeddings=64, initializer_range=0.3, **WIDTHS, **options
    )
    getattr(transformers, kind)(config).save_pretrained(folder)
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)


def _words(folder: Path) -> Sequence[Any]:
    _bert("BertForTokenClassification", folder, id2label={0: "O", 1: "B-X"}, label2id={"O": 0, "B-X": 1})
    return TEXTS


def _masked(folder: Path) -> Sequence[Any]:
    _bert("BertForMaskedLM", folder)
    return [f"{text} [MASK]" for text in TEXTS]


def _encoder(folder: Path) -> Sequence[Any]:
    _bert("BertModel", folder)
    return TEXTS


def _photos(folder: Path) -> list[str]:
    tiny_images(folder / "photos", 5, seed=1)
    return sorted(map(str, (folder / "photos").rglob("*.*")))[:5]


def _segmentation(folder: Path) -> Sequence[Any]:
    config = transformers.SegformerConfig(
        hidden_sizes=[8, 16, 16, 16], decoder_hidden_size=16, id2label={0: "road", 1: "sky"}
    )
    transformers.SegformerForSemanticSegmentation(config).save_pretrained(folder)
    transformers.SegformerImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return _photos(folder)


def _detection(folder: Path) -> Sequence[Any]:
    sizes = {**WIDTHS, "num_hidden_layers": 2, "image_size": [32, 32], "num_detection_tokens": 10}
    config = transformers.YolosConfig(**sizes, id2label={0: "cat", 1: "dog"}, label2id={"cat": 0, "dog": 1})
    transformers.YolosForObjectDetection(config).save_pretrained(folder)
    transformers.YolosImageProcessorPil(size={"height": 32, "width": 32}, do_pad=False).save_pretrained(folder)
    return _photos(folder)


def _features(folder: Path) -> Sequence[Any]:
    return _photos(tiny_dinov2(folder))


def _zero_shot(folder: Path) -> Sequence[Any]:
    _bert("BertModel", folder)
    text = {**WIDTHS, "vocab_size": len(WORDS) + 5, "eos_token_id": 3}
    vision = {**WIDTHS, "image_size": 32, "patch_size": 8}
    transformers.CLIPModel(
        transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)
    ).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return _photos(folder)


def _ctc(folder: Path) -> Sequence[Any]:
    tiny_recordings(folder / "tones", 5, seed=1)
    return sorted(map(str, (tiny_ctc(folder) / "tones").rglob("*.wav")))


def _whisper(folder: Path) -> Sequence[Any]:
    tiny_recordings(folder / "tones", 5, seed=1)
    return sorted(map(str, (tiny_whisper(folder) / "tones").rglob("*.wav")))


def _equal(found: Any, expected: Any) -> None:
    """Compare results, whose numbers differ by rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            _equal(found[name], value)
    elif isinstance(expected, list | tuple):
        for pair in zip(found, expected, strict=True):
            _equal(*pair)
    elif isinstance(expected, float | np.floating):
        assert found == pytest.approx(expected, abs=1e-4)
    elif hasattr(expected, "getdata"):
        assert np.array_equal(found, expected)
    else:
        assert found == expected


def _waves(task: str, folder: Path, paths: Sequence[Any]) -> list[Any]:
    processor = load_processor(str(folder), task)
    recordings = Recordings(processor.feature_extractor, None)
    return [recordings.wave(Path(path))[: recordings.samples] for path in paths]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("task", "made", "ours", "theirs", "called"),
    [
        ("token-classification", _words, {}, {}, {}),
        ("fill-mask", _masked, {}, {}, {}),
        ("sentence-similarity", _encoder, {}, {"task": "feature-extraction"}, {}),
        ("semantic-segmentation", _segmentation, {}, {"task": "image-segmentation", "subtask": "semantic"}, {}),
        ("image-feature-extraction", _features, {}, {}, {}),
        ("object-detection", _detection, {"threshold": 0.1}, {"threshold": 0.1}, {}),
        (
            "zero-shot-image-classification",
            _zero_shot,
            {},
            {},
            {"candidate_labels": ["good", "bad"], "hypothesis_template": "{}"},
        ),
        ("automatic-speech-recognition", _ctc, {}, {}, {}),
        (
            "speech-to-text",
            _whisper,
            {},
            {"task": "automatic-speech-recognition", "generate_kwargs": {"max_new_tokens": 8}},
            {},
        ),
    ],
)
def test_results_are_those_of_transformers(
    task: str,
    made: Callable[[Path], Sequence[Any]],
    ours: dict[str, Any],
    theirs: dict[str, Any],
    called: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Float engines, so that only the rounding of sums differs; five samples for an engine of at most four."""
    monkeypatch.setattr(benchmark, "_LATENCY_SECONDS", 0.1)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    samples = made(tmp_path)
    words = ["--batch-size", "1", "2", "4", "--backend", "openvino", "--task", task, "-o", str(tmp_path / "out")]
    if tasks[task].reads == "text":
        words += ["--seq-len", "8", "16", "32"]
    if tasks[task].names_labels:
        words += ["--labels", "good", "bad", "--template", "{}"]
    if tasks[task].in_parts:
        words += ["--new-tokens", "8"]
    assert main(["convert", "-m", str(tmp_path), *words]) == 0
    found = quantizer.load_pipeline(tmp_path / "out" / "openvino", **ours)(samples)
    loaded: dict[str, Any] = {"task": task, "model": str(tmp_path), **theirs}
    if tasks[task].reads == "image":
        loaded["image_processor"] = load_processor(str(tmp_path), task)
    elif tasks[task].reads == "audio":
        samples = _waves(task, tmp_path, samples)
    assert len(found) == len(samples) == 5
    _equal(found, transformers.pipeline(**loaded)(samples, **called))
