"""The autocast state of a call, for computing the call again elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class Autocast:
    """The state of ``torch.autocast`` at one time.

    Attributes:
        devices: each kind of device with the type that autocast computes in there; None: it is off there.
    """

    devices: tuple[tuple[str, torch.dtype | None], ...]

    @classmethod
    def now(cls) -> Self:
        """Return the current state."""
        accelerator = torch.accelerator.current_accelerator()
        kinds = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
        return cls(
            tuple((kind, torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None) for kind in kinds)
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Compute in this state while the block is open."""
        if self == Autocast.now():
            yield
            return
        with ExitStack() as stack:
            for kind, dtype in self.devices:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None))
            yield
