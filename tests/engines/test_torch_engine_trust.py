"""Engine files of torch from elsewhere: nothing in them becomes code, and native code is loaded when it is trusted."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import quantizer
from quantizer import Quantizer
from quantizer.cli.main import main
from quantizer.engines import BuildOptions, InputSizes, build_engine, inspect_engine, load_engine
from quantizer.engines.engine_file import read_engine, write_engine
from quantizer.engines.torch_engine.graph_file import allowed_operator
from quantizer.errors import EngineError, QuantizerError
from quantizer.utils import cpu as trust

onnx = pytest.importorskip("onnx", reason="exporting needs enginequant[onnx]")

Change = Callable[[dict[str, Any]], object]

HARMLESS = "a note of mine"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An eager engine of a small model."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("trust")
    model, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)).eval(), torch.randn(32, 16)
    q = Quantizer(preset="plain", backend="torch")
    q.calibrate(model, [x])
    q.export(q.quantize(model), folder / "m.onnx", x)
    return build_engine("torch", folder / "m.onnx", folder / "m.engine", BuildOptions(compiled=False)).path


def _parts(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(read_engine(path)[0])) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _write(path: Path, parts: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """An engine file of these parts, whose checksum is right."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    write_engine(path, memoryview(stream.getvalue()))
    return path


def _changed(good: Path, path: Path, change: Change) -> Path:
    parts = _parts(good)
    description = json.loads(parts["engine.json"])
    change(description)
    return _write(path, {**parts, "engine.json": json.dumps(description).encode()})


def _first(description: dict[str, Any], kind: str, **fields: Any) -> None:
    """Change fields of the first node of a kind."""
    next(node for node in description["nodes"] if node["op"] == kind).update(fields)


def _rename_everywhere(description: dict[str, Any], name: str) -> None:
    """Give the first input's node another name, wherever it is read."""
    before = description["nodes"][0]["name"]
    text = json.dumps(description["nodes"]).replace(f'"node": "{before}"', f'"node": {json.dumps(name)}')
    description["nodes"] = json.loads(text)
    description["nodes"][0]["name"] = name


CODE = "x=__import__('os').mkdir('ran')"
NAMES = [CODE, f"{CODE}):\n    {CODE[2:]}\n    return (x,", CODE[2:], "self.__class__"]


@pytest.mark.parametrize("text", NAMES)
@pytest.mark.parametrize("place", ["target", "name", "origin", "output name", "input name", "dimension", "constant"])
def test_no_name_becomes_code(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, text: str
) -> None:
    """These names stand for nothing but themselves, so the engine loads and computes what it did."""

    def change(description: dict[str, Any]) -> None:
        match place:
            case "target":
                _first(description, "placeholder", target=text)
            case "name":
                _rename_everywhere(description, text)
            case "origin":
                _first(description, "call_function", onnx=text)
            case "output name":
                description["outputs"] = [text]
            case "input name":
                description["inputs"][0]["name"] = text
            case "dimension":
                description["inputs"][0]["dimensions"] = [text, ""]
            case _:
                description["constants"] = {text: next(iter(description["constants"].values()))}

    monkeypatch.chdir(tmp_path)
    path = _changed(good, tmp_path / "m.engine", change)
    engine = load_engine("torch", path)
    x = np.ones((3, 16), np.float32)
    (expected,), (found,) = (one({one.input_names[0]: x}).values() for one in (load_engine("torch", good), engine))
    assert np.array_equal(found, expected)
    assert inspect_engine("torch", path, sizes=InputSizes(2, 4)).layers
    assert not (tmp_path / "ran").exists()


CHANGES: dict[str, Change] = {
    "keyword that is code": lambda d: _first(d, "call_function", kwargs={"items": {CODE: 1}}),
    "keyword that is none": lambda d: _first(d, "call_function", kwargs={"items": {"no_such": 1}}),
    "target of a constant": lambda d: _first(d, "get_attr", target="graph.__class__"),
    "function of Python": lambda d: _first(d, "call_function", target="operator.attrgetter"),
    "operator of files": lambda d: _first(d, "call_function", target="aten.from_file.default", args=["/etc/passwd"]),
    "operator that is no overload": lambda d: _first(d, "call_function", target="aten.mul.__init__"),
    "operator of another library": lambda d: _first(d, "call_function", target="quantizer.fake_quantize.default"),
    "method": lambda d: _first(d, "call_function", op="call_method", target="__reduce__"),
    "module": lambda d: _first(d, "call_function", op="call_module", target="graph"),
    "device": lambda d: _first(
        d, "call_function", target="aten.full.default", args=[[1], 0], kwargs={"items": {"device": "cuda"}}
    ),
    "text where there is none": lambda d: _first(d, "call_function", args=[CODE]),
    "type that is none": lambda d: _first(d, "call_function", args=[{"dtype": "ops"}]),
    "number of 400 digits": lambda d: _first(d, "call_function", args=[10**400]),
    "sequence times a number": lambda d: _first(d, "call_function", target="operator.mul", args=[[0], 2**40]),
    "mapping": lambda d: _first(d, "call_function", args=[{"items": {"a": 1}}]),
    "node that comes later": lambda d: _first(d, "call_function", args=[{"node": d["nodes"][-1]["name"]}]),
    "input's type": lambda d: d["inputs"][0].update(dtype="O"),
    "input's records": lambda d: d["inputs"][0].update(dtype="i4,i4"),
    "size below 0": lambda d: d["inputs"][0].update(shape=[-1, 16]),
    "two inputs of one": lambda d: d["inputs"].append(d["inputs"][0]),
    "outputs of one name": lambda d: d.update(outputs=["a", "a"]),
    "no nodes": lambda d: d.update(nodes=[]),
    "nodes twice": lambda d: d.update(nodes=d["nodes"] * 2),
    "unknown field": lambda d: d.update(more=1),
    "argument that is missing": lambda d: _first(d, "call_function", args=[]),
    "lists in lists": lambda d: _first(d, "call_function", args=json.loads("[" * 300 + "]" * 300)),
}


@pytest.mark.parametrize("what", [*CHANGES])
def test_what_no_engine_has_is_refused(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = _changed(good, tmp_path / "m.engine", CHANGES[what])
    with pytest.raises(EngineError, match=r"m\.engine is not an engine of backend torch or is damaged: "):
        load_engine("torch", path)
    with pytest.raises(EngineError, match=r"m\.engine is not an engine of backend torch"):
        inspect_engine("torch", path)
    assert os.listdir(tmp_path) == ["m.engine"]


def _returned(description: dict[str, Any], operator: str, *arguments: Any) -> None:
    """Return the result of an operator on the engine's output."""
    nodes = description["nodes"]
    given = [nodes[-1]["args"][0][0], *arguments]
    more = {"op": "call_function", "name": "more", "target": operator, "args": given, "kwargs": {"items": {}}}
    nodes[-1:] = [{**more, "onnx": ""}, {**nodes[-1], "args": [[{"node": "more"}]]}]


OUTPUTS: dict[str, Change] = {
    "weights in a kernel's layout": lambda d: d["nodes"][-1].update(
        args=[[{"node": next(node["name"] for node in d["nodes"] if "prepack" in node["target"])}]]
    ),
    "bfloat16": lambda d: _returned(d, "aten.to.dtype", {"dtype": "bfloat16"}),
    "several tensors": lambda d: _returned(d, "aten.topk.default", 1),
}


@pytest.mark.parametrize("what", [*OUTPUTS])
def test_outputs_that_are_no_arrays(good: Path, tmp_path: Path, what: str) -> None:
    path = _changed(good, tmp_path / "m.engine", OUTPUTS[what])
    with pytest.raises(EngineError, match=r"torch could not run the engine|did not return 1 tensors"):
        load_engine("torch", path)(np.ones((3, 16), np.float32))
    with pytest.raises(EngineError, match=r"torch could not run the engine|did not return 1 tensors"):
        inspect_engine("torch", path)


def test_an_input_that_is_larger_than_any_memory(good: Path, tmp_path: Path) -> None:
    path = _changed(good, tmp_path / "m.engine", lambda d: d["inputs"][0].update(shape=[None, 2**62]))
    with pytest.raises(EngineError, match=r"would have 4e\+19 values; a size in the file is wrong"):
        inspect_engine("torch", path)


def test_names_in_a_file_do_not_steer_the_terminal(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(description: dict[str, Any]) -> None:
        for number, node in enumerate(description["nodes"]):
            node["onnx"] = f"\x1b]0;owned\x07{number}"

    assert main(["show", str(_changed(good, tmp_path / "m.engine", change))]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert "\\x1b" in shown
    assert main(["show", str(tmp_path / "\x1b]0;owned\x07")]) == 1
    assert "\x1b" not in capsys.readouterr().err


def test_an_archive_that_would_grow_is_refused(good: Path, tmp_path: Path) -> None:
    parts = {**_parts(good), "engine.json": b" " * 2**22 + _parts(good)["engine.json"]}
    path = _write(tmp_path / "m.engine", parts, zipfile.ZIP_DEFLATED)
    with pytest.raises(EngineError, match="a file in the archive is compressed"):
        load_engine("torch", path)


def test_every_operator_that_an_import_makes_is_allowed() -> None:
    """Those that it names in its source, so that no engine is written that cannot be read."""
    import re

    import quantizer.engines.torch_engine as package
    import quantizer.export.onnx_import as importer

    made = set()
    for file in (file for part in (package, importer) for file in Path(part.__file__).parent.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        made |= set(re.findall(r"\baten\.[a-z]\w*\.[a-zA-Z]\w*", text))
        made |= {f"operator.{name}" for name in re.findall(r"\boperator\.(\w+)\b", text)}
    made -= {"aten.mul_.Tensor", "operator.attrgetter"}  # in a prepared graph alone
    assert len(made) > 100
    for name in made:
        allowed_operator(name)


def test_names_of_an_onnx_file_are_no_code_either(tmp_path: Path) -> None:
    """Neither are those that Python would read as another name, or as none."""
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[2, 4] x) => (float[2, 4] y) { y = Mul (x, w) }'
    model = onnx.parser.parse_model(text)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full((2, 4), 3, np.float32), "w"))
    for name in ("\ufb01\u00b2\u00e9", "x=__import__('os').mkdir('ran')"):
        model.graph.initializer[0].name = model.graph.node[0].input[1] = name
        model.graph.node[0].name = model.graph.name = name
        onnx.save(model, tmp_path / "m.onnx")
        build_engine("torch", tmp_path / "m.onnx", tmp_path / "m.engine", BuildOptions(compiled=False))
        x = np.ones((2, 4), np.float32)
        assert np.array_equal(load_engine("torch", tmp_path / "m.engine")(x)["y"], 3 * x)
        assert torch.equal(quantizer.from_onnx(tmp_path / "m.onnx")(torch.ones(2, 4)), torch.full((2, 4), 3.0))
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def compiled(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a run whose engine claims to be compiled; what stands for the library is none."""
    monkeypatch.setattr(trust, "_BUILT_DIGESTS", set())
    parts = {"engine.json": _parts(good)["engine.json"], "compiled.pt2": b"no library"}
    _write(tmp_path / "model.engine", parts)
    (tmp_path / "config.yaml").write_text("quantizer: {backend: torch}\nengine: {threads: 1}\n")
    return tmp_path


UNTRUSTED = r"model\.engine contains native code that this process did not build.*trust=True \(--trust"
TRIED = "cannot load the compiled graph"


def test_native_code_is_loaded_when_it_is_trusted(compiled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = compiled / "model.engine"
    loads: dict[str, Callable[..., object]] = {
        "load_engine": lambda **more: load_engine("torch", path, **more),
        "without checksum": lambda **more: load_engine("torch", path, verify=False, **more),
        "inspect_engine": lambda **more: inspect_engine("torch", path, **more),
        "load": lambda **more: quantizer.load(compiled, **more),
    }
    for load in loads.values():
        with pytest.raises(EngineError, match=UNTRUSTED):
            load()
        with pytest.raises(EngineError, match=TRIED):
            load(trust=True)
    assert main(["show", str(path)]) == 1
    assert "--trust" in capsys.readouterr().err
    assert main(["show", str(path), "--trust"]) == 1
    assert TRIED in " ".join(capsys.readouterr().err.split())


def test_what_this_process_built_needs_no_word(compiled: Path) -> None:
    """Wherever its file was copied to; another one of the same name does."""
    trust.note_built(b"no library")
    with pytest.raises(QuantizerError, match=TRIED):
        quantizer.load(compiled)
    parts = _parts(compiled / "model.engine")
    _write(compiled / "model.engine", {**parts, "compiled.pt2": b"another one"})
    with pytest.raises(QuantizerError, match=UNTRUSTED):
        quantizer.load(compiled)


# The C++ compiler takes twenty seconds.
@pytest.mark.nightly
def test_a_compiled_engine_is_mapped_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quantizer.engines.torch_engine.compiled import missing_compiler

    maps = Path("/proc/self/maps")
    if (reason := missing_compiler()) is not None or not maps.exists():
        pytest.skip(reason or "this system does not say what is mapped")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[2, 4] x) => (float[2, 4] y) { y = Relu (x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    build_engine("torch", tmp_path / "m.onnx", tmp_path / "m.engine", BuildOptions(compiled=True))
    x, counts = np.ones((2, 4), np.float32), []
    for _ in range(4):
        assert np.array_equal(load_engine("torch", tmp_path / "m.engine")(x)["y"], x)
        counts.append(maps.read_text().count("wrapper.so"))
    assert counts[0] > 0
    assert counts == counts[:1] * 4
    monkeypatch.setattr(trust, "_BUILT_DIGESTS", set())
    with pytest.raises(EngineError, match="contains native code"):
        load_engine("torch", tmp_path / "m.engine")
    assert np.array_equal(load_engine("torch", tmp_path / "m.engine", trust=True)(x)["y"], x)
