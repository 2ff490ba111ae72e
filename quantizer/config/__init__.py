"""The configuration of a run: a frozen schema, and reading of YAML that reports all problems at once."""

from __future__ import annotations

from quantizer.config.data_section import DataConfig, DatasetConfig, ModelConfig
from quantizer.config.load import dump_yaml, load_run, quantizer_config
from quantizer.config.quantizer_section import (
    ActivationsConfig,
    QuantizerConfig,
    SelectionConfig,
    SitesConfig,
    WeightsConfig,
)
from quantizer.config.schema import DynamicConfig, EngineConfig, ExportConfig, ReportConfig, RunConfig
from quantizer.config.sensitivity_section import AmpConfig, FallbackConfig
from quantizer.config.training_section import QatConfig

__all__ = [
    "ActivationsConfig",
    "AmpConfig",
    "DataConfig",
    "DatasetConfig",
    "DynamicConfig",
    "EngineConfig",
    "ExportConfig",
    "FallbackConfig",
    "ModelConfig",
    "QatConfig",
    "QuantizerConfig",
    "ReportConfig",
    "RunConfig",
    "SelectionConfig",
    "SitesConfig",
    "WeightsConfig",
    "dump_yaml",
    "load_run",
    "quantizer_config",
]
