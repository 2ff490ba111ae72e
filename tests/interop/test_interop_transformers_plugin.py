"""The plug-in for transformers: ready to calibrate, calibrated, quantized, saved, and loaded again bit for bit."""

from __future__ import annotations

import importlib
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Snapshot, assert_same, batch, differences, tiny
from torch import Tensor, nn

from quantizer import Quantizer, QuantizerConfig
from quantizer.errors import ProxyError
from quantizer.tasks import build_task, load_examples, load_tokenizer

tf = pytest.importorskip("transformers", reason="the plug-in is for transformers: install enginequant[hf]")
plugin = importlib.import_module("quantizer.integrations.transformers.plugin")
quantizer_of = plugin.quantizer_of

SHARED = Path(__file__).parents[2].parent / "shared"
INT4 = {"weights": "int4", "activations": "int8", "block_size": 16, "kinds": ["linear"]}
TEXT = batch("bert", padded=True)
NIGHTLY = pytest.mark.nightly
BIAS = {"bias_correction": True, "activations": {"percentile": 95}}
Prepare = Callable[[Quantizer, nn.Module, dict[str, Tensor]], None]


def ready(folder: Path, auto: Any = None, **config: Any) -> nn.Module:
    """The model of a folder, with a ``Quantizer`` of its own."""
    auto = auto or tf.AutoModelForSequenceClassification
    model: nn.Module = auto.from_pretrained(folder, quantization_config=QuantizerConfig(**config))
    return model


def quantized(model: nn.Module, inputs: dict[str, Tensor] = TEXT, prepare: Prepare | None = None) -> nn.Module:
    """What its ``Quantizer`` makes of a model, calibrated on one batch."""
    q = quantizer_of(model)
    q.calibrate(model, [inputs], progress=False)
    if prepare is not None:
        prepare(q, model, inputs)
    return q.quantize(model)


def keep_in_float(q: Quantizer, model: nn.Module, inputs: dict[str, Tensor]) -> None:
    amp = q.amp(model)
    amp(**inputs)
    q.fallback(amp, num=5)


def trained(q: Quantizer, model: nn.Module, inputs: dict[str, Tensor]) -> None:
    proxy = q.qat(model, scales="learned")
    optimizer = torch.optim.SGD(proxy.parameters(), lr=0.05)
    for _ in range(3):
        optimizer.zero_grad()
        proxy(**inputs, labels=torch.tensor([0, 1, 2])).loss.backward()
        optimizer.step()


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny float classifier."""
    folder = tmp_path_factory.mktemp("bert")
    tiny("bert-classification").save_pretrained(folder)
    return folder


def llama(tied: bool) -> nn.Module:
    config = tf.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    model: nn.Module = tf.LlamaForCausalLM(config)
    return model


# -- float: ready to calibrate -------------------------------------------------------------------------------------


def test_the_model_is_the_float_one_and_knows_its_quantizer(bert):
    plain = tf.AutoModelForSequenceClassification.from_pretrained(bert)
    model = ready(bert, backend="openvino", exclude={"names": ["classifier"]})
    assert type(model) is type(plain)
    assert_same(model(**TEXT), plain(**TEXT))
    q = quantizer_of(model)
    assert q.config.backend == "openvino"
    assert q.config.exclude.names == ("classifier",)
    assert model.hf_quantizer.quantizer is q
    before = Snapshot.of(model)
    frozen = quantized(model)
    assert not q.plan["classifier.forward.linear_0"].quantized
    assert differences(frozen(**TEXT), model(**TEXT))
    before.assert_unchanged(model)
    # transformers refuses to cast and to train what it calls quantized.
    assert model.half().dtype == torch.float16


def test_a_mapping_is_a_config_too(bert):
    given = {"quant_method": "quantizer", "backend": "openvino"}
    model = tf.AutoModelForSequenceClassification.from_pretrained(bert, quantization_config=given)
    assert quantizer_of(model).config == QuantizerConfig(backend="openvino")


def test_a_float_model_is_saved_ready_to_calibrate(bert, tmp_path, caplog):
    model = ready(bert, backend="openvino")
    with caplog.at_level(logging.WARNING, "quantizer"):
        model.save_pretrained(tmp_path / "float")
        assert not caplog.records
        quantizer_of(model).calibrate(model, [TEXT], progress=False)
        model.save_pretrained(tmp_path / "calibrated")
    assert "saved in float, without its calibration; save the result of quantize(model)" in caplog.text
    for name in ("float", "calibrated"):
        again = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / name)
        assert quantizer_of(again).config == quantizer_of(model).config
        assert_same(again(**TEXT), model(**TEXT))
        assert differences(quantized(again)(**TEXT), model(**TEXT))


def test_a_model_that_was_loaded_without_has_no_quantizer(bert):
    with pytest.raises(ProxyError, match=r"has no Quantizer: load it with from_pretrained\(path, quantization_config="):
        quantizer_of(tf.AutoModelForSequenceClassification.from_pretrained(bert))


# -- quantized: saved and loaded -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "prepare"),
    [
        pytest.param({"backend": "openvino"}, None, id="int8"),
        pytest.param({"dtype": "fp8"}, None, id="fp8", marks=NIGHTLY),
        pytest.param({"formats": [INT4]}, None, id="int4-blocks", marks=NIGHTLY),
        pytest.param({"formats": [INT4]}, trained, id="int4-blocks-trained", marks=NIGHTLY),
        pytest.param(
            {"activations": {"smoothquant_alpha": 0.5}, "sites": {"embedding": True}}, None, id="smooth-embedding"
        ),
        pytest.param(BIAS, None, id="bias-correction", marks=NIGHTLY),
        pytest.param({"formats": [INT4], "weights": {"rounding": "gptq"}}, None, id="gptq"),
        pytest.param({}, keep_in_float, id="kept-in-float"),
        pytest.param({"backend": "onnxruntime"}, trained, id="trained"),
    ],
)
def test_saving_and_loading_is_exact(bert, tmp_path, config, prepare):
    model = ready(bert, **config)
    frozen = quantized(model, prepare=prepare)
    frozen.save_pretrained(tmp_path / "one")
    expected = frozen(**TEXT)
    assert differences(expected, model(**TEXT))
    again = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "one")
    assert_same(again(**TEXT), expected)
    # The same decisions too, and the same files when it is saved once more.
    ours, theirs = quantizer_of(model), quantizer_of(again)
    assert str(theirs.coverage) == str(ours.coverage)
    assert str(theirs.ranges) == str(ours.ranges)
    again.save_pretrained(tmp_path / "two")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "two" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


@pytest.mark.parametrize(
    ("auto", "make", "inputs"),
    [
        pytest.param("AutoModel", lambda: tiny("vit"), batch("vit"), id="vit"),
        pytest.param("AutoModelForCausalLM", lambda: llama(tied=True), TEXT, id="llama-tied"),
        pytest.param("AutoModelForCausalLM", lambda: llama(tied=False), TEXT, id="llama"),
    ],
)
def test_other_models(tmp_path, auto, make, inputs):
    make().save_pretrained(tmp_path / "float")
    auto = getattr(tf, auto)
    model = ready(tmp_path / "float", auto, backend="openvino")
    inputs = inputs if "pixel_values" in inputs else {**inputs, "use_cache": False}
    frozen = quantized(model, inputs)
    frozen.save_pretrained(tmp_path / "int8")
    again = auto.from_pretrained(tmp_path / "int8")
    assert_same(again(**inputs), frozen(**inputs))
    if model.config.to_dict().get("tie_word_embeddings") and hasattr(again, "lm_head"):
        assert again.lm_head.weight is again.model.embed_tokens.weight


def test_weights_are_integers_and_files_may_be_many(bert, tmp_path):
    from safetensors.torch import load_file

    frozen = quantized(ready(bert, formats=[{**INT4, "names": ["bert.encoder.layer.0.**"]}]))
    frozen.save_pretrained(tmp_path, max_shard_size="20KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    tensors = {name: value for file in files for name, value in load_file(file).items()}
    layers = "bert.encoder.layer.{}.output.dense.{}"
    assert layers.format(0, "weight") not in tensors
    stored = layers.format("{}", "site_forward_linear_0._weight_quantizer.stored")
    assert tensors[stored.format(1)].dtype == torch.int8
    assert tensors[stored.format(1)].shape == (32, 64)
    assert tensors[stored.format(0)].shape == (32 * 64 // 2,)
    again = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert_same(again(**TEXT), frozen(**TEXT))


def test_saving_keeps_what_lies_beside(bert, tmp_path):
    (tmp_path / "notes").write_text("mine")
    frozen = quantized(ready(bert))
    for _ in range(2):
        frozen.save_pretrained(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors", "notes"}
    assert (tmp_path / "notes").read_text() == "mine"


def test_a_loaded_model_is_the_frozen_one(bert, tmp_path):
    from transformers.trainer_utils import validate_quantization_for_training

    model = ready(bert, backend="openvino")
    frozen = quantized(model)
    # Of a copy that was pickled, too.
    pickle.loads(pickle.dumps(frozen)).save_pretrained(tmp_path / "int8")
    again = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "int8")
    assert_same(again(**TEXT), frozen(**TEXT))
    assert [weight.shape for weight in again.parameters()] == [weight.shape for weight in frozen.parameters()]
    q = quantizer_of(again)
    with pytest.raises(ProxyError, match="the model is already a proxy"):
        q.qat(again)
    # What the Trainer asks of a model.
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
        validate_quantization_for_training(again)
    validate_quantization_for_training(model)
    pytest.importorskip("onnxscript", reason="exporting needs enginequant[onnx]")
    assert q.export(again, tmp_path / "again.onnx", TEXT).is_file()


def test_what_was_not_quantized_or_is_no_more_so_is_not_saved(bert, tmp_path):
    model = ready(bert)
    frozen = quantized(model)
    q = quantizer_of(model)
    refused = r"needs the latest result of quantize\(model\), but this is another proxy, or the plan changed since"
    for proxy in (q.proxy(model), q.calib(model, resume=True), q.amp(model), q.simulate(model)):
        with pytest.raises(ProxyError, match=refused):
            proxy.save_pretrained(tmp_path / "refused")
    keep_in_float(q, model, TEXT)
    with pytest.raises(ProxyError, match=refused):
        frozen.save_pretrained(tmp_path / "refused")
    q.clear_fallback()
    frozen.save_pretrained(tmp_path / "as before")


def test_a_proxy_in_training_is_saved_with_its_float_weights(bert, tmp_path):
    model = ready(bert)
    q = quantizer_of(model)
    q.calibrate(model, [TEXT], progress=False)
    proxy = q.qat(model)
    with torch.no_grad():
        proxy.classifier.bias.add_(1.0)
    proxy.save_pretrained(tmp_path)
    again = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert_same(again(**TEXT), model(**TEXT))


# -- registering ---------------------------------------------------------------------------------------------------


def test_registering_twice_is_harmless(bert, tmp_path):
    model = ready(bert, backend="openvino")
    frozen = quantized(model)
    frozen.save_pretrained(tmp_path / "one")
    importlib.import_module("quantizer.integrations.transformers.plugin")
    importlib.reload(plugin)
    # Those from before go on, and what they saved loads.
    assert plugin.quantizer_of(model) is frozen.hf_quantizer.quantizer
    again = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "one")
    assert_same(again(**TEXT), frozen(**TEXT))
    frozen.save_pretrained(tmp_path / "two")
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == (
        tmp_path / "one" / "model.safetensors"
    ).read_bytes()


# -- a real model --------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_real_classifier_comes_back_bit_for_bit(tmp_path):
    source, data = SHARED / "models" / "minilm-sst2", SHARED / "data" / "sst2"
    if not (source.is_dir() and data.is_dir()):
        pytest.skip(f"model or data are not here: no folders {source} and {data}")
    model = ready(source, backend="openvino")
    task = build_task("sequence-classification", model, load_tokenizer(str(source)), min_length=16)
    rows = load_examples("sst2-text", path=data / "stsa.binary.dev", samples=48)
    batches = task.batches(rows)
    q = quantizer_of(model)
    q.calibrate(model, batches[:1], progress=False)
    frozen = q.quantize(model)
    frozen.save_pretrained(tmp_path)
    again = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with torch.no_grad():
        for inputs in batches:
            assert_same(again(**inputs), frozen(**inputs))
    floats = sum(parameter.nbytes for parameter in model.parameters())
    size = (tmp_path / "model.safetensors").stat().st_size / floats
    # The table of embeddings, which is not quantized, is half of this model.
    print(f"model.safetensors: {size:.2f} of the float weights")
    assert size < 0.66


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_are_loaded_as_they_were_saved_into_a_model_of_halves(
    bert: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    # Scales that are subnormal in float16.
    model = ready(bert)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("dense.weight"):
                parameter.mul_(1e-4)
    saved = quantized(model)
    saved.save_pretrained(tmp_path / "int8")
    expected = saved.state_dict()
    loaded = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "int8", dtype=dtype)
    found = loaded.state_dict()
    scales = [name for name in expected if name.endswith(".scale")]
    assert len(scales) > 20
    for name in (*scales, *(name for name in expected if name.endswith(".stored"))):
        assert found[name].dtype == expected[name].dtype, name
        assert torch.equal(found[name], expected[name]), name
    assert next(p for p in loaded.parameters()).dtype == dtype
    # And once more: what is saved of it is what was saved before.
    loaded.save_pretrained(tmp_path / "again")
    again = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path / "again", dtype=dtype)
    differing = [name for name, value in again.state_dict().items() if not torch.equal(value, found[name])]
    assert not differing
    with torch.no_grad():
        assert torch.equal(again(**TEXT).logits, loaded(**TEXT).logits)


def test_a_folder_with_scales_in_halves_still_loads(bert: Path, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    quantized(ready(bert)).save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened:
        names = opened.keys()
        tensors = {name: opened.get_tensor(name) for name in names}
        metadata = opened.metadata()
    halves = {name: value.half() if name.endswith(".scale") else value for name, value in tensors.items()}
    save_file(halves, file, metadata=metadata)
    found = tf.AutoModelForSequenceClassification.from_pretrained(tmp_path).state_dict()
    for name, value in halves.items():
        if name.endswith(".scale"):
            assert torch.equal(found[name], value.float()), name


def test_a_net_with_quantized_results_is_loaded(tmp_path: Path) -> None:
    shape = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
    tf.ResNetForImageClassification(tf.ResNetConfig(**shape)).eval().save_pretrained(tmp_path / "float")
    auto, images = tf.AutoModelForImageClassification, {"pixel_values": torch.rand(4, 3, 32, 32)}
    proxy = quantized(ready(tmp_path / "float", auto, backend="onnxruntime", preset="plain"), images)
    assert any(entry.kind == "output" for entry in quantizer_of(proxy).plan.values())
    proxy.save_pretrained(tmp_path / "quantized")
    again = auto.from_pretrained(tmp_path / "quantized")
    assert torch.equal(again(**images).logits, proxy(**images).logits)
