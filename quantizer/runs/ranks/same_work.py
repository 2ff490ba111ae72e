"""Comparison of the work of all processes of a run, of which each does a part."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from torch import nn

from quantizer.common.distributed import all_gather_bytes, get_world_size
from quantizer.common.fingerprint import Fingerprint
from quantizer.errors import QuantizerError
from quantizer.tasks import Row
from quantizer.tasks.datasets.rows import content_of


def require_same_work(settings: str, model: nn.Module, rows: Mapping[str, Sequence[Row]]) -> None:
    """Raise unless all processes have the same settings, weights and rows; all processes must call this.

    Args:
        settings: the configuration as text.
        model: the float model.
        rows: rows by purpose, in the order in which they are dealt out.

    Raises:
        QuantizerError: a process has something else than the first one.
        LostRankError: another process has ended.
    """
    if get_world_size() == 1:
        return
    weights = repr(sorted(Fingerprint.of(model).plain().items()))
    mine = {
        "configuration": settings,
        "weights of the model": hashlib.sha256(weights.encode()).hexdigest(),
        **{f"{purpose} rows": content_of(some) for purpose, some in rows.items()},
    }
    told = [json.loads(one) for one in all_gather_bytes(json.dumps(mine).encode())]
    for rank, other in enumerate(told):
        if others := [name for name in mine if other[name] != told[0][name]]:
            raise QuantizerError(
                f"rank {rank} differs from rank 0 in the {' and '.join(others)}, and all processes of a run do parts "
                "of one work: give them the same files, and seed the function that makes the model, if one does"
            )
