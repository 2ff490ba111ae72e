"""Tiny classifiers of images with their image processors, and images in folders of classes, made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import transformers
from PIL import Image

CLASSES = ("red", "green", "blue")
SIZE = 32
_NAMES = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: number for number, name in enumerate(CLASSES)}}


def tiny_vit(folder: Path) -> Path:
    """A transformer of one layer over 16 patches."""
    torch.manual_seed(0)
    options = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.ViTConfig(image_size=SIZE, patch_size=8, initializer_range=0.2, **options, **_NAMES)
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return folder


def tiny_resnet(folder: Path) -> Path:
    """A convolutional network of two stages, with batch norms and a head that have seen images."""
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", **_NAMES
    )
    model = transformers.ResNetForImageClassification(config)
    images = 1.25 * torch.rand(12, 3, SIZE, SIZE) - 1
    for number, image in enumerate(images):
        image[number % 3] += 0.7
    with torch.no_grad():
        for _ in range(20):
            model.train()(images)
        model.classifier[1].bias -= model.eval()(images).logits.mean(0)
    model.save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return folder


def tiny_detector(folder: Path, kind: str) -> Path:
    """A detector of five candidates with the processor of published ones, which keeps proportions: detr or yolos."""
    torch.manual_seed(0)
    shared = {"id2label": {0: "cat", 1: "dog"}, "label2id": {"cat": 0, "dog": 1}}
    if kind == "detr":
        backbone = transformers.ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
        )
        layers = {f"{part}_layers": 1 for part in ("encoder", "decoder")}
        heads = {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
        widths = {f"{part}_ffn_dim": 32 for part in ("encoder", "decoder")}
        config = transformers.DetrConfig(
            backbone_config=backbone, num_queries=5, d_model=32, init_std=0.2, **layers, **heads, **widths, **shared
        )
        transformers.DetrForObjectDetection(config).save_pretrained(folder)
        processor = transformers.DetrImageProcessorPil
    else:
        options = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        config = transformers.YolosConfig(
            image_size=[SIZE, SIZE], patch_size=8, num_detection_tokens=5, **options, **shared
        )
        transformers.YolosForObjectDetection(config).save_pretrained(folder)
        processor = transformers.YolosImageProcessorPil
    processor(size={"shortest_edge": SIZE, "longest_edge": 2 * SIZE}).save_pretrained(folder)
    return folder


def tiny_dinov2(folder: Path) -> Path:
    """An encoder of one layer without a head."""
    torch.manual_seed(0)
    options = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 2}
    config = transformers.Dinov2Config(image_size=SIZE, patch_size=8, initializer_range=0.2, **options)
    transformers.Dinov2Model(config).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return folder


def tiny_segformer(folder: Path) -> Path:
    """A segmenter of two stages."""
    torch.manual_seed(0)
    config = transformers.SegformerConfig(
        num_encoder_blocks=2,
        depths=[1, 1],
        sr_ratios=[2, 1],
        hidden_sizes=[8, 16],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[1, 2],
        mlp_ratios=[2, 2],
        decoder_hidden_size=16,
        id2label=dict(enumerate(CLASSES)),
    )
    transformers.SegformerForSemanticSegmentation(config).save_pretrained(folder)
    transformers.SegformerImageProcessorPil(size={"height": SIZE, "width": SIZE}).save_pretrained(folder)
    return folder


def tiny_images(folder: Path, count: int, seed: int) -> Path:
    """Noise in several sizes, tinted by its class, as FOLDER/CLASS/NUMBER.png."""
    pick = np.random.default_rng(seed)
    for number in range(count):
        channel = number % len(CLASSES)
        pixels = pick.integers(0, 160, size=(24 + 8 * (number % 3), 40, 3), dtype=np.uint8)
        pixels[..., channel] += 90
        path = folder / CLASSES[channel] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return folder
