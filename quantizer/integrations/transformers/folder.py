"""The folder of a quantized ``transformers`` model: its format, and the checks on loading.

``config.json`` has a ``quantization_config``. ``model.safetensors`` has the tensors of the frozen proxy under their own
names, and one more, ``quantizer_state`` uint8: plan, ranges and config, see ``plan/saved_folder.py``. The plan thus
stays with its weights when their file is split, renamed or sent elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from torch import nn
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantizer.config import QuantizerConfig, quantizer_config
from quantizer.errors import ConfigError, ProxyError, QuantizerError
from quantizer.plan.site_plan import Plan
from quantizer.proxy.build import sites_of

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel


METHOD = QuantizerConfig.quant_method
STATE = "quantizer_state"


class SavedConfig(QuantizationConfigMixin):
    """A ``QuantizerConfig`` in the form of ``config.json``."""

    quant_method = METHOD  # type: ignore[assignment]

    def __init__(self, settings: QuantizerConfig, *, quantized: bool = False) -> None:
        self.settings = settings
        self.quantized = quantized

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **keywords: Any) -> Any:
        """Return the config whose ``to_dict()`` this is."""
        fields = dict(config_dict)
        fields.pop("quant_method", None)
        quantized = fields.pop("quantized", False)
        problems = [] if isinstance(quantized, bool) else [f"quantized: got {quantized!r}; expected true or false"]
        try:
            config = cls(quantizer_config(fields), quantized=quantized)
        except ConfigError as error:
            problems += [problem.removeprefix("mapping: ") for problem in error.problems]
        if problems:
            raise ConfigError([f"quantization_config: {problem}" for problem in problems])
        return (config, keywords) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**self.settings.to_dict(), "quantized": self.quantized}


# If a folder has a config and another is given, transformers raises unless their classes have the same name. If they
# have, it takes the folder's and warns.
SavedConfig.__name__ = QuantizerConfig.__name__


def read_state(files: Sequence[Path]) -> tuple[Path, bytes | None]:
    """Return the file that has the state, and the state; if none of the files has it, their folder and None."""
    found: tuple[Path, bytes | None] = files[0].parent if files else Path("what from_pretrained() was given"), None
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                if STATE in tensors.keys():  # noqa: SIM118 - it is no mapping
                    found = file, tensors.get_tensor(STATE).numpy().tobytes()
        except (OSError, SafetensorError) as error:
            raise QuantizerError(f"{file} cannot be read: {error}; copy it again, or save the model again") from error
    return found


def require_sites(model: PreTrainedModel, plan: Plan, place: Path) -> None:
    """Raise if a model is not of the class that was saved, or of another version of its code."""
    different = sorted(set(plan) ^ {site.path for site in sites_of(model)})
    if different:
        saved = (model.config.architectures or ["model"])[0]
        raise ProxyError(
            f"{place} holds a quantized {saved}, and this {type(model).__name__} has other sites: {len(different)} "
            f"differ, the first is {different[0]!r}; load it as {saved}, with the config.json and the version of "
            "transformers that it was saved with"
        )


def require_loaded(modules: Iterable[nn.Module], place: Path) -> None:
    """Raise if tensors of modules were in no file: transformers leaves them uninitialized."""
    # parameters() would also list dequantized weights, which are in no file: their sites have the stored tensors.
    named = (found for module in modules for found in chain(module.named_parameters(), module.named_buffers()))
    tensors = {tensor for _, tensor in named}
    missing = sum(not getattr(tensor, "_is_hf_initialized", False) for tensor in tensors)
    if missing:
        raise QuantizerError(
            f"{place} is damaged: {missing} tensors of quantized operations are missing there; copy it again, or save "
            "the model again"
        )
