"""Export of a module to ONNX, and the folding of constants in the graph.

The exporter's own ``optimize`` (``onnxscript.optimizer``) does the same, but one of its rules has two outputs
(``Slice`` and ``Slice`` to ``Split``), and for each node of the graph the matcher of such rules goes through the whole
graph again: a third of the time of an export of 32 layers. The rule is left out. It compares each slice with itself
first, and where that does not match, with no other, so that it never did anything to two slices in their usual order.

Parts of a model that TorchScript compiled, so that torch.export can trace them.

torch.export calls each module through a hook, which reads the class of a compiled one wrongly, and it swaps parameters
that a compiled module does not let go. A call of its compiled function avoids both. TorchScript computes sizes that it
needs for gradients as numbers; parameters without gradients need none, so that the axes stay open.

Export of a frozen proxy to a checked ``.onnx`` file.

Dynamic axes of the inputs in the file: by convention, or from the caller.
"""

from __future__ import annotations

import inspect
import logging
import os
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils import _pytree

from quantizer.errors import ExportError, MissingDependencyError
from quantizer.export.onnx_storage import write_onnx
from quantizer.export.operators_to_onnx import translations
from quantizer.export.passes import passes, run_passes
from quantizer.export.quick_exporter import bags_as_reductions, quick_exporter
from quantizer.numerics.formats import BLOCKS_OPSET, qtype
from quantizer.observe.float16_modules import Float32Modules, convert_floats
from quantizer.observe.float16_overflow import with_one_type
from quantizer.plan.targets import TargetProfile
from quantizer.proxy.build import own_copy
from quantizer.proxy.operand_quantizer import OperandQuantizer
from quantizer.proxy.restored_state import untouched
from quantizer.utils.batches import beside
from quantizer.utils.child_process import interrupts_end_the_block
from quantizer.utils.files import checked_file
from quantizer.utils.sizes import BATCH, Axes, DataSizes
from quantizer.utils.structure import fields_of, leaves

if TYPE_CHECKING:
    import onnx_ir


def optimize(model: onnx_ir.Model, output_names: Sequence[str] | None = None) -> None:
    """Fold constants, apply the rules of onnxscript, join equal constants and nodes, and name the outputs, in place."""
    import onnx_ir
    import onnx_ir.passes.common as common
    from onnxscript import optimizer, rewriter
    from onnxscript.rewriter import onnx_fusions
    from onnxscript.rewriter.rules.common import slice_split_rule

    rules = [rule for rule in rewriter._DEFAULT_REWRITE_RULES if rule is not slice_split_rule]

    class FoldConstants(onnx_ir.passes.InPlacePass):
        def call(self, model: onnx_ir.Model) -> onnx_ir.passes.PassResult:
            return optimizer.fold_constants(model, onnx_shape_inference=True)

    class NameOutputs(onnx_ir.passes.InPlacePass):
        """Give each output a value of its own, with its own name, and let the inputs keep theirs.

        An output that is an input, or another output, becomes an Identity of it. ``OutputFixPass`` gives the Identity
        the name of the input, and the input another one.
        """

        def call(self, model: onnx_ir.Model) -> onnx_ir.passes.PassResult:
            inputs = {value.name: value for value in model.graph.inputs}
            common.OutputFixPass()(model)
            for output in model.graph.outputs:
                if output.name in inputs:
                    output.name = f"{output.name}_output"
            for name, value in inputs.items():
                value.name = name
            for output, name in zip(model.graph.outputs, output_names or (), strict=False):
                output.name = name
            return onnx_ir.passes.PassResult(model, modified=True)

    unused = common.RemoveUnusedFunctionsPass()  # type: ignore[no-untyped-call]
    cleaned = (common.RemoveUnusedNodesPass(), unused, common.RemoveUnusedOpsetsPass())
    onnx_ir.passes.Sequential(
        common.InlinePass(),
        onnx_ir.passes.PassManager([FoldConstants(), rewriter.RewritePass(rules), *cleaned], steps=2),
        common.RemoveUnusedNodesPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        NameOutputs(),
        common.NameFixPass(),
    )(model)
    onnx_fusions.fuse(model)


_STAYS = ("cpu", "meta")


def bring_to_cpu(exported: nn.Module) -> None:
    """Move a copy to the CPU: what is folded into its file is computed as for a model that is there.

    The copy shares parameters with the caller's model, which ``Module.cpu`` would move in place.
    """
    moved: dict[Parameter, Parameter] = {}
    for module in exported.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type not in _STAYS:
                if parameter not in moved:
                    moved[parameter] = Parameter(parameter.detach().cpu(), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in _STAYS:
                module._buffers[name] = buffer.cpu()


class _CompiledPart(nn.Module):
    """Caller of a compiled module, which is not registered as a child."""

    def __init__(self, part: torch.jit.ScriptModule) -> None:
        super().__init__()
        vars(self)["part"] = part

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return vars(self)["part"]._c._get_method("forward")(*args, **inputs)


def call_compiled_parts(model: nn.Module) -> None:
    """Replace each module of TorchScript in a model by one that calls its compiled function, in place."""
    for name, child in model.named_children():
        if isinstance(child, torch.jit.ScriptModule):
            for parameter in child.parameters():
                parameter.detach_()
            setattr(model, name, _CompiledPart(child))
        else:
            call_compiled_parts(child)


_HALF_SCALES_OPSET = 19

_BY_VALUES = ("GuardOnDataDependentSymNode", "DataDependentOutputException")
"""Errors of torch for Python code that reads a number of a tensor whose values are not known."""

_NOT_OF_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


def export_onnx(
    model: nn.Module,
    path: Path,
    example: Any,
    *,
    opset: int,
    dtype: torch.dtype,
    regions: Float32Modules | None = None,
    axes: Axes | DataSizes | None = None,
    data: DataSizes | None = None,
    target: TargetProfile | None = None,
) -> Path:
    """Write a frozen proxy (or a float model) as ONNX with dynamic axes."""
    require_exporter()
    checked_file(path, ExportError)
    if dtype != torch.float32 and opset < _HALF_SCALES_OPSET:
        raise ExportError(f"opset={opset}: {dtype} scales need opset {_HALF_SCALES_OPSET} or later")
    for name, quantizer in _enabled(model):
        if opset < _least_opset(quantizer):
            what = "scales of blocks" if quantizer.block_size is not None else quantizer.dtype
            raise ExportError(f"opset={opset}: {what} ({name}) needs opset {_least_opset(quantizer)} or later")
    # A copy is converted and put in eval mode: in place, the caller's model would change.
    regions = regions or Float32Modules()
    exported = convert_floats(_copied(model, dtype, regions).eval(), dtype, regions)
    output = _output_of(model, beside(model, example))
    names = _output_names(output)
    if not _is_known_to_torch(output):
        _return_tensors(exported)
    bring_to_cpu(exported)
    call_compiled_parts(exported)
    _mark_parameters(exported)
    args, keywords = _split(beside(exported, example), regions.io_dtype(dtype))
    _name_positional(exported, args)
    _check_output_names(names, [*inspect.signature(exported.forward).parameters, *keywords])
    parameters = _name_inputs(exported, keywords)
    inputs = _named(exported, args, keywords)
    asked = isinstance(axes, Mapping)
    sizes = DataSizes(asked_axes(axes, inputs), {}) if isinstance(axes, Mapping) else usual_axes(inputs, axes, data)
    inputs = widened(inputs, sizes)
    args, keywords = tuple(inputs[name] for name in [*inputs][: len(args)]), {name: inputs[name] for name in keywords}
    dynamic = _renamed(dynamic_shapes(inputs, sizes), parameters)
    with_one_type(exported, dtype, bool(regions.masked))
    program = _export(exported, args, _renamed(keywords, parameters), opset, dynamic, names)
    ir_model = program.model
    of_parameter = {parameter: name for name, parameter in parameters.items()}
    for value in ir_model.graph.inputs:
        value.name = of_parameter.get(value.name, value.name)
    check_dynamic(ir_model, sizes.axes, asked=asked, log=axes is None)
    if ir_model.opset_imports[""] != opset:
        raise ExportError(f"opset={opset}: the exporter cannot write it; expected 18 or later, such as 20")
    run_passes(ir_model, passes(target, str(dtype).removeprefix("torch.")))
    write_onnx(ir_model, path)
    return path


def require_exporter() -> None:
    """Raise if a package that an export needs is missing."""
    for package in ("onnx", "onnxscript", "onnx_ir"):
        _require(package)


def least_opset(model: nn.Module) -> int:
    """Return the first opset that has all formats of a frozen proxy's operands; 0 if it has none."""
    return max((_least_opset(quantizer) for _, quantizer in _enabled(model)), default=0)


def _enabled(model: nn.Module) -> Iterator[tuple[str, OperandQuantizer]]:
    for name, module in model.named_modules():
        if isinstance(module, OperandQuantizer) and module.enabled:
            yield name, module


def _least_opset(quantizer: OperandQuantizer) -> int:
    blocks = quantizer.block_size is not None and not quantizer.dynamic
    return BLOCKS_OPSET if blocks else qtype(quantizer.dtype).onnx_opset


def _require(package: str) -> None:
    try:
        __import__(package)
    except ImportError as error:
        raise MissingDependencyError(package, "onnx") from error


def _copied(model: nn.Module, dtype: torch.dtype, regions: Float32Modules) -> nn.Module:
    """Return a copy with tensors of its own, except large ones that stay unchanged: those are shared."""
    kept: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, OperandQuantizer) and module.stored is not None:
            kept[id(module.stored)] = module.stored
        if not regions.applies_to(dtype):
            kept.update((id(p), p) for p in module._parameters.values() if p is not None and p.dtype == dtype)
    return own_copy(model, kept)


def _dtype_of(model: nn.Module) -> torch.dtype | None:
    """Return the type of the parameters; None if there are none, as when all are stored as integers."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _split(example: Any, dtype: torch.dtype | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword inputs, with floating tensors in the graph's float type (None: in their own)."""

    def cast(value: Any) -> Any:
        return value.to(dtype or value.dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    def convert(value: Any) -> Any:
        return _pytree.tree_map(cast, value)

    if isinstance(example, Mapping) or hasattr(example, "keys"):
        return (), {name: convert(example[name]) for name in example}
    if isinstance(example, tuple | list):
        return tuple(map(convert, example)), {}
    return (convert(example),), {}


def _mark_parameters(model: nn.Module) -> None:
    """Mark what parts compiled by TorchScript give as parameters, plain tensors, as the exporter wants them.

    The mark is the one by which ``isinstance`` knows a parameter of another tensor class.
    """
    for parameter in model.parameters():
        if not isinstance(parameter, nn.Parameter):
            vars(parameter)["_is_param"] = True


def _name_positional(model: nn.Module, args: tuple[Any, ...]) -> None:
    """Give forward a name for each argument of ``*args``, ``args_0``, ``args_1`` and so on, as a graph needs."""
    forward = model.forward
    named = list(inspect.signature(forward).parameters.values())
    place = next((index for index, parameter in enumerate(named) if parameter.kind is parameter.VAR_POSITIONAL), None)
    if place is None:
        return

    def with_names(*args: Any, **inputs: Any) -> Any:
        return forward(*args, **inputs)

    kind = inspect.Parameter.POSITIONAL_ONLY
    before = [parameter.replace(kind=kind, default=parameter.empty) for parameter in named[:place]]
    more = [inspect.Parameter(f"{named[place].name}_{index}", kind) for index in range(len(args) - place)]
    vars(with_names)["__signature__"] = inspect.Signature([*before, *more, *named[place + 1 :]])
    vars(model)["forward"] = with_names


def _check_output_names(outputs: list[str] | None, inputs: Sequence[str]) -> None:
    """Raise if a graph could not tell its names apart."""
    for index, name in enumerate(outputs or ()):
        if name in inputs or name in (outputs or ())[:index]:
            what = "an input" if name in inputs else "another output"
            raise ExportError(
                f"the model's output {name!r} has the name of {what}, and all names in a graph differ: give its "
                "dictionary another key"
            )


def _name_inputs(model: nn.Module, keywords: Mapping[str, Any]) -> dict[str, str]:
    """Give forward a named parameter for each input that only ``**kwargs`` takes: dynamic axes need named inputs."""
    forward = model.forward
    named = inspect.signature(forward).parameters
    unnamed = [name for name in keywords if name not in named]
    kept = [parameter for parameter in named.values() if parameter.kind is not parameter.VAR_KEYWORD]
    if not unnamed or len(kept) == len(named):
        return {}
    parameters = {name: re.sub(r"\W", "_", name) for name in unnamed}
    of_parameter = {parameter: name for name, parameter in parameters.items()}

    def with_names(*args: Any, **inputs: Any) -> Any:
        return forward(*args, **_renamed(inputs, of_parameter))

    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in parameters.values()]
    vars(with_names)["__signature__"] = inspect.Signature([*kept, *more])
    vars(model)["forward"] = with_names
    return parameters


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


def _named(model: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs by the names that ``forward`` gives them, in the order of the graph."""
    names = [name for name in inspect.signature(model.forward).parameters if name not in keywords]
    return {**dict(zip(names, args, strict=False)), **keywords}


def _output_of(model: nn.Module, example: Any) -> Any:
    """Return what the model returns for the example."""
    args, keywords = _split(example, _dtype_of(model))
    try:
        with torch.no_grad(), untouched(model):
            return model(*args, **keywords)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise ExportError(f"the example does not run through {type(model).__name__}.forward: {error}") from error


def _output_names(output: Any) -> list[str] | None:
    """Return the names of the tensors in a mapping or a dataclass; None leaves the naming to the exporter.

    The other parts of a dataclass may be None or plain values, which no graph returns.
    """
    # Keys of a mapping may be of any kind, and two of them may be written alike: those are refused later.
    fields = output if isinstance(output, Mapping) else fields_of(output)
    if fields is None:
        return None
    names = [str(name) for name, value in fields.items() if isinstance(value, Tensor)]
    others = [value for value in fields.values() if not isinstance(value, Tensor)]
    # The exporter would count the plain values of a mapping as outputs.
    if (others and isinstance(output, Mapping)) or any(isinstance(leaf, Tensor) for leaf in leaves(others)):
        return None
    return names


def _is_known_to_torch(output: Any) -> bool:
    """Return whether the exporter takes an output as it is, and not only the tensors that are in it."""
    return (isinstance(output, Mapping) or fields_of(output) is None) and len(_pytree.tree_leaves(output)) == len(
        leaves(output)
    )


def _return_tensors(model: nn.Module) -> None:
    """Let a model return the tensors of its output alone, as a tuple: the exporter knows no class of the user's."""
    forward = model.forward

    @wraps(forward)
    def tensors_of(*args: Any, **inputs: Any) -> Any:
        return tuple(leaf for leaf in leaves(forward(*args, **inputs)) if isinstance(leaf, Tensor))

    vars(model)["forward"] = tensors_of


def _export(
    model: nn.Module,
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    opset: int,
    dynamic: Any,
    output_names: list[str] | None,
) -> Any:
    with interrupts_end_the_block(), quick_exporter(), bags_as_reductions(), _quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                model,
                # The exporter would take a dictionary in the last place for keywords.
                (*args, {}) if args and isinstance(args[-1], Mapping) else args,
                kwargs=keywords,
                dynamo=True,
                opset_version=opset,
                dynamic_shapes=_with_containers(dynamic, (*args, *keywords.values())),
                custom_translation_table=translations(opset),
                verbose=False,
                optimize=False,
            )
            assert program is not None
            # The names come last: the exporter would name an input for the output that returns it.
            optimize(program.model, output_names)
            return program
        except (torch.onnx.errors.OnnxExporterError, RuntimeError, TypeError, ValueError) as error:
            if (reason := _reason(error)) is not None:
                raise ExportError(f"{type(model).__name__} cannot be exported: {reason}") from error
            raise ExportError(
                f"{type(model).__name__} cannot be exported: {_said(error)}; "
                f"see the exception above for the exporter's own report{hint(error)}{_of_gradients(error)}"
            ) from error


def _with_containers(dynamic: Mapping[str, Any], values: Sequence[Any]) -> dict[str, Any]:
    """Return ``dynamic`` with an entry for each tensor inside a dictionary or list; the batch's axis is dynamic.

    The batch is that of the inputs beside it, or of the first tensor if there are no others.
    """
    named = zip(dynamic.values(), values, strict=True)
    found = [(value.shape[axis], dim) for axes, value in named for axis, dim in (axes or {}).items() if _is_batch(dim)]
    inside = [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim()]
    if inside and not any(isinstance(value, Tensor) for value in values):
        found = [(inside[0].shape[0], torch.export.Dim("batch", min=1))]

    def entry(leaf: Any) -> Any:
        if not found or not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != found[0][0]:
            return None
        return {0: found[0][1]}

    return {
        name: shapes if isinstance(value, Tensor) or shapes is not None else _pytree.tree_map(entry, value)
        for (name, shapes), value in zip(dynamic.items(), values, strict=True)
    }


def _is_batch(dimension: Any) -> bool:
    return bool(dimension.__name__ == "batch")


def _of_gradients(error: BaseException) -> str:
    """Return advice if the exporter met tensors that only exist while it traces, as those of gradients are."""
    if "fake tensor in the exported program" not in _said(error):
        return ""
    return (
        "; if the forward computes gradients (torch.autograd.grad), no exporter can write it: run what quantize(model) "
        "gives"
    )


def _reason(error: BaseException) -> str | None:
    """Return why a model cannot be exported and what to do, where that is known; None: the exporter's words say it."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ExportError):
        return str(error)
    if type(error).__name__ not in _BY_VALUES and "data-dependent" not in str(error):
        return None
    place = _line(error)
    return (
        f"what it computes depends on the values of its inputs{f' at {place}' if place else ''}, where Python reads a "
        "number of a tensor for a branch, a loop or a size, as float(y.mean()) or int(y.argmax()) do. A file holds one "
        "way for all inputs: choose with torch.where, or leave this part outside of the model"
    )


def _line(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback of an error; empty if there is none."""
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        # A function that was rewritten has the lines of its file.
        name = frame.filename.removeprefix("<quantizer ").removesuffix(">")
        if os.path.isabs(name) and not name.startswith(_NOT_OF_USERS):
            found = f"{name}:{frame.lineno}"
    return found


def _said(error: BaseException) -> str:
    """Return the first line of the innermost cause: the exporter's own first lines only name its stage."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's warnings about its own future and optional packages: users cannot act on them."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


logger = logging.getLogger(__name__)

_SHORTEST = 2
"""The least sequence: what torch.export sees of an axis of length 1 holds for that length alone."""

_OTHERWISE = "dynamic_axes= says otherwise"
_OF_SHAPES = ("ConstraintViolationError", "UserError")


def usual_axes(inputs: Mapping[str, Any], told: DataSizes | None = None, data: DataSizes | None = None) -> DataSizes:
    """Return the open axes where the caller names none: those of the data, or by the example alone."""
    if told is not None and _fits(inputs, told.axes):
        return told
    sizes = data if data is not None and _fits(inputs, data.axes) else DataSizes.of([inputs])
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() > 0}
    batch = next((value.shape[0] for value in tensors.values()), 1)
    for name, value in tensors.items():
        opened = sizes.axes.get(name, {})
        if 0 not in opened and value.shape[0] not in (1, batch):
            logger.warning(
                "export: axis 0 of %r is fixed at %d, as the batch of the example is %d; %s",
                name,
                value.shape[0],
                batch,
                _OTHERWISE,
            )
        if value.dim() == 2 and not value.is_floating_point() and 1 not in opened and value.shape[1] == 1:
            logger.warning("export: axis 1 of %r is fixed at 1, as in the example; %s", name, _OTHERWISE)
    return sizes


def _fits(inputs: Mapping[str, Any], axes: Axes) -> bool:
    """Return whether an example has the open axes of the data, and one size in each dimension."""
    shapes = {name: value.shape for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() > 0}
    if shapes.keys() != axes.keys() or any(len(shapes[name]) <= axis for name in axes for axis in axes[name]):
        return False
    sizes = {(dimension, shapes[name][axis]) for name in axes for axis, dimension in axes[name].items()}
    return len(sizes) == len({dimension for dimension, _ in sizes})


def asked_axes(axes: Axes, inputs: Mapping[str, Any]) -> Axes:
    """Return the caller's own axes."""
    lengths: dict[str, tuple[str, int]] = {}
    for name, named in axes.items():
        if name not in inputs:
            raise ExportError(f"dynamic_axes names the input {name!r}; the example has: {', '.join(inputs)}")
        shape = inputs[name].shape if isinstance(inputs[name], Tensor) else ()
        for axis, dimension in named.items():
            if not 0 <= axis < len(shape):
                raise ExportError(f"dynamic_axes: {name!r} has no axis {axis}; expected 0 to {len(shape) - 1}")
            if not dimension.isidentifier():
                raise ExportError(f"dynamic_axes: {dimension!r} is no name of a dimension; expected one like 'batch'")
            place = f"axis {axis} of {name!r}"
            first, length = lengths.setdefault(dimension, (place, shape[axis]))
            if length != shape[axis]:
                raise ExportError(
                    f"dynamic_axes: {dimension!r} is {length} in the example at {first} and {shape[axis]} at {place}; "
                    "one dimension has one length: give them two names"
                )
    return axes


def widened(inputs: Mapping[str, Any], sizes: DataSizes) -> dict[str, Any]:
    """Return an example with no open axis of size 1 where the data has larger ones.

    torch takes what broadcasts at size 1 for a property of the model, and fixes the axis.
    """
    usual = {
        dimension: min(size for size in seen if size > 1)
        for dimension, seen in sizes.seen.items()
        if max(seen, default=1) > 1 and any(_is_one(inputs.get(name), axis) for name, axis in _places(sizes, dimension))
    }
    return sizes.resized(inputs, usual)


def _places(sizes: DataSizes, dimension: str) -> list[tuple[str, int]]:
    return [(name, axis) for name, opened in sizes.axes.items() for axis, word in opened.items() if word == dimension]


def _is_one(value: Any, axis: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > axis and value.shape[axis] == 1


def dynamic_shapes(inputs: Mapping[str, Any], sizes: DataSizes) -> dict[str, Any]:
    """Return the argument for ``torch.export``: one entry for each input."""
    axes = sizes.axes
    dimensions: dict[str, Any] = {}

    def entry(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return None
        for axis, dimension in axes.get(name, {}).items():
            least = min(value.shape[axis], _SHORTEST, *sizes.seen.get(dimension, ()))
            dimensions.setdefault(dimension, torch.export.Dim(dimension, min=1 if dimension == BATCH else least))
        return {axis: dimensions[dimension] for axis, dimension in axes.get(name, {}).items()}

    return {name: entry(name, value) for name, value in inputs.items()}


def check_dynamic(model: Any, axes: Axes, *, asked: bool, log: bool = True) -> None:
    """Log the axes that are fixed in the graph: torch fixes an axis if the model only works at one length."""
    shapes = {value.name: value.shape for value in model.graph.inputs}
    for name, named in axes.items():
        shape = shapes.get(name)
        for axis, dimension in named.items():
            if shape is None or axis >= len(shape) or not isinstance(shape[axis], int):
                continue
            what = f"axis {axis} of {name!r} can only be {shape[axis]} in this model"
            if asked:
                raise ExportError(f"dynamic_axes: {what}, so it is not {dimension!r}; leave it out of dynamic_axes")
            if log:
                logger.warning("export: %s, so it is fixed in the file", what)


def hint(error: BaseException) -> str:
    """Return advice on dynamic axes if an error of the exporter is about the lengths of axes; else an empty text."""
    while error.__cause__ is not None:
        error = error.__cause__
    if type(error).__name__ not in _OF_SHAPES:
        return ""
    return "; dynamic_axes= says which axes of the inputs are dynamic, {} that none is"
