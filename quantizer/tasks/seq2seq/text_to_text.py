"""The task ``text-to-text``: translations and summaries, by encoders with decoders.

Shapes: N rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from quantizer.tasks.datasets.rows import Rewritten, Row
from quantizer.tasks.inputs import Sample
from quantizer.tasks.kinds import rows_of_kind
from quantizer.tasks.seq2seq.writer import WritingTask
from quantizer.tasks.task import Predictions, tasks


@tasks.add("text-to-text")
class TextToText(WritingTask):
    """Texts to the texts that are written for them, scored by ROUGE-L: the F1 of the longest common words in order."""

    name = "text-to-text"
    auto_class = "AutoModelForSeq2SeqLM"
    metric_name = "rouge_l"
    packages = ("torchmetrics",)

    def samples(self, rows: Sequence[Row]) -> list[Sample]:
        return [row.text for row in rows_of_kind(rows, Rewritten, self.name)]

    def targets(self, rows: Sequence[Row]) -> npt.NDArray[Any]:
        """Return the texts that are right [N]."""
        return np.array([row.target for row in rows_of_kind(rows, Rewritten, self.name)], dtype=object)

    def counts(self, predictions: Predictions, rows: Sequence[Row]) -> npt.NDArray[np.float64]:
        """Return the ROUGE-L of each row, and 1 for the row [N x 2]."""
        score = partial(
            import_module("torchmetrics.functional.text").rouge_score,
            # By default it knows no letters but those of English.
            normalizer=str.casefold,
            tokenizer=partial(re.findall, r"\w+"),
            rouge_keys="rougeL",
        )
        pairs = zip(self.texts(predictions), self.targets(rows), strict=True)
        return np.array([(float(score(*pair)["rougeL_fmeasure"]), 1.0) for pair in pairs], dtype=np.float64)

    def ratio(self, sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the mean over rows."""
        return np.asarray(sums[..., 0] / sums[..., 1])
