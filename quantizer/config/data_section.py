"""The ``model:`` and ``data:`` sections: the float model, and the rows for calibration, evaluation and training."""

from __future__ import annotations

from os.path import expanduser
from os.path import realpath
from typing import Annotated
from typing import Literal

from pydantic import AfterValidator
from pydantic import Field

from quantizer.common.choices import TASKS
from quantizer.config.section import OneOf
from quantizer.config.section import Section
from quantizer.config.section import Text

__all__ = ["DataConfig", "DatasetConfig", "ModelConfig"]

_TASKS = OneOf(TASKS)


class ModelConfig(Section):
    """The float model and the task on which it is scored."""

    source: Text = Field(
        description="A local folder, a hub name, or 'package:NAME/FOLDER' for a folder inside an installed package. "
        "A relative folder is resolved against the current directory, not against the YAML file."
    )
    task: Annotated[str, AfterValidator(_TASKS.check), _TASKS] = Field(
        description="What the model's output is used for; decides the metric."
    )
    attention: Literal["eager", "sdpa"] = Field(
        default="eager", description="Attention implementation that the float model is loaded with."
    )
    max_length: int = Field(
        default=128, ge=1, description="Longer texts are cut to this many tokens; images have none."
    )


class DatasetConfig(Section):
    """Rows of one data set."""

    name: Text = Field(description="Name of a registered data set, such as 'stsb-csv' or 'vader'.")
    path: Text | None = Field(
        default=None,
        description="File or folder that holds the rows, where the data set reads one. A relative path is resolved "
        "against the current directory, not against the YAML file.",
    )
    split: Text | None = Field(default=None, description="Name of the split, where the data set has several.")
    rows: int | None = Field(default=None, ge=1, description="Take this many rows; null: all.")
    offset: int = Field(default=0, ge=0, description="Skip this many rows first.")
    subset: Text | None = Field(default=None, description="Part of the data set, such as 'movieReviewSnippets'.")

    def shares_rows_with(self, other: DatasetConfig) -> bool:
        """Return whether the two data sets have, or may have, a row in common."""
        if self._source != other._source:
            return False
        if self.split != other.split:
            # Without a split the rows are those of all splits, in another order: offset and rows prove nothing.
            return None in (self.split, other.split)
        first, second = sorted((self, other), key=lambda dataset: dataset.offset)
        return first.rows is None or second.offset < first.offset + first.rows

    @property
    def _source(self) -> tuple[str | None, ...]:
        return self.name, None if self.path is None else realpath(expanduser(self.path)), self.subset


class DataConfig(Section):
    """The rows of each stage."""

    calibration: DatasetConfig = Field(description="Rows that the activation ranges are taken from.")
    evaluation: DatasetConfig = Field(description="Rows that the scores are measured on.")
    tuning: DatasetConfig | None = Field(
        default=None,
        description="Rows that a choice is scored on, none of them of evaluation; needed by fallback.max_drop, by "
        "amp.measure 'metric' and by qat.",
    )
    training: DatasetConfig | None = Field(
        default=None, description="Rows that qat trains on, none of them of evaluation or tuning."
    )
    head: DatasetConfig | None = Field(
        default=None, description="Rows that the classifier is fitted on; needed by task 'embedding-classification'."
    )
    batch_size: int = Field(default=32, ge=1, description="Rows in one batch.")
