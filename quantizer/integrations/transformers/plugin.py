"""The plug-in for ``transformers``: ``from_pretrained(path, quantization_config=QuantizerConfig(...))``.

Importing this module registers it. A float checkpoint is loaded in float, for calibration by the ``Quantizer`` that
``quantizer_of`` returns. ``save_pretrained`` writes the result of ``quantize(model)`` with integer weights, and
``from_pretrained`` of that folder returns the same quantized model, bit for bit.

In a quantized folder, ``config.json`` has a ``quantization_config``. ``model.safetensors`` has the tensors of the
frozen proxy, and ``quantizer_state`` (uint8) with plan, ranges and config; see ``plan/saved_folder.py``. The plan thus
stays with the weights when their file is split, renamed or copied.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quantizer.config import QuantizerConfig, quantizer_config
from quantizer.errors import ConfigError, ProxyError, QuantizerError
from quantizer.numerics.formats import qtype
from quantizer.numerics.weight_codes import pack_pairs, packed_size, unpack_pairs
from quantizer.observe.float16_simulation import is_simulation
from quantizer.plan.apply import add_planned_outputs, dropped_parameters, frozen_skeleton, is_frozen_by
from quantizer.plan.saved_folder import state_bytes, state_of_bytes
from quantizer.plan.site_plan import Plan
from quantizer.proxy.build import instrument, is_proxy, sites_of
from quantizer.proxy.eager_attention import use_eager_attention
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.quantizer import Quantizer

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
        """Return the config from the values of ``to_dict()``."""
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
    """Return the file that contains the state, and the state; without one, the folder of the files and None."""
    state: tuple[Path, bytes | None] = files[0].parent if files else Path("the folder of from_pretrained()"), None
    for file in files:
        try:
            with safe_open(file, framework="pt") as tensors:
                if STATE in tensors.keys():  # noqa: SIM118 - it is no mapping
                    state = file, tensors.get_tensor(STATE).numpy().tobytes()
        except (OSError, SafetensorError) as error:
            raise QuantizerError(f"{file} cannot be read: {error}; copy it again, or save the model again") from error
    return state


def require_sites(model: PreTrainedModel, plan: Plan, place: Path) -> None:
    """Raise unless a model has the sites of a saved plan; its class or code may differ."""
    different = sorted(set(plan) ^ {site.path for site in sites_of(model)})
    if different:
        saved = (model.config.architectures or ["model"])[0]
        raise ProxyError(
            f"{place} holds a quantized {saved}, and this {type(model).__name__} has other sites: {len(different)} "
            f"differ, the first is {different[0]!r}; load it as {saved}, with the config.json and the version of "
            "transformers that it was saved with"
        )


def require_loaded(modules: Iterable[nn.Module], place: Path) -> None:
    """Raise if tensors of modules were missing in all files; transformers leaves them uninitialized."""
    # parameters() would also list dequantized weights, which are in no file: their sites have the stored tensors.
    named = (entry for module in modules for entry in chain(module.named_parameters(), module.named_buffers()))
    tensors = {tensor for _, tensor in named}
    missing = sum(not getattr(tensor, "_is_hf_initialized", False) for tensor in tensors)
    if missing:
        raise QuantizerError(
            f"{place} is damaged: {missing} tensors of quantized operations are missing there; copy it again, or save "
            "the model again"
        )


logger = logging.getLogger(__name__)

_HOW_TO_SAVE = "save the result of quantize(model) of its Quantizer"


class TransformersQuantizer(HfQuantizer):
    """The hooks of ``from_pretrained`` and ``save_pretrained``; the attribute ``hf_quantizer`` of loaded models.

    Attributes:
        quantizer: the ``Quantizer`` of the model, with a plan if the model was loaded quantized.
        frozen: True if the folder has a quantized model.
    """

    def __init__(self, quantization_config: QuantizerConfig | SavedConfig, **keywords: Any) -> None:
        if isinstance(quantization_config, QuantizerConfig):
            quantization_config = SavedConfig(quantization_config)
        super().__init__(quantization_config, **keywords)
        self._settings = quantization_config.settings
        self.quantizer = Quantizer(self._settings)
        self.frozen = self.pre_quantized and quantization_config.quantized
        # State during loading: the file, the dropped parameters, the shapes of weights with elements below a byte.
        self._place, self._dropped = Path(), list[str]()
        self._shapes: dict[OperandQuantizer, torch.Size] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> TransformersQuantizer:
        # A proxy copies the model, and must share its Quantizer.
        return self

    def __reduce__(self) -> Any:
        session = self.quantizer._session
        state = _state(session.refitted(), self.quantizer, []) if session.has_plan else None
        return _restored, (self._settings, self.frozen, state)

    # -- loading ---------------------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **keywords: Any
    ) -> None:
        files = [Path(file) for file in checkpoint_files or () if Path(file).suffix == ".safetensors"]
        place, data = read_state(files)
        if not self.frozen:
            if data is not None:
                raise QuantizerError(
                    f"{place} holds a quantized model, but the config.json beside it has no quantization_config; "
                    f"restore "
                    "the one that save_pretrained() wrote"
                )
            return
        if data is None:
            raise QuantizerError(
                f"{place}: its config.json is that of a quantized model, but no .safetensors file there has the "
                f"tensor {STATE!r}; load a complete folder of save_pretrained(), or remove quantization_config from "
                "config.json to load a float model"
            )
        # from_pretrained sets the meta device, on which new tensors would have no values.
        with torch.device("cpu"):
            dropped = self._restore_state(data, place)
            instrument(model)
            use_eager_attention(model)
            add_planned_outputs(model, self.quantizer.plan)
            require_sites(model, self.quantizer.plan, place)
            frozen_skeleton(model, self.quantizer.plan, dropped)
            self.quantizer._session.scan_source(model)
        for _, quantizer, stored in _packed(model):
            self._shapes[quantizer] = stored.shape
            quantizer.stored = stored.new_empty(packed_size(stored.numel()), dtype=torch.uint8)
        for owner in _owners(model, dropped):
            # Otherwise transformers would initialize the dropped weights.
            vars(owner)["_is_hf_initialized"] = True
        self._place, self._dropped = place, dropped
        known = model._keys_to_ignore_on_load_unexpected
        known = [] if known is None else known
        # A list in the first versions of transformers 5, and a set since.
        model._keys_to_ignore_on_load_unexpected = type(known)([*known, rf"{STATE}$"])

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **keywords: Any) -> None:
        # transformers would treat any model with a quantization_config as quantized, and refuse to train or cast it.
        vars(model)["is_quantized"] = self.frozen
        # push_to_hub() writes these tags into the model card.
        model.add_model_tags([METHOD, self._settings.dtype])
        if not self.frozen:
            return
        require_loaded([*sites_of(model), *_owners(model, self._dropped)], self._place)
        for quantizer, shape in self._shapes.items():
            assert quantizer.stored is not None
            quantizer.stored = unpack_pairs(quantizer.stored, shape)
        self._shapes.clear()

    def _restore_state(self, data: bytes, place: Path) -> list[str]:
        """Restore the saved state of the Quantizer, and return the names of the dropped parameters."""
        plan, products, document = state_of_bytes(data, place)
        missing = {"config", "fallback", "dropped"} - set(document)
        if missing:
            raise QuantizerError(f"{place} is damaged: {', '.join(sorted(missing))} missing in its {STATE}")
        if quantizer_config(document["config"]) != self.quantizer.config:
            raise QuantizerError(
                f"{place.parent / 'config.json'}: its quantization_config differs from that of "
                f"{place.name}; restore it, or load the float model and calibrate again"
            )
        self.quantizer._session.load(plan, products, document)
        dropped: list[str] = document["dropped"]
        return dropped

    # -- saving ----------------------------------------------------------------------------------------------------

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor] | None, dict[str, str]]:
        """Return the state dict and metadata for ``save_pretrained``; None: use the model's own state dict."""
        session = self.quantizer._session
        quantized = is_proxy(model) and not (session.trainable is not None and model is session.trainable.proxy)
        state: dict[str, Tensor] | None = None
        if quantized:
            plan = self.quantizer.plan
            if is_simulation(model) or not is_frozen_by(model, plan):
                raise ProxyError(
                    "save_pretrained() needs the latest result of quantize(model), but this is another proxy, or the "
                    f"plan changed since; {_HOW_TO_SAVE}"
                )
            data = bytearray(_state(session.refitted(), self.quantizer, dropped_parameters(model, plan)))
            packed = {name: pack_pairs(stored) for name, _, stored in _packed(model)}
            state = {**model.state_dict(), **packed, STATE: torch.frombuffer(data, dtype=torch.uint8)}
        elif session.has_plan and not is_proxy(model):
            logger.warning(
                "this model is saved in float, without its calibration; %s for a quantized one", _HOW_TO_SAVE
            )
        model.config.quantization_config = SavedConfig(self._settings, quantized=quantized)
        return state, {}

    # -- properties that transformers reads ------------------------------------------------------------------------

    def is_serializable(self) -> bool:
        """Return True: models can be saved in float, during training and quantized."""
        return True

    @property
    def is_trainable(self) -> bool:
        """Trainability: true for a float model; quantized models have no trainable weights."""
        return not self.frozen


def quantizer_of(model: PreTrainedModel) -> Quantizer:
    """Return the ``Quantizer`` of a model loaded with a ``QuantizerConfig`` or from a folder with one."""
    quantizer = getattr(getattr(model, "hf_quantizer", None), "quantizer", None)
    if not isinstance(quantizer, Quantizer):
        raise ProxyError(
            f"this {type(model).__name__} has no Quantizer: load it with from_pretrained(path, quantization_config="
            "QuantizerConfig(...)), or create a Quantizer for it"
        )
    return quantizer


def _state(decided: Plan, quantizer: Quantizer, dropped: list[str]) -> bytes:
    session = quantizer._session
    return state_bytes(decided, session.products(), {**session.document(), "dropped": dropped})


def _packed(model: PreTrainedModel) -> Iterator[tuple[str, OperandQuantizer, Tensor]]:
    """Yield tensor name, quantizer and stored weight of each weight with elements smaller than a byte."""
    for path, module in model.named_modules():
        if isinstance(module, OperandQuantizer) and module.stored is not None and qtype(module.dtype).is_packed:
            yield f"{path}.stored", module, module.stored


def _owners(model: PreTrainedModel, parameters: Sequence[str]) -> list[nn.Module]:
    """Return the modules that own, or owned, these parameters."""
    return [model.get_submodule(path.rpartition(".")[0]) for path in parameters]


def _restored(settings: QuantizerConfig, frozen: bool, state: bytes | None) -> TransformersQuantizer:
    restored = TransformersQuantizer(SavedConfig(settings, quantized=frozen), pre_quantized=frozen)
    if state is not None:
        restored._restore_state(state, Path("the pickled model"))
    return restored


# The register functions of transformers raise on a second call, such as after a reload of this module.
AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD] = SavedConfig
AUTO_QUANTIZER_MAPPING[METHOD] = TransformersQuantizer
