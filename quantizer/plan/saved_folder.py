"""The folder of a saved plan: a YAML file for people, and safetensors files for tensors.

- ``quantizer.yaml``: format, config, fallback, every site with its reason, every counted matrix multiplication and
convolution. Long group names are in the list ``long_groups``, and operands refer to them by index.
- ``ranges.safetensors``: amax, scale and smooth of every operand, float32, under ``SITE/OPERAND/amax`` and so on; the
shift of a site's bias under ``SITE/bias_shift``; chosen integers of weights, int8 or uint8 (two of 4 bits each).
- ``observed.safetensors``: the statistics of calibration, to resume it; optional.

The folder is written atomically. Inside another file, the first two are the bytes of one safetensors file with the same
tensors and the document, as JSON, in the tensor ``document``. Loading checks types, checksums and consistency.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from quantizer.errors import QuantizerError
from quantizer.numerics.formats import QTYPES
from quantizer.observe.completeness import CountedProduct
from quantizer.plan.site_plan import OperandPlan, Plan, SitePlan
from quantizer.plan.weight_scales import code_faults, codes_of_file, file_of_codes
from quantizer.utils.files import restore_folder, write_folder
from quantizer.utils.fingerprint import tensors_digest
from quantizer.utils.paths import regular_file
from quantizer.utils.plain_values import decoded, json_values, yaml_values

FORMAT = 1
_KIND = "saved quantizer"
_YAML = "quantizer.yaml"
_TENSORS = "ranges.safetensors"
_OBSERVED = "observed.safetensors"
_DOCUMENT = "document"
_SUMS = "sha256"
# Both dumpers write the same text, but libyaml is several times faster for a large plan.
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_TENSOR_FIELDS = ("amax", "scale", "smooth", "spread", "codes")
_DOCUMENT_FIELDS = {
    "format": int,
    "config": Mapping[str, Any],
    "scales_replaced": bool,
    "fallback": Mapping[str, Any] | None,
    "regions": Mapping[str, Any] | None,
    "fingerprint": Mapping[str, Any] | None,
    "dropped": list[str],
    "sites": list[Any],
    "products": list[Any],
    "long_groups": list[str],
}
_LONG_GROUP = 200
"""The length in characters above which a group name is written only once."""
_OPERAND_FIELDS = tuple(name for name in OperandPlan.__slots__ if name not in _TENSOR_FIELDS)
_SITE_FIELDS = tuple(name for name in SitePlan.__slots__ if name not in ("operands", "bias_shift"))


def save_state(
    folder: str | os.PathLike[str],
    plan: Plan,
    products: Iterable[CountedProduct],
    document: Mapping[str, Any],
    observed: bytes | None,
) -> Path:
    """Write a plan, the counted operations and the caller's own values to a folder; return its path."""
    values, tensors = _plain(plan, products, document)

    def fill(target: Path) -> None:
        files = {_TENSORS: save(tensors)}
        if observed is not None:
            files[_OBSERVED] = observed
        for name, content in files.items():
            (target / name).write_bytes(content)
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        text = yaml.dump({"format": FORMAT, _SUMS: sums, **values}, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        (target / _YAML).write_text(text, encoding="utf-8")

    return write_folder(folder, fill, kind=_KIND)


def load_state(
    folder: str | os.PathLike[str],
) -> tuple[Plan, tuple[CountedProduct, ...], dict[str, Any], bytes | None]:
    """Return the plan, the counted operations, the document and the snapshot (or None) that ``save_state`` wrote."""
    source = Path(folder)
    restore_folder(source)
    try:
        document = yaml_values(regular_file(source / _YAML).read_bytes())
        files = {_TENSORS: regular_file(source / _TENSORS).read_bytes()}
        if (source / _OBSERVED).exists():
            files[_OBSERVED] = regular_file(source / _OBSERVED).read_bytes()
        tensors = load(files[_TENSORS])
    except FileNotFoundError as error:
        raise QuantizerError(
            f"{source} is not a folder of Quantizer.save(): {error.filename or _TENSORS} is missing"
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise QuantizerError(f"{source} cannot be read: {error}; save it again, or copy it again") from error
    _check_format(document, source / _YAML)
    _check_sums(document.pop(_SUMS, None), files, source)
    plan, products = _from_plain(document, tensors, source / _YAML)
    return plan, products, document, files.get(_OBSERVED)


def _check_sums(recorded: Any, files: Mapping[str, bytes], folder: Path) -> None:
    """Compare the SHA-256 of the files with the document; a document without checksums was edited by hand."""
    if recorded is None:
        return
    try:
        sums: dict[str, str] = decoded(Mapping[str, str], recorded, _SUMS)
    except ValueError as error:
        raise QuantizerError(f"{folder / _YAML} is damaged: {error}") from error
    for name, content in files.items():
        if sums.get(name) != hashlib.sha256(content).hexdigest():
            raise QuantizerError(
                f"{folder / name} is damaged: its SHA-256 differs from the one in {_YAML}; copy the folder again, or "
                "calibrate and save again"
            )


def state_bytes(plan: Plan, products: Iterable[CountedProduct], document: Mapping[str, Any]) -> bytes:
    """Return the contents of ``save_state``, without a snapshot, as the bytes of one safetensors file."""
    values, tensors = _plain(plan, products, document)
    text = bytearray(json.dumps({"format": FORMAT, _SUMS: tensors_digest(tensors), **values}).encode())
    return save({**tensors, _DOCUMENT: torch.frombuffer(text, dtype=torch.uint8)})


def state_of_bytes(data: bytes, place: object) -> tuple[Plan, tuple[CountedProduct, ...], dict[str, Any]]:
    """Return the plan, the counted operations and the document from bytes of ``state_bytes``.

    Args:
        data: the bytes.
        place: the origin of the bytes, for errors.
    """
    try:
        tensors = load(data)
        document = json_values(tensors.pop(_DOCUMENT).numpy().tobytes())
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise QuantizerError(f"{place} is damaged: {error}") from error
    _check_format(document, place)
    if document.pop(_SUMS, None) not in (None, tensors_digest(tensors)):
        raise QuantizerError(
            f"{place} is damaged: the SHA-256 of its ranges differs; copy it again, or save the model again"
        )
    plan, products = _from_plain(document, tensors, place)
    return plan, products, document


def _plain(
    plan: Plan, products: Iterable[CountedProduct], document: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    long_groups: dict[str, int] = {}
    sites = []
    for entry in plan.values():
        site: dict[str, Any] = {name: getattr(entry, name) for name in _SITE_FIELDS}
        if not entry.follows:
            del site["follows"]
        site["operands"] = [_fields(operand, long_groups) for operand in entry.operands]
        sites.append(site)
        if entry.bias_shift is not None:
            tensors[f"{entry.name}/bias_shift"] = entry.bias_shift.contiguous().clone()
        for operand in entry.operands:
            for name in _TENSOR_FIELDS:
                value = getattr(operand, name)
                if value is None:
                    continue
                # A copy, because both operands share ``smooth``, and safetensors does not save shared memory.
                stored = file_of_codes(value, operand.dtype) if name == "codes" else value.contiguous().clone()
                tensors[f"{entry.name}/{operand.name}/{name}"] = stored
    plain = [product.plain() for product in products]
    named = {"long_groups": list(long_groups)} if long_groups else {}
    return {**document, **named, "sites": sites, "products": plain}, tensors


def _check_format(document: Any, place: object) -> None:
    version = document.get("format") if isinstance(document, dict) else None
    if type(version) is not int or version != FORMAT:
        raise QuantizerError(
            f"{place}: format {version!r}, but this version reads format {FORMAT}; calibrate and save again"
        )


def _from_plain(
    document: dict[str, Any], tensors: Mapping[str, Tensor], place: object
) -> tuple[Plan, tuple[CountedProduct, ...]]:
    try:
        _check_fields(document)
        sites = decoded(tuple[SitePlan, ...], _with_groups(document), "sites")
        products = tuple(
            CountedProduct.from_plain(values, f"products[{number}]")
            for number, values in enumerate(document.pop("products"))
        )
        plan = {site.name: _with_tensors(site, tensors) for site in sites}
        check_plan(sites, plan, tensors)
        lost = {product.site for product in products} - {None} - set(plan)
        if lost:
            raise ValueError(f"products of {sorted(map(str, lost))[0]!r}, which is not a site")
    except ValueError as error:
        raise QuantizerError(f"{place} is damaged: {error}") from error
    return plan, products


def _with_groups(document: dict[str, Any]) -> Any:
    """Return the sites of a document with full group names, and remove both from the document."""
    names, sites = document.pop("long_groups", []), document.pop("sites")
    for site in sites:
        operands = site.get("operands") if isinstance(site, dict) else None
        # Decoding the sites reports values that are not lists.
        for operand in operands if isinstance(operands, list) else ():
            place = operand.get("group") if isinstance(operand, dict) else None
            if type(place) is int:
                if not 0 <= place < len(names):
                    raise ValueError(f"group {place} of {site.get('name')!r} is beyond the {len(names)} long_groups")
                operand["group"] = names[place]
    return sites


def _check_fields(document: Mapping[str, Any]) -> None:
    required = ("sites", "products", "config", "scales_replaced", "fallback", "regions", "fingerprint")
    missing = [name for name in required if name not in document]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing")
    for name, value in document.items():
        if name not in _DOCUMENT_FIELDS:
            raise ValueError(f"unknown field {name!r}; known: {', '.join(_DOCUMENT_FIELDS)}")
        decoded(_DOCUMENT_FIELDS[name], value, name)


def _with_tensors(site: SitePlan, tensors: Mapping[str, Tensor]) -> SitePlan:
    operands = []
    for operand in site.operands:
        amax, scale, smooth, spread, codes = (
            tensors.get(f"{site.name}/{operand.name}/{name}") for name in _TENSOR_FIELDS
        )
        chosen = codes_of_file(codes, operand.dtype)
        operands.append(replace(operand, amax=amax, scale=scale, smooth=smooth, spread=spread, codes=chosen))
    return replace(site, operands=tuple(operands), bias_shift=tensors.get(f"{site.name}/bias_shift"))


def _fields(operand: OperandPlan, long_groups: dict[str, int]) -> dict[str, Any]:
    """Return the plain values of an operand; a long group name moves to ``long_groups``, with its index."""
    fields = {name: getattr(operand, name) for name in _OPERAND_FIELDS}
    if operand.group is not None and len(operand.group) > _LONG_GROUP:
        fields["group"] = long_groups.setdefault(operand.group, len(long_groups))
    if operand.computation is None:
        del fields["computation"]
    else:
        fields["computation"] = operand.computation.plain()
    if operand.calls:
        fields["calls"] = [asdict(call) for call in operand.calls]
    else:
        del fields["calls"]
    if operand.view is not None:
        fields["view"] = {
            "shape": list(operand.view.shape),
            "order": list(operand.view.order),
            "offset": operand.view.offset,
        }
    return fields


_ROLES = ("activation", "weight")
_TENSOR_FILES = ("amax", "scale", "smooth", "spread")


def check_plan(sites: Sequence[SitePlan], plan: Mapping[str, SitePlan], tensors: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if a plan and the tensors of its operands are inconsistent."""
    names: set[str] = set()
    expected: set[str] = set()
    for number, site in enumerate(plan[site.name] for site in sites):
        place = f"sites[{number}]"
        if site.name in names:
            raise ValueError(f"{place}.name: {site.name!r} occurs twice")
        names.add(site.name)
        for fault in _of_site(site):
            raise ValueError(f"{place}.{fault}")
        own = [operand.name for operand in site.operands]
        if len(set(own)) < len(own):
            raise ValueError(f"{place}.operands: names must be unique, got {', '.join(own)}")
        for index, operand in enumerate(site.operands):
            for fault in _of_operand(operand):
                raise ValueError(f"{place}.operands[{index}].{fault}")
            expected |= {f"{site.name}/{operand.name}/{field}" for field in (*_TENSOR_FILES, "codes")}
        expected.add(f"{site.name}/bias_shift")
    lost = [name for name in tensors if name not in expected]
    if lost:
        raise ValueError(f"the tensor {lost[0]!r} belongs to no site or operand")


def _of_site(site: SitePlan) -> Iterator[str]:
    for name, value in (("line", site.line), ("multiply_adds", site.multiply_adds)):
        if value < 0:
            yield f"{name}: expected 0 or more, got {value}"
    if site.quantized != any(operand.quantized for operand in site.operands):
        yield f"quantized: is {site.quantized}, which contradicts its operands"
    shift = site.bias_shift
    if shift is None:
        return
    if not site.quantized:
        yield "bias_shift: expected none for a site that is not quantized"
    elif shift.dtype != torch.float32 or shift.dim() != 1 + (site.calls_apart > 0):
        expected = f"[{site.calls_apart}, C]" if site.calls_apart else "[C]"
        yield f"bias_shift: expected a tensor of float32 {expected}, got {shift.dtype} {list(shift.shape)}"
    elif not bool(torch.isfinite(shift).all()):
        yield "bias_shift: expected finite numbers"


def _of_operand(operand: OperandPlan) -> Iterator[str]:
    if operand.role not in _ROLES:
        yield f"role: expected {' or '.join(_ROLES)}, got {operand.role!r}"
    if operand.dtype not in QTYPES:
        yield f"dtype: expected one of {', '.join(QTYPES)}, got {operand.dtype!r}"
        return
    yield from _of_tensors(operand)
    yield from _of_view(operand)
    yield from _of_calls(operand)
    if operand.block_size is not None and operand.block_size < 1:
        yield f"block_size: expected 1 or more, got {operand.block_size}"
    kind = QTYPES[operand.dtype]
    if operand.zero_point is not None and not (kind.has_zero_point and kind.qmin <= operand.zero_point <= kind.qmax):
        allowed = f"{kind.qmin} to {kind.qmax} for {kind.name}" if kind.has_zero_point else f"none for {kind.name}"
        yield f"zero_point: expected {allowed}, got {operand.zero_point}"
    for name, value in (("minimum", operand.minimum), ("maximum", operand.maximum)):
        if value is not None and math.isnan(value):
            yield f"{name}: expected a number, got NaN"
    if operand.quantized and operand.role == "weight" and operand.parameter is None:
        yield "parameter: is null for a quantized weight"
    yield from (f"computation.{fault}" for fault in (operand.computation.faults() if operand.computation else ()))
    yield from code_faults(operand)


def _of_tensors(operand: OperandPlan) -> Iterator[str]:
    for name in _TENSOR_FILES:
        tensor: Tensor | None = getattr(operand, name)
        if tensor is not None and tensor.dtype != torch.float32:
            yield f"{name}: expected a tensor of float32, got {tensor.dtype}"
    scale, amax, smooth = operand.scale, operand.amax, operand.smooth
    if operand.dynamic and (operand.role == "weight" or scale is not None or QTYPES[operand.dtype].is_float):
        yield "dynamic: expected an integer activation without a scale"
    if operand.quantized and not operand.dynamic and (scale is None or amax is None):
        yield "scale: expected scale and amax for a quantized operand"
    if (smooth is None) != (operand.smooth_axis is None) or (smooth is not None and smooth.dim() != 1):
        yield "smooth_axis: expected exactly if there are smooth factors [K]"
    if scale is None or amax is None:
        return
    if operand.quantized and not bool((torch.isfinite(scale) & (scale > 0)).all()):
        yield "scale: expected numbers above 0"
    if operand.spread is not None and operand.spread.shape != scale.shape:
        yield f"spread: expected the shape of scale, {list(scale.shape)}, got {list(operand.spread.shape)}"
    if scale.shape != amax.shape:
        yield f"scale: expected the shape of amax, {list(amax.shape)}, got {list(scale.shape)}"
    # One scale, one per index of an axis, or one per block along it, for a matrix or for the matrices of experts.
    expected = (0,) if operand.axis is None else (1,) if operand.block_size is None else (2, 3)
    if scale.dim() not in expected or (operand.axis is None and operand.block_size is not None):
        yield f"axis: {operand.axis} with block_size {operand.block_size} does not fit scales {list(scale.shape)}"


def _of_calls(operand: OperandPlan) -> Iterator[str]:
    if operand.calls and (operand.role == "weight" or operand.scale is None or operand.axis is not None):
        yield "calls: expected only for an activation with one scale"
    kind = QTYPES[operand.dtype]
    for number, call in enumerate(operand.calls):
        if not (math.isfinite(call.scale) and call.scale > 0 and math.isfinite(call.amax) and call.amax >= 0):
            yield f"calls[{number}]: expected a positive scale and an amax >= 0, got {call.scale} and {call.amax}"
        point = call.zero_point
        if (point is None) != (operand.zero_point is None) or not kind.qmin <= (point or 0) <= kind.qmax:
            yield f"calls[{number}].zero_point: expected a zero point of {kind.name} as for all calls, got {point}"


def _of_view(operand: OperandPlan) -> Iterator[str]:
    view = operand.view
    if view is None:
        return
    if any(size < 0 for size in view.shape) or view.offset < 0:
        yield f"view: expected sizes and an offset of 0 or more, got {list(view.shape)} and {view.offset}"
    elif sorted(view.order) != list(range(len(view.shape))):
        yield f"view.order: expected a permutation of {len(view.shape)} axes, got {list(view.order)}"
