"""Tiny models with random weights, batches for them, and comparisons that say where two outputs differ."""

from __future__ import annotations

import copy
import importlib.util
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.utils import _pytree as pytree

ARCHITECTURES = ("bert", "bert-classification", "roberta", "distilbert", "mpnet", "vit", "dinov2")
EAGER_ONLY = ("mpnet",)  # its attention stands inside the class, with no other implementation
VISION = ("vit", "dinov2")

_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 40,
}
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}


def _byte_products_are_exact() -> bool:
    found = Path("/proc/cpuinfo")
    flags = found.read_text(encoding="utf-8", errors="replace") if found.exists() else ""
    return "avx2" not in flags or "vnni" in flags


# Without VNNI, OpenVINO and ONNX Runtime multiply bytes by VPMADDUBSW: two products are added in 16 bits, and saturate.
BYTE_PRODUCTS_ARE_EXACT = _byte_products_are_exact()
needs_exact_byte_products = pytest.mark.skipif(
    not BYTE_PRODUCTS_ARE_EXACT, reason="this x86 CPU has no VNNI: its products of bytes saturate"
)


def user_pages() -> str:
    """The README and the pages of ``docs/`` that say how to use the package, those without which it is no promise."""
    repository, folders = Path(__file__).parents[1], ("tutorials", "how-to", "migrate", "concepts", "extending")
    names = ("index", "install", "choose", "support", "troubleshooting", "limitations")
    pages = [repository / "README.md", *(repository / "docs" / f"{name}.md" for name in names)]
    pages += [page for folder in folders for page in sorted((repository / "docs" / folder).glob("*.md"))]
    return "\n\n".join(page.read_text(encoding="utf-8") for page in pages)


def tiny(architecture: str, attention: str = "eager", *, train: bool = False) -> nn.Module:
    """A model of one of ``ARCHITECTURES`` with random weights, the same at every call."""
    import transformers as tf

    made = {
        "bert": (tf.BertModel, tf.BertConfig, _ENCODER),
        "bert-classification": (tf.BertForSequenceClassification, tf.BertConfig, {**_ENCODER, "num_labels": 3}),
        "roberta": (tf.RobertaModel, tf.RobertaConfig, _ENCODER),
        "distilbert": (
            tf.DistilBertModel,
            tf.DistilBertConfig,
            {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64, "vocab_size": 99, "max_position_embeddings": 40},
        ),
        "mpnet": (tf.MPNetModel, tf.MPNetConfig, _ENCODER),
        "vit": (tf.ViTModel, tf.ViTConfig, _VISION),
        "dinov2": (tf.Dinov2Model, tf.Dinov2Config, _VISION),
    }
    model_class, config_class, options = made[architecture]
    config = config_class(**options)
    config._attn_implementation = attention
    torch.manual_seed(1)
    model: nn.Module = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            # Trained weights are not as small as fresh ones; biases and scales are not all alike.
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train(train)


def batch(
    architecture: str, *, padded: bool = False, seed: int = 0, rows: int = 3, length: int = 8
) -> dict[str, Tensor]:
    """Inputs of ``tiny(architecture)``: token ids [rows, length] and their mask, or pixels [rows, 3, 16, 16]."""
    generator = torch.Generator().manual_seed(seed)
    if architecture in VISION:
        return {"pixel_values": torch.randn(rows, 3, 16, 16, generator=generator)}
    mask = torch.ones(rows, length, dtype=torch.long)
    ids = torch.randint(3, 99, (rows, length), generator=generator)
    if padded:
        for row in range(rows):
            mask[row, length - 2 * row :] = 0
        ids = torch.where(mask.bool(), ids, torch.full_like(ids, 1))
    return {"input_ids": ids, "attention_mask": mask}


def cast(inputs: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The inputs with floating tensors in ``dtype``."""
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}


def differences(first: Any, second: Any) -> list[str]:
    """Where two outputs of a model differ: structure, dtype, or any bit of a tensor."""
    one, one_spec = pytree.tree_flatten_with_path(first)
    two, two_spec = pytree.tree_flatten_with_path(second)
    if one_spec != two_spec:
        return [f"structure: {one_spec} against {two_spec}"]
    found = []
    for (path, a), (_, b) in zip(one, two, strict=True):
        place = pytree.keystr(path) or "output"
        if isinstance(a, Tensor):
            if a.dtype != b.dtype:
                found.append(f"{place}: {a.dtype} against {b.dtype}")
            elif not torch.equal(a, b):
                gap = (a.double() - b.double()).abs().max() if a.shape == b.shape else f"{a.shape} against {b.shape}"
                found.append(f"{place}: {gap}")
        elif a != b:
            found.append(f"{place}: {a!r} against {b!r}")
    return found


def assert_same(first: Any, second: Any) -> None:
    """Two outputs agree to the last bit."""
    found = differences(first, second)
    assert not found, "\n".join(found)


@dataclass(frozen=True)
class Snapshot:
    """What must not change in a user's model: its tensors and their names, classes, config, hooks, modes."""

    state: dict[str, Tensor]
    identities: tuple[int, ...]
    classes: tuple[type, ...]
    attributes: tuple[tuple[str, ...], ...]
    modes: tuple[bool, ...]
    hooks: int
    config: Any
    attention: Any

    @classmethod
    def of(cls, model: nn.Module) -> Snapshot:
        """The state of a model now."""
        config = getattr(model, "config", None)
        modules = list(model.modules())
        return cls(
            state={name: value.detach().clone() for name, value in model.state_dict().items()},
            # By name: what a frozen model lists of its stored weights is made at each read.
            identities=tuple(id(tensor) for tensor in [*dict(model.named_parameters()).values(), *model.buffers()]),
            classes=tuple(type(module) for module in modules),
            attributes=tuple(tuple(module.__dict__) for module in modules),
            modes=tuple(module.training for module in modules),
            hooks=sum(
                len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
                for module in modules
            ),
            config=copy.deepcopy(config.to_dict()) if config is not None else None,
            attention=getattr(config, "_attn_implementation", None),
        )

    def assert_unchanged(self, model: nn.Module) -> None:
        """The model is as it was when the snapshot was taken."""
        now = Snapshot.of(model)
        assert list(now.state) == list(self.state)
        for name, value in self.state.items():
            assert now.state[name].dtype == value.dtype, name
            assert torch.equal(now.state[name], value), name
        assert now.identities == self.identities
        assert now.classes == self.classes
        assert now.attributes == self.attributes
        assert now.modes == self.modes
        assert now.hooks == self.hooks
        assert now.config == self.config
        assert now.attention == self.attention


class Mlp(nn.Module):
    """Two linears and a residual add: [rows, 32] to [rows, 32]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class ConvNet(nn.Module):
    """Two convolutions with a batch norm and a linear head: [rows, 3, 16, 16] to [rows, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.body = nn.Conv2d(16, 16, 3, padding=1)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.body(x))
        return self.head(self.dropout(x.mean((2, 3))))


def imported(folder: Path, name: str, text: str) -> types.ModuleType:
    """Write a module and import it under a name, dotted or not."""
    path = folder / f"{name.rpartition('.')[2]}.py"
    path.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def forget_checksums(folder: Path) -> None:
    """Let the folder of a saved quantizer be one from before it held checksums of its other files."""
    file = folder / "quantizer.yaml"
    document = yaml.safe_load(file.read_text(encoding="utf-8"))
    del document["sha256"]
    file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")


def openvino_core() -> Any:
    """Return a core of OpenVINO with the CPU's plugin loaded, and this thread's signal stack as it was.

    Without that, two cores let go in the order in which they were made leave an unmapped stack, and the next test that
    gets a signal ends its process.
    """
    # Here: goldens name the lines of the nets above.
    from quantizer.engines.openvino.compiled_models import kept_signal_stack

    openvino = pytest.importorskip("openvino", reason="needs enginequant[openvino]")
    with kept_signal_stack():
        core = openvino.Core()
        core.get_property("CPU", "FULL_DEVICE_NAME")
    return core


def read_json(path: Path) -> Any:
    """What a file of JSON holds."""
    import json  # here: goldens name the lines of the nets above

    return json.loads(path.read_text(encoding="utf-8"))
