"""Values that the first of several processes makes alone, as by building and timing engines, and tells the others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from quantizer.common.distributed import get_rank, get_world_size, of_first_rank
from quantizer.common.plain_values import decoded
from quantizer.files import require_room, scratch

Value = TypeVar("Value")


def from_first_rank(make: Callable[[], Value], hint: Any) -> Value:
    """Return what ``make`` returns on the first rank, which alone calls it.

    Args:
        make: returns plain values, or a dataclass of them.
        hint: the annotation of what it returns; see ``decoded``.

    Raises:
        LostRankError: another process has ended.
    """
    if get_world_size() == 1:
        return make()
    told = of_first_rank(lambda: json.dumps(_plain(make())).encode())
    given: Value = decoded(hint, json.loads(told), "what the first rank told")
    return given


@contextmanager
def own_place(folder: Path) -> Iterator[Path]:
    """Yield the folder of a run; on all ranks but the first a temporary one, as the first one writes what remains."""
    if get_rank() == 0:
        yield folder
        return
    with scratch() as beside:
        yield beside / folder.name


def require_room_to_write(folder: Path, size: int, what: str) -> None:
    """Raise if the disk has too little space, on the first rank, the only one whose folder remains.

    Raises:
        QuantizerError: see ``require_room``.
    """
    if get_rank() == 0:
        require_room(folder, size, what)


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
