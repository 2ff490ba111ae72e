"""The workload of a configuration whose ``model.source`` is a function: import, weights, batches and score.

Only names from the user's own file or command line are imported, never names from a checkpoint or a YAML tag.
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
from quantizer.pipeline.optional_inputs import completed_batches, omitted_arguments
from quantizer.pipeline.preflight_checks import Faults
from quantizer.pipeline.processes import require_room_to_write
from quantizer.pipeline.progress import StageTimer
from quantizer.pipeline.resume import ResumeFiles
from quantizer.pipeline.scores import FunctionScorer, ScoreFunction
from quantizer.pipeline.workload import Workload, module_batches, module_workload, output_of
from quantizer.proxy.build import is_proxy
from quantizer.tasks import Batch
from quantizer.utils.paths import is_file, is_there, regular_file

_MACHINERY = (__file__, importlib.__file__, "<frozen ")
"""Import machinery, which is skipped in tracebacks."""


@contextmanager
def current_folder_first() -> Iterator[None]:
    """Put the current folder first on the import path while the user's code runs.

    It is removed afterwards, so that a folder named like an optional library is not imported by torch.
    """
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        # The code may have changed the path.
        if folder in sys.path:
            sys.path.remove(folder)


def imported(name: str) -> Callable[..., Any]:
    """Return the function named by ``MODULE:FUNCTION``.

    Raises:
        TaskError: the import fails, or the name is not a function.
    """
    module_name, _, path = name.partition(":")
    try:
        with current_folder_first():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise TaskError(f"{name}: importing {module_name} failed, {_error_text(error)}") from error
        raise TaskError(
            f"{name}: the module {error.name!r} is neither in {os.getcwd()} nor installed; expected "
            "MODULE:FUNCTION as Python imports it from the current folder"
        ) from error
    # A script without `if __name__ == "__main__"` may exit.
    except (Exception, SystemExit) as error:
        raise TaskError(f"{name}: importing {module_name} failed, {_error_text(error)}") from error
    try:
        target = reduce(getattr, path.split("."), module)
    except AttributeError as error:
        similar = nearest(path, [key for key, value in vars(module).items() if callable(value)])
        hint = f"; did you mean {similar!r}?" if similar else ""
        raise TaskError(f"{name}: {module.__file__ or module_name} has no {path!r}{hint}") from error
    if not callable(target) or isinstance(target, nn.Module):
        raise TaskError(f"{name} is {_kind(target)}; expected a function")
    function: Callable[..., Any] = target
    return function


def called(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Return the result of the user's function; an error becomes a ``TaskError``."""
    try:
        with current_folder_first():
            return function(*args)
    except QuantizerError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise TaskError(f"{name}() failed, {_error_text(error)}") from error


def called_form(where: str, model: nn.Module, batches: Sequence[Batch]) -> tuple[list[Batch], CallForm]:
    """Return batches with equal arguments, and the form of the calls of a model.

    Args:
        where: the place of the first batch, for messages.
        model: the float model, in eval mode.
        batches: its arguments by name; some may omit optional ones.

    Raises:
        CalibrationError: a batch omits an argument that no constant tensor replaces.
        TaskError: the model fails on the first batch.
    """
    omitted = omitted_arguments(model, batches)
    completed = completed_batches(model, batches, omitted)
    output = called(where, output_of, model, completed[0])
    return completed, CallForm.of(model, output, completed[0], omitted)


def _error_text(error: BaseException) -> str:
    """Return an error as text, with the line of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_MACHINERY)]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return f"with {type(error).__name__}: {error}{place}"


def _kind(value: object) -> str:
    return f"a module itself, a {type(value).__name__}" if isinstance(value, nn.Module) else f"a {type(value).__name__}"


_FORMS = (".safetensors", ".pt", ".pth")
_MAX_NAMES = 6
"""Maximum number of tensor names in a message."""


def check_weights(path: Path) -> None:
    """Raise if a path is not a weights file; the file is not read."""
    if path.suffix not in _FORMS:
        raise TaskError(f"weights {path}: expected a file that ends in {', '.join(_FORMS)}")
    if not is_file(path):
        raise TaskError(f"weights {path}: the file does not exist")


def load_weights(model: nn.Module, path: Path) -> None:
    """Load all weights of a module from a file, without running code in it.

    Raises:
        TaskError: the file is damaged, or tensors are missing, unexpected or of another shape.
    """
    check_weights(path)
    state = _state_dict(path)
    context = f"weights {path} do not fit {type(model).__name__}"
    try:
        missing, unexpected = model.load_state_dict(state, strict=False)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        raise TaskError(f"{context}: {_listed(lines) if lines else error}") from error
    # Safetensors files store a shared tensor only once.
    tensors = model.state_dict(keep_vars=True)
    loaded_ids = {id(tensors[name]) for name in tensors.keys() & state.keys()}
    missing = [name for name in missing if id(tensors.get(name)) not in loaded_ids]
    differences = {"missing": missing, "unexpected": unexpected}
    problems = [
        f"{_listed(names)} {'is' if len(names) == 1 else 'are'} {what}" for what, names in differences.items() if names
    ]
    if problems:
        raise TaskError(f"{context}: {'; '.join(problems)}. Expected the state_dict() of a module of this class")


def _state_dict(path: Path) -> Mapping[str, Any]:
    try:
        regular_file(path)
        loaded = load_file(path) if path.suffix == ".safetensors" else _load_pickled(path)
    except OSError as error:
        raise TaskError(f"weights {path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        # torch's message recommends weights_only=False, which runs code in the file.
        raise TaskError(
            f"weights {path}: the file is damaged or contains other objects than tensors ({type(error).__name__}); "
            "write it with torch.save(model.state_dict(), path)"
        ) from error
    if not isinstance(loaded, Mapping) or not any(isinstance(value, Tensor) for value in loaded.values()):
        content = f"{_listed([str(key) for key in loaded])}" if isinstance(loaded, Mapping) else type(loaded).__name__
        raise TaskError(
            f"weights {path}: expected a state dict, got {content or 'nothing'}; write it with "
            "torch.save(model.state_dict(), path)"
        )
    return loaded


def _load_pickled(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"{', '.join(names[:_MAX_NAMES])}{more}"


def check_functions(faults: Faults, model: ModelConfig) -> None:
    """Check that the functions of a model can be imported and that its weights exist; nothing is called."""
    faults.of(partial(_check_no_path, model.source))
    for name in (model.source, model.inputs, model.metric):
        if name is not None:
            faults.of(partial(imported, name))
    if model.weights is not None:
        faults.of(partial(check_weights, Path(model.weights)))


def function_workload(config: RunConfig, timer: StageTimer, kept: ResumeFiles, folder: Path) -> Workload:
    """Return the workload of a configuration with functions: the module, its batches and its score."""
    settings = config.model
    model = returned_module(settings)
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    require_room_to_write(folder, size, "the output of this run")
    assert settings.inputs is not None
    batches, call = called_form(f"{settings.source}: forward", model, _batches(model, settings.inputs))
    score = None if settings.metric is None else _score(settings.metric)
    scorer = partial(FunctionScorer, function=score, call=call, higher_is_better=True)
    return module_workload(model, settings.source, batches, scorer, timer, kept, folder)


def returned_module(model: ModelConfig) -> nn.Module:
    """Return the module of a function with its weights, in eval mode on the CPU."""
    _check_no_path(model.source)
    module = called(model.source, imported(model.source))
    if not isinstance(module, nn.Module) or is_proxy(module):
        kind = "a proxy" if isinstance(module, nn.Module) else f"a {type(module).__name__}"
        raise TaskError(f"{model.source}() returned {kind}; expected a float model, a torch.nn.Module")
    if model.weights is not None:
        load_weights(module, Path(model.weights))
    return module.cpu().eval()


def _check_no_path(source: str) -> None:
    if is_there(Path(source)):
        raise TaskError(
            f"model source {source!r} names a function, but also an existing file or folder: use ./{source} with a "
            "task for the folder, or rename one of them"
        )


def _batches(model: nn.Module, name: str) -> list[Batch]:
    """Return the batches of a function, by the argument names of the module."""
    data = called(name, imported(name))
    try:
        # A generator runs its code, and its imports, while it is read.
        with current_folder_first():
            return module_batches(model, data)
    except CalibrationError as error:
        raise CalibrationError(f"{name}(): {error}") from error


def _score(name: str) -> ScoreFunction:
    function = imported(name)

    @wraps(function)
    def score(model: nn.Module) -> float:
        # The scorer checks that it is a number.
        value: float = called(name, function, model)
        return value

    return score
