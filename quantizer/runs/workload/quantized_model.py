"""``QuantizedModel``: what ``quantize_model`` returns, with the engines, the measurements and the report."""

from __future__ import annotations

import os
import shutil
import weakref
from functools import partial
from pathlib import Path

from torch import nn

from quantizer.common.once_property import once_property
from quantizer.engines import load_engine
from quantizer.errors import EngineError
from quantizer.files import write_folder
from quantizer.quantizer import Quantizer
from quantizer.report import RunRecord, print_record, write_html
from quantizer.report.tables import plain_text
from quantizer.runs.graphs import FLOAT_STEM, QUANTIZED_STEM
from quantizer.runs.run import RUN
from quantizer.runs.saved.call_form import CallForm
from quantizer.runs.workload.engine_module import EngineModule
from quantizer.sensitivity.ranking import Sensitivity


class QuantizedModel:
    """A quantized model: two engines, what was measured, and the quantizer that made them.

    Its files lie in a temporary folder, which goes with this object; ``save`` writes them to a folder of yours, from
    which ``quantizer.load`` loads the engine.

    Attributes:
        record: all measurements, as in ``report.json``.
        model: the float model, in eval mode.
        folder: the temporary folder of the run, as ``quantizer run`` writes it.
        saved: the folder that ``save`` wrote last; None: none yet.
    """

    def __init__(self, model: nn.Module, call: CallForm, record: RunRecord, folder: Path) -> None:
        """
        Args:
            model: the float model, in eval mode.
            call: how it is called, and what it returns.
            record: all measurements.
            folder: the folder of the run, alone in a temporary folder, which is removed with this object.
        """
        self.model = model
        self.record = record
        self.folder = folder
        self.saved: Path | None = None
        self._call = call
        weakref.finalize(self, shutil.rmtree, folder.parent, ignore_errors=True)

    @once_property
    def engine(self) -> EngineModule:
        """The INT8 engine, called as the model is.

        Raises:
            EngineError: it runs on another device.
        """
        return self._engine(QUANTIZED_STEM)

    @once_property
    def float_engine(self) -> EngineModule:
        """The engine of the float model, of the same backend, called as the model is.

        Raises:
            EngineError: it runs on another device, or was refused as it is wrong.
        """
        if self.record.float_engine_refused is not None:
            raise EngineError(f"the float engine is refused: {self.record.float_engine_refused}")
        return self._engine(FLOAT_STEM)

    @once_property
    def quantizer(self) -> Quantizer:
        """The calibrated quantizer, with the ranking and the fallback of the run.

        ``quantizer.quantize(model)`` returns the quantized model in PyTorch.
        """
        loaded = Quantizer.load(self.folder / "quantizer")
        if self.record.measure is not None:
            loaded.ranked = Sensitivity(self.record.sensitivity, loaded.chosen_fallback, self.record.measure)
        return loaded

    def summary(self, width: int = 100) -> str:
        """Return the result as text: the choice of the engine, score, outputs, speed, size, and what to do.

        Args:
            width: the columns of the text.
        """
        return plain_text(partial(print_record, self.record, self.saved), width)

    def report(self, path: str | os.PathLike[str]) -> Path:
        """Write the report as one HTML file that opens offline, and return its path.

        Raises:
            MissingDependencyError: jinja2 is not installed.
            QuantizerError: the file cannot be written.
        """
        return write_html(self.record, Path(path))

    def save(self, folder: str | os.PathLike[str], *, replace: bool = False) -> Path:
        """Write everything to a folder: both engines and ONNX files, the quantizer, report and configuration.

        Args:
            folder: the folder.
            replace: replace a folder that ``save`` or ``quantizer run`` wrote and that holds nothing else.

        Raises:
            QuantizerError: the folder exists already or cannot be written.
        """
        self.saved = write_folder(
            folder, lambda new: shutil.copytree(self.folder, new, dirs_exist_ok=True), kind=RUN, replace=replace
        )
        return self.saved

    def __repr__(self) -> str:
        record = self.record
        backend = "no engine" if record.engine is None else record.engine.backend
        place = "not saved" if self.saved is None else f"saved in {self.saved}"
        return f"QuantizedModel({type(self.model).__name__}, {backend}, {place})"

    def _engine(self, stem: str) -> EngineModule:
        assert self.record.engine is not None
        threads = int(self.record.config["engine"]["threads"])
        loaded = load_engine(self.record.engine.backend, self.folder / f"{stem}.engine", threads=threads)
        return EngineModule(loaded, self._call)
