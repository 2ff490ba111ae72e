"""The plug-in for ``transformers``: ``from_pretrained(path, quantization_config=QuantizerConfig(...))``.

Importing this file registers it. A float checkpoint gives the float model, ready to be calibrated by the ``Quantizer``
that ``quantizer_of`` returns; what its ``quantize(model)`` gives is saved by ``save_pretrained``, with weights as
integers; and ``from_pretrained`` of that folder, without an argument, gives the same quantized model, bit for bit.

``model.safetensors`` holds the tensors of the frozen proxy under their own names, and one more, ``quantizer_state``
uint8: plan, ranges and config, see ``proxy/state.py``. So the state lies in the file of the weights that it belongs
to, wherever that file is sharded, renamed or sent to.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors import safe_open
from torch import Tensor
from torch import nn
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantizer.config import QuantizerConfig as Settings
from quantizer.config import quantizer_config
from quantizer.errors import ConfigError
from quantizer.errors import ProxyError
from quantizer.errors import QuantizerError
from quantizer.proxy.attention import use_eager_attention
from quantizer.proxy.build import instrument
from quantizer.proxy.build import is_proxy
from quantizer.proxy.freeze import dropped_parameters
from quantizer.proxy.freeze import frozen_skeleton
from quantizer.proxy.freeze import is_frozen_by
from quantizer.proxy.plan import Plan
from quantizer.proxy.simulate import is_simulation
from quantizer.proxy.state import state_bytes
from quantizer.proxy.state import state_of_bytes
from quantizer.quantizer import Quantizer

__all__ = ["QuantizerConfig", "TransformersQuantizer", "quantizer_of"]

logger = logging.getLogger(__name__)

METHOD = "quantizer"
_STATE = "quantizer_state"
_WAY = "save what quantize(model) of its Quantizer gives"


class QuantizerConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The settings of a ``Quantizer`` as ``from_pretrained`` takes them: those that ``Quantizer`` takes.

    Args:
        source: a YAML file, a mapping, a ``quantizer.QuantizerConfig``, or None for the defaults.
        keywords: fields that override those of ``source``: ``QuantizerConfig(backend="openvino")``.

    Attributes:
        settings: the resolved ``quantizer.QuantizerConfig``.
        quantized: the folder that this stands in holds a quantized model; set by ``save_pretrained``.

    Raises:
        ConfigError: the configuration has problems; all of them are listed.
    """

    quant_method = METHOD

    def __init__(
        self, source: str | PathLike[str] | Mapping[str, Any] | Settings | None = None, **keywords: Any
    ) -> None:
        self.settings = quantizer_config(source, **keywords)
        self.quantized = False

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **keywords: Any) -> Any:
        """What ``to_dict`` gave, as ``config.json`` holds it.

        Raises:
            ConfigError: it has problems; all of them are listed.
        """
        fields = {name: value for name, value in config_dict.items() if name not in ("quant_method", "quantized")}
        quantized = config_dict.get("quantized", False)
        problems = [] if isinstance(quantized, bool) else [f"quantized: got {quantized!r}; expected true or false"]
        try:
            config = cls(fields)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError([f"quantization_config: {problem.removeprefix('mapping: ')}" for problem in problems])
        config.quantized = quantized
        return (config, keywords) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        """All fields, as plain values."""
        return {"quant_method": METHOD, "quantized": self.quantized, **self.settings.model_dump(mode="json")}


class TransformersQuantizer(HfQuantizer):  # type: ignore[misc]
    """What ``from_pretrained`` and ``save_pretrained`` ask; a model that was loaded has it as ``hf_quantizer``.

    Attributes:
        quantizer: calibrates and quantizes the model; of a quantized one it holds the plan.
        frozen: the folder holds a quantized model.
    """

    quantization_config: QuantizerConfig

    def __init__(self, quantization_config: QuantizerConfig, **keywords: Any) -> None:
        super().__init__(quantization_config, **keywords)
        self.quantizer = Quantizer(quantization_config.settings)
        self.frozen = self.pre_quantized and quantization_config.quantized

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformersQuantizer:
        # A proxy is a copy of the model, and the model's Quantizer is the one that knows it.
        return self

    def __reduce__(self) -> Any:
        served = self.quantizer._served
        state = _state(served.decided(), self.quantizer, []) if served.decisions.decided else None
        return _restored, (self.quantization_config, self.frozen, state)

    # -- loading ---------------------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: Sequence[str] | None = None, **keywords: Any
    ) -> None:
        if not self.frozen:
            return
        # Modules are on the meta device here, and so would be what is read.
        with torch.device("cpu"):
            place, data = _read_state(checkpoint_files or ())
            dropped = self._take(data, place)
            instrument(model)
            use_eager_attention(model)
            try:
                frozen_skeleton(model, self.quantizer.plan, dropped)
            except ProxyError as error:
                saved = (getattr(model.config, "architectures", None) or ["another model"])[0]
                raise ProxyError(
                    f"{place} holds a quantized {saved}, which does not fit this {type(model).__name__}: {error}. Load "
                    "it with the class that it was saved with, and with the same version of transformers"
                ) from error
        known = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        model._keys_to_ignore_on_load_unexpected = {*known, rf"{_STATE}$"}

    def _process_model_after_weight_loading(self, model: nn.Module, **keywords: Any) -> None:
        # Of a float model transformers believes otherwise, and would refuse to train or to cast it.
        model.is_quantized = self.frozen

    def _take(self, data: bytes, place: Path) -> list[str]:
        """Let the Quantizer be the one that was saved; the parameters that are dropped."""
        plan, products, document = state_of_bytes(data, place)
        missing = {"config", "fallback", "dropped"} - set(document)
        if missing:
            raise QuantizerError(f"{place} is damaged: {', '.join(sorted(missing))} is missing in its {_STATE}")
        if quantizer_config(document["config"]) != self.quantizer.config:
            raise QuantizerError(
                f"{place.parent / 'config.json'}: its quantization_config is not the one that {place.name} was "
                "quantized with; restore it, or load the float model and calibrate again"
            )
        self.quantizer._served.load(plan, products, document)
        dropped: list[str] = document["dropped"]
        return dropped

    # -- saving ----------------------------------------------------------------------------------------------------

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """What ``save_pretrained`` writes; None stands for the model's own tensors.

        Raises:
            ProxyError: the model is a proxy that is neither trained nor quantized, or was quantized before a change.
        """
        served = self.quantizer._served
        config = QuantizerConfig(self.quantization_config.settings)
        config.quantized = is_proxy(model) and not (served.trainable and model is served.trainable.proxy)
        state: dict[str, Tensor] | None = None
        if config.quantized:
            plan = self.quantizer.plan
            if is_simulation(model) or not is_frozen_by(model, plan):
                raise ProxyError(
                    "save_pretrained() takes what quantize(model) gave, and this proxy is another, or the Quantizer's "
                    f"decisions changed since; {_WAY} now"
                )
            data = bytearray(_state(served.decided(), self.quantizer, dropped_parameters(model, plan)))
            state = {**model.state_dict(), _STATE: torch.frombuffer(data, dtype=torch.uint8)}
        elif served.decisions.decided and not is_proxy(model):
            logger.warning("this float model is saved as it is, without its calibration; %s for a quantized one", _WAY)
        model.config.quantization_config = config  # type: ignore[union-attr]
        return state, {}

    # -- what transformers wants to know ---------------------------------------------------------------------------

    def is_serializable(self) -> bool:
        """Float, in training or quantized: all can be saved."""
        return True

    @property
    def is_trainable(self) -> bool:
        """A quantized model has no weights to train."""
        return not self.frozen

    @property
    def is_qat_trainable(self) -> bool:
        """Whether training it trains its weights."""
        return not self.frozen


def quantizer_of(model: nn.Module) -> Quantizer:
    """The ``Quantizer`` of a model that was loaded with a ``QuantizerConfig`` or from a folder that holds one.

    Raises:
        ProxyError: the model was loaded without.
    """
    found = getattr(model, "hf_quantizer", None)
    if not isinstance(found, TransformersQuantizer):
        raise ProxyError(
            f"this {type(model).__name__} has no Quantizer: load it with from_pretrained(path, quantization_config="
            "QuantizerConfig(...)), or use Quantizer(...) on it as it is"
        )
    return found.quantizer


def _state(decided: Plan, quantizer: Quantizer, dropped: list[str]) -> bytes:
    served = quantizer._served
    return state_bytes(decided, served.decisions.products(), {**served.document(), "dropped": dropped})


def _restored(config: QuantizerConfig, frozen: bool, state: bytes | None) -> TransformersQuantizer:
    found = TransformersQuantizer(config, pre_quantized=frozen)
    if state is not None:
        found._take(state, Path("a pickled model"))
    return found


def _read_state(files: Sequence[str]) -> tuple[Path, bytes]:
    """The state among the tensors of these files, and the file that it is in.

    Raises:
        QuantizerError: there is none, or a file is damaged.
    """
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                if _STATE in tensors.keys():  # noqa: SIM118 - it is no mapping
                    return Path(file), tensors.get_tensor(_STATE).numpy().tobytes()
        except (OSError, SafetensorError) as error:
            raise QuantizerError(f"{file} cannot be read: {error}; copy it again, or save the model again") from error
    where = Path(files[0]).parent if files else "what was given to from_pretrained()"
    raise QuantizerError(
        f"{where}: its config.json says that it holds a quantized model, and no file of weights has the tensor "
        f"{_STATE!r}; load a folder that save_pretrained() wrote for a quantized model, or remove "
        "quantization_config from config.json to load a float one"
    )


# transformers' own functions for this refuse a second time, as when this file is loaded again.
AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = QuantizerConfig
AUTO_QUANTIZER_MAPPING[METHOD] = TransformersQuantizer
