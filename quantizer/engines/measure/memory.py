"""Peak memory of an engine, as JSON.

``python -m quantizer.engines.measure.memory MODULE BACKEND PATH BATCH SEQUENCE THREADS SIZES`` is run by
``peak_memory_mib`` in a process of its own: a peak never falls, so one process measures one engine.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from quantizer.engines.backends import load_engine
from quantizer.engines.measure.benchmark import PeakMemory
from quantizer.engines.measure.dummy_inputs import working_inputs
from quantizer.engines.measure.own_process import read_built
from quantizer.engines.optional_import import import_library
from quantizer.errors import QuantizerError
from quantizer.targets import profile

_RUNS = 3


def peak_rss_mib() -> float:
    """Return the peak resident memory of this process so far."""
    status = Path("/proc/self/status")
    if status.exists() and (match := re.search(r"^VmHWM:\s+(\d+) kB", status.read_text(), re.MULTILINE)):
        # Not ru_maxrss: on Linux a new program starts with the peak of the process that started it.
        return int(match[1]) / 1024
    # Bytes on macOS, KiB elsewhere.
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def main(arguments: Sequence[str]) -> int:
    """Print one line of JSON; return 1 after a message if the engine does not load or run."""
    module, backend, path, batch, sequence, threads, sizes = arguments
    try:
        # Importing the module of the backend's class registers a backend from outside the package.
        import_module(module)
        library = profile(backend).library
        if library is not None:
            import_library(backend, library)
        baseline_mib = peak_rss_mib()
        # The memory for computing the checksum is not the engine's.
        engine = load_engine(backend, path, threads=int(threads), verify=False)
        inputs = working_inputs(engine, int(batch), int(sequence), json.loads(sizes))
        for _ in range(_RUNS):
            engine(inputs)
    except (QuantizerError, ImportError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    print(json.dumps(asdict(PeakMemory(peak_mib=peak_rss_mib(), baseline_mib=baseline_mib))))
    return 0


if __name__ == "__main__":
    read_built()
    sys.exit(main(sys.argv[1:]))
