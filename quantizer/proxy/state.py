"""Saving and loading a plan: YAML for what people read, safetensors for tensors.

A folder holds ``quantizer.yaml`` (format, config, fallback, every site with its reason, every product counted) and
``ranges.safetensors`` (amax, scale and smooth of every operand, float32, under ``SITE/OPERAND/amax``, ``/scale`` and
``/smooth``), and ``observed.safetensors``, what calibration saw, to go on with. It appears as a whole or not at all.

Inside of another file both are bytes: a safetensors file of the same tensors and ``document`` uint8, the rest as JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors import SafetensorError
from safetensors.torch import load
from safetensors.torch import load_file
from safetensors.torch import save
from safetensors.torch import save_file
from torch import Tensor

from quantizer.errors import QuantizerError
from quantizer.files import restore_folder
from quantizer.files import write_folder
from quantizer.proxy.completeness import CountedProduct
from quantizer.proxy.plan import OperandPlan
from quantizer.proxy.plan import Plan
from quantizer.proxy.plan import SitePlan
from quantizer.proxy.weight import WeightView

__all__ = ["load_state", "save_state", "state_bytes", "state_of_bytes"]

FORMAT = 1
_KIND = "saved quantizer"
_YAML = "quantizer.yaml"
_TENSORS = "ranges.safetensors"
_OBSERVED = "observed.safetensors"
_DOCUMENT = "document"
# The same safe values either way: libyaml reads and writes a large plan several times as fast.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_TENSOR_FIELDS = ("amax", "scale", "smooth")
_OPERAND_FIELDS = tuple(name for name in OperandPlan.__slots__ if name not in _TENSOR_FIELDS)
_SITE_FIELDS = tuple(name for name in SitePlan.__slots__ if name != "operands")


def save_state(
    folder: str | os.PathLike[str],
    plan: Plan,
    products: Iterable[CountedProduct],
    document: Mapping[str, Any],
    observed: bytes | None,
) -> Path:
    """Write a plan, what was counted and whatever else the caller keeps to a folder.

    Args:
        folder: replaced where it holds a saved quantizer and nothing else.
        plan: what becomes of each site.
        products: what torch computed in calibration.
        document: more plain values.
        observed: a snapshot of what calibration saw; None where there is none.

    Raises:
        QuantizerError: the folder cannot be written, or what stands there is kept.
    """
    whole, tensors = _plain(plan, products, document)

    def fill(target: Path) -> None:
        text = yaml.dump(whole, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        (target / _YAML).write_text(text, encoding="utf-8")
        save_file(tensors, target / _TENSORS)
        if observed is not None:
            (target / _OBSERVED).write_bytes(observed)

    return write_folder(folder, fill, kind=_KIND)


def load_state(
    folder: str | os.PathLike[str],
) -> tuple[Plan, tuple[CountedProduct, ...], dict[str, Any], bytes | None]:
    """What ``save_state`` wrote: the plan, the products, the document and the snapshot.

    A folder from before they were kept has no products or no snapshot.

    Raises:
        QuantizerError: the folder is none of ours, is of another format, or is damaged.
    """
    source = Path(folder)
    restore_folder(source)
    try:
        text = (source / _YAML).read_text(encoding="utf-8")
        document = yaml.load(text, Loader=_Loader)
        tensors = load_file(source / _TENSORS)
        observed = (source / _OBSERVED).read_bytes() if (source / _OBSERVED).exists() else None
    except FileNotFoundError as error:
        raise QuantizerError(
            f"{source} is no folder that Quantizer.save() wrote: {error.filename or _TENSORS} is missing"
        ) from error
    except (OSError, yaml.YAMLError, SafetensorError) as error:
        raise QuantizerError(f"{source} cannot be read: {error}") from error
    plan, products = _from_plain(document, tensors, source / _YAML)
    return plan, products, document, observed


def state_bytes(plan: Plan, products: Iterable[CountedProduct], document: Mapping[str, Any]) -> bytes:
    """What ``save_state`` writes, without a snapshot, as the bytes of one safetensors file."""
    whole, tensors = _plain(plan, products, document)
    text = bytearray(json.dumps(whole).encode())
    return save({**tensors, _DOCUMENT: torch.frombuffer(text, dtype=torch.uint8)})


def state_of_bytes(data: bytes, place: object) -> tuple[Plan, tuple[CountedProduct, ...], dict[str, Any]]:
    """What ``state_bytes`` gave: the plan, the products and the document.

    Args:
        data: the bytes.
        place: where they were, for an error.

    Raises:
        QuantizerError: they are none of ours, of another format, or damaged.
    """
    try:
        tensors = load(data)
        document = json.loads(tensors.pop(_DOCUMENT).numpy().tobytes())
    except (SafetensorError, KeyError, ValueError) as error:
        raise QuantizerError(f"{place} is damaged: {error}") from error
    plan, products = _from_plain(document, tensors, place)
    return plan, products, document


def _plain(
    plan: Plan, products: Iterable[CountedProduct], document: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Plain values, and tensors by name."""
    tensors: dict[str, Tensor] = {}
    sites = []
    for entry in plan.values():
        site: dict[str, Any] = {name: getattr(entry, name) for name in _SITE_FIELDS}
        site["operands"] = [_fields(operand) for operand in entry.operands]
        sites.append(site)
        for operand in entry.operands:
            for name in _TENSOR_FIELDS:
                value = getattr(operand, name)
                if value is not None:
                    # A copy: both operands of a product have one ``smooth``, and the format shares no memory.
                    tensors[f"{entry.name}/{operand.name}/{name}"] = value.contiguous().clone()
    plain = [product.plain() for product in products]
    return {"format": FORMAT, **document, "sites": sites, "products": plain}, tensors


def _from_plain(document: Any, tensors: Mapping[str, Tensor], place: object) -> tuple[Plan, tuple[CountedProduct, ...]]:
    """Plan and products, taken out of what ``_plain`` gave.

    Raises:
        QuantizerError: it is of another format, or damaged.
    """
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else None
        raise QuantizerError(f"{place}: format {found!r}; this version reads format {FORMAT}")
    plan: Plan = {}
    try:
        for site in document.pop("sites"):
            operands = tuple(
                OperandPlan(
                    **operand
                    | {"view": _view(operand.get("view"))}
                    | {name: tensors.get(f"{site['name']}/{operand['name']}/{name}") for name in _TENSOR_FIELDS}
                )
                for operand in site.pop("operands")
            )
            reads = tuple(site.pop("reads"))
            plan[site["name"]] = SitePlan(**site, reads=reads, operands=operands)
        products = tuple(CountedProduct.from_plain(values) for values in document.pop("products", ()))
        lost = {product.site for product in products} - {None} - set(plan)
        if lost:
            raise ValueError(f"products of {sorted(map(str, lost))[0]!r}, which is no site")
    except (KeyError, TypeError, ValueError) as error:
        raise QuantizerError(f"{place} is damaged: {error}") from error
    return plan, products


def _fields(operand: OperandPlan) -> dict[str, Any]:
    fields = {name: getattr(operand, name) for name in _OPERAND_FIELDS}
    if operand.view is not None:
        fields["view"] = {
            "shape": list(operand.view.shape),
            "order": list(operand.view.order),
            "offset": operand.view.offset,
        }
    return fields


def _view(saved: dict[str, Any] | None) -> WeightView | None:
    if saved is None:
        return None
    return WeightView(tuple(saved["shape"]), tuple(saved["order"]), saved.get("offset", 0))
