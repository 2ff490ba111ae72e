"""The blocks of a model: modules that are reconstructed one after another, and hold all sites that they call.

A container that lists blocks (``encoder.layer``, the stages of a convolutional network) is taken apart into them; so is
every module that such a container is in. What is left is a block: an encoder layer, an inverted residual, a head.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.site import Site, SourceCall

Block = tuple[str, nn.Module, tuple[Site, ...]]
"""The path of a block, the block, and its sites."""


def blocks_of(model: nn.Module, sites: Collection[Site]) -> list[Block]:
    """Return the blocks of a proxy that have some of ``sites``, in the order of its modules.

    Sites that a module calls which is taken apart, such as a residual addition between blocks, are in none.
    """
    wanted = {id(site) for site in sites}

    def inside(module: nn.Module) -> tuple[Site, ...]:
        return tuple(entry for entry in module.modules() if isinstance(entry, Site) and id(entry) in wanted)

    def parts(path: str, module: nn.Module) -> Iterator[Block]:
        if not _lists_blocks_within(module):
            yield path, module, inside(module)
            return
        for name, child in module.named_children():
            if not isinstance(child, SourceCall) and inside(child):
                yield from parts(f"{path}.{name}" if path else name, child)

    return list(parts("", model)) if wanted else []


def _lists_blocks_within(module: nn.Module) -> bool:
    return any(isinstance(entry, nn.Sequential | nn.ModuleList) and _lists_blocks(entry) for entry in module.modules())


def _lists_blocks(container: nn.Module) -> bool:
    """Return whether a container holds modules with modules of their own, and not only layers."""
    return any(_has_modules(child) for child in container.children())


def _has_modules(module: nn.Module) -> bool:
    return any(not isinstance(child, SourceCall | OperandQuantizer) for child in module.children())
