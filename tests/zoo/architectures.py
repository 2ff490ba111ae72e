"""The architecture zoo, as data: tiny transformers models with random weights, made from their configs, offline."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 32
VOCABULARY = 99
TOKENS = 8
IMAGE_TOKEN = 3

_WIDTHS = (
    "hidden_size hidden_sizes d_model n_embd dim embed_dim embed_dims emb_dim embedding_size word_embed_proj_dim "
    "projection_dim conv_dim embedding_dim"
)
_LAYERS = (
    "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers"
)
_HEADS = (
    "num_attention_heads num_heads n_head n_heads encoder_attention_heads decoder_attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads num_key_value_heads num_experts_per_tok"
)
_INNER = (
    "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner hidden_dim d_inner mlp_dim "
    "moe_intermediate_size shared_expert_intermediate_size dim_feedforward ffn_hidden_size"
)
_LENGTHS = (
    "max_position_embeddings n_positions max_seq_len n_ctx max_target_positions max_source_positions seq_length "
    "max_sequence_length"
)
COMMON: Mapping[str, Any] = {
    **dict.fromkeys(_WIDTHS.split(), WIDTH),
    **dict.fromkeys(_LAYERS.split(), 2),
    **dict.fromkeys(_HEADS.split(), 2),
    **dict.fromkeys(_INNER.split(), 2 * WIDTH),
    **dict.fromkeys(_LENGTHS.split(), 64),
    "vocab_size": VOCABULARY,
    "head_dim": 16,
    "d_kv": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "image_size": 32,
    "patch_size": 8,
    "num_mel_bins": 16,
    "depths": 1,
}
"""Small values for fields that many configs have, by their name; widths are set where the default is one number."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture: how to make its model and its inputs.

    Attributes:
        name: its ``model_type``.
        inputs: what the model takes: names of ``_MAKERS``, or a name and the shape of its random numbers.
        options: config fields beside the common ones; those of a sub-config in a mapping of their own.
        model: the model's class (None: what ``AutoModel`` makes).
    """

    name: str
    inputs: tuple[str | tuple[str, tuple[int, ...]], ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None

    def build(self) -> nn.Module:
        """The model with random weights, the same at every call, in eval mode."""
        import transformers

        config = shrunk(transformers.CONFIG_MAPPING[self.name], self.options)
        torch.manual_seed(1)
        if self.model is None:
            model: nn.Module = transformers.AutoModel.from_config(config)
        else:
            model = getattr(transformers, self.model)._from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # Trained weights are not as small as fresh ones; biases and scales are not all alike.
                parameter.add_(torch.randn_like(parameter) * 0.05)
        return model.eval()

    def batch(self, seed: int) -> dict[str, Tensor]:
        """Random inputs, two of each."""
        generator = torch.Generator().manual_seed(seed)
        made: dict[str, Tensor] = {}
        for wanted in self.inputs:
            if isinstance(wanted, str):
                made |= _MAKERS[wanted](generator)
            else:
                name, shape = wanted
                made[name] = torch.randn(shape, generator=generator)
        return made


def shrunk(
    config_class: Any,
    options: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    sizes: Mapping[str, Any] = COMMON,
) -> Any:
    """A config of ``defaults``, small values for what it has of ``sizes``, and ``options``; sub-configs likewise."""
    from transformers import CONFIG_MAPPING

    small: dict[str, Any] = dict(defaults or {})
    for name, known in config_class.__dataclass_fields__.items():
        if name in sizes:
            # One number for each stage of the network.
            several = isinstance(known.default, tuple)
            small[name] = [sizes[name]] * len(known.default) if several else sizes[name]
        elif (
            "vocab_size" in sizes
            and name.endswith("_token_id")
            and isinstance(known.default, int)
            and known.default >= VOCABULARY
        ):
            small[name] = 1 if name == "pad_token_id" else 2
    subs = getattr(config_class, "sub_configs_defaults", {})
    for name, sub in subs.items():
        wanted = options.get(name, {})
        if wanted is not None:
            chosen = getattr(sub, "config_class", sub)
            if not hasattr(chosen, "__dataclass_fields__") or "model_type" in wanted:
                chosen = CONFIG_MAPPING[wanted.get("model_type", sub.model_type)]
            small[name] = shrunk(chosen, wanted, getattr(sub, "init_kwargs", None), sizes)
    return config_class(**{**small, **{name: value for name, value in options.items() if name not in subs}})


def _ids(name: str, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    # Above the small numbers that are special tokens.
    return {name: torch.randint(4, VOCABULARY - 1, (2, length), generator=generator)}


def _mask(generator: torch.Generator) -> dict[str, Tensor]:
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, -2:] = 0
    return {"attention_mask": mask}


def _with_image(generator: torch.Generator) -> dict[str, Tensor]:
    """A text that holds the 16 tokens of one image, each ``IMAGE_TOKEN``."""
    ids = _ids("input_ids", 16 + TOKENS, generator)["input_ids"]
    ids[:, 1:17] = IMAGE_TOKEN
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _boxes(generator: torch.Generator) -> dict[str, Tensor]:
    corners = torch.randint(0, 50, (2, TOKENS, 2), generator=generator)
    return {"bbox": torch.cat([corners, corners + 10], dim=-1)}


_MAKERS = {
    "ids": lambda generator: _ids("input_ids", TOKENS, generator),
    "mask": _mask,
    "decoder_ids": lambda generator: _ids("decoder_input_ids", TOKENS - 2, generator),
    "ids_with_image": _with_image,
    "boxes": _boxes,
}


def _floats(name: str, *shape: int) -> tuple[str, tuple[int, ...]]:
    """An input of random numbers, two of ``shape``."""
    return name, (2, *shape)


TEXT = ("ids", "mask")
TRANSLATION = ("ids", "mask", "decoder_ids")
IMAGE = (_floats("pixel_values", 3, 32, 32),)
LARGER_IMAGE = (_floats("pixel_values", 3, 64, 64),)
SOUND = (_floats("input_values", 800),)
ONE_CHANNEL = (_floats("input_values", 1, 320),)
VIDEO = (_floats("pixel_values", 2, 3, 32, 32),)


def _plain(inputs: Any, names: str, **more: Any) -> list[Architecture]:
    return [Architecture(name=name, inputs=inputs, **more) for name in names.split()]


def _one(inputs: Any, name: str, model: str | None = None, **options: Any) -> Architecture:
    return Architecture(name=name, inputs=inputs, model=model, options=options)


_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 16, "mamba_chunk_size": 8}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_SPEECH = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}
_FOUR = [WIDTH] * 4

TEXT_ENCODERS = (
    *_plain(
        TEXT,
        "albert bert bert-generation big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra "
        "ernie eurobert flaubert gte ibert layoutlm longformer markuplm megatron-bert mobilebert modernbert mpnet "
        "mra nomic_bert nystromformer rembert roberta roberta-prelayernorm roformer splinter squeezebert tapas xlm "
        "xlm-roberta xlm-roberta-xl xlnet yoso",
    ),
    _one(TEXT, "canine", num_hash_buckets=64),
    _one(TEXT, "esm", pad_token_id=1, mask_token_id=3),
    _one(("ids",), "fnet"),
    _one(TEXT, "funnel", "FunnelModel", block_sizes=[1, 1], d_head=16, num_decoder_layers=1),
    _one((*TEXT, "boxes"), "lilt", hidden_size=48),
    _one(TEXT, "luke", entity_vocab_size=50, entity_emb_size=16),
    _one(
        TEXT,
        "reformer",
        axial_pos_embds=False,
        attention_head_size=16,
        attn_layers=["local", "lsh"],
        feed_forward_size=64,
        hash_seed=0,
        local_attn_chunk_length=4,
        lsh_attn_chunk_length=4,
        num_buckets=2,
    ),
    _one(
        TEXT,
        "roc_bert",
        pronunciation_embed_dim=16,
        pronunciation_vocab_size=99,
        shape_embed_dim=16,
        shape_vocab_size=99,
    ),
    _one(TEXT, "xmod", default_language="en_XX"),
)

DECODERS = (
    *_plain(
        TEXT,
        "apertus arcee biogpt bitnet bloom cohere cohere2 ctrl diffllama doge ernie4_5 exaone4 falcon falcon_mamba "
        "gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese granite helium hunyuan_v1_dense "
        "internlm3 lfm2 llama mamba minicpm3 ministral mistral modernbert-decoder mpt nemotron olmo olmo2 olmo3 "
        "openai-gpt opt persimmon phi phi3 qwen2 qwen3 rwkv seed_oss smollm3 stablelm starcoder2 vaultgemma xglm",
    ),
    _one(TEXT, "bamba", attn_layer_indices=[1], **_MAMBA),
    _one(TEXT, "codegen", n_head=4, rotary_dim=8),
    _one(TEXT, "cpmant", dim_ff=64, dim_head=16, position_bias_num_buckets=32),
    _one(TEXT, "falcon_h1", mamba_d_ssm=64, **_MAMBA),
    _one(TEXT, "gpt_neo", attention_types=[[["global", "local"], 1]]),
    _one(TEXT, "gptj", rotary_dim=8),
    _one(TEXT, "mamba2", num_heads=4, n_groups=1, state_size=16, chunk_size=8),
    _one(TEXT, "recurrent_gemma", block_types=["recurrent", "attention"], attention_window_size=16),
    _one(TEXT, "zamba", layers_block_type=["mamba", "hybrid", "hybrid"], num_hidden_layers=3, mamba_dt_rank=4),
    _one(
        TEXT,
        "zamba2",
        layers_block_type=["mamba", "hybrid"],
        n_mamba_heads=4,
        mamba_d_state=16,
        chunk_size=8,
        adapter_rank=8,
    ),
)

MIXTURES_OF_EXPERTS = (
    *_plain(TEXT, "ernie4_5_moe flex_olmo glm4_moe gpt_oss granitemoe granitemoeshared jetmoe minimax mixtral"),
    *_plain(TEXT, "olmoe phimoe qwen2_moe qwen3_moe solar_open"),
    *_plain(TEXT, "deepseek_v2 deepseek_v3", options=_LATENT),
    _one(TEXT, "granitemoehybrid", layer_types=["mamba", "attention"], shared_intermediate_size=64, **_MAMBA),
    _one(TEXT, "jamba", attn_layer_period=2, attn_layer_offset=1, use_mamba_kernels=False),
    _one(
        TEXT,
        "nemotron_h",
        layers_block_type=["mamba", "attention", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=1,
        chunk_size=8,
        moe_shared_expert_intermediate_size=64,
        n_routed_experts=4,
    ),
    _one(
        TEXT,
        "qwen3_next",
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
    ),
)

ENCODER_DECODERS = (
    *_plain(
        TRANSLATION,
        "bart bigbird_pegasus blenderbot blenderbot-small led longt5 m2m_100 marian mbart mt5 mvp nllb-moe pegasus "
        "pegasus_x plbart prophetnet switch_transformers t5 t5gemma umt5",
    ),
    _one(TRANSLATION, "fsmt", src_vocab_size=99, tgt_vocab_size=99),
)

VISION = (
    *_plain(
        IMAGE,
        "aimv2_vision_model beit data2vec-vision deit dinov2 dinov2_with_registers dinov3_vit glpn ijepa "
        "pixio poolformer pvt pvt_v2 resnet segformer siglip_vision_model swiftformer vit vit_mae vit_msn vitdet",
    ),
    *_plain(LARGER_IMAGE, "convnext convnextv2"),
    *_plain(IMAGE, "swin swinv2", options={"patch_size": 4, "window_size": 4, "depths": [2, 2], "num_heads": [2, 2]}),
    *_plain(LARGER_IMAGE, "conditional_detr deformable_detr detr table-transformer", options={"num_queries": 5}),
    _one(IMAGE, "bit", num_groups=8),
    _one(IMAGE, "cvt", depth=[1, 2, 3]),
    _one(
        LARGER_IMAGE,
        "depth_anything",
        "DepthAnythingForDepthEstimation",
        backbone_config={"num_hidden_layers": 4, "image_size": 64, "out_indices": [1, 2, 3, 4]},
        neck_hidden_sizes=_FOUR,
        fusion_hidden_size=WIDTH,
        reassemble_hidden_size=WIDTH,
        head_hidden_size=16,
        depth_estimation_type="metric",
        max_depth=1,
    ),
    _one(
        IMAGE,
        "dpt",
        "DPTForDepthEstimation",
        num_hidden_layers=4,
        backbone_config=None,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=_FOUR,
        fusion_hidden_size=WIDTH,
    ),
    _one(LARGER_IMAGE, "dinov3_convnext", hidden_sizes=_FOUR, depths=[1] * 4),
    _one(IMAGE, "efficientnet", width_coefficient=0.25, depth_coefficient=0.1, hidden_dim=320),
    _one(IMAGE, "focalnet", patch_size=4, depths=[1, 1]),
    _one(
        IMAGE,
        "hgnet_v2",
        stem_channels=[3, 16, 32],
        stage_in_channels=_FOUR,
        stage_mid_channels=[16] * 4,
        stage_out_channels=_FOUR,
        stage_num_blocks=[1] * 4,
        stage_numb_of_layers=[2] * 4,
    ),
    _one(LARGER_IMAGE, "hiera", image_size=[64, 64], patch_size=[7, 7], embed_dim=16),
    _one(("ids",), "imagegpt"),
    _one(LARGER_IMAGE, "levit", image_size=64, patch_size=16),
    _one(IMAGE, "mobilenet_v1", depth_multiplier=0.125),
    _one(IMAGE, "mobilenet_v2", depth_multiplier=0.125),
    _one(LARGER_IMAGE, "mobilevit", image_size=64, patch_size=2, neck_hidden_sizes=[16] * 7),
    _one(
        LARGER_IMAGE,
        "mobilevitv2",
        image_size=64,
        patch_size=2,
        base_attn_unit_dims=[WIDTH] * 3,
        n_attn_blocks=[1] * 3,
        width_multiplier=0.5,
    ),
    _one(IMAGE, "regnet", groups_width=8),
    _one(
        LARGER_IMAGE,
        "rt_detr",
        num_queries=5,
        encoder_hidden_dim=WIDTH,
        encoder_in_channels=[WIDTH] * 3,
        decoder_in_channels=[WIDTH] * 3,
    ),
    _one(IMAGE, "swin2sr", patch_size=1, window_size=4, depths=[2], num_heads=[2]),
    _one(LARGER_IMAGE, "textnet", stem_out_channels=WIDTH, hidden_sizes=[WIDTH] * 5),
    _one(VIDEO, "videomae", num_frames=2),
    _one(VIDEO, "vivit", num_frames=2, tubelet_size=[2, 8, 8]),
    _one(IMAGE, "yolos", num_detection_tokens=5),
)

AUDIO = (
    *_plain(
        SOUND,
        "data2vec-audio hubert sew unispeech unispeech-sat wav2vec2 wav2vec2-conformer wavlm",
        options=_SPEECH,
    ),
    _one(SOUND, "sew-d", squeeze_factor=2, **_SPEECH),
    _one((_floats("input_values", 32, 16),), "audio-spectrogram-transformer", max_length=32),
    _one((_floats("input_values", 1, 640),), "dac", encoder_hidden_size=32, decoder_hidden_size=256),
    _one(ONE_CHANNEL, "encodec"),  # fewer filters than its own would leave its LSTM too small for every target
    _one(
        ONE_CHANNEL,
        "mimi",
        num_filters=8,
        upsample_groups=32,
        num_quantizers=4,
        codebook_dim=16,
        vector_quantization_hidden_dimension=16,
    ),
    _one((_floats("input_values", 1600), "decoder_ids"), "moonshine"),
    _one(
        (_floats("input_features", 32, 16), "decoder_ids"),
        "speech_to_text",
        input_feat_per_channel=16,
        conv_channels=32,
    ),
    _one((_floats("input_features", 16, 16),), "wav2vec2-bert", feature_projection_input_dim=16),
    _one((_floats("input_features", 16, 128), "decoder_ids"), "whisper"),
)

MULTIMODAL = (
    *_plain(
        (*TEXT, *IMAGE),
        "altclip blip chinese_clip clip clipseg flava git groupvit metaclip_2 owlvit owlv2 siglip vilt",
    ),
    _one(
        (*TEXT, *IMAGE),
        "align",
        vision_config={"width_coefficient": 0.25, "depth_coefficient": 0.1, "hidden_dim": 320},
        projection_dim=80,
    ),
    _one(
        (*TEXT, *IMAGE),
        "bridgetower",
        hidden_size=64,
        text_config={"hidden_size": 64},
        vision_config={"hidden_size": 64},
    ),
    *_plain(("ids_with_image", *IMAGE), "llava paligemma", options={"image_token_index": 3}),
)

SERIES = (
    _one((_floats("past_values", 32, 1),), "patchtst"),
    _one((_floats("past_values", 32, 1),), "patchtsmixer"),
    _one(
        (_floats("inputs", 12, WIDTH),),
        "perceiver",
        num_latents=8,
        d_latents=32,
        num_self_attends_per_block=2,
        num_self_attention_heads=2,
        num_cross_attention_heads=2,
    ),
)

_EACH_PATTERN = """
    albert: layers of one weight      bert: the plain encoder           deberta-v2: relative positions
    funnel: pooled in between         longformer: windows               modernbert: query, key, value in one weight
    mpnet: a position bias            nystromformer: an inverse         reformer: hashing, reversible layers
    xlnet: einsum
    bart: attention across            led: windows and across           prophetnet: several tokens ahead
    t5: a position bias, tied head    switch_transformers: experts
    bloom: slopes, baddbmm            falcon: packed, one key head      gemma2: capped scores
    gpt2: Conv1D                      gptj: a parallel block            llama: fewer key heads, rotary
    mamba2: state space               recurrent_gemma: recurrence       rwkv: a recurrence of its own
    deepseek_v3: latent attention     gpt_oss: sinks, packed experts    mixtral: routing
    qwen3_next: linear attention      zamba2: layers that are shared
    convnext: depthwise, layer scale  deformable_detr: sampling         detr: a convnet, then a transformer
    efficientnet: squeeze and excite  levit: attention with batch norm  mobilenet_v2: inverted residuals
    resnet: batch norm                segformer: strided attention      swin: shifted windows
    vit: a conv stem
    clip: two towers                  llava: two models, one text       mimi: codes and transposed convs
    patchtsmixer: mixing              perceiver: attention to latents   wav2vec2: weight norm, a long stem
    whisper: sound to text
"""
ALL_THE_WAY = frozenset(re.findall(r"([\w-]+):", _EACH_PATTERN))
"""One architecture of each pattern, by name: these go all the way at each run of the tests, the others at night."""


@dataclass(frozen=True, kw_only=True)
class TorchArchitecture:
    """One of torch's own transformers.

    Attributes:
        name: what it is called in reports.
        make: makes the module.
        inputs: shapes by the name of the argument.
        products: products of one pass through Python: projections, attention, feed-forward.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Mapping[str, tuple[int, ...]]
    products: int

    def build(self) -> nn.Module:
        """The module with random weights, the same at every call, in eval mode."""
        torch.manual_seed(1)
        return self.make().eval()

    def batch(self, seed: int) -> dict[str, Tensor]:
        """Random inputs."""
        generator = torch.Generator().manual_seed(seed)
        return {name: torch.randn(shape, generator=generator) for name, shape in self.inputs.items()}


_LAYER = {"d_model": WIDTH, "nhead": 2, "dim_feedforward": 2 * WIDTH, "batch_first": True}
_SHAPE = (2, 6, WIDTH)

TORCH: tuple[TorchArchitecture, ...] = (
    TorchArchitecture(
        name="MultiheadAttention",
        make=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
        inputs={"query": _SHAPE, "key": _SHAPE, "value": _SHAPE},
        products=6,
    ),
    TorchArchitecture(
        name="TransformerEncoderLayer",
        make=lambda: nn.TransformerEncoderLayer(**_LAYER),
        inputs={"src": _SHAPE},
        products=5,
    ),
    TorchArchitecture(
        name="TransformerEncoder",
        make=lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(**_LAYER), num_layers=2),
        inputs={"src": _SHAPE},
        products=10,
    ),
    TorchArchitecture(
        name="TransformerDecoder",
        make=lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(**_LAYER), num_layers=1),
        inputs={"tgt": (2, 5, WIDTH), "memory": _SHAPE},
        products=9,
    ),
    TorchArchitecture(
        name="Transformer",
        make=lambda: nn.Transformer(num_encoder_layers=1, num_decoder_layers=1, **_LAYER),
        inputs={"src": _SHAPE, "tgt": (2, 5, WIDTH)},
        products=14,
    ),
)
"""Encoders (of TransformerEncoder) and attention skip Python where torch's fast path is on, which it is by default."""
