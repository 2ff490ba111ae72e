"""The YAML file of a run."""

from __future__ import annotations

import shutil
from pathlib import Path

from quantizer.config import dump_yaml, load_run
from quantizer.config.schema import check_run
from torture import mutations
from torture.kinds import Kind, kind

CONFIGS = Path(__file__).parents[2] / "configs"


def _make(folder: Path) -> None:
    shutil.copy(CONFIGS / "minilm-sentiment-int8.yaml", folder / "run.yaml")


def _read(folder: Path) -> str:
    config = load_run(folder / "run.yaml", ["quantizer.backend=openvino"])
    check_run(config)
    return dump_yaml(config).encode().decode()


kind(
    Kind(
        name="yaml",
        make=_make,
        files=("run.yaml",),
        how=(mutations.raw, mutations.text, mutations.yaml_text, mutations.yaml_text),
        read=_read,
    )
)
