"""Small random checkpoints, for tasks of which there is no real one here."""

from __future__ import annotations

import json
from pathlib import Path

from common import SHARED
from task_data import COLOURS, SIDE
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    CLIPConfig,
    CLIPModel,
    GLPNConfig,
    GLPNForDepthEstimation,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    SegformerImageProcessorPil,
    T5Config,
    T5ForConditionalGeneration,
    ViTImageProcessorPil,
    Wav2Vec2Config,
    Wav2Vec2CTCTokenizer,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2ForCTC,
    Wav2Vec2ForSequenceClassification,
    Wav2Vec2Processor,
    YolosConfig,
    YolosForObjectDetection,
    YolosImageProcessorPil,
)

__all__ = [
    "choices",
    "depth",
    "detection",
    "fill_mask",
    "images_and_texts",
    "segmentation",
    "sounds",
    "speech",
    "texts_to_texts",
]

_TOKENIZER = SHARED / "models/minilm-sst2"
_SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}


def fill_mask(folder: Path) -> None:
    """A random BERT with the tokenizer of MiniLM."""
    tokenizer = AutoTokenizer.from_pretrained(_TOKENIZER)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    BertForMaskedLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def segmentation(folder: Path) -> None:
    """A random Segformer of 5 classes."""
    names = {at: f"class {at}" for at in range(5)}
    widths = [16, 32, 40, 64]
    config = SegformerConfig(num_encoder_blocks=4, hidden_sizes=widths, decoder_hidden_size=64, id2label=names)
    SegformerForSemanticSegmentation(config).save_pretrained(folder)
    SegformerImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)


def detection(folder: Path) -> None:
    """A random YOLOS of 3 classes."""
    names = {at: f"class {at}" for at in range(3)}
    config = YolosConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=[SIDE, SIDE],
        num_detection_tokens=10,
        id2label=names,
        label2id={name: at for at, name in names.items()},
    )
    YolosForObjectDetection(config).save_pretrained(folder)
    YolosImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_pad=False).save_pretrained(folder)


def depth(folder: Path) -> None:
    """A random GLPN."""
    config = GLPNConfig(hidden_sizes=[16, 32, 40, 64], decoder_hidden_size=32)
    GLPNForDepthEstimation(config).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)


def choices(folder: Path) -> None:
    """A random BERT that chooses, with the tokenizer of MiniLM."""
    tokenizer = AutoTokenizer.from_pretrained(_TOKENIZER)
    BertForMultipleChoice(BertConfig(vocab_size=len(tokenizer), **_SIZES)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def images_and_texts(folder: Path) -> None:
    """A random CLIP, with the tokenizer of MiniLM."""
    tokenizer = AutoTokenizer.from_pretrained(_TOKENIZER)
    text = {**_SIZES, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.sep_token_id}
    vision = {**_SIZES, "image_size": SIDE, "patch_size": 8}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    ViTImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(folder)


def texts_to_texts(folder: Path) -> None:
    """A random T5, with the tokenizer of MiniLM."""
    tokenizer = AutoTokenizer.from_pretrained(_TOKENIZER)
    ids = {"eos_token_id": tokenizer.sep_token_id, "decoder_start_token_id": tokenizer.cls_token_id}
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = T5Config(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **sizes, **ids)
    T5ForConditionalGeneration(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _of_sound(**options: object) -> Wav2Vec2Config:
    layers = {"conv_dim": (32, 32, 32), "conv_kernel": (10, 8, 4), "conv_stride": (10, 8, 4)}
    places = {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2}
    norms = {"feat_extract_norm": "layer", "do_stable_layer_norm": True}
    return Wav2Vec2Config(**_SIZES, **layers, **places, **norms, classifier_proj_size=32, **options)


def sounds(folder: Path) -> None:
    """A random Wav2Vec2 that tells three kinds of sound apart."""
    names = dict(enumerate(COLOURS))
    config = _of_sound(id2label=names, label2id={name: at for at, name in names.items()})
    Wav2Vec2ForSequenceClassification(config).save_pretrained(folder)
    Wav2Vec2FeatureExtractor(return_attention_mask=True).save_pretrained(folder)


def speech(folder: Path) -> None:
    """A random Wav2Vec2 that writes the letters a to h."""
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefgh"]
    Wav2Vec2ForCTC(_of_sound(vocab_size=len(letters), pad_token_id=0)).save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({letter: at for at, letter in enumerate(letters)}))
    tokenizer = Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    extractor = Wav2Vec2FeatureExtractor(return_attention_mask=True)
    Wav2Vec2Processor(feature_extractor=extractor, tokenizer=tokenizer).save_pretrained(folder)
