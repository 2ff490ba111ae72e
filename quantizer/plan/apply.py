"""Apply a plan to a proxy, detect changes of shared tensors, and reuse frozen proxies during a search.

A proxy copies small tensors only. It detects changes of other tensors by torch's version counter, and by a checksum of
a sample for writes through ``.data``.

``FrozenTries`` builds a proxy once and restores it for each plan of a search. The integers of a weight depend only on
its own entry of the plan, so plans that share an entry share them.
"""

from __future__ import annotations

import copy
import sys
import weakref
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from quantizer.errors import ProxyError
from quantizer.numerics.formats import qtype
from quantizer.plan.site_plan import OperandPlan, SitePlan
from quantizer.proxy.build import build_proxy, quantizers_of, sites_of
from quantizer.proxy.eager_attention import use_python_paths
from quantizer.proxy.generated_classes import number_calls, with_listed_weights, with_stored_weight
from quantizer.proxy.integer_kernels import LazyWeight
from quantizer.proxy.kept_tensors import memory_of, reached_tensors
from quantizer.proxy.model_sharing import LocalHook, OwnBuffers, Sharing, take_small
from quantizer.proxy.operand_quantizer import ComputedOperand, FrozenOperand, OperandQuantizer
from quantizer.proxy.site import OUTPUT, Site, SourceCall, add_output_sites, move_beside_parameters
from quantizer.proxy.weight import operand_of
from quantizer.utils.fingerprint import tensor_version

SMALL = 2**16
"""The largest number of elements of a tensor that is copied: biases, normalizations, classifier heads."""

_SAMPLE = 256


class WatchedTensor:
    """A parameter with its original version, address and checksum of a sample."""

    def __init__(self, path: str, tensor: Tensor) -> None:
        self.path = path
        self._tensor = weakref.ref(tensor)
        self._version, self._place = tensor_version(tensor), tensor.data_ptr()
        self._sample = _sample(tensor)
        self._checksum = self._checked()

    def changed(self) -> bool:
        """Return whether the parameter still exists and its values changed."""
        tensor = self._tensor()
        if tensor is None:
            return False
        moved = tensor_version(tensor) != self._version or tensor.data_ptr() != self._place
        return moved or self._checked() != self._checksum

    def is_unchanged(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is this parameter with its original values."""
        return self._tensor() is tensor and not self.changed()

    def is_of(self, module: nn.Module, name: str) -> bool:
        """Return whether a module still uses the tensor or its memory; a cast gives the module a new tensor."""
        tensor, current = self._tensor(), dict(module._parameters.items()).get(name)
        if tensor is current or tensor is None or current is None or tensor.layout is not torch.strided:
            return current is tensor
        return current.layout is torch.strided and current.untyped_storage()._cdata == tensor.untyped_storage()._cdata

    def _checked(self) -> int:
        # Not an operation of torch: a trace would record it, and a dispatch mode would count it.
        return 0 if self._sample is None else zlib.crc32(self._sample.tobytes())


def watch(proxy: nn.Module, verb: str, selects: Callable[[Tensor], bool]) -> None:
    """Make each module of a proxy raise a ProxyError at its next call if its parameters changed."""
    checks: list[tuple[nn.Module, _Check]] = []
    for path, module in proxy.named_modules():
        watched = {
            name: WatchedTensor(f"{path}.{name}" if path else name, parameter)
            for name, parameter in module._parameters.items()
            if parameter is not None and not parameter.is_meta and selects(parameter)
        }
        if watched:
            checks.append((module, _Check(watched, verb)))
            if not isinstance(module, torch.jit.ScriptModule):
                module.register_forward_pre_hook(LocalHook(checks[-1][1]))
    if any(module is not proxy for module, _ in checks):
        # Other modules may read a parameter whose own module is never called; TorchScript runs no hooks of submodules.
        proxy.register_forward_pre_hook(LocalHook(partial(_check_all, checks)))


def _check_all(checks: Sequence[tuple[nn.Module, _Check]], proxy: nn.Module, args: Any) -> None:
    for module, check in checks:
        check(module, args)


class _Check:
    def __init__(self, watched: dict[str, WatchedTensor], verb: str) -> None:
        self._watched = watched
        self._verb = verb

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for name, watched in list(self._watched.items()):
            if not watched.is_of(module, name):
                del self._watched[name]
            elif watched.changed():
                raise ProxyError(
                    f"{watched.path} changed since {self._verb}(model): this proxy shares it with the model, and its "
                    f"integers are those of the old weights; call {self._verb}(model) again, or copy.deepcopy() the "
                    "proxy before the model changes"
                )


def _sample(tensor: Tensor) -> Any:
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.is_contiguous():
        return None
    flat = tensor.detach().view(-1)
    stride = max(1, len(flat) // _SAMPLE)
    return flat.view(torch.uint8).view(-1, tensor.element_size()).numpy()[::stride]


def apply_plan(proxy: nn.Module, plan: Mapping[str, SitePlan]) -> None:
    """Set the scale of every operand that the plan quantizes; sites stay inactive.

    If calls have ranges of their own, passes must number them, see ``with_passes``.
    """
    add_planned_outputs(proxy, plan)
    sites = {site.path: site for site in sites_of(proxy) if site.operation.name != OUTPUT or site.path in plan}
    missing = sorted(set(plan) ^ set(sites))
    if missing:
        raise ProxyError(
            f"the calibration belongs to another model: {len(missing)} sites differ, the first is {missing[0]!r}; "
            "calibrate this model with a new Quantizer"
        )
    for path, entry in plan.items():
        _apply_site_plan(sites[path], entry)
        move_beside_parameters(sites[path], proxy)


def with_passes(proxy: nn.Module, plan: Mapping[str, SitePlan]) -> nn.Module:
    """Return the proxy, with passes that number the calls of sites if calls have ranges of their own."""
    if any(operand.several_ranges for entry in plan.values() for operand in entry.operands):
        number_calls(proxy)
    return proxy


def _apply_site_plan(site: Site, entry: SitePlan) -> None:
    """Set the bias shift of a site, and the scale and factor of each operand, without switching the site on."""
    site.bias_shift = None if entry.bias_shift is None else entry.bias_shift.detach().clone()
    for planned in entry.operands:
        if planned.quantized:
            quantizer = site.quantizer_of(planned.name)
            if planned.dynamic:
                quantizer.set_dynamic(planned.dtype, planned.block_size)
            else:
                assert planned.scale is not None
                quantizer.set_scale(planned.scale, planned.dtype, planned.axis, planned.block_size, planned.zero_point)
                if planned.several_ranges:
                    ranges = [
                        (torch.tensor(call.scale, dtype=torch.float32), call.zero_point) for call in planned.calls
                    ]
                    quantizer.set_calls(site.path, ranges)
                    site.counts_calls = True
            quantizer.is_weight, quantizer.contiguous = planned.role == "weight", planned.as_computed
            quantizer.set_codes(planned.codes)
        if planned.factor is not None and (planned.quantized or entry.quantized):
            # A float input is also multiplied if the weight contains the factors.
            apply_factor(site.quantizer_of(planned.name), planned)


def apply_factor(quantizer: OperandQuantizer, planned: OperandPlan) -> None:
    """Set the factors that multiply an operand before quantization, if it has any."""
    if planned.factor is not None:
        assert planned.smooth_axis is not None
        quantizer.set_factor(planned.factor, planned.smooth_axis)


def switch_on(proxy: nn.Module, plan: Mapping[str, SitePlan]) -> None:
    """Switch each site on or off, as planned."""
    for site in sites_of(proxy):
        # Output sites that calibration did not observe are in no plan.
        site.active = site.path in plan and plan[site.path].quantized


def store_weights(proxy: nn.Module, plan: Mapping[str, SitePlan]) -> None:
    """Store the quantized weights as integers in their sites; the modules keep their parameters."""
    for _, quantizer, weight in float_weights(proxy, plan):
        quantizer.store(weight)


def float_weights(proxy: nn.Module, plan: Mapping[str, SitePlan]) -> Iterator[tuple[Site, OperandQuantizer, Tensor]]:
    """Yield site, quantizer and float value of each weight that the plan quantizes."""
    for site, quantizer, planned in planned_weights(proxy, plan):
        yield site, quantizer, _weight(proxy, site, planned)


def freeze(proxy: nn.Module, plan: Mapping[str, SitePlan]) -> None:
    """Store the weights as integers, remove the float weights, and switch the planned sites on.

    A parameter is removed if only one site of its own module reads it; the module then reads it from the site. It
    remains if other code reads it (a tied embedding, a hook) or if the site reads a view of it.
    """
    store_weights(proxy, plan)
    _seal(proxy, plan)
    uses = Counter(id(parameter) for module in proxy.modules() for parameter in module._parameters.values())
    readers = Counter(path for entry in plan.values() for path in entry.reads)
    for site, quantizer, planned in planned_weights(proxy, plan):
        if planned.computation is not None:
            continue
        owner, name = _owner(proxy, planned)
        unshared_owner = planned.view is None and owner is proxy.get_submodule(site.host_path)
        shared = uses[id(owner._parameters[name])] != 1 or readers[planned.parameter or ""] != 1
        if unshared_owner and not shared and planned.read_outside is None:
            _hand_over(owner, name, site, quantizer, planned)
    _list_weights(proxy, {})
    # A frozen proxy must not change when the model is trained further.
    take_small(proxy, SMALL, OperandQuantizer)
    watch(proxy, "quantize", lambda parameter: parameter.numel() > SMALL)
    for site, quantizer, planned in planned_weights(proxy, plan):
        quantizer.frozen = _frozen_operand(proxy, site, planned)


def frozen_proxy(model: nn.Module, plan: Mapping[str, SitePlan], *, fused: bool = False) -> nn.Module:
    """Return the frozen proxy of a plan: static ranges, weights as integers, in eval mode.

    ``fused``: keep the model's own attention if the plan quantizes no MatMul of two activations.
    """
    own = fused and not any(entry.quantized and entry.kind == "matmul" for entry in plan.values())
    proxy = build_proxy(model, eager_attention=not own).eval()
    use_python_paths(proxy)
    return frozen_new(proxy, model, plan)


def frozen_new(proxy: nn.Module, model: nn.Module, plan: Mapping[str, SitePlan]) -> nn.Module:
    """Freeze a new proxy by a plan, with its own copies of the model's buffers, and return it."""
    OwnBuffers(proxy, model)
    apply_plan(proxy, plan)
    freeze(proxy, plan)
    return with_passes(proxy, plan)


def frozen_skeleton(proxy: nn.Module, plan: Mapping[str, SitePlan], dropped: Collection[str]) -> None:
    """Prepare a proxy on the meta device for loading: set scales, and create empty tensors for the weights."""
    apply_plan(proxy, plan)
    _seal(proxy, plan)
    for site, quantizer, planned in planned_weights(proxy, plan):
        weight = _weight(proxy, site, planned)
        quantizer.stored = torch.empty_like(weight, dtype=qtype(quantizer.dtype).storage)
        quantizer.stored_dtype = weight.dtype
        quantizer.set_codes(None)
        if planned.computation is None and planned.parameter in dropped:
            _hand_over(*_owner(proxy, planned), site, quantizer, planned)
    _list_weights(proxy, {})
    with_passes(proxy, plan)


def dropped_parameters(proxy: nn.Module, plan: Mapping[str, SitePlan]) -> list[str]:
    """Return the paths of parameters that a frozen proxy reads from its sites instead of its modules."""
    weights = (
        (planned.parameter or "", *_owner(proxy, planned))
        for _, _, planned in planned_weights(proxy, plan)
        if planned.computation is None
    )
    return sorted({path for path, owner, name in weights if name not in owner._parameters})


def add_planned_outputs(proxy: nn.Module, plan: Mapping[str, SitePlan]) -> None:
    """Add the output sites of a plan to a proxy."""
    add_output_sites(proxy, {path for path, entry in plan.items() if entry.kind == OUTPUT})


def is_frozen_by(proxy: nn.Module, plan: Mapping[str, SitePlan]) -> bool:
    """Return whether a proxy was frozen by exactly this plan: equal sites, formats, scales and chosen integers."""
    sites = {site.path: site for site in sites_of(proxy)}
    if set(sites) != set(plan):
        return False
    return all(
        sites[path].frozen
        and sites[path].active == entry.quantized
        and _same_shift(sites[path].bias_shift, entry.bias_shift)
        and all(_holds(sites[path].quantizer_of(planned.name), planned) for planned in entry.operands)
        for path, entry in plan.items()
    )


def require_scales_of(proxy: nn.Module, scale_dtype: torch.dtype, backend: str) -> None:
    """Raise a ProxyError if ``scale_dtype`` cannot represent the scales of a frozen proxy."""
    for site in sites_of(proxy):
        for quantizer in quantizers_of(site):
            scale = quantizer.scale
            if not site.active or scale is None:
                continue
            scale = scale.float()
            lost = (scale.to(scale_dtype).float() - scale).abs() > torch.finfo(scale_dtype).eps * scale
            if bool(lost.any()):
                first, name = float(scale[lost].flatten()[0]), str(scale_dtype).removeprefix("torch.")
                raise ProxyError(
                    f"this model was quantized for another backend than {backend}: scales of {site.path}, such as "
                    f"{first:.3g}, cannot be represented in {name}; "
                    f"export it with the Quantizer that quantized it, or quantize with its for_backend({backend!r})"
                )


def _same_shift(current: Tensor | None, planned: Tensor | None) -> bool:
    if current is None or planned is None:
        return current is planned
    return torch.equal(current, planned.to(current))


def _holds(quantizer: OperandQuantizer, planned: OperandPlan) -> bool:
    """Return whether a frozen quantizer has the state, format, scale and chosen integers of the plan."""
    if not planned.quantized:
        return not quantizer.enabled
    if quantizer.dynamic or planned.dynamic:
        same = quantizer.dtype == planned.dtype and quantizer.block_size == planned.block_size
        return quantizer.dynamic == planned.dynamic and same
    scale = quantizer.scale
    if scale is None or planned.scale is None or quantizer.dtype != planned.dtype:
        return False
    ranges = [_range_of(quantizer.of_call(number)) for number in range(len(quantizer.calls))]
    if ranges != ([(call.scale, call.zero_point) for call in planned.calls] if planned.several_ranges else []):
        return False
    stored = quantizer.stored
    if planned.codes is not None and (stored is None or not torch.equal(stored, planned.codes.to(stored.device))):
        return False
    return torch.equal(scale, planned.scale.to(scale))


def _range_of(quantizer: OperandQuantizer) -> tuple[float, int | None]:
    assert quantizer.scale is not None
    return float(quantizer.scale), None if quantizer.zero_point is None else int(quantizer.zero_point)


def _seal(proxy: nn.Module, plan: Mapping[str, SitePlan]) -> None:
    switch_on(proxy, plan)
    for site in sites_of(proxy):
        site.frozen = True


def _weight(proxy: nn.Module, site: Site, planned: OperandPlan) -> Tensor:
    if planned.computation is not None:
        try:
            return operand_of(planned.computation.inputs_of(proxy), None, planned.computation)
        except (KeyError, ValueError) as error:
            raise ProxyError(
                f"{site.path}: the calibration belongs to another model, whose weight is computed from "
                f"{', '.join(planned.parameters)} ({error}); calibrate this model with a new Quantizer"
            ) from error
    owner, name = _owner(proxy, planned)
    parameter = owner._parameters.get(name)
    if parameter is None:
        raise ProxyError(
            f"{site.path}: the calibration belongs to another model, whose weight is {planned.parameter!r}; "
            "calibrate this model with a new Quantizer"
        )
    return parameter if planned.view is None else planned.view.of(parameter)


def _frozen_operand(proxy: nn.Module, site: Site, planned: OperandPlan) -> FrozenOperand | None:
    """Return the check of a frozen weight; None if its module no longer has the parameter."""
    name = f"{site.path}.{planned.name}"
    if planned.computation is not None:
        return ComputedOperand(name, _weight(proxy, site, planned))
    owner, parameter = _owner(proxy, planned)
    if parameter not in owner._parameters:
        return None
    return FrozenOperand(name, owner._parameters[parameter], planned.view)


def _hand_over(owner: nn.Module, name: str, site: Site, quantizer: OperandQuantizer, planned: OperandPlan) -> None:
    """Remove a parameter from its module, so that the module reads it from the site."""
    del owner._parameters[name]
    owner.__class__ = with_stored_weight(type(owner), name, site.source.attribute, planned.name)
    # The module's property returns the weight without the factor, so with a factor the site reads its own integers.
    quantizer.handed_over = quantizer.factor is None
    if site.operation.kind == "embedding":
        # A lookup needs few rows of the table.
        LazyWeight.of(quantizer)


def _list_weights(module: nn.Module, known: dict[nn.Module, bool]) -> bool:
    """Make every module list the stored weights below it among its parameters; return whether there are any."""
    if module not in known:
        known[module] = hasattr(type(module), "_quantizer_stored")
        # Not any(), which would stop at the first child.
        below = [_list_weights(child, known) for child in module._modules.values() if child is not None]
        known[module] = known[module] or any(below)
        if known[module]:
            module.__class__ = with_listed_weights(type(module))
    return known[module]


def planned_weights(
    proxy: nn.Module, plan: Mapping[str, SitePlan]
) -> Iterator[tuple[Site, OperandQuantizer, OperandPlan]]:
    """Yield site, quantizer and operand plan of each weight that the plan quantizes."""
    for site in sites_of(proxy):
        if site.path not in plan:
            continue
        planned = {operand.name: operand for operand in plan[site.path].operands}
        for position, operand in enumerate(site.operation.operands):
            entry = planned.get(operand.name)
            if entry is not None and entry.quantized and entry.role == "weight":
                yield site, site.quantizer(position), entry


def _owner(proxy: nn.Module, weight: OperandPlan) -> tuple[nn.Module, str]:
    path, _, name = (weight.parameter or "").rpartition(".")
    try:
        return proxy.get_submodule(path), name
    except AttributeError as error:
        raise ProxyError(
            f"the calibration belongs to another model, which has a weight {weight.parameter!r} ({error}); calibrate "
            "this model with a new Quantizer"
        ) from error


_CONTAINERS = (dict, OrderedDict, set, list)
_FIXED = (bool, int, float, str, type(None), torch.dtype, torch.device, BuiltinFunctionType, FunctionType)


class FrozenTries:
    """Frozen proxies of a model for one plan after another; each is valid until the next request.

    If other code still refers to the previous proxy, that one is left alone and a new one is built.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._built: _Built | None = None
        self._weights: list[WatchedTensor] = []
        self._codes: dict[tuple[str, str], tuple[OperandPlan, Tensor]] = {}

    def of(self, plan: Mapping[str, SitePlan]) -> nn.Module:
        """Return the frozen proxy of a plan, equal to the result of ``frozen_proxy``."""
        self._forget_if_changed()
        if self._built is None or not self._built.restore():
            self._built = _Built(build_proxy(self._model, eager_attention=True).eval())
        # No variable may refer to the proxy, because references to it are counted.
        known = {path: self._with_codes(path, entry) for path, entry in plan.items()}
        frozen_new(self._built.proxy, self._model, known)
        self._keep_codes(self._built.proxy, plan)
        self._built.note_references()
        return self._built.proxy

    def _forget_if_changed(self) -> None:
        now = list(self._model.named_parameters())
        same = len(now) == len(self._weights) and all(
            known.path == path and known.is_unchanged(parameter)
            for known, (path, parameter) in zip(self._weights, now, strict=True)
        )
        if not same:
            self._built, self._codes = None, {}
            self._weights = [WatchedTensor(path, parameter) for path, parameter in now]

    def _with_codes(self, path: str, entry: SitePlan) -> SitePlan:
        operands = []
        for planned in entry.operands:
            source, codes = self._codes.get((path, planned.name), (None, None))
            operands.append(planned if source is not planned else replace(planned, codes=codes))
        return replace(entry, operands=tuple(operands))

    def _keep_codes(self, proxy: nn.Module, plan: Mapping[str, SitePlan]) -> None:
        for site, quantizer, planned in planned_weights(proxy, plan):
            source, _ = self._codes.get((site.path, planned.name), (None, None))
            if planned.codes is None and source is not planned:
                assert quantizer.stored is not None
                # A copy, because other code may write into the integers of the proxy.
                self._codes[site.path, planned.name] = planned, quantizer.stored.clone()


class _Built:
    """A newly built proxy, with the classes and attributes of its modules. Tensors are not copied."""

    def __init__(self, proxy: nn.Module) -> None:
        self.proxy = proxy
        self._modules = list(proxy.modules())
        self._classes = [type(module) for module in self._modules]
        self._references: list[int] = []
        self._same = {id(value): value for value in _not_copied(self._modules)}
        self._state = [vars(module).copy() for module in self._modules]
        uses = Counter(id(value) for attributes in self._state for value in attributes.values())
        shallow, deep = set(), {}
        for place, attributes in enumerate(self._state):
            for name, value in attributes.items():
                if type(value) in _CONTAINERS and uses[id(value)] == 1 and self._has_only_fixed(value):
                    shallow.add((place, name))
                elif not self._is_fixed(value):
                    deep[place, name] = value
        self._shallow, self._deep = shallow, self._copied(deep)
        self._install_copies()
        self._restorable = not any(map(_has_own_copy, self._modules))

    def note_references(self) -> None:
        """Count the references to the modules before the proxy is handed out."""
        self._references = self._counted()

    def restore(self) -> bool:
        """Restore classes and attributes; return False and change nothing if other code refers to a module."""
        if not self._references:
            # The plan before this one failed, so the references were not counted.
            return False
        referenced = any(now > before for now, before in zip(self._counted(), self._references, strict=True))
        if referenced or not self._restorable:
            return False
        for module, cls, attributes in zip(self._modules, self._classes, self._state, strict=True):
            module.__class__ = cls
            vars(module).clear()
            vars(module).update(attributes)
        self._install_copies()
        return True

    def _install_copies(self) -> None:
        """Give the modules copies of mutable attributes, so that the stored state does not change."""
        for place, name in self._shallow:
            value = self._state[place][name]
            # An ordered dictionary, which most are, is slow to copy.
            vars(self._modules[place])[name] = value.copy() if value else type(value)()
        for (place, name), value in self._copied(self._deep).items():
            vars(self._modules[place])[name] = value

    def _copied(self, values: dict[tuple[int, str], Any]) -> dict[tuple[int, str], Any]:
        # One memo, so that what modules share, such as a configuration, they still share.
        return copy.deepcopy(values, dict(self._same))

    def _counted(self) -> list[int]:
        return [sys.getrefcount(module) + weakref.getweakrefcount(module) for module in self._modules]

    def _is_fixed(self, value: Any) -> bool:
        return isinstance(value, _FIXED) or id(value) in self._same

    def _has_only_fixed(self, value: Any) -> bool:
        return all(map(self._is_fixed, value.values() if isinstance(value, dict) else value))


def _not_copied(modules: list[nn.Module]) -> list[Any]:
    """Return the objects shared by all copies: modules, tensors, and attributes never changed in place."""
    shared: list[Any] = list(modules)
    for module in modules:
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            ours = isinstance(module, SourceCall | OperandQuantizer) and not isinstance(value, dict | set)
            if isinstance(value, Tensor | Sharing) or ours:
                shared.append(value)
    parameters = {memory_of(p) for module in modules for p in module._parameters.values() if p is not None} - {None}
    return [*shared, *(tensor for tensor in reached_tensors(modules) if memory_of(tensor) in parameters)]


def _has_own_copy(module: nn.Module) -> bool:
    """Return whether a class defines how its modules are copied, so that attributes alone are not enough."""
    if isinstance(module, SourceCall | OperandQuantizer):
        return False
    cls: Any = type(module)
    return hasattr(cls, "__deepcopy__") or cls.__getstate__ is not nn.Module.__getstate__
