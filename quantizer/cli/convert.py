"""``quantizer convert``: from a checkpoint to checked engines, in folders that an inference server can load."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from quantizer.cli.output import require_one_process
from quantizer.config.data_section import is_function_name
from quantizer.errors import ConfigError
from quantizer.utils.paths import is_there

_THREE = ("LEAST", "USUAL", "MOST")
_SIZES = {
    "--batch-size": "samples in a batch (default: 1 8 32, or less where the output holds the vocabulary)",
    "--seq-len": "tokens in a sample of text (default: 16 128 512, or less where the model takes less)",
}


_SET = "set keys of the run, as in fallback.num=2 (the value is YAML), or remove one with ~key"


class Convert:
    """Verb that calibrates, quantizes, exports, builds, checks against PyTorch and times, in one command."""

    name = "convert"
    help = "turn a checkpoint into ONNX and engines, quantized if you like, checked against PyTorch"
    rest: str | None = None
    epilog = """\
examples:
  quantizer convert -m my-model --quantization --calibration texts.txt
  quantizer convert -m my-model --quantization --calibration texts.txt --backend openvino tensorrt-rtx \\
      --compute-capability sm89 --batch-size 1 8 32 --seq-len 16 128 512 -o converted/my-model
  quantizer convert -m my-model --quantization --calibration text-csv:train.csv \\
      --max-drop 0.002 --tuning text-csv:dev.csv --evaluation text-csv:test.csv
  quantizer convert -m my-vit --quantization --calibration photos --evaluation image-folder:labelled
  quantizer convert -m my_pkg.nets:build --inputs my_pkg.data:calibration --score my_pkg.data:score --quantization
  quantizer convert -m my-model.onnx --quantization --calibration arrays.npz

Data is a plain file of texts (.txt with one a line, .csv or .jsonl with a column of them), a folder of images or
recordings, or NAME:PATH with labels: text-csv (a header  text,label), sst2-text (label text), stsb-csv
(sentence,sentence,score), image-folder and audio-folder (a folder with one of files a class), image-csv and audio-csv
(a header  path,label), transcripts (a header  path,text). For an .onnx file it is a file of arrays, .npz or
.safetensors, one for each input by its name, or a folder of them, each a batch.

The folder holds one for each backend, for auto that of the fastest alone, with model.onnx, model.engine, tokenizer/ or
processor/, config.json and a report; it is complete when the command ends well, and absent otherwise."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "-m",
            "--model",
            required=True,
            help="a folder that save_pretrained() wrote, a hub name, a float .onnx file, or a function that returns a "
            "module, my_pkg.nets:build",
        )
        parser.add_argument("--task", help="what the model is for (default: told from the checkpoint)")
        parser.add_argument("--quantization", action="store_true", help="quantize; without it the float model is built")
        own = parser.add_argument_group("a module of your own, -m MODULE:FUNCTION")
        own.add_argument(
            "--inputs", metavar="FUNCTION", help="returns the batches to calibrate on: my_pkg.data:calibration"
        )
        own.add_argument("--weights", metavar="FILE", help="state dict for it: .safetensors, .pt or .pth")
        own.add_argument(
            "--score", metavar="FUNCTION", help="takes it, or an engine, and returns a number; more is better"
        )
        _add_data(parser)
        target = parser.add_argument_group("engines")
        target.add_argument(
            "--backend",
            nargs="+",
            help="auto: the fastest that runs on this CPU and is right, quantized or float, of all (default) or of "
            "those named beside it; openvino, onnxruntime, or these with -avx2 for CPUs without VNNI, tensorrt, "
            "tensorrt-rtx: a folder for each, all from one calibration",
        )
        target.add_argument("--dtype", help="int8 or fp8 (default: int8)")
        target.add_argument(
            "--config",
            metavar="FILE",
            type=Path,
            help="YAML with other keys: of the section quantizer (preset, formats, exclude), or of a whole run",
        )
        target.add_argument("--set", nargs="+", metavar="KEY=VALUE", help=_SET)
        for option, meaning in _SIZES.items():
            target.add_argument(option, nargs=3, type=int, metavar=_THREE, help=meaning)
        target.add_argument(
            "--new-tokens", type=int, help="tokens that a model of text or speech to text writes at most (default: 128)"
        )
        target.add_argument("--seconds", type=float, help="length of recordings (default: the extractor's own, or 10)")
        target.add_argument(
            "--compute-capability", metavar="SM", help="GPU for tensorrt-rtx to build for, such as sm89"
        )
        target.add_argument(
            "--inference-precision", metavar="TYPE", help="what openvino computes the rest in: float32 or bfloat16"
        )
        target.add_argument("--threads", type=int, help="CPU threads to check and time with (default: 1)")
        target.add_argument(
            "--tolerance", metavar="DB", type=float, help="least SQNR against PyTorch (default: 30 quantized, 60 float)"
        )
        parser.add_argument(
            "-o", "--output", type=Path, help="folder to write (default: converted/ and the model's name)"
        )
        parser.add_argument("--force", action="store_true", help="replace the folder of a conversion that stands there")

    def __call__(self, args: Namespace, console: Console) -> int:
        require_one_process("quantizer convert")
        # Imported here, so that a wrong argument is reported before the seconds that these imports take.
        from quantizer.pipeline.convert_options import SUFFIX, conversion_configs, convert_onnx
        from quantizer.pipeline.run import convert, run

        given = {name: value for name, value in vars(args).items() if value is not None}
        for name in ("verb", "parser"):
            del given[name]
        for name in ("backend", "batch_size", "seq_len", "labels"):
            if name in given:
                given[name] = tuple(given[name])
        force = given.pop("force")
        if "fixed" in given and not args.model.endswith(SUFFIX):
            raise ConfigError([f"--fixed is for .onnx files, and {args.model} is none; leave it out"])
        if function := _is_function(args.model):
            given.setdefault("output", Path("converted") / args.model.replace(":", "."))
        given.setdefault("output", Path("converted") / args.model.rstrip("/").rpartition("/")[2].removesuffix(SUFFIX))
        if args.model.endswith(SUFFIX):
            convert_onnx(given, force, console)
        elif function:
            (config,) = conversion_configs(given, function=True)
            run(config, None, force, console)
        else:
            convert(conversion_configs(given), given["output"], force, console)
        return 0


def _add_data(parser: ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument("--calibration", metavar="DATA", help="texts or images like those that the model will see")
    data.add_argument(
        "--samples", type=int, help="samples that calibrate (default: 128); the output check takes others"
    )
    data.add_argument("--column", help="the texts' column in .csv and .jsonl (default: text)")
    data.add_argument(
        "--max-drop", metavar="DROP", type=float, help="keep the score so close to float, groups kept in float"
    )
    data.add_argument("--tuning", metavar="DATA", help="labelled samples that --max-drop scores on")
    data.add_argument("--evaluation", metavar="DATA", help="labelled samples to score everything on at the end")
    data.add_argument(
        "--fixed",
        nargs="+",
        metavar="NAME=NUMBER",
        help="inputs of an .onnx file that never change, and the lengths of its named axes: sr=16000 sequence=576",
    )
    data.add_argument("--labels", nargs="+", metavar="LABEL", help="labels that CLIP and its like choose from")
    data.add_argument("--template", help="text of a label, with {} in its place (default: This is a photo of {}.)")


def _is_function(model: str) -> bool:
    """Return whether a model is named by a function that returns it."""
    return (is_function_name(model) or ".py:" in model) and not is_there(Path(model))
