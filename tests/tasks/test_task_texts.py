"""Plain files of texts, and what a checkpoint says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from quantizer.errors import TaskError
from quantizer.tasks import read_checkpoint, read_texts

GOOD = {
    "lines.txt": "a good film\n\n  the plot was dull \r\n",
    "rows.csv": 'id,text\n1,a good film\n2,"the plot was dull"\n3,""\n',
    "rows.jsonl": '{"text": "a good film"}\n\n{"text": "the plot was dull", "id": 2}\n',
    "MARKED.TXT": "\N{ZERO WIDTH NO-BREAK SPACE}a good film\nthe plot was dull",
}


@pytest.mark.parametrize("name", GOOD)
def test_texts_of_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(GOOD[name], encoding="utf-8", newline="")
    assert read_texts(tmp_path / name) == ["a good film", "the plot was dull"]


def test_another_column(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,review\n1,good\n")
    (tmp_path / "a.jsonl").write_text('{"review": "good"}\n')
    assert read_texts(tmp_path / "a.csv", "review") == read_texts(tmp_path / "a.jsonl", "review") == ["good"]


@pytest.mark.parametrize(
    ("kind", "architecture", "task"),
    [
        ("Bert", "BertModel", "sentence-similarity"),
        ("Bert", "BertForSequenceClassification", "sequence-classification"),
        ("Bert", "BertForTokenClassification", "token-classification"),
        ("Bert", "BertForQuestionAnswering", "question-answering"),
        ("Bert", "BertForMultipleChoice", "multiple-choice"),
        ("Bert", "BertForMaskedLM", "fill-mask"),
        ("Bert", "BertForPreTraining", None),
        ("Bert", None, None),
        ("GPT2", "GPT2LMHeadModel", "text-generation"),
        ("T5", "T5ForConditionalGeneration", "text-to-text"),
        ("Bart", "BartForConditionalGeneration", "text-to-text"),
        ("Whisper", "WhisperForConditionalGeneration", "speech-to-text"),
        ("ViT", "ViTForImageClassification", "image-classification"),
        ("ViT", "ViTModel", "image-feature-extraction"),
        ("Dinov2", "Dinov2Model", "image-feature-extraction"),
        ("GLPN", "GLPNForDepthEstimation", "depth-estimation"),
        ("Segformer", "SegformerForSemanticSegmentation", "semantic-segmentation"),
        ("Wav2Vec2", "Wav2Vec2ForSequenceClassification", "audio-classification"),
        ("AST", "ASTForAudioClassification", "audio-classification"),
        ("Wav2Vec2", "Wav2Vec2ForCTC", "automatic-speech-recognition"),
    ],
)
def test_a_checkpoint_tells_its_task(tmp_path: Path, kind: str, architecture: str | None, task: str | None) -> None:
    names: dict[str, Any] = {
        "architectures": None if architecture is None else [architecture],
        "id2label": {1: "good", 0: "bad"},
    }
    names |= {"max_position_embeddings": 40} if kind == "Bert" else {}
    getattr(transformers, f"{kind}Config")(**names).save_pretrained(tmp_path)
    found = read_checkpoint(str(tmp_path))
    assert (found.architecture, found.task, found.labels) == (architecture, task, ("bad", "good"))
    if kind == "Bert":
        assert found.positions == 40


def test_a_checkpoint_without_text(tmp_path: Path) -> None:
    transformers.PatchTSTConfig(architectures=["PatchTSTModel"]).save_pretrained(tmp_path)
    with pytest.raises(TaskError, match="PatchTSTModel has no vocabulary, and transformers has no classifier"):
        read_checkpoint(str(tmp_path))


def test_a_checkpoint_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(TaskError, match="cannot load the config of model source"):
        read_checkpoint(str(tmp_path))
