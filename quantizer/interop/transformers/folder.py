"""The folder of a quantized ``transformers`` model: what it holds, and what is refused of one.

``config.json`` has a ``quantization_config``; ``model.safetensors`` the tensors of the frozen proxy under their own
names, and one more, ``quantizer_state`` uint8: plan, ranges and config, see ``plan/saved_folder.py``. So they lie in
the file of the weights that they belong to, wherever that is split, renamed or sent to.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Any

from safetensors import SafetensorError
from safetensors import safe_open
from torch import nn
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantizer.config import QuantizerConfig
from quantizer.config import quantizer_config
from quantizer.errors import ConfigError
from quantizer.errors import ProxyError
from quantizer.errors import QuantizerError
from quantizer.plan.site_plan import Plan
from quantizer.proxy.build import sites_of

if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel

__all__ = ["METHOD", "STATE", "SavedConfig", "read_state", "require_loaded", "require_sites"]

METHOD = QuantizerConfig.quant_method
STATE = "quantizer_state"


class SavedConfig(QuantizationConfigMixin):
    """A ``QuantizerConfig`` as ``config.json`` holds it.

    Args:
        settings: of the ``Quantizer``.
        quantized: the folder holds a quantized model, and not a float one.
    """

    quant_method = METHOD  # type: ignore[assignment]

    def __init__(self, settings: QuantizerConfig, *, quantized: bool = False) -> None:
        self.settings = settings
        self.quantized = quantized

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **keywords: Any) -> Any:
        """Return what ``to_dict`` gave.

        Raises:
            ConfigError: it has problems; all of them are listed.
        """
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
        """Plain values."""
        return {**self.settings.to_dict(), "quantized": self.quantized}


# Where a folder has a config and one is given, transformers takes the folder's and says so, if their classes have one
# name.
SavedConfig.__name__ = QuantizerConfig.__name__


def read_state(files: Sequence[Path]) -> tuple[Path, bytes | None]:
    """Return the state among the tensors of these files, after its file; after their folder None, where it is in none.

    Raises:
        QuantizerError: a file is damaged.
    """
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
    """Refuse a model of another class than the one that was saved, or of another version of its code.

    Raises:
        ProxyError: it has other sites.
    """
    different = sorted(set(plan) ^ {site.path for site in sites_of(model)})
    if different:
        saved = (model.config.architectures or ["model"])[0]
        raise ProxyError(
            f"{place} holds a quantized {saved}, and this {type(model).__name__} has other sites: {len(different)} "
            f"differ, the first is {different[0]!r}; load it as {saved}, with the config.json and the version of "
            "transformers that it was saved with"
        )


def require_loaded(modules: Iterable[nn.Module], place: Path) -> None:
    """Refuse modules with tensors that were in no file, for which transformers takes whatever is in memory.

    Raises:
        QuantizerError: there are such.
    """
    # By name: parameters() lists stored weights too, which the tensors of their sites stand for.
    named = (found for module in modules for found in chain(module.named_parameters(), module.named_buffers()))
    tensors = {tensor for _, tensor in named}
    missing = sum(not getattr(tensor, "_is_hf_initialized", False) for tensor in tensors)
    if missing:
        raise QuantizerError(
            f"{place} is damaged: {missing} tensors of quantized operations are missing there; copy it again, or save "
            "the model again"
        )
