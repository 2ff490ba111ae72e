"""Tiny models of recordings with their feature extractors, and recordings of tones, made here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from scipy.io import wavfile

CLASSES = ("low", "middle", "high")
RATE = 16000
_NAMES = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: number for number, name in enumerate(CLASSES)}}
_LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefgh"]


def _config(**options: object) -> transformers.Wav2Vec2Config:
    return transformers.Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=(32, 32, 32),
        conv_kernel=(10, 8, 4),
        conv_stride=(10, 8, 4),
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        classifier_proj_size=32,
        initializer_range=0.2,
        **options,
    )


def tiny_wav2vec2(folder: Path) -> Path:
    """A classifier of raw samples, which reads filled recordings without a mask."""
    torch.manual_seed(0)
    transformers.Wav2Vec2ForSequenceClassification(_config(**_NAMES)).eval().save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    return folder


def tiny_hubert(folder: Path) -> Path:
    """A classifier of raw samples, with a mask for what fills a recording."""
    torch.manual_seed(0)
    options = _config(feat_extract_norm="layer", do_stable_layer_norm=True, **_NAMES).to_diff_dict()
    config = transformers.HubertConfig(**{name: value for name, value in options.items() if name != "model_type"})
    transformers.HubertForSequenceClassification(config).eval().save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(folder)
    return folder


def tiny_sew(folder: Path) -> Path:
    """A classifier whose code decides by the parity of its time steps, so that a trace is right for half of them."""
    torch.manual_seed(0)
    options = _config(**_NAMES).to_diff_dict()
    config = transformers.SEWConfig(**{name: value for name, value in options.items() if name != "model_type"})
    transformers.SEWForSequenceClassification(config).eval().save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    return folder


def tiny_ast(folder: Path) -> Path:
    """A classifier of spectrograms, whose length is the extractor's own."""
    torch.manual_seed(0)
    options = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ASTConfig(max_length=64, num_mel_bins=32, initializer_range=0.2, **options, **_NAMES)
    transformers.ASTForAudioClassification(config).save_pretrained(folder)
    transformers.ASTFeatureExtractor(max_length=64, num_mel_bins=32).save_pretrained(folder)
    return folder


def tiny_ctc(folder: Path) -> Path:
    """A recognizer of letters, with a mask for what fills a recording."""
    torch.manual_seed(0)
    config = _config(vocab_size=len(_LETTERS), pad_token_id=0, feat_extract_norm="layer", do_stable_layer_norm=True)
    transformers.Wav2Vec2ForCTC(config).eval().save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({letter: number for number, letter in enumerate(_LETTERS)}))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    transformers.Wav2Vec2Processor(feature_extractor=extractor, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def tiny_recordings(folder: Path, count: int, seed: int, rate: int = RATE) -> Path:
    """Tones with noise, a quarter to half a second long, as FOLDER/CLASS/NUMBER.wav."""
    pick = np.random.default_rng(seed)
    for number in range(count):
        seconds = np.arange(int(rate * pick.uniform(0.25, 0.5))) / rate
        wave = 0.5 * np.sin(2 * np.pi * 300 * 3 ** (number % len(CLASSES)) * seconds)
        path = folder / CLASSES[number % len(CLASSES)] / f"{number}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        wavfile.write(path, rate, ((wave + pick.normal(0, 0.05, len(wave))) * 2**14).astype(np.int16))
    return folder
