"""The attention implementation of a proxy.

Transformers models read the name of their attention function from their config at each call, and make their masks
accordingly. Fused attention hides both products; ``eager`` computes them separately. The proxy's configs are its own
copies, so the user's model does not change.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from quantizer.rewrite.host_argument import EAGER, RECORDED

_SETTING = "_attn_implementation"


def use_eager_attention(proxy: nn.Module) -> None:
    """Switch the configs of all modules of a proxy to eager attention, and torch's layers to their Python path."""
    use_python_paths(proxy)
    for module in proxy.modules():
        config = module.__dict__.get("config")
        if hasattr(config, _SETTING):
            setattr(config, _SETTING, "eager")


def use_python_paths(proxy: nn.Module) -> None:
    """Switch torch's own layers to their Python path, where their sites are; other attention stays the model's own."""
    for module in proxy.modules():
        vars(module)[EAGER] = True


@contextmanager
def attention_of(model: nn.Module, proxy: nn.Module) -> Iterator[bool]:
    """Switch the configs of a proxy to the attention of its model inside the block; give whether that is another."""
    changed = []
    own = dict(model.named_modules(remove_duplicate=False))
    for path, module in proxy.named_modules(remove_duplicate=False):
        config, other = (vars(one).get("config") for one in (module, own.get(path, module)))
        name = getattr(other, _SETTING, None)
        if hasattr(config, _SETTING) and getattr(config, _SETTING) != name:
            changed.append((config, getattr(config, _SETTING)))
            setattr(config, _SETTING, name)
    try:
        yield bool(changed)
    finally:
        for config, former in reversed(changed):
            setattr(config, _SETTING, former)


@contextmanager
def as_recorded(proxy: nn.Module, recorded: bool) -> Iterator[None]:
    """Make a proxy compute as if gradients were recorded, or not recorded, whatever the actual gradient mode.

    torch's encoder writes 0 at padded positions if no gradients are recorded, and else leaves them as they are.
    """
    for module in proxy.modules():
        vars(module)[RECORDED] = recorded
    try:
        yield
    finally:
        for module in proxy.modules():
            vars(module).pop(RECORDED, None)
