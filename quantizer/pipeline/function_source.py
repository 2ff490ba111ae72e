"""Functions of the user's own, imported by the names that he wrote into his file or command line.

Nothing else is imported by name: no folder of a checkpoint and no tag of YAML leads here.

The weights of a module, from a file of tensors alone.

The workload of a configuration whose ``model.source`` is a function that returns a module.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, reduce, wraps
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from quantizer.config import ModelConfig, RunConfig
from quantizer.config.describe import nearest
from quantizer.errors import CalibrationError, QuantizerError, TaskError, is_out_of_memory
from quantizer.pipeline.engine_module import CallForm
from quantizer.pipeline.faults import Faults
from quantizer.pipeline.processes import require_room_to_write
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.resume import ResumeFiles
from quantizer.pipeline.scores import FunctionScorer, ScoreFunction
from quantizer.pipeline.workload import Workload, module_batches, module_workload, output_of
from quantizer.proxy.build import is_proxy
from quantizer.tasks import Batch
from quantizer.utils.paths import is_file, is_there, regular_file

_MACHINERY = (__file__, importlib.__file__, "<frozen ")
"""Files whose lines say nothing about a failed import."""


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Put the current folder on the import path, first, as ``python -m`` has it; for the user's own code alone.

    A folder there that is named like a library that torch would import if it were installed is none for us.
    """
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        # The code may have put other folders before it.
        if here in sys.path:
            sys.path.remove(here)


def imported(name: str) -> Callable[..., Any]:
    """Return the function that ``MODULE:FUNCTION`` names."""
    module_name, _, path = name.partition(":")
    try:
        with current_folder_first():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise TaskError(f"{name}: importing {module_name} failed, {_what(error)}") from error
        raise TaskError(
            f"{name}: there is no module {error.name!r}, neither in {os.getcwd()} nor installed; expected "
            "MODULE:FUNCTION as Python imports it from the current folder"
        ) from error
    # A script without a guard around its main part may exit.
    except (Exception, SystemExit) as error:
        raise TaskError(f"{name}: importing {module_name} failed, {_what(error)}") from error
    try:
        found = reduce(getattr, path.split("."), module)
    except AttributeError as error:
        near = nearest(path, [key for key, value in vars(module).items() if callable(value)])
        hint = f"; did you mean {near!r}?" if near else ""
        raise TaskError(f"{name}: {module.__file__ or module_name} has no {path!r}{hint}") from error
    if not callable(found) or isinstance(found, nn.Module):
        raise TaskError(f"{name} is {_kind(found)}; expected a function, which is called")
    function: Callable[..., Any] = found
    return function


def called(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return what a function returns."""
    try:
        with current_folder_first():
            return function(*args)
    except QuantizerError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise TaskError(f"{name}() failed, {_what(error)}") from error


def _what(error: BaseException) -> str:
    """Return an error in words, with the line of the user's code that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_MACHINERY)]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"with {type(error).__name__}: {error}{place}"


def _kind(value: object) -> str:
    return f"a module itself, a {type(value).__name__}" if isinstance(value, nn.Module) else f"a {type(value).__name__}"


_FORMS = (".safetensors", ".pt", ".pth")
_NAMED = 6
"""So many names of tensors are listed."""


def check_weights(path: Path) -> None:
    """Raise if a path is no file of weights, without reading it."""
    if path.suffix not in _FORMS:
        raise TaskError(f"weights {path}: expected a file that ends in {', '.join(_FORMS)}")
    if not is_file(path):
        raise TaskError(f"weights {path}: there is no such file")


def load_weights(model: nn.Module, path: Path) -> None:
    """Load all weights of a module. No code in the file is run."""
    check_weights(path)
    state = _state_dict(path)
    where = f"weights {path} do not fit {type(model).__name__}"
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise TaskError(f"{where}: {_listed(lines) if lines else error}") from error
    # Files of safetensors hold a tensor that two modules share once.
    tensors = model.state_dict(keep_vars=True)
    given = {id(tensors[name]) for name in tensors.keys() & state.keys()}
    missing = [name for name in missing if id(tensors.get(name)) not in given]
    found = {"missing": missing, "unexpected": unexpected}
    problems = [
        f"{_listed(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in found.items() if names
    ]
    if problems:
        raise TaskError(f"{where}: {'; '.join(problems)}. Expected the state_dict() of a module of this class")


def _state_dict(path: Path) -> Mapping[str, Any]:
    try:
        regular_file(path)
        loaded = load_file(path) if path.suffix == ".safetensors" else _load_pickled(path)
    except OSError as error:
        raise TaskError(f"weights {path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        # torch's own message advises weights_only=False, which runs any code in the file.
        raise TaskError(
            f"weights {path}: the file is damaged, or does not hold tensors alone ({type(error).__name__}); write it "
            "by torch.save(model.state_dict(), path)"
        ) from error
    if not isinstance(loaded, Mapping) or not any(isinstance(value, Tensor) for value in loaded.values()):
        held = f"{_listed([str(key) for key in loaded])}" if isinstance(loaded, Mapping) else type(loaded).__name__
        raise TaskError(
            f"weights {path}: the file holds no state dict, but {held or 'nothing'}; write it by "
            "torch.save(model.state_dict(), path)"
        )
    return loaded


def _load_pickled(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


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
