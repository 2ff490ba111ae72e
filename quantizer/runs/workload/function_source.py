"""The workload of a configuration whose ``model.source`` is a function that returns a module."""

from __future__ import annotations

from functools import partial, wraps
from pathlib import Path

from torch import nn

from quantizer.common.paths import is_there
from quantizer.config import ModelConfig, RunConfig
from quantizer.errors import CalibrationError, TaskError
from quantizer.proxy.build import is_proxy
from quantizer.runs.preflight.faults import Faults
from quantizer.runs.progress.stage_timer import StageTimer
from quantizer.runs.ranks.process_group import require_room_to_write
from quantizer.runs.run_context import ResumeFiles
from quantizer.runs.saved.call_form import CallForm
from quantizer.runs.workload.function_scorer import FunctionScorer, ScoreFunction
from quantizer.runs.workload.module_workload import module_batches, module_workload, output_of
from quantizer.runs.workload.weights_file import check_weights, load_weights
from quantizer.runs.workload.workload import Workload
from quantizer.runs.workload.written_functions import called, current_folder_first, imported
from quantizer.tasks import Batch


def check_functions(faults: Faults, model: ModelConfig) -> None:
    """Check that the functions of a model can be imported, and that its weights are there; nothing is called."""
    faults.of(partial(_check_no_path, model.source))
    for name in (model.source, model.inputs, model.metric):
        if name is not None:
            faults.of(partial(imported, name))
    if model.weights is not None:
        faults.of(partial(check_weights, Path(model.weights)))


def function_workload(config: RunConfig, timer: StageTimer, kept: ResumeFiles, folder: Path) -> Workload:
    """Return the module that a configuration's functions make, with its batches and their score."""
    settings = config.model
    model = returned_module(settings)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    require_room_to_write(folder, size, "what a run writes of this model")
    assert settings.inputs is not None
    batches = _batches(model, settings.inputs)
    call = CallForm.of(model, called(f"{settings.source}: forward", output_of, model, batches[0]))
    score = None if settings.metric is None else _score(settings.metric)
    scorer = partial(FunctionScorer, function=score, call=call, higher_is_better=True)
    return module_workload(model, settings.source, batches, scorer, timer, kept, folder)


def returned_module(model: ModelConfig) -> nn.Module:
    """Return the module that a function returns, with its weights, in eval mode on the CPU."""
    _check_no_path(model.source)
    made = called(model.source, imported(model.source))
    if not isinstance(made, nn.Module) or is_proxy(made):
        what = "a proxy" if isinstance(made, nn.Module) else f"a {type(made).__name__}"
        raise TaskError(f"{model.source}() returned {what}; expected a float model, a torch.nn.Module")
    if model.weights is not None:
        load_weights(made, Path(model.weights))
    return made.cpu().eval()


def _check_no_path(source: str) -> None:
    if is_there(Path(source)):
        raise TaskError(
            f"model source {source!r} is the name of a function, and of a file or folder here: name the folder "
            f"./{source} and a task, or rename one of them"
        )


def _batches(model: nn.Module, name: str) -> list[Batch]:
    """Return the batches that a function returns, by the names of the module's arguments."""
    data = called(name, imported(name))
    try:
        # A generator imports when it runs.
        with current_folder_first():
            return module_batches(model, data)
    except CalibrationError as error:
        raise CalibrationError(f"{name}(): {error}") from error


def _score(name: str) -> ScoreFunction:
    function = imported(name)

    @wraps(function)
    def score(model: nn.Module) -> float:
        # That it is a number is checked where every score is.
        given: float = called(name, function, model)
        return given

    return score
