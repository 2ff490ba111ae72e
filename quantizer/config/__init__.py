"""The configuration of a run: a frozen schema, and reading of YAML that reports all problems at once."""

from __future__ import annotations

from quantizer.config.data_section import DataConfig, DatasetConfig, ModelConfig
from quantizer.config.load import dump_yaml, load_run, quantizer_config
from quantizer.config.quantizer_section import (
    ActivationsConfig,
    AmpConfig,
    FallbackConfig,
    QuantizerConfig,
    SelectionConfig,
    SitesConfig,
    WeightsConfig,
)
from quantizer.config.schema import DynamicConfig, EngineConfig, ExportConfig, QatConfig, ReportConfig, RunConfig

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
