"""``quantizer diagnose``: finds the groups of a finished run that cost most accuracy, with their causes and fixes."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from quantizer.cli.output import require_one_process
from quantizer.errors import QuantizerError
from quantizer.utils.files import restore_folder


class Diagnose:
    """Command that diagnoses the run in a folder, and adds the result to its reports."""

    name = "diagnose"
    help = "find the groups of a finished run that cost most accuracy, with their causes and fixes"
    list_argument: str | None = None
    epilog = """\
examples:
  quantizer diagnose runs/minilm-sentiment-int8
  quantizer diagnose converted/my-model/openvino

The model and the data are loaded again, as config.yaml in the folder names them, and the calibration is reused.
Sensitivity and peak memory are measured as well. All results are added to the reports in the folder. For a run that is
diagnosed already, they are only printed. `report.diagnose=true` does the same within a run, and --diagnose within a
conversion."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder of a run, or of one in a conversion")

    def __call__(self, args: Namespace, console: Console) -> int:
        require_one_process("quantizer diagnose")
        folder: Path = args.folder
        restore_folder(folder)
        # Imported here, so that a wrong argument is reported before these slow imports.
        from quantizer.pipeline.diagnose_run import diagnose_folder
        from quantizer.report.terminal import print_diagnosis

        record = diagnose_folder(folder, console)
        if record.diagnosis_error is not None:
            raise QuantizerError(f"{folder}: the diagnosis failed: {record.diagnosis_error}")
        print_diagnosis(record, folder, console)
        return 0
