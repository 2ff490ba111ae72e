"""``quantizer convert``: converts a checkpoint, a function's module or an ONNX file to engines, without a YAML file."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from quantizer.cli.output import require_one_process
from quantizer.config.data_section import is_function_name
from quantizer.errors import ConfigError
from quantizer.utils.paths import is_there

_RANGE = ("MIN", "OPT", "MAX")
_SIZES = {
    "--batch-size": "samples per batch (default: 1 8 32, or less if the output has the size of the vocabulary)",
    "--seq-len": "tokens per text (default: 16 128 512, or less if the model accepts less)",
}


_SET = "set keys of the run to YAML values, as in fallback.num=2, or remove a key with ~key"


class Convert:
    """Command that calibrates, quantizes, exports, builds, checks against PyTorch and benchmarks."""

    name = "convert"
    help = "convert a model to ONNX and engines, optionally quantized, and check them against PyTorch"
    list_argument: str | None = None
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

DATA without labels is a file of texts (.txt with one text per line, or .csv or .jsonl with a column of texts), or a
folder of images or recordings. DATA with labels is NAME:PATH, where NAME is text-csv (header text,label), sst2-text
(label text), stsb-csv (sentence,sentence,score), beir or trec (a collection with judged queries), image-folder or
audio-folder (one folder of files per class), image-csv or audio-csv (header path,label), coco-json (boxes in images),
or transcripts (header path,text). A .json file of COCO needs no NAME. For an .onnx file, DATA is an .npz or
.safetensors file with one array per input, by name, or a folder of such files with one batch each.

The output folder contains one folder per backend, and for auto only the folder of the fastest. Each contains
model.onnx, model.engine, tokenizer/ or processor/, config.json and a report. The output folder appears only if the
command succeeds."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "-m",
            "--model",
            required=True,
            help="a folder that save_pretrained() wrote, a Hugging Face hub name, a float .onnx file, or a function "
            "that returns a module, such as my_pkg.nets:build",
        )
        parser.add_argument("--task", help="task of the model (default: derived from the checkpoint)")
        parser.add_argument(
            "--quantization", action="store_true", help="quantize the model (default: build engines of the float model)"
        )
        own = parser.add_argument_group("your own module, -m MODULE:FUNCTION")
        own.add_argument(
            "--inputs",
            metavar="FUNCTION",
            help="function that returns the calibration batches: my_pkg.data:calibration",
        )
        own.add_argument(
            "--weights", metavar="FILE", help="state dict of the module: .safetensors, .pt or .pth (default: none)"
        )
        own.add_argument(
            "--score",
            metavar="FUNCTION",
            help="function that scores the module or an engine; higher is better (default: none)",
        )
        _add_data(parser)
        target = parser.add_argument_group("engines")
        target.add_argument(
            "--backend",
            nargs="+",
            help="one or more of openvino, onnxruntime, torch (each also with -avx2, for CPUs without VNNI), tensorrt, "
            "tensorrt-rtx and torch-cuda, all from one calibration; or auto: the fastest correct engine on the device, "
            "quantized or float, among all backends or those named after auto (default: auto)",
        )
        target.add_argument(
            "--device", help="device of the engines that auto compares: cpu, or cuda for the GPU (default: cpu)"
        )
        target.add_argument("--dtype", help="number format, int8 or fp8 (default: int8)")
        target.add_argument(
            "--config",
            metavar="FILE",
            type=Path,
            help="YAML file with further keys of the quantizer section (preset, formats, exclude), or of a whole run",
        )
        target.add_argument("--set", nargs="+", metavar="KEY=VALUE", help=_SET)
        for option, meaning in _SIZES.items():
            target.add_argument(option, nargs=3, type=int, metavar=_RANGE, help=meaning)
        target.add_argument(
            "--new-tokens",
            type=int,
            help="maximum number of tokens that an encoder-decoder model generates (default: 128)",
        )
        target.add_argument(
            "--seconds", type=float, help="longest recording in seconds (default: the feature extractor's, or 10)"
        )
        target.add_argument(
            "--compute-capability",
            metavar="SM",
            help="GPU that tensorrt-rtx builds for, such as sm89 (default: the GPU of this machine)",
        )
        target.add_argument(
            "--inference-precision",
            metavar="TYPE",
            help="precision of non-quantized operations: float32 or bfloat16 in openvino (default: float32), float16 "
            "or bfloat16 in torch-cuda (default: float16)",
        )
        target.add_argument("--threads", type=int, help="CPU threads for checks and benchmarks (default: 1)")
        target.add_argument(
            "--tolerance",
            metavar="DB",
            type=float,
            help="minimum SQNR relative to PyTorch in dB (default: 30 quantized, 60 float)",
        )
        target.add_argument(
            "--deliver",
            nargs="+",
            metavar="LAYOUT",
            help="further folders for other clients: openvino, onnx, sentence-transformers, optimum, transformers-js, "
            "compressed-tensors; of your own module: ultralytics",
        )
        parser.add_argument(
            "--diagnose",
            action="store_true",
            default=None,
            help="find the groups that cost most accuracy, with fixes, and measure sensitivity and memory",
        )
        parser.add_argument(
            "-o", "--output", type=Path, help="output folder (default: converted/ and the name of the model)"
        )
        parser.add_argument("--force", action="store_true", help="replace the output folder of an earlier conversion")

    def __call__(self, args: Namespace, console: Console) -> int:
        require_one_process("quantizer convert")
        # Imported here, so that a wrong argument is reported before these slow imports.
        from quantizer.pipeline.convert_options import SUFFIX, conversion_configs, convert_onnx
        from quantizer.pipeline.run import convert, run

        options = {name: value for name, value in vars(args).items() if value is not None}
        for name in ("verb", "parser"):
            del options[name]
        for name in ("backend", "batch_size", "seq_len", "labels", "deliver"):
            if name in options:
                options[name] = tuple(options[name])
        force = options.pop("force")
        if "fixed" in options and not args.model.endswith(SUFFIX):
            raise ConfigError([f"--fixed is only for .onnx files, and {args.model} is not one; remove it"])
        if function := _is_function(args.model):
            options.setdefault("output", Path("converted") / args.model.replace(":", "."))
        options.setdefault("output", Path("converted") / args.model.rstrip("/").rpartition("/")[2].removesuffix(SUFFIX))
        if args.model.endswith(SUFFIX):
            convert_onnx(options, force, console)
        elif function:
            (config,) = conversion_configs(options, function=True)
            run(config, None, force, console, "options")
        else:
            convert(conversion_configs(options), options["output"], force, console)
        return 0


def _add_data(parser: ArgumentParser) -> None:
    data = parser.add_argument_group("data")
    data.add_argument(
        "--calibration", metavar="DATA", help="calibration data: texts, images or recordings as in production"
    )
    data.add_argument(
        "--samples", type=int, help="number of calibration samples (default: 128); the output check uses other samples"
    )
    data.add_argument("--column", help="column with the texts in .csv and .jsonl files (default: text)")
    data.add_argument(
        "--max-drop",
        metavar="DROP",
        type=float,
        help="maximum drop of the score below float, in units of the metric; groups fall back to float until it holds",
    )
    data.add_argument("--tuning", metavar="DATA", help="labelled samples for the search of --max-drop")
    data.add_argument("--evaluation", metavar="DATA", help="labelled samples for the final scores (default: none)")
    data.add_argument(
        "--fixed",
        nargs="+",
        metavar="NAME=NUMBER",
        help="constant inputs of an .onnx file, and sizes of its named axes: sr=16000 sequence=576",
    )
    data.add_argument("--labels", nargs="+", metavar="LABEL", help="labels for zero-shot image classification (CLIP)")
    data.add_argument("--template", help="text of a label; {} stands for the label (default: This is a photo of {}.)")


def _is_function(model: str) -> bool:
    """Return whether ``--model`` names a function."""
    return (is_function_name(model) or ".py:" in model) and not is_there(Path(model))
