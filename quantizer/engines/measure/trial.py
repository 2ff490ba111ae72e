"""Build of an engine and its first run in a process of their own, where they may crash or hang.

``python -m quantizer.engines.measure.trial MODULE BACKEND ONNX ENGINE THREADS BATCH SEQUENCE OPTIONS SIZES`` is run
by ``tried_build``; OPTIONS is a JSON object of ``BuildOptions``, SIZES one of sizes by the name of their dimension.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

from quantizer.engines.backends import build_engine, load_engine
from quantizer.engines.base import BuildOptions, BuildResult, built_here, note_digests
from quantizer.engines.measure.benchmark import working_inputs
from quantizer.engines.measure.own_process import in_own_process, read_built
from quantizer.errors import QuantizerError

TIMEOUT_S = 600.0
"""After so many seconds a build and its first run are given up."""


def tried_build(
    backend: str,
    onnx: Path,
    engine: Path,
    options: BuildOptions,
    *,
    threads: int = 1,
    batch: int = 1,
    sequence: int = 16,
    sizes: Mapping[str, int] = MappingProxyType({}),
    timeout_s: float | None = None,
) -> BuildResult:
    """Build an engine and run it once on made-up inputs, in a fresh process.

    Args:
        backend: the backend's name.
        onnx: the ONNX file to read.
        engine: the engine file to write.
        options: those of a backend on a CPU.
        threads: threads of the CPU.
        batch: size of the first dimension of an input, where it is dynamic.
        sequence: size of its other dynamic dimensions.
        sizes: sizes of dynamic dimensions by name, where they are known; they come before the two.
        timeout_s: seconds until it is given up; None: ``TIMEOUT_S``.
    """
    told = {
        "dynamic": dict(options.dynamic),
        "only_sizes": [dict(sizes) for sizes in options.only_sizes],
        "inference_precision": options.inference_precision,
        "compiled": options.compiled,
    }
    timeout_s = TIMEOUT_S if timeout_s is None else timeout_s
    words = (onnx, engine, threads, batch, sequence, json.dumps(told), json.dumps(dict(sizes)))
    doing = f"building and running {engine.name} for {backend} in a process of its own"
    result = in_own_process("quantizer.engines.measure.trial", backend, words, doing=doing, timeout_s=timeout_s)
    note_digests(result["native"])
    return BuildResult(engine, result["size_bytes"], result["seconds"], tuple(result["warnings"]))


def main(arguments: Sequence[str]) -> int:
    """Print one line of JSON; return 1 after a message if the engine cannot be built or run."""
    module, backend, onnx, engine, threads, batch, sequence, options, sizes = arguments
    try:
        # Importing the module of the backend's class registers a backend from outside the package.
        import_module(module)
        built = build_engine(backend, onnx, engine, BuildOptions(**json.loads(options)))
        loaded = load_engine(backend, engine, threads=int(threads), verify=False)
        loaded(working_inputs(loaded, int(batch), int(sequence), json.loads(sizes)))
    except (QuantizerError, ImportError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    print(json.dumps({**asdict(built), "path": str(built.path), "native": built_here()}))
    return 0


if __name__ == "__main__":
    read_built()
    sys.exit(main(sys.argv[1:]))
