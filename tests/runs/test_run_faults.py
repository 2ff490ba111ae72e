"""What ``run`` and ``convert`` refuse: told with its place before the work, and with nothing written."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file
from torch import nn

for _package in (
    "transformers",
    "PIL",
    "scipy",
    "sklearn",
    "torchmetrics",
    "jinja2",
    "onnx",
    "openvino",
    "onnxruntime",
):
    pytest.importorskip(_package, reason="needs enginequant[hf,onnx,openvino,onnxruntime,report]")

import transformers
from tiny_audio import tiny_ast, tiny_ctc, tiny_recordings
from tiny_run import tiny_run
from tiny_seq2seq import TEXTS, tiny_t5
from tiny_vision import tiny_images, tiny_vit
from user_package import DATA as USER_DATA
from user_package import NETS

from quantizer import Quantizer
from quantizer.cli.main import main

FILES = {
    "texts.txt": "a good film\n\nthe plot was dull\n",
    "empty.txt": "\n \n",
    "none.csv": "text,label\n",
    "plain.yaml": "preset: plain\n",
    "wrong.yaml": "preset: fats\n",
    "dynamic.yaml": "formats:\n  - {activations: dynamic}\n",
    "fp8.yaml": "formats:\n  - {activations: fp8, weights: fp8}\n",
    "bad.py": "undefined\n",
    "needs.py": "import absent_package\n",
    "exits.py": "import sys\nsys.exit(2)\n",
    "words.csv": "path,text\ntones/high/2.wav,a bad cab\n",
    "pairs.csv": "source,target\n" + "".join(f"{text},{TEXTS[at - 1]}\n" for at, text in enumerate(TEXTS)) * 4,
    "few.csv": "source,target\n" + "".join(f"{text},{TEXTS[at - 1]}\n" for at, text in enumerate(TEXTS)),
    "boxes.json": '{"images": [], "annotations": []}',
    "broken/a.wav": "nothing",
    "broken-photos/a.png": "\x89PNG\r\n",
    "mine/file": "mine",
    "my_pkg/nets.py": NETS,
    "my_pkg/data.py": USER_DATA,
}


class _Code:
    """An object that makes a file when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("ran"),)


def _write_weights(folder: Path, state: dict[str, torch.Tensor]) -> None:
    (folder / "w.bin").touch()
    torch.save({name: value for name, value in state.items() if name != "head.bias"}, folder / "less.pt")
    save_file({**state, "tail.bias": torch.ones(2)}, folder / "more.safetensors")
    torch.save({**state, "head.weight": torch.ones(2, 2)}, folder / "other.pt")
    torch.save({"epoch": 3, "model": state}, folder / "nested.pth")
    torch.save({"head.bias": _Code()}, folder / "code.pt")
    (folder / "torn.safetensors").write_bytes(b"\x40\x00\x00\x00\x00\x00\x00\x00{")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models of each kind with their data, and files that are damaged."""
    folder = tmp_path_factory.mktemp("faults")
    run = tiny_run(folder)
    for name, make in (("vit", tiny_vit), ("ast", tiny_ast), ("ctc", tiny_ctc), ("t5", tiny_t5)):
        make(folder / name)
    for name in ("photos", "dev", "labelled"):
        tiny_images(folder / name, 3, seed=1)
    (folder / "labelled" / "red").rename(folder / "labelled" / "purple")
    tiny_recordings(folder / "tones", 6, seed=1)
    (folder / "empty").mkdir()
    (folder / "both:build").mkdir()
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="latin-1")
    made: dict[str, nn.Module] = {}
    exec(compile(NETS, "nets", "exec"), made)
    _write_weights(folder, made["module"].state_dict())
    transformers.BertConfig(architectures=["BertForPreTraining"]).save_pretrained(folder / "untold")
    rows = {"name": "text-pairs", "path": "pairs.csv"}
    t5 = {
        "model": {"source": "t5", "task": "text-to-text", "max_length": 16, "new_tokens": 6},
        "data": {"calibration": rows, "evaluation": rows, "batch_size": 4},
        "quantizer": {"backend": "onnxruntime"},
        "export": {"dynamic": {"batch": [1, 2, 4], "sequence": [4, 8, 16]}},
        "report": {"latency_batch": 3, "latency_sequence": 8},
    }
    functions = {"source": "my_pkg.nets:build", "inputs": "my_pkg.data:calibration", "metric": "my_pkg.data:score"}
    for name, settings in (("run", run), ("t5", t5), ("functions", {"model": functions, "quantizer": {}})):
        settings["quantizer"].setdefault("backend", "onnxruntime")
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture(autouse=True)
def _here(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder is the current one, and modules and paths are as before at the end."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("my_pkg", "bad", "needs", "exits")]:
        del sys.modules[name]


BERT, OPENVINO = "convert -m model", "convert -m model --backend openvino"
DATA = "--quantization --calibration texts.txt"
INT8, RTX = f"{OPENVINO} {DATA}", "--backend tensorrt-rtx --compute-capability"
VIT, PHOTOS = "convert -m vit", "convert -m vit --quantization --calibration photos"
AST, CTC = "convert -m ast", "convert -m ctc --quantization --calibration tones --evaluation"
A_B, RUN, T5, FUNCTIONS = "convert -m a:b", "run run.yaml --output out", "run t5.yaml", "run functions.yaml"

TRAINING = "'data.training={name: text-pairs, path: few.csv}' 'data.tuning={name: texts, path: texts.txt}'"

# Before the weights of a model are loaded.
EARLY = {
    f"{OPENVINO} --quantization": "--quantization needs calibration data, but --calibration is missing",
    f"{OPENVINO} --calibration texts.txt": "--calibration texts.txt is only used with --quantization",
    f"{OPENVINO} --quantization --calibration missing.txt": "there is no file missing.txt",
    f"{OPENVINO} --quantization --calibration empty.txt": "empty.txt has no texts",
    f"{INT8} --samples 9": "texts.txt has 2 samples, fewer than --samples 9",
    f"{OPENVINO} --quantization --calibration a.parquet": "expected a file of texts (.txt, .csv, .jsonl), a .json",
    f"{OPENVINO} --quantization --calibration text-csv": "the path is missing; expected text-csv:PATH",
    f"{OPENVINO} --quantization --calibration photos": "contains image data, but task sequence-classification reads",
    f"{OPENVINO} --batch-size 8 4 2": "--batch-size 8 4 2: export.dynamic.batch: got [8, 4, 2]; expected [min, opt",
    f"{OPENVINO} --seq-len 16 64 512": "the model has 64 positions; lower the last number",
    f"{OPENVINO} --seq-len 1 8 16": "--seq-len 1 ...: expected at least 2",
    f"{BERT} --backend tensort": "--backend tensort: unknown; expected auto, or one or more of onnxruntime, ",
    f"{BERT} --backend auto tensorrt-rtx": "torch sees no NVIDIA GPU on this machine, so that no engine can be",
    f"{BERT} {DATA} --backend auto --dtype fp8": "quantizer.dtype: openvino does not support activations in fp8",
    f"{BERT} --backend openvino openvino": "expected at least one",
    f"{OPENVINO} --task poetry": "--task poetry: unknown; expected one of audio-classification, automatic-speech",
    f"{INT8} --max-drop 0.1": "limits the drop of the score, but --tuning is missing",
    f"{INT8} --max-drop 0.1 --tuning texts.txt": "text data without labels cannot be scored",
    f"{INT8} --evaluation boxes.json": "boxes.json: the file is not in the format of COCO (an object with images, ann",
    f"{INT8} --tuning text-csv:a.csv": "--tuning a.csv: data.tuning: is only used by fallback.max_drop",
    f"{INT8} --max-drop -1 --tuning text-csv:a.csv": "--max-drop -1.0: fallback.max_drop: got the number -1.0",
    f"{INT8} --max-drop 0 --tuning text-csv:a --evaluation text-csv:a": "--tuning and --evaluation are both text-csv:a",
    f"{INT8} --dtype fp8": "quantizer.dtype: openvino does not support activations in fp8; use int8, uint8",
    f"{OPENVINO} --compute-capability sm89": "--compute-capability sm89 is only for --backend tensorrt-rtx",
    f"{BERT} --backend onnxruntime --inference-precision bfloat16": "types of the ONNX file; remove 'bfloat16'",
    f"{OPENVINO} --inference-precision int8": "engine.inference_precision: got the text 'int8'; expected 'float16'",
    f"{BERT} {RTX} ada": "--compute-capability ada: engine.compute_capability: got the text 'ada'; expected a compute",
    f"{BERT} {RTX} sm999": "engine.compute_capability: tensorrt-rtx does not support 'sm999'",
    f"{BERT} {DATA} --dtype fp8 {RTX} sm80": "engine.compute_capability: 'sm80' has no FP8",
    f"{BERT} {DATA} --config fp8.yaml {RTX} sm80": "engine.compute_capability: 'sm80' has no FP8",
    f"{INT8} --config wrong.yaml": "wrong.yaml:1: preset: got the text 'fats'; expected",
    f"{INT8} --config no.yaml": "no.yaml: the file does not exist; expected a YAML file",
    f"{BERT} {DATA} --backend tensorrt --config dynamic.yaml": "formats[0]: tensorrt has no kernels for dynamic ranges",
    f"{INT8} --set quantizer.presett=plain": "override 'quantizer.presett=plain': quantizer.presett: unknown key",
    f"{OPENVINO} --threads 0": "--threads 0: engine.threads: got the whole number 0; expected a whole number, at least",
    f"{OPENVINO} --threads 0 --seq-len 9 8 7": "2 problems",
    f"{OPENVINO} --seconds 3": "--seconds 3 is for recordings, but task sequence-classification reads text data",
    f"{OPENVINO} -o texts.txt": "texts.txt cannot be written: it is not a folder",
    f"{OPENVINO} -o . --force": "is or contains the current folder",
    f"{OPENVINO} -o ''": "is or contains the current folder",
    "convert -m ./nowhere": "there is no folder nowhere",
    "convert -m untold": "cannot derive the task from the architecture BertForPreTraining; set --task to",
    f"{VIT} --quantization": "expected 100 or more samples as in",
    f"{VIT} --quantization --calibration empty": "empty holds no images: expected files that end in",
    f"{VIT} --quantization --calibration missing": "an existing folder of images",
    f"{VIT} {DATA}": "--calibration texts.txt contains text data, but task image-class",
    f"{VIT} --seq-len 2 4 8": "--seq-len 2 4 8: task image-classification reads images, which have no",
    f"{VIT} --task sequence-classification": "ViTForImageClassification has image inputs, and task",
    f"{PHOTOS} --max-drop 0.1 --tuning dev": "expected NAME:PATH with labels, such as image-csv:labels.csv",
    f"{AST} --quantization --calibration photos": "--calibration photos contains image data, but task",
    f"{AST} --seq-len 2 4 8": "audio-classification reads recordings, which have no tokens; use",
    f"{AST} --seconds 0": "--seconds 0.0: model.seconds: got the number 0.0; expected a number of seconds",
    f"{AST} --evaluation tones": "audio data without labels cannot be scored; expected NAME:PATH with labels, such as",
    "convert -m t5 --new-tokens 6 --task fill-mask": "--new-tokens 6: task fill-mask does not generate text; remove it",
    f"{A_B} --quantization": "--inputs is missing: the module of the function a:b needs calibration batches",
    f"{A_B} --inputs a:c --max-drop 1": "--max-drop 1.0 limits the drop of a score, but --score is missing",
    f"{A_B} --inputs a:c --tuning text-csv:x": "--tuning is only for checkpoints, but -m a:b is a function",
    f"{A_B} --backend openvino torch": "--backend openvino torch: expected one backend for -m a:b, or `auto",
    f"{A_B} --inputs c.py --quantization": "--inputs c.py: model.inputs: got the text 'c.py'; expected the name of a",
    f"{A_B} --inputs a:c --dtype int3 --quantization": "--dtype int3: quantizer.dtype: got the",
    "convert -m my-net --score a:b": "--score is only for a module that a function returns, but -m my-net names",
    "convert -m nets.py:build --inputs a:b --quantization": "-m nets.py:build: model.source: got the file 'nets.py:",
    f"{RUN} model.source=./nowhere": "there is no folder ",
    f"{RUN} model.source=package:no_such_package/model": "the package 'no_such_package' is not installed",
    f"{RUN} data.calibration.path=nowhere.csv": "nowhere.csv",
    f"{RUN} data.calibration.path=none.csv": "has no samples",
    f"{RUN} data.evaluation.samples=9999": "has 24 samples, fewer than",
    f"{RUN} data.evaluation.name=nonsense": "unknown data set 'nonsense'",
    f"{RUN} engine.compute_capability=sm89": "which has no compute capability; remove 'sm89'",
    f"{RUN} engine.strip_weights=true": "engine.strip_weights: openvino always stores the weights in its engines",
    f"{RUN} 'quantizer.backend=[openvino, tensorrt]'": "on one device, but tensorrt runs on a GPU and the others on",
    "run run.yaml --output texts.txt/run": "texts.txt is not a folder; choose another folder",
    "run run.yaml --output mine --force": "it contains 'file'",
    "run run.yaml --output mine/file --force": "it is not a folder",
    f"{T5} qat={{}} {TRAINING}": "qat: task 'text-to-text' is for an encoder-decoder model, which has several",
    f"{T5} 'fallback={{min_speedup: 1.5}}' amp={{}}": "fallback.min_speedup: task 'text-to-text' is for an encoder",
    f"{T5} engine.strip_weights=true": "engine.strip_weights: task 'text-to-text' is for an en",
    f"{T5} model.new_tokens=0": "model.new_tokens: got the whole number 0; expected",
    f"{T5} model.task=fill-mask": "model.new_tokens: got 6, but task 'fill-mask' does not generate text",
    f"{T5} quantizer.bakend=openvino": "quantizer.bakend: unknown key",
}
# Before anything is calibrated: it is seen in the model, or in all rows.
LATE = {
    f"{VIT} --quantization --calibration broken-photos": "a.png cannot be read as an image",
    f"{PHOTOS} --evaluation image-folder:labelled": "the label 'purple' is no class of the model; expected one of its",
    f"{AST} --evaluation transcripts:words.csv": "needs samples of kind Audio, got Speech",
    f"{AST} --quantization --calibration broken": "a.wav cannot be read as a recording",
    f"{CTC} transcripts:words.csv --seconds 0.2": "but recordings are read up to 0.2 s only",
    f"{FUNCTIONS} model.source=my_pgk.nets:build": "my_pgk.nets:build: the module 'my_pgk' is neither in ",
    f"{FUNCTIONS} model.source=my_pkg.net:build": "my_pkg.net:build: the module 'my_pkg.net' is neither in ",
    f"{FUNCTIONS} model.source=my_pkg.nets:buidl": "nets.py has no 'buidl'; did you mean 'build'?",
    f"{FUNCTIONS} model.source=my_pkg.nets:number": "my_pkg.nets:number is a int; expected a function",
    f"{FUNCTIONS} model.source=my_pkg.nets:module": "my_pkg.nets:module is a module itself, a Net; expected a function",
    f"{FUNCTIONS} model.source=my_pkg.nets:fails": "my_pkg.nets:fails() failed, with ValueError: no such width (",
    f"{FUNCTIONS} model.source=my_pkg.nets:nothing": "my_pkg.nets:nothing() returned a NoneType; expected a float",
    f"{FUNCTIONS} model.source=bad:build": "importing bad failed, with NameError: name 'undefined' is not defined (",
    f"{FUNCTIONS} model.source=needs:build": "importing needs failed, with ModuleNotFoundError: No module named 'abse",
    f"{FUNCTIONS} model.source=exits:build": "exits:build: importing exits failed, with SystemExit: 2",
    f"{FUNCTIONS} model.source=both:build": "'both:build' names a function, but also an existing file or folder",
    f"{FUNCTIONS} model.inputs=my_pkg.data:none": "none(): the calibration data is a NoneType; pass an iterable of",
    f"{FUNCTIONS} model.inputs=my_pkg.data:empty": "empty(): the calibration data is empty: at least one",
    f"{FUNCTIONS} model.inputs=my_pkg.data:wrong": "my_pkg.data:wrong(): batch 0 does not fit Net.forward",
    f"{FUNCTIONS} model.inputs=my_pkg.data:broken": "broken(): the calibration data failed after 1 batch, with OSErr",
    f"{FUNCTIONS} model.inputs=my_pkg.data:small": "my_pkg.nets:build: forward() failed, with RuntimeError: ",
    f"{FUNCTIONS} model.metric=my_pkg.data:word": "word() returned a str; expected a number, or one for each sample",
    f"{FUNCTIONS} model.metric=my_pkg.data:silent": "silent() returned a NoneType; expected a number",
    f"{FUNCTIONS} model.metric=my_pkg.data:endless": "the score of the float is nan; expected a finite number",
    f"{FUNCTIONS} model.metric=my_pkg.data:raises": "my_pkg.data:raises() failed, with KeyError: 'label' (",
    f"{FUNCTIONS} model.weights=none.safetensors": "none.safetensors: the file does not exist",
    f"{FUNCTIONS} model.weights=w.bin": "w.bin: expected a file that ends in .safetensors, .pt, .pth",
    f"{FUNCTIONS} model.weights=less.pt": "less.pt do not fit Net: head.bias is missing. Expected the state_dict() of",
    f"{FUNCTIONS} model.weights=more.safetensors": "more.safetensors do not fit Net: tail.bias is unexpected.",
    f"{FUNCTIONS} model.weights=other.pt": "other.pt do not fit Net: size mismatch for head.weight",
    f"{FUNCTIONS} model.weights=nested.pth": "nested.pth: expected a state dict, got epoch, model; write it with",
    f"{FUNCTIONS} model.weights=code.pt": "code.pt: the file is damaged or contains other objects than tensors (Unp",
    f"{FUNCTIONS} model.weights=torn.safetensors": "torn.safetensors: the file is damaged or contains other objects",
    f"{FUNCTIONS} model.source=no:build model.inputs=my_pkg.data:nothing model.weights=w.bin": "for 3 reasons",
}


def _told(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that is refused, and return what it says; nothing is written."""
    there = set(Path().rglob("[!_]*"))
    assert main(shlex.split(command)) == 1
    assert {path for path in Path().rglob("[!_]*") if "__pycache__" not in path.parts} <= there
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "Traceback" not in said
    return " ".join(said.split())


def _never(what: str, monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> None:
    monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail(f"it was {what}"))


@pytest.mark.parametrize("command", EARLY)
def test_before_the_model_is_loaded(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _never("loaded", monkeypatch, transformers.PreTrainedModel, "from_pretrained")
    assert EARLY[command] in _told(command, capsys)


@pytest.mark.parametrize("command", LATE)
def test_before_the_calibration(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _never("calibrated", monkeypatch, Quantizer, "calibrate")
    assert LATE[command] in _told(command, capsys)


def test_a_fault_of_several_backends_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    told = _told(f"{BERT} {DATA} --dtype fp8 --config plain.yaml --backend openvino onnxruntime", capsys)
    assert told.count("quantizer.dtype: openvino does not support activations in fp8; use int8, uint8") == 1
    assert told.count("quantizer.dtype: onnxruntime has no activations in fp8") <= 1
