"""The configuration of a run: a frozen schema, and reading of YAML that reports all problems at once."""

from __future__ import annotations

from quantizer.config.data_section import DataConfig
from quantizer.config.data_section import DatasetConfig
from quantizer.config.data_section import ModelConfig
from quantizer.config.load import dump_yaml
from quantizer.config.load import load_run
from quantizer.config.load import quantizer_config
from quantizer.config.quantizer_section import ActivationsConfig
from quantizer.config.quantizer_section import QuantizerConfig
from quantizer.config.quantizer_section import SelectionConfig
from quantizer.config.quantizer_section import SitesConfig
from quantizer.config.quantizer_section import WeightsConfig
from quantizer.config.schema import DynamicConfig
from quantizer.config.schema import EngineConfig
from quantizer.config.schema import ExportConfig
from quantizer.config.schema import ReportConfig
from quantizer.config.schema import RunConfig
from quantizer.config.sensitivity_section import AmpConfig
from quantizer.config.sensitivity_section import FallbackConfig
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
