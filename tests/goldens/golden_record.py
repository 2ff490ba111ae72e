"""What quantizing a net gives, as text and as checksums, to be compared with what an earlier commit gave.

Text with its digits masked is the same on any machine. Digits and tensors are bits of one kind of CPU: their checksums
are kept by kind, and compared where the machine is of one that was recorded.

    make goldens             # record anew, after a change that is meant
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from golden_nets import NETS, GoldenNet, Packed

import quantizer
from quantizer import Quantizer
from quantizer.errors import QuantizerError
from quantizer.plan.targets.base import profiles
from quantizer.report.page import html_from_record
from quantizer.report.record import RunRecord

FOLDER = Path(__file__).resolve().parent / "recorded"
_PACKAGE = Path(quantizer.__file__).parent
"""Warnings are recorded that point into it; those at a line of these files are of the nets here."""
BACKENDS = tuple(sorted(profiles.names()))
# Torch takes a second for each file: one target with float32 beside its integers, one with float16.
EXPORTED = ("openvino", "tensorrt-rtx")

_DIGITS = re.compile(r"-?\d+\.\d+(e[+-]?\d+)?")
_MEASURED = re.compile(r"\b[0-9a-f]{64}\b|\b\d{6,}\b|-?\d+\.\d+(e[+-]?\d+)?")
"""What a saved quantizer has of this kind of CPU: checksums and ranges."""
_HOLD_TEXTS = {"text", "quantizer.yaml", "observed.safetensors"}
"""Checksums that words change; the statistics of calibration hold reasons."""
_BATCHES = 3


def machine() -> str:
    """The kind of machine on which bits are the same: torch's release, its kernels, and who made the CPU."""
    found = Path("/proc/cpuinfo")
    lines = found.read_text(encoding="utf-8", errors="replace").splitlines() if found.exists() else []
    vendor = next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "unknown")
    return f"torch {torch.__version__.partition('+')[0]}, {torch.backends.cpu.get_cpu_capability()}, {vendor}"


def golden_of(name: str, backends: Iterable[str] = BACKENDS) -> dict[str, dict[str, Any]]:
    """Quantize a net for some backends; return by backend what came of it: ``text``, and ``bits`` as checksums."""
    return {backend: dict(_entry(NETS[name], backend)) for backend in backends}


def page_golden(record: RunRecord) -> str:
    """The checksum of the page of a record; one that is made up has nothing of this machine in it."""
    return _digest(html_from_record(record).encode())


def recorded(name: str) -> Any:
    """Return what was recorded of a net."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def _entry(net: GoldenNet, backend: str) -> Iterator[tuple[str, Any]]:
    torch.manual_seed(7)
    model = net.model().eval()
    data = [net.data(seed) for seed in range(_BATCHES)]
    # The values of ``plain`` under the name that they had when most was recorded.
    plain = {"calibrator": "percentile", "percentile": 99.99, "smoothquant_alpha": None, "zero_point": False}
    config = {"backend": backend, **net.config}
    config["activations"] = {**plain, **config.get("activations", {})}
    with warnings.catch_warnings(record=True) as said, tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        text: dict[str, str] = {}
        bits: dict[str, str] = {}
        saved: dict[str, str] = {}
        try:
            _quantized(Quantizer(preset="fast", **config), model, data, Path(folder), text, bits)
            saved["saved"] = _digest(_MEASURED.sub("#", _yaml(Path(folder) / "saved" / "quantizer.yaml")).encode())
        except QuantizerError as refused:
            text["refused"] = str(refused)
    ours = {str(one.message) for one in said if Path(one.filename).is_relative_to(_PACKAGE)}
    text["warnings"] = "\n".join(sorted(ours))
    bits["text"] = _digest(json.dumps(text, sort_keys=True).encode())
    masked = {key: _DIGITS.sub("#", value) for key, value in (*text.items(), *saved.items())}
    # Whole for two of the backends, to be read where it differs.
    shown = {key: value.splitlines() for key, value in masked.items()}
    yield "text", shown if backend in EXPORTED else _digest(json.dumps(masked, sort_keys=True).encode())
    yield "bits", bits


def _quantized(
    quantizer: Quantizer,
    model: torch.nn.Module,
    data: list[Any],
    folder: Path,
    text: dict[str, str],
    bits: dict[str, str],
) -> None:
    text["found"] = quantizer.inspect(model).text()
    if not isinstance(model, Packed):
        # Which variants of torch's own functions there are depends on what the process has rewritten before.
        text["rewritten"] = _digest(_placeless(quantizer.diff(model)).encode())
    quantizer.calibrate(model, data)
    text["coverage"], text["ranges"] = quantizer.coverage.text(), quantizer.ranges.text()
    quantizer.save(folder / "saved")
    for file in sorted((folder / "saved").iterdir()):
        if not file.name.startswith("."):
            bits[file.name] = _digest(_yaml(file).encode() if file.suffix == ".yaml" else file.read_bytes())
    frozen = quantizer.quantize(model)
    with torch.no_grad():
        output = frozen(**data[0]) if isinstance(data[0], dict) else frozen(data[0])
    bits["output"] = _digest(_bytes(output[0] if isinstance(output, tuple) else next(iter(_values(output)))))
    if quantizer.config.backend in EXPORTED:
        path = quantizer.export(frozen, folder / "model.onnx", data[0])
        text["file"], bits["file"] = _onnx(path)


def _yaml(file: Path) -> str:
    """The text of a file, without the places of this machine."""
    return _placeless(file.read_text(encoding="utf-8"))


def _placeless(text: str) -> str:
    """A text that names files of source, from their package, ours too, or the tests on; with one number of patches.

    How many are registered is in the name of patched source, and says nothing of it. What is recorded has 46.
    """
    return re.sub(r", patches \d+", ", patches 46", re.sub(r"/\S*/(?=site-packages/|tests/|quantizer/)", "", text))


def _values(output: Any) -> Iterator[torch.Tensor]:
    yield from [output] if isinstance(output, torch.Tensor) else output.values()


def _onnx(path: Path) -> tuple[str, str]:
    """The nodes of a file as text, and the checksum of its tensors by name."""
    import onnx

    graph = onnx.load(path).graph
    nodes = (f"{', '.join(node.output)} = {node.op_type} ({', '.join(node.input)})" for node in graph.node)
    tensors = (tensor.name.encode() + onnx.numpy_helper.to_array(tensor).tobytes() for tensor in graph.initializer)
    return _digest("\n".join(nodes).encode()), _digest(b"".join(tensors))


def _bytes(value: torch.Tensor) -> bytes:
    return value.detach().contiguous().view(torch.uint8).numpy().tobytes()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _tensors(bits: dict[str, str]) -> dict[str, str]:
    """The checksums that no word changes."""
    return {name: digest for name, digest in bits.items() if name not in _HOLD_TEXTS}


def _record() -> None:
    """Write what the nets give now; of other kinds of machine the bits of tensors are kept where words have changed."""
    FOLDER.mkdir(exist_ok=True)
    for name in NETS:
        entries = golden_of(name)
        known = recorded(name) if (FOLDER / f"{name}.json").exists() else {}
        text = {backend: entry["text"] for backend, entry in entries.items()}
        bits = known.get("bits", {})
        if known.get("text") != text:
            bits = {kind: {backend: _tensors(of) for backend, of in found.items()} for kind, found in bits.items()}
        bits[machine()] = {backend: entry["bits"] for backend, entry in entries.items()}
        written = json.dumps({"text": text, "bits": bits}, indent=1, ensure_ascii=False, sort_keys=True)
        (FOLDER / f"{name}.json").write_text(written + "\n", encoding="utf-8")
    from report_samples import sample_record

    (FOLDER / "page.json").write_text(json.dumps(page_golden(sample_record())) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    _record()
