"""The folder of a saved plan: a YAML file for people, and safetensors files for tensors.

- ``quantizer.yaml``: format, config, fallback, every site with its reason, every product counted. The name of a group
  holds those of its members, so that N sites of one group would take N^2: long ones are in a list, ``long_groups``, and
  operands have their places in it.
- ``ranges.safetensors``: amax, scale and smooth of every operand, float32, under ``SITE/OPERAND/amax`` and so on, and
  the shift of a site's bias under ``SITE/bias_shift``; the codes of weights whose rounding was chosen, int8 or uint8
  (two of 4 bits each).
- ``observed.safetensors``: the statistics of calibration, to continue it; not in every folder.

The folder appears as a whole or not at all. Inside another file, the first two are the bytes of one safetensors file
with the same tensors and ``document`` uint8, the rest as JSON.

Checks that a plan from a file is consistent; the types of its values were checked when it was read.
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
# Both dumpers write the same text, but libyaml writes a large plan several times as fast.
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
"""The characters from which on the name of a group is written once."""
_OPERAND_FIELDS = tuple(name for name in OperandPlan.__slots__ if name not in _TENSOR_FIELDS)
_SITE_FIELDS = tuple(name for name in SitePlan.__slots__ if name not in ("operands", "bias_shift"))


def save_state(
    folder: str | os.PathLike[str],
    plan: Plan,
    products: Iterable[CountedProduct],
    document: Mapping[str, Any],
    observed: bytes | None,
) -> Path:
    """Write a plan, the products and the caller's own values to a folder."""
    whole, tensors = _plain(plan, products, document)

    def fill(target: Path) -> None:
        files = {_TENSORS: save(tensors)}
        if observed is not None:
            files[_OBSERVED] = observed
        for name, content in files.items():
            (target / name).write_bytes(content)
        sums = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        text = yaml.dump({"format": FORMAT, _SUMS: sums, **whole}, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        (target / _YAML).write_text(text, encoding="utf-8")

    return write_folder(folder, fill, kind=_KIND)


def load_state(
    folder: str | os.PathLike[str],
) -> tuple[Plan, tuple[CountedProduct, ...], dict[str, Any], bytes | None]:
    """Return the plan, the products, the document and the snapshot, if there is one, that ``save_state`` wrote."""
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
            f"{source} is no folder that Quantizer.save() wrote: {error.filename or _TENSORS} is missing"
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise QuantizerError(f"{source} cannot be read: {error}; save it again, or copy it again") from error
    _check_format(document, source / _YAML)
    _check_sums(document.pop(_SUMS, None), files, source)
    plan, products = _from_plain(document, tensors, source / _YAML)
    return plan, products, document, files.get(_OBSERVED)


def _check_sums(told: Any, files: Mapping[str, bytes], folder: Path) -> None:
    """Compare the SHA-256 of the files with those in the document; who edits a folder by hand removes them."""
    if told is None:
        return
    try:
        sums: dict[str, str] = decoded(Mapping[str, str], told, _SUMS)
    except ValueError as error:
        raise QuantizerError(f"{folder / _YAML} is damaged: {error}") from error
    for name, content in files.items():
        if sums.get(name) != hashlib.sha256(content).hexdigest():
            raise QuantizerError(
                f"{folder / name} is damaged: it is not the file that {_YAML} was written with (its SHA-256 differs); "
                "copy the folder again, or calibrate and save again"
            )


def state_bytes(plan: Plan, products: Iterable[CountedProduct], document: Mapping[str, Any]) -> bytes:
    """Return the contents of ``save_state``, without a snapshot, as the bytes of one safetensors file."""
    whole, tensors = _plain(plan, products, document)
    text = bytearray(json.dumps({"format": FORMAT, _SUMS: tensors_digest(tensors), **whole}).encode())
    return save({**tensors, _DOCUMENT: torch.frombuffer(text, dtype=torch.uint8)})


def state_of_bytes(data: bytes, place: object) -> tuple[Plan, tuple[CountedProduct, ...], dict[str, Any]]:
    """Return the plan, the products and the document from bytes of ``state_bytes``.

    Args:
        data: the bytes.
        place: the place of the bytes, for errors.
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
    """Return the document with all plain values, and the tensors by name."""
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
                # A copy, since both operands of a product share ``smooth``, and safetensors shares no memory.
                held = file_of_codes(value, operand.dtype) if name == "codes" else value.contiguous().clone()
                tensors[f"{entry.name}/{operand.name}/{name}"] = held
    plain = [product.plain() for product in products]
    named = {"long_groups": list(long_groups)} if long_groups else {}
    return {**document, **named, "sites": sites, "products": plain}, tensors


def _check_format(document: Any, place: object) -> None:
    """Raise if this version cannot read a document."""
    found = document.get("format") if isinstance(document, dict) else None
    if type(found) is not int or found != FORMAT:
        raise QuantizerError(f"{place}: format {found!r}; this version reads format {FORMAT}: calibrate and save again")


def _from_plain(
    document: dict[str, Any], tensors: Mapping[str, Tensor], place: object
) -> tuple[Plan, tuple[CountedProduct, ...]]:
    """Return plan and products, and remove them from a document of ``_plain``."""
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
            raise ValueError(f"products of {sorted(map(str, lost))[0]!r}, which is no site")
    except ValueError as error:
        raise QuantizerError(f"{place} is damaged: {error}") from error
    return plan, products


def _with_groups(document: dict[str, Any]) -> Any:
    """Return the sites of a document with the names of their groups, and remove both from it."""
    names, sites = document.pop("long_groups", []), document.pop("sites")
    for site in sites:
        operands = site.get("operands") if isinstance(site, dict) else None
        # What is no list is told of by the reader of the sites.
        for operand in operands if isinstance(operands, list) else ():
            place = operand.get("group") if isinstance(operand, dict) else None
            if type(place) is int:
                if not 0 <= place < len(names):
                    raise ValueError(f"group {place} of {site.get('name')!r} is none of {len(names)} long_groups")
                operand["group"] = names[place]
    return sites


def _check_fields(document: Mapping[str, Any]) -> None:
    """Check the types of the document's fields; their values are checked by their own readers."""
    required = ("sites", "products", "config", "scales_replaced", "fallback", "regions", "fingerprint")
    missing = [name for name in required if name not in document]
    if missing:
        raise ValueError(f"{' and '.join(missing)} missing")
    for name, value in document.items():
        if name not in _DOCUMENT_FIELDS:
            raise ValueError(f"unknown field {name!r}; known: {', '.join(_DOCUMENT_FIELDS)}")
        decoded(_DOCUMENT_FIELDS[name], value, name)


def _with_tensors(site: SitePlan, tensors: Mapping[str, Tensor]) -> SitePlan:
    found = []
    for operand in site.operands:
        amax, scale, smooth, spread, codes = (
            tensors.get(f"{site.name}/{operand.name}/{name}") for name in _TENSOR_FIELDS
        )
        held = codes_of_file(codes, operand.dtype)
        found.append(replace(operand, amax=amax, scale=scale, smooth=smooth, spread=spread, codes=held))
    return replace(site, operands=tuple(found), bias_shift=tensors.get(f"{site.name}/bias_shift"))


def _fields(operand: OperandPlan, long_groups: dict[str, int]) -> dict[str, Any]:
    """Return the plain values of an operand; a long name of a group is put into ``long_groups``, by place."""
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
    """Check a plan and the tensors of its operands."""
    names: set[str] = set()
    known: set[str] = set()
    for number, site in enumerate(plan[site.name] for site in sites):
        place = f"sites[{number}]"
        if site.name in names:
            raise ValueError(f"{place}.name: {site.name!r} is there twice")
        names.add(site.name)
        for fault in _of_site(site):
            raise ValueError(f"{place}.{fault}")
        own = [operand.name for operand in site.operands]
        if len(set(own)) < len(own):
            raise ValueError(f"{place}.operands: two of them have one name, of {', '.join(own)}")
        for index, operand in enumerate(site.operands):
            for fault in _of_operand(operand):
                raise ValueError(f"{place}.operands[{index}].{fault}")
            known |= {f"{site.name}/{operand.name}/{field}" for field in (*_TENSOR_FILES, "codes")}
        known.add(f"{site.name}/bias_shift")
    lost = [name for name in tensors if name not in known]
    if lost:
        raise ValueError(f"the tensor {lost[0]!r} belongs to no site or operand")


def _of_site(site: SitePlan) -> Iterator[str]:
    for name, value in (("line", site.line), ("multiply_adds", site.multiply_adds)):
        if value < 0:
            yield f"{name}: expected 0 or more, got {value}"
    if site.quantized != any(operand.quantized for operand in site.operands):
        yield f"quantized: is {site.quantized}, and its operands say otherwise"
    shift = site.bias_shift
    if shift is None:
        return
    if not site.quantized:
        yield "bias_shift: there is one, and the site is float"
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
        steps = f"a step of {kind.name}, {kind.qmin} to {kind.qmax}" if kind.has_zero_point else f"none for {kind.name}"
        yield f"zero_point: expected {steps}, got {operand.zero_point}"
    for name, value in (("minimum", operand.minimum), ("maximum", operand.maximum)):
        if value is not None and math.isnan(value):
            yield f"{name}: expected a number, got NaN"
    if operand.quantized and operand.role == "weight" and operand.parameter is None:
        yield "parameter: is null for a weight that is quantized"
    yield from (f"computation.{fault}" for fault in (operand.computation.faults() if operand.computation else ()))
    yield from code_faults(operand)


def _of_tensors(operand: OperandPlan) -> Iterator[str]:
    for name in _TENSOR_FILES:
        tensor: Tensor | None = getattr(operand, name)
        if tensor is not None and tensor.dtype != torch.float32:
            yield f"{name}: expected a tensor of float32, got {tensor.dtype}"
    scale, amax, smooth = operand.scale, operand.amax, operand.smooth
    if operand.dynamic and (operand.role == "weight" or scale is not None or QTYPES[operand.dtype].is_float):
        yield "dynamic: expected an activation in integers without a scale"
    if operand.quantized and not operand.dynamic and (scale is None or amax is None):
        yield "scale: there is no range of it, and it is quantized"
    if (smooth is None) != (operand.smooth_axis is None) or (smooth is not None and smooth.dim() != 1):
        yield "smooth_axis: there is one where there are factors [K] along it, and only there"
    if scale is None or amax is None:
        return
    if operand.quantized and not bool((torch.isfinite(scale) & (scale > 0)).all()):
        yield "scale: expected numbers above 0"
    if operand.spread is not None and operand.spread.shape != scale.shape:
        yield f"spread: its shape is {list(operand.spread.shape)}, that of scale {list(scale.shape)}"
    if scale.shape != amax.shape:
        yield f"scale: its shape is {list(scale.shape)}, that of amax {list(amax.shape)}"
    # One scale, one for each index of an axis, or one for each block along it, of a matrix or of those of experts.
    expected = (0,) if operand.axis is None else (1,) if operand.block_size is None else (2, 3)
    if scale.dim() not in expected or (operand.axis is None and operand.block_size is not None):
        yield f"axis: is {operand.axis} with block_size {operand.block_size}, and its scales are {list(scale.shape)}"


def _of_calls(operand: OperandPlan) -> Iterator[str]:
    if operand.calls and (operand.role == "weight" or operand.scale is None or operand.axis is not None):
        yield "calls: expected them for an activation with one scale"
    kind = QTYPES[operand.dtype]
    for number, call in enumerate(operand.calls):
        if not (math.isfinite(call.scale) and call.scale > 0 and math.isfinite(call.amax) and call.amax >= 0):
            yield f"calls[{number}]: expected a scale above 0 and an amax from 0, got {call.scale} and {call.amax}"
        point = call.zero_point
        if (point is None) != (operand.zero_point is None) or not kind.qmin <= (point or 0) <= kind.qmax:
            yield f"calls[{number}].zero_point: expected one such as that of all calls, got {point}"


def _of_view(operand: OperandPlan) -> Iterator[str]:
    view = operand.view
    if view is None:
        return
    if any(size < 0 for size in view.shape) or view.offset < 0:
        yield f"view: expected sizes and an offset of 0 or more, got {list(view.shape)} and {view.offset}"
    elif sorted(view.order) != list(range(len(view.shape))):
        yield f"view.order: expected an order of {len(view.shape)} axes, got {list(view.order)}"
