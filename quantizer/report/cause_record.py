"""The records of causes and cures: the groups that cost most, and the setting that mends each."""

from __future__ import annotations

from dataclasses import dataclass

from quantizer.common.plain_values import yaml_values
from quantizer.report.record_base import Record


@dataclass(frozen=True, kw_only=True)
class Cure(Record):
    """A setting that was tried."""

    setting: str
    """The setting, as YAML of the ``quantizer`` section."""
    gain_db: float
    """By how many dB the SQNR of the model's output rises with it, measured with all groups quantized."""
    alone_db: float
    """By how many dB the SQNR of the model's output rises with it if this group alone is quantized; infinite if it
    leaves the group in float."""

    def __post_init__(self) -> None:
        super().__post_init__()
        told = yaml_values(self.setting.encode())
        if not isinstance(told, dict) or len(told) != 1:
            raise ValueError(f"the setting of a cure is {self.setting!r}, expected one section of YAML")


@dataclass(frozen=True, kw_only=True)
class Cause(Record):
    """The cost of one group, and its cause."""

    group: str
    """Name of the group."""
    sqnr_db: float
    """The SQNR of the model's output in dB with this group alone quantized, measured on calibration batches."""
    findings: tuple[str, ...] = ()
    """What is wrong with its inputs; empty if nothing stands out."""
    cure: Cure | None = None
    """The setting that gains most; null if nothing stands out, or if no setting that was tried gains."""
    notes: tuple[str, ...] = ()
    """Why outliers of its inputs cannot move into its weights; empty if they can."""
