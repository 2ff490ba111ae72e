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
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from quantizer.common.digest import tensors_digest
from quantizer.common.paths import regular_file
from quantizer.common.plain_values import decoded, json_values, yaml_values
from quantizer.errors import QuantizerError
from quantizer.files import restore_folder, write_folder
from quantizer.observe.completeness.product_counter import CountedProduct
from quantizer.plan.saved_folder_check import check_plan
from quantizer.plan.site_plan import OperandPlan, Plan, SitePlan
from quantizer.plan.weight_codes import codes_of_file, file_of_codes

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
    """Write a plan, the products and the caller's own values to a folder.

    Args:
        folder: replaced if it contains a saved quantizer and nothing else.
        plan: the plan of all sites.
        products: the products that torch computed in calibration.
        document: more plain values.
        observed: a snapshot of the statistics of calibration; None if there is none.

    Raises:
        QuantizerError: the folder cannot be written, or has other contents, which are kept.
    """
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
    """Return the plan, the products, the document and the snapshot that ``save_state`` wrote.

    Older folders have no products or no snapshot.

    Raises:
        QuantizerError: the folder was not written by ``save_state``, is of another format, or is damaged.
    """
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
    """Compare the SHA-256 of the files with those in the document; older folders have none.

    Raises:
        QuantizerError: a file has another SHA-256.
    """
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

    Raises:
        QuantizerError: the bytes are not those of a plan, are of another format, or are damaged.
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
            # Without them files are as those of earlier versions.
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
    """Raise if this version cannot read a document.

    Raises:
        QuantizerError: the document is of another format, or none at all.
    """
    found = document.get("format") if isinstance(document, dict) else None
    if type(found) is not int or found != FORMAT:
        raise QuantizerError(f"{place}: format {found!r}; this version reads format {FORMAT}")


def _from_plain(
    document: dict[str, Any], tensors: Mapping[str, Tensor], place: object
) -> tuple[Plan, tuple[CountedProduct, ...]]:
    """Return plan and products, and remove them from a document of ``_plain``.

    Raises:
        QuantizerError: the document or a tensor is damaged.
    """
    try:
        _check_fields(document)
        sites = decoded(tuple[SitePlan, ...], _with_groups(document), "sites")
        products = tuple(
            CountedProduct.from_plain(values, f"products[{number}]")
            for number, values in enumerate(document.pop("products", ()))
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
    """Return the sites of a document with the names of their groups, and remove both from it.

    Raises:
        ValueError: a group is no place in the list of long ones.
    """
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
    """Check the types of the document's fields; their values are checked by their own readers.

    Raises:
        ValueError: a field is missing, unknown or of another type.
    """
    missing = [name for name in ("sites", "config", "fallback") if name not in document]
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
        # Without one files are as those of earlier versions.
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
