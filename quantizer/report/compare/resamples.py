"""``resamples.json`` in the folder of a run: its scores on bootstrap resamples of the evaluation rows.

The resamples of the same rows are the same in every run, so that two runs are compared in pairs, whatever the metric:
the interval of the difference needs neither the model nor the rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from quantizer.common.paths import regular_file
from quantizer.common.plain_values import decoded, json_values
from quantizer.errors import QuantizerError
from quantizer.files import whole_file

RESAMPLES = "resamples.json"


@dataclass(frozen=True, kw_only=True)
class Resamples:
    """The scores of one run.

    Attributes:
        rows: a hash of the rows, their labels included.
        metric: the name of the metric.
        scores: the score of each resample [R] by the form of the model, such as ``float`` and ``engine``.
    """

    rows: str
    metric: str
    scores: Mapping[str, tuple[float, ...]]


def write_resamples(resamples: Resamples, folder: Path) -> None:
    """Write the file into the folder of a run."""
    with whole_file(folder / RESAMPLES) as part:
        part.write_text(json.dumps(asdict(resamples)) + "\n", encoding="utf-8")


def read_resamples(folder: Path) -> Resamples | None:
    """Return what the file of a run holds; None if it has none, as that of an earlier version."""
    path = folder / RESAMPLES
    try:
        found: Resamples = decoded(Resamples, json_values(regular_file(path).read_bytes()), "the file")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise QuantizerError(f"{path} cannot be read ({error}); remove it to compare without intervals") from error
    return found
