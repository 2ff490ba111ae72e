"""Models as other libraries hand them out: adapters, hooks around forward, remote code, checkpoints, caches."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from daily import some_daily
from helpers import Mlp, Snapshot, assert_same, batch, tiny
from torch import Tensor, nn

from quantizer import Quantizer

tf = pytest.importorskip("transformers", reason="makes transformers models: install enginequant[hf]")

SIZES = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}


def _gpt2() -> nn.Module:
    torch.manual_seed(1)
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **SIZES)).eval()


def _llama() -> nn.Module:
    torch.manual_seed(1)
    layers = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return tf.LlamaForCausalLM(tf.LlamaConfig(**layers, **heads, **SIZES)).eval()


def _calibrated(model: nn.Module, inputs: dict[str, Tensor]) -> Quantizer:
    return make_calibrated(model, [inputs], backend="openvino")


def _run(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


# -- low-rank adapters ---------------------------------------------------------------------------------------------

# What each model wraps: linears with a bias, and GPT-2's Conv1D, whose weight stands the other way round.
ADAPTED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "bert": (
        lambda: tiny("bert", "sdpa"),
        {"target_modules": ["query", "value", "dense"], "task_type": "FEATURE_EXTRACTION"},
    ),
    "gpt2": (_gpt2, {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "task_type": "CAUSAL_LM"}),
}


def _adapted(name: str) -> Any:
    peft = pytest.importorskip("peft", reason="adapts a model: install enginequant[test]")
    make, options = ADAPTED[name]
    model = make()
    # Of rank 16, so that the adapters are large enough for INT8; fresh ones would add nothing.
    config = peft.LoraConfig(r=16, lora_alpha=16, lora_dropout=0.1, init_lora_weights=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it reads a property that transformers has renamed
        return peft.get_peft_model(model, config).eval()


@pytest.mark.parametrize("name", some_daily(sorted(ADAPTED), 1))
def test_adapters_are_quantized(name: str) -> None:
    model, inputs = _adapted(name), batch("bert")
    expected = _run(model, inputs)
    with model.disable_adapter():
        without = _run(model, inputs)
    assert _error(without, expected) > 0.05
    before = Snapshot.of(model)

    proxy: Any = Quantizer(preset="plain").proxy(model)
    assert_same(_run(proxy, inputs), expected)
    with proxy.disable_adapter():
        assert_same(_run(proxy, inputs), without)
    assert_same(_run(proxy, inputs), expected)

    q = _calibrated(model, inputs)
    layers = {path for path, module in model.named_modules() if path.endswith((".lora_A.default", ".lora_B.default"))}
    layers |= {path for path, _ in model.named_modules() if path.endswith(".base_layer")}
    ran = {path for path in layers if ".pooler." not in path}
    assert len(ran) == {"bert": 3 * 2 * 5, "gpt2": 3 * 2 * 2}[name]
    assert ran <= {row.name.rpartition(".forward")[0] for row in q.coverage.quantized if row.kind == "linear"}
    assert q.coverage.share is not None
    assert q.coverage.share >= 0.99

    quantized: Any = q.quantize(model)
    assert 0 < _error(_run(quantized, inputs), expected) < 0.05
    with quantized.disable_adapter():
        assert 0 < _error(_run(quantized, inputs), without) < 0.05
    before.assert_unchanged(model)
    # The weights of the model are still its own to change.
    merged = model.merge_and_unload()
    torch.testing.assert_close(_run(merged, inputs), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_train_in_a_proxy(name: str) -> None:
    model, inputs = _adapted(name).train(), batch("bert")
    gradients = []
    for trained in (copy.deepcopy(model), Quantizer(preset="plain").proxy(copy.deepcopy(model))):
        torch.manual_seed(3)
        trained(**inputs)[0].square().sum().backward()
        gradients.append({name: p.grad for name, p in trained.named_parameters() if p.grad is not None})
    assert all("lora_" in name for name in gradients[0])
    assert len(gradients[0]) >= 8
    assert_same(gradients[1], gradients[0])


@pytest.mark.nightly
def test_a_frozen_model_with_adapters_compiles_whole() -> None:
    model, inputs = _adapted("bert"), batch("bert")
    frozen = _calibrated(model, inputs).quantize(model)
    torch._dynamo.reset()
    compiled = torch.compile(frozen, fullgraph=True, backend="aot_eager")
    assert_same(_run(compiled, inputs), _run(frozen, inputs))
    torch._dynamo.reset()


# -- hooks around forward ------------------------------------------------------------------------------------------

OFFLOADED = "the weight is offloaded and loaded at each call, so the model has no weight to store as integers"


def _hooked(model: nn.Module) -> nn.Module:
    from accelerate import hooks

    for module in (model, model.model.layers[0].mlp, model.model.layers[1].self_attn, model.lm_head):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu", io_same_device=True))
    return model


def _hooked_twice(model: nn.Module) -> nn.Module:
    from accelerate import hooks

    for _ in range(2):
        for layer in model.model.layers:
            hooks.add_hook_to_module(layer.self_attn, hooks.ModelHook(), append=True)
    return model


@pytest.mark.parametrize("hook", [_hooked, _hooked_twice])
def test_hooks_around_forward(hook: Callable[[nn.Module], nn.Module]) -> None:
    pytest.importorskip("accelerate", reason="hooks a model: install enginequant[test]")
    plain, inputs = _llama(), batch("bert")
    model = hook(_llama())
    expected = _run(plain, inputs)
    assert_same(_run(model, inputs), expected)
    before = Snapshot.of(model)
    assert_same(_run(Quantizer(preset="plain").proxy(model), inputs), expected)

    q, unhooked = _calibrated(model, inputs), _calibrated(plain, inputs)
    assert [(row.name, row.quantized) for row in q.coverage] == [(row.name, row.quantized) for row in unhooked.coverage]
    assert_same(_run(q.quantize(model), inputs), _run(unhooked.quantize(plain), inputs))
    assert_same(_run(model, inputs), expected)
    before.assert_unchanged(model)


def _offloaded_to_cpu(model: nn.Module, folder: Path) -> nn.Module:
    import accelerate

    return accelerate.cpu_offload(model, execution_device="cpu")


def _offloaded_to_disk(model: nn.Module, folder: Path) -> nn.Module:
    import accelerate

    places = dict.fromkeys(("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    places["model.layers.1"] = "disk"
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=folder)


@pytest.mark.parametrize("offload", [_offloaded_to_cpu, _offloaded_to_disk])
def test_offloaded_weights_stay_float(offload: Callable[[nn.Module, Path], nn.Module], tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="hooks a model: install enginequant[test]")
    plain, inputs = _llama(), batch("bert")
    expected = _run(plain, inputs)
    model = offload(_llama(), tmp_path)
    offloaded = {
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight.device.type == "meta"
    }
    assert len(offloaded) == {_offloaded_to_cpu: 15, _offloaded_to_disk: 7}[offload]
    assert_same(_run(model, inputs), expected)
    assert_same(_run(Quantizer(preset="plain").proxy(model), inputs), expected)

    q = _calibrated(model, inputs)
    linears = {row.name.rpartition(".forward")[0]: row for row in q.coverage if row.kind == "linear"}
    assert {path for path, row in linears.items() if not row.quantized} == offloaded
    assert {linears[path].reason for path in offloaded} == {OFFLOADED}
    assert sum(row.quantized for row in q.coverage if row.kind == "matmul") == 4
    assert 0 < _error(_run(q.quantize(model), inputs), expected) < 0.05
    assert_same(_run(model, inputs), expected)


def test_casting_a_dispatched_proxy_leaves_the_model() -> None:
    """Its ``to`` is a function on the module, which holds the module and its method."""
    accelerate = pytest.importorskip("accelerate", reason="hooks a model: install enginequant[test]")
    inputs = batch("bert")
    model = accelerate.dispatch_model(_llama(), {"": "cpu"}, main_device="cpu", force_hooks=True)
    assert "to" in vars(model)
    before, expected = Snapshot.of(model), _run(model, inputs)
    proxy = Quantizer(preset="plain").proxy(model)
    proxy.to(torch.float64)
    assert {parameter.dtype for parameter in proxy.parameters()} == {torch.float64}
    before.assert_unchanged(model)
    assert_same(_run(model, inputs), expected)


def _doubled(module: nn.Module) -> None:
    """Patch one module as many do: a function around the forward that it had."""
    original = module.forward

    def forward(x: Tensor) -> Tensor:
        return original(x) * 2

    module.forward = forward


def _hook_that_calls(module: nn.Module) -> None:
    module.register_forward_hook(lambda hooked, args, output: output + module.down(module.up(args[0])))


@pytest.mark.parametrize("patch", [_doubled, _hook_that_calls])
def test_functions_that_hold_a_module(patch: Callable[[nn.Module], None]) -> None:
    model, x = nn.Sequential(Mlp(), Mlp()).eval(), torch.randn(8, 32)
    patch(model[0])
    before, expected = Snapshot.of(model), model(x)
    proxy = Quantizer(preset="plain").proxy(model)
    assert_same(proxy(x), expected)
    q = _calibrated_by_position(model, x)
    assert {row.name for row in q.coverage.quantized if row.kind == "linear"} == {
        f"{number}.{layer}.forward.linear_0" for number in (0, 1) for layer in ("up", "down")
    }
    assert q.coverage.share == 1
    assert not [row for row in q.coverage if row.kind == "source"]
    proxy.double()
    assert proxy(x.double()).dtype == torch.float64
    before.assert_unchanged(model)
    assert_same(model(x), expected)


def _calibrated_by_position(model: nn.Module, x: Tensor) -> Quantizer:
    return make_calibrated(model, [x], backend="openvino")


# -- remote code ---------------------------------------------------------------------------------------------------

_REMOTE = {
    "configuration_tiny.py": """
from transformers import PretrainedConfig

class TinyConfig(PretrainedConfig):
    model_type = "tiny-remote"
    def __init__(self, width=32, **more):
        self.width = width
        super().__init__(**more)
""",
    "mixing_tiny.py": """
import torch

def attend(q, k):
    return torch.matmul(q, k.transpose(-1, -2)).softmax(-1)
""",
    "modeling_tiny.py": """
from torch import nn
from transformers import PreTrainedModel
from .configuration_tiny import TinyConfig
from .mixing_tiny import attend

class TinyModel(PreTrainedModel):
    config_class = TinyConfig
    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(99, config.width)
        self.linear = nn.Linear(config.width, config.width)
        self.post_init()
    def forward(self, input_ids):
        x = self.embedding(input_ids)
        return (attend(self.linear(x), x) @ x,)
""",
}


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a model and the code that makes it; nothing of it is left in the user's cache."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "remote"
    folder.mkdir()
    for name, text in _REMOTE.items():
        (folder / name).write_text(text)
    names = {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModel": "modeling_tiny.TinyModel"}
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny-remote", "auto_map": names}))
    config = tf.AutoConfig.from_pretrained(folder, trust_remote_code=True)
    tf.AutoModel.from_config(config, trust_remote_code=True).save_pretrained(folder)
    yield folder
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        del sys.modules[name]


def test_remote_code(remote: Path) -> None:
    model = tf.AutoModel.from_pretrained(remote, trust_remote_code=True).eval()
    inputs = {"input_ids": batch("bert")["input_ids"]}
    assert type(model).__module__.startswith("transformers_modules.")
    expected = _run(model, inputs)
    assert_same(_run(Quantizer(preset="plain").proxy(model), inputs), expected)
    q = _calibrated(model, inputs)
    names = {row.name for row in q.coverage.quantized}
    assert names == {"linear.forward.linear_0", "forward.matmul_0", "attend.matmul_0"}
    assert q.coverage.share == 1
    frozen = q.quantize(model)
    found = _run(frozen, inputs)
    assert 0 < _error(found, expected) < 0.05
    for duplicate in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert_same(_run(duplicate, inputs), found)
    q.save(remote / "quantizer")
    # Loaded again, it is a model of the same class with ranges of the same names.
    again = tf.AutoModel.from_pretrained(remote, trust_remote_code=True).eval()
    assert_same(_run(Quantizer.load(remote / "quantizer").quantize(again), inputs), found)
    # What was rewritten stays, also where the file that it came from has gone.
    shutil.rmtree(remote)
    assert_same(_run(copy.deepcopy(frozen), inputs), found)


# -- checkpointing and caches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model, inputs = _llama().train(), batch("bert")
    model.enable_input_require_grads()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    gradients = []
    for trained in (copy.deepcopy(model), Quantizer(preset="plain").proxy(copy.deepcopy(model))):
        passes = _count_calls(trained.model.layers[0].mlp)
        trained(**inputs, use_cache=False).logits.square().sum().backward()
        assert len(passes) == 2  # forward, and once more in backward
        gradients.append({name: parameter.grad for name, parameter in trained.named_parameters()})
    assert all(gradient is not None for gradient in gradients[0].values())
    assert_same(gradients[1], gradients[0])


def _count_calls(module: nn.Module) -> list[None]:
    calls: list[None] = []
    module.register_forward_pre_hook(lambda hooked, args: calls.append(None))
    return calls


@pytest.mark.parametrize(("cache", "kind"), [("static", "StaticCache"), ("dynamic", "DynamicCache")])
def test_generation_step_by_step_is_the_full_pass(cache: str, kind: str) -> None:
    model, inputs = _llama(), batch("bert")
    frozen: Any = _calibrated(model, inputs).quantize(model)
    found = frozen.generate(
        **inputs,
        max_new_tokens=6,
        do_sample=False,
        cache_implementation=cache,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert type(found.past_key_values).__name__ == kind
    whole = _run(frozen, {"input_ids": found.sequences[:, :-1]})
    torch.testing.assert_close(torch.stack(found.logits, 1), whole[:, 7:], atol=1e-5, rtol=1e-5)
