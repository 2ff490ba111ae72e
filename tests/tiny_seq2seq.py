"""Tiny encoders with decoders that write text, with their tokenizers and processors, made here."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers

TEXTS = ("the cat is fast and the dog is not slow .", "a good film and not a bad plane .", "the film was fine")
WORDS = sorted({word for text in TEXTS for word in text.split()})
SPECIAL = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|transcribe|>", "<|notimestamps|>")


def _words(folder: Path) -> int:
    """Save a tokenizer of words, and return their number; [CLS] begins what is written, and [SEP] ends it."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    tokenizer = transformers.BertTokenizer(vocab=str(vocabulary))
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def _saved(model: transformers.PreTrainedModel, folder: Path, scale: float) -> Path:
    """Save a model with larger weights, which writes no token twice: what it writes depends on what it reads."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(scale)
    model.generation_config.no_repeat_ngram_size = 1
    model.save_pretrained(folder)
    return folder


def tiny_t5(folder: Path) -> Path:
    """A T5: relative positions, and scores that are not scaled."""
    ids = {"pad_token_id": 0, "eos_token_id": 3, "decoder_start_token_id": 2}
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    config = transformers.T5Config(vocab_size=_words(folder), **sizes, **ids)
    torch.manual_seed(0)
    return _saved(transformers.T5ForConditionalGeneration(config).eval(), folder, 1)


def tiny_bart(folder: Path) -> Path:
    """A BART, which searches with two beams."""
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
    sizes = {f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in _SIZES.items()}
    config = transformers.BartConfig(
        vocab_size=_words(folder), d_model=32, max_position_embeddings=64, forced_eos_token_id=None, **sizes, **ids
    )
    torch.manual_seed(0)
    model = transformers.BartForConditionalGeneration(config).eval()
    model.generation_config.num_beams = 2
    return _saved(model, folder, 8)


def tiny_whisper(folder: Path) -> Path:
    """A Whisper of one second, which finds out the language first, and begins with two tokens more."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = {token: number for number, token in enumerate([*"abcdefgh", "\u0120", *SPECIAL])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = transformers.WhisperTokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    tokenizer.pad_token = SPECIAL[0]
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    extractor = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    transformers.WhisperProcessor(feature_extractor=extractor, tokenizer=tokenizer).save_pretrained(folder)
    end = {f"{name}_token_id": vocabulary[SPECIAL[0]] for name in ("pad", "bos", "eos")}
    ids = {**end, "decoder_start_token_id": vocabulary[SPECIAL[1]]}
    sizes = {f"{half}_{name}": size for half in ("encoder", "decoder") for name, size in _SIZES.items()}
    lengths = {"max_source_positions": 50, "max_target_positions": 32, "num_mel_bins": 16}
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer),
        d_model=32,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        **lengths,
        **sizes,
        **ids,
    )
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).eval()
    model.generation_config = transformers.GenerationConfig(
        is_multilingual=True,
        lang_to_id={name: vocabulary[name] for name in ("<|en|>", "<|de|>")},
        task_to_id={"transcribe": vocabulary["<|transcribe|>"]},
        no_timestamps_token_id=vocabulary["<|notimestamps|>"],
        begin_suppress_tokens=[vocabulary[SPECIAL[0]]],
        max_length=32,
        **ids,
    )
    return _saved(model, folder, 8)


_SIZES = {"layers": 1, "attention_heads": 4, "ffn_dim": 48}
