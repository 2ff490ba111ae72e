"""A proxy does what its model does: casts, copies, training, generation, compilation, export."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from calibrated import make_calibrated
from daily import some_daily
from helpers import ConvNet, Mlp, assert_same, batch, tiny
from outside import run_ranks
from torch import Tensor, nn

from quantizer import Quantizer

KINDS = ("proxy", "quantize")


def _calibrated(model: nn.Module, *args: Any, **keywords: Any) -> Quantizer:
    return make_calibrated(model.eval(), [keywords or args], backend="openvino", sites={"residual_add": True})


class Tied(nn.Module):
    """A head that reads the embedding's weight, and a recurrence that keeps a list of its own: ids to [rows, n, 20]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 32)
        self.norm = nn.LayerNorm(32)
        self.recurrence = nn.LSTM(32, 32, batch_first=True)
        self.head = nn.Linear(32, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.recurrence(self.norm(self.embedding(ids)))[0])


def _ids(rows: int = 2, length: int = 8, top: int = 20) -> Tensor:
    return torch.randint(3, top, (rows, length))


# -- casts ---------------------------------------------------------------------------------------------------------


def test_a_cast_of_a_part_keeps_what_is_tied() -> None:
    model = Tied().eval()
    proxy: Any = Quantizer(preset="plain").proxy(model)
    proxy.norm.double()
    assert proxy.head.weight is proxy.embedding.weight
    assert proxy.head.weight is not model.head.weight
    proxy.head.double()
    assert proxy.embedding.weight.dtype == torch.float64
    assert proxy.recurrence.weight_ih_l0 is proxy.recurrence._flat_weights[0]


# -- data parallel -------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A frozen proxy beside a layer that trains: without one, there would be nothing to synchronise."""

    def __init__(self) -> None:
        super().__init__()
        model = Mlp().eval()
        self.frozen = _calibrated(model, torch.randn(4, 32)).quantize(model)
        self.head = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(x))


def _partly_frozen() -> nn.Module:
    """One part frozen, one that trains, one an off proxy that trains; the same in every process."""
    torch.manual_seed(0)
    return nn.Sequential(Mixed(), Quantizer(preset="plain").proxy(Mlp(4)))


def _rows() -> Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _of_rank(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The output of the rows of a process of two, and its gradients."""
    model = _partly_frozen()
    # It ends with this function, before the group does: the last to hold that waits for gloo's threads with Python's
    # lock, which one of them may wait for.
    wrapped = nn.parallel.DistributedDataParallel(model)
    output = wrapped(_rows()[rank::2])
    output.square().mean().backward()
    return output.detach(), _gradients(model)


def _one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(_of_rank(rank), f"{folder}/{rank}.pt")
    # Together: gloo may abort a process whose peer is gone while its threads end.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def test_two_processes_share_their_gradients(tmp_path: Path) -> None:
    run_ranks(_one_of_two, tmp_path)
    (even, first), (odd, second) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert len(first) == 2 + 2 + 4  # the biases of the frozen part, the head, the off proxy
    assert_same(first, second)
    whole = _partly_frozen()
    output = whole(_rows())
    output.square().mean().backward()
    torch.testing.assert_close(torch.stack([even, odd], 1).flatten(0, 1), output.detach())
    torch.testing.assert_close(first, _gradients(whole))


# -- generation ----------------------------------------------------------------------------------------------------


def _decoder(name: str) -> nn.Module:
    tf = pytest.importorskip("transformers", reason="makes a transformers model: install enginequant[hf]")
    common = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(1)
    if name == "llama":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "max_position_embeddings": 64}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        return tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, **heads, **common)).eval()
    return tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, **common)).eval()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_off_proxy_generates_the_models_tokens(name: str) -> None:
    model, ids = _decoder(name), _ids(top=99)
    proxy: Any = Quantizer(preset="plain").proxy(model)
    for options in ({"do_sample": False}, {"do_sample": False, "num_beams": 2}, {"do_sample": True}):
        tokens = []
        for each in (model, proxy):
            torch.manual_seed(5)
            tokens.append(each.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, **options))
        assert tokens[0].shape[1] == 14
        assert_same(tokens[1], tokens[0])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_quantized_attention_is_right_step_by_step(name: str) -> None:
    model, ids = _decoder(name), _ids(top=99)
    q = _calibrated(model, input_ids=ids)
    assert any(row.kind == "matmul" for row in q.coverage.quantized)
    proxy = q.quantize(model)
    with torch.no_grad():
        whole = proxy(ids).logits
        cache, steps = None, []
        for place in range(ids.shape[1]):
            result = proxy(ids[:, place : place + 1], past_key_values=cache, use_cache=True)
            cache = result.past_key_values
            steps.append(result.logits)
        assert not torch.equal(whole, model(ids).logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-5, rtol=1e-5)


# -- compilation, export, tracing ----------------------------------------------------------------------------------

MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "mlp": lambda: (Mlp(), (torch.randn(4, 32),), {}),
    "conv": lambda: (ConvNet(), (torch.randn(3, 3, 16, 16),), {}),
    "bert": lambda: (tiny("bert", "sdpa"), (), batch("bert", padded=True)),
    "vit": lambda: (tiny("vit", "sdpa"), (), batch("vit")),
    "llama": lambda: (_decoder("llama"), (), {"input_ids": _ids(3, 8, 99), "use_cache": False}),
}


def _made(name: str, kind: str) -> tuple[nn.Module, nn.Module, tuple[Any, ...], dict[str, Any]]:
    if name in ("bert", "vit"):
        pytest.importorskip("transformers", reason="makes a transformers model: install enginequant[hf]")
    model, args, keywords = MODELS[name]()
    q = _calibrated(model, *args, **keywords)
    return model, getattr(q, kind)(model), args, keywords


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Each compilation of a transformer takes seconds.
QUICK = [(name, made) for name in ("mlp", "conv") for made in ("quantize", "proxy")]
SOME = some_daily([*QUICK, ("bert", "quantize"), ("bert", "proxy"), ("vit", "quantize"), ("llama", "quantize")], 5)


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(("name", "kind"), SOME)
def test_compiles_whole(name: str, kind: str) -> None:
    _, proxy, args, keywords = _made(name, kind)
    with torch.no_grad():
        expected = proxy(*args, **keywords)
        # fullgraph makes a graph break an error.
        assert_same(torch.compile(proxy, fullgraph=True, backend="aot_eager")(*args, **keywords), expected)


@pytest.mark.parametrize(("name", "kind"), SOME)
def test_exports_with_dynamic_shapes(name: str, kind: str) -> None:
    model, proxy, args, keywords = _made(name, kind)
    axes = (0, 1) if "input_ids" in keywords else (0,)

    def dynamic(value: Any) -> Any:
        return dict.fromkeys(axes, torch.export.Dim.DYNAMIC) if isinstance(value, Tensor) else None

    shapes: Any = {key: dynamic(value) for key, value in keywords.items()} or tuple(map(dynamic, args))
    two = {key: value[:2] if isinstance(value, Tensor) else value for key, value in keywords.items()}
    with torch.no_grad():
        expected = torch.export.export(model, args, keywords, dynamic_shapes=shapes).module()
        program = torch.export.export(proxy, args, keywords, dynamic_shapes=shapes).module()
        assert ("quantizer.fake_quantize" in str(program.graph)) == (kind == "quantize")
        for arguments, named in ((args, keywords), (tuple(value[:2] for value in args), two)):
            found = program(*arguments, **named)
            if kind == "proxy":
                assert_same(found, expected(*arguments, **named))
            assert_same(found, proxy(*arguments, **named))


# torch says that tracing is deprecated, and tracing reads a property of transformers that is.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mlp", "conv", "bert", "vit"])
def test_traces(name: str, kind: str, tmp_path: Path) -> None:
    _, proxy, args, keywords = _made(name, kind)
    example = args or tuple(keywords.values())
    with torch.no_grad():
        traced = torch.jit.trace(proxy, example, strict=False)
        torch.jit.save(traced, tmp_path / "traced.pt")
        loaded = torch.jit.load(tmp_path / "traced.pt")
        expected = proxy(*example)
        whole = expected if isinstance(expected, Tensor) else expected[0]
        found = loaded(*example)
        if isinstance(found, dict):
            found = tuple(found.values())
    assert_same(found if isinstance(found, Tensor) else found[0], whole)
