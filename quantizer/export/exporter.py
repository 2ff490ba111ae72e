"""Export of a frozen proxy or a float model to a checked ``.onnx`` file.

This file prepares a copy of the model, calls ``torch.onnx.export``, folds constants, and chooses the dynamic axes.
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
from quantizer.utils.signatures import signature_of
from quantizer.utils.sizes import BATCH, Axes, DataSizes
from quantizer.utils.structure import exported as exported_part
from quantizer.utils.structure import fields_of, leaves

if TYPE_CHECKING:
    import onnx_ir


def optimize(model: onnx_ir.Model, output_names: Sequence[str] | None = None) -> None:
    """Fold constants, apply the rules of onnxscript, merge equal constants and nodes, and name the outputs, in place.

    Same as ``onnxscript.optimizer.optimize`` without the rule that merges slices into a Split. That rule takes a third
    of the export time of 32 layers, because it searches the whole graph for each node. It matches no usual order of
    slices. The other rules are tried only at nodes of their last operator.
    """
    import onnx_ir
    import onnx_ir.passes.common as common
    from onnxscript import optimizer, rewriter
    from onnxscript.rewriter import onnx_fusions
    from onnxscript.rewriter.rules.common import slice_split_rule

    rules = [_quick_rule(rule) for rule in rewriter._DEFAULT_REWRITE_RULES if rule is not slice_split_rule]

    class FoldConstants(onnx_ir.passes.InPlacePass):
        def call(self, model: onnx_ir.Model) -> onnx_ir.passes.PassResult:
            return optimizer.fold_constants(model, onnx_shape_inference=True)

    class NameOutputs(onnx_ir.passes.InPlacePass):
        """Pass that gives each output a separate value and name, and keeps the names of the inputs.

        An output that equals an input or another output becomes an Identity. ``OutputFixPass`` alone would rename the
        input.
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


def _quick_rule(rule: Any) -> Any:
    """Return a rule of onnxscript that skips nodes with another operator than the last one of its pattern.

    onnxscript finds the same, but prepares a match and words its failure for each rule at each node, which takes a
    twentieth of the export time. Rules with several last operators, or of unknown releases, are returned unchanged.
    """
    from onnxscript.rewriter._matcher import SimplePatternMatcher

    try:
        (last,) = rule._target_pattern.output_nodes
        known = type(rule._matcher) is SimplePatternMatcher
    except (AttributeError, ValueError):
        known = False
    return _QuickRule(rule, last.op) if known else rule


class _QuickRule:
    """Rule of onnxscript with an operator pattern that is checked first."""

    def __init__(self, rule: Any, operator: Any) -> None:
        self._rule, self._operator = rule, operator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def try_rewrite(self, model: onnx_ir.Model, graph: Any, node: onnx_ir.Node, **options: Any) -> Any:
        """Return the replacement of the nodes that end in a node; None if the rule does not apply."""
        if not self._operator.matches(node.op_type):
            return None
        return self._rule.try_rewrite(model, graph, node, **options)


_UNMOVED_DEVICES = ("cpu", "meta")


def bring_to_cpu(exported: nn.Module) -> None:
    """Move a copy of a model to the CPU, where constants are folded.

    The copy shares parameters with the caller's model, which ``Module.cpu`` would move in place.
    """
    moved: dict[Parameter, Parameter] = {}
    for module in exported.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.device.type not in _UNMOVED_DEVICES:
                if parameter not in moved:
                    moved[parameter] = Parameter(parameter.detach().cpu(), requires_grad=parameter.requires_grad)
                module._parameters[name] = moved[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in _UNMOVED_DEVICES:
                module._buffers[name] = buffer.cpu()


class _CompiledPart(nn.Module):
    """Module that calls the compiled function of a TorchScript module.

    torch.export cannot call the TorchScript module: it misreads its class, and cannot swap its parameters.
    """

    def __init__(self, part: torch.jit.ScriptModule) -> None:
        super().__init__()
        vars(self)["part"] = part

    def forward(self, *args: Any, **inputs: Any) -> Any:
        return vars(self)["part"]._c._get_method("forward")(*args, **inputs)


def call_compiled_parts(model: nn.Module) -> None:
    """Replace each TorchScript module by a caller of its compiled function, in place.

    Its parameters are detached: TorchScript computes sizes for gradients as numbers, which would fix the axes.
    """
    for name, child in model.named_children():
        if isinstance(child, torch.jit.ScriptModule):
            for parameter in child.parameters():
                parameter.detach_()
            setattr(model, name, _CompiledPart(child))
        else:
            call_compiled_parts(child)


_HALF_SCALES_OPSET = 19

_DATA_DEPENDENT = ("GuardOnDataDependentSymNode", "DataDependentOutputException")
"""Errors of torch for Python code that reads a value of a tensor during tracing."""

_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


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
    others: Sequence[Mapping[str, Tensor]] = (),
) -> Path:
    """Write a frozen proxy or a float model as an ONNX file with dynamic axes, and return the path.

    Args:
        others: inputs of other sizes, for which the file must also compute the outputs of the model.

    Raises:
        ExportError: the model cannot be exported, or the file would be wrong for other inputs.
    """
    require_exporter()
    checked_file(path, ExportError)
    if dtype != torch.float32 and opset < _HALF_SCALES_OPSET:
        raise ExportError(f"opset={opset}: {dtype} scales need opset {_HALF_SCALES_OPSET} or later")
    for name, quantizer in _enabled(model):
        if opset < _least_opset(quantizer):
            feature = "a scale per block" if quantizer.block_size is not None else quantizer.dtype
            raise ExportError(f"opset={opset}: {feature} ({name}) needs opset {_least_opset(quantizer)} or later")
    # Convert a copy: the caller's model must not change.
    regions = regions or Float32Modules()
    exported = convert_floats(_copy_for_export(model, dtype, regions).eval(), dtype, regions)
    whole = _output_of(model, beside(model, example))
    output = exported_part(model, whole)
    names = _output_names(output)
    if output is not whole:
        _return_part(exported)
    elif not _is_known_to_torch(output):
        _return_tensors(exported)
    bring_to_cpu(exported)
    call_compiled_parts(exported)
    _mark_parameters(exported)
    args, keywords = _split(beside(exported, example), regions.io_dtype(dtype))
    _hide_unknown_annotations(exported)
    _name_positional(exported, args)
    _check_output_names(names, [*inspect.signature(exported.forward).parameters, *keywords])
    parameters = _name_inputs(exported, keywords)
    inputs = _named(exported, args, keywords)
    explicit = isinstance(axes, Mapping)
    sizes = DataSizes(asked_axes(axes, inputs), {}) if isinstance(axes, Mapping) else usual_axes(inputs, axes, data)
    inputs = widened(inputs, sizes)
    args, keywords = tuple(inputs[name] for name in [*inputs][: len(args)]), {name: inputs[name] for name in keywords}
    dynamic = _renamed(dynamic_shapes(inputs, sizes), parameters)
    with_one_type(exported, dtype, bool(regions.masked))
    program = _export(exported, args, _renamed(keywords, parameters), opset, dynamic, names)
    for other in others:
        _require_same_outputs(model, program.exported_program, _renamed(other, parameters), other)
    ir_model = program.model
    of_parameter = {parameter: name for name, parameter in parameters.items()}
    for value in ir_model.graph.inputs:
        value.name = of_parameter.get(value.name, value.name)
    check_dynamic(ir_model, sizes.axes, explicit=explicit, log=axes is None)
    if ir_model.opset_imports[""] != opset:
        raise ExportError(f"opset={opset} cannot be exported; expected 18 or later, such as 20")
    run_passes(ir_model, passes(target, str(dtype).removeprefix("torch.")))
    write_onnx(ir_model, path)
    return path


_SAME = 1e-3
"""Maximum relative difference of outputs due to the order of float sums."""


def _require_same_outputs(
    model: nn.Module, program: torch.export.ExportedProgram, named: Mapping[str, Any], inputs: Mapping[str, Any]
) -> None:
    """Raise unless a traced program computes the outputs of the model for these inputs.

    Python code of a model may decide by a size, and the program contains only the decision for the example.
    """
    shapes = ", ".join(f"{name} {list(value.shape)}" for name, value in inputs.items())
    with torch.no_grad():
        output = exported_part(model, _output_of(model, inputs))
        expected = [leaf for leaf in leaves(output) if isinstance(leaf, Tensor)]
        try:
            # torch also refuses sizes for which the program is right.
            found = [leaf for leaf in leaves(program.module(check_guards=False)(**named)) if isinstance(leaf, Tensor)]
        except (RuntimeError, ValueError, IndexError, AssertionError) as error:
            raise ExportError(
                f"{type(model).__name__} cannot be exported for {shapes}: {_first_line(error)}"
            ) from error
    for right, other in zip(expected, found, strict=True):
        if right.shape != other.shape or not torch.allclose(right, other, _SAME, _SAME * float(right.abs().max())):
            raise ExportError(f"{type(model).__name__} cannot be exported for {shapes}: its code decides by a size")


def require_exporter() -> None:
    """Raise MissingDependencyError without onnx, onnxscript or onnx-ir."""
    for package in ("onnx", "onnxscript", "onnx_ir"):
        _require(package)


def least_opset(model: nn.Module) -> int:
    """Return the first opset with all formats of a frozen proxy's quantizers; 0 without quantizers."""
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


def _copy_for_export(model: nn.Module, dtype: torch.dtype, regions: Float32Modules) -> nn.Module:
    """Return a copy of the model that shares large tensors which the export does not change."""
    shared: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, OperandQuantizer) and module.stored is not None:
            shared[id(module.stored)] = module.stored
        if not regions.applies_to(dtype):
            shared.update((id(p), p) for p in module._parameters.values() if p is not None and p.dtype == dtype)
    return own_copy(model, shared)


def _dtype_of(model: nn.Module) -> torch.dtype | None:
    """Return the float type of the parameters; None without float parameters."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def _split(example: Any, dtype: torch.dtype | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword inputs, with floating tensors in ``dtype``; None keeps their types."""

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
    """Mark plain tensors that compiled modules return as parameters, as the exporter requires.

    ``isinstance`` uses this mark for parameters of other tensor classes.
    """
    for parameter in model.parameters():
        if not isinstance(parameter, nn.Parameter):
            vars(parameter)["_is_param"] = True


def _hide_unknown_annotations(model: nn.Module) -> None:
    """Remove annotations from the signature of ``forward`` if they cannot be evaluated, since torch evaluates them."""
    forward = model.forward
    try:
        inspect.signature(forward)
    except (AttributeError, NameError):
        # Only since Python 3.14: before, the definition of the function raised.
        def without_annotations(*args: Any, **inputs: Any) -> Any:
            return forward(*args, **inputs)

        parameters = signature_of(forward).parameters.values()
        bare = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
        vars(without_annotations)["__signature__"] = inspect.Signature(bare)
        vars(model)["forward"] = without_annotations


def _name_positional(model: nn.Module, args: tuple[Any, ...]) -> None:
    """Give ``forward`` one named parameter per element of ``*args``: ``args_0``, ``args_1``, ..."""
    forward = model.forward
    named = list(inspect.signature(forward).parameters.values())
    position = next(
        (index for index, parameter in enumerate(named) if parameter.kind is parameter.VAR_POSITIONAL), None
    )
    if position is None:
        return

    def with_names(*args: Any, **inputs: Any) -> Any:
        return forward(*args, **inputs)

    kind = inspect.Parameter.POSITIONAL_ONLY
    # Arguments that are passed by name keep their kind.
    given = min(position, len(args))
    before = [parameter.replace(kind=kind, default=parameter.empty) for parameter in named[:given]] + named[
        given:position
    ]
    numbered = [inspect.Parameter(f"{named[position].name}_{index}", kind) for index in range(len(args) - position)]
    vars(with_names)["__signature__"] = inspect.Signature([*before, *numbered, *named[position + 1 :]])
    vars(model)["forward"] = with_names


def _check_output_names(outputs: list[str] | None, inputs: Sequence[str]) -> None:
    """Raise if an output has the name of an input or of another output."""
    for index, name in enumerate(outputs or ()):
        if name in inputs or name in (outputs or ())[:index]:
            owner = "an input" if name in inputs else "another output"
            raise ExportError(
                f"output {name!r} of the model has the name of {owner}, but names in a graph must be unique: "
                "rename the key of the output dictionary"
            )


def _name_inputs(model: nn.Module, keywords: Mapping[str, Any]) -> dict[str, str]:
    """Give ``forward`` a named parameter per input of ``**kwargs``: dynamic axes need named inputs."""
    forward = model.forward
    named = inspect.signature(forward).parameters
    unnamed = [name for name in keywords if name not in named]
    remaining = [parameter for parameter in named.values() if parameter.kind is not parameter.VAR_KEYWORD]
    if not unnamed or len(remaining) == len(named):
        return {}
    parameters = {name: re.sub(r"\W", "_", name) for name in unnamed}
    of_parameter = {parameter: name for name, parameter in parameters.items()}

    def with_names(*args: Any, **inputs: Any) -> Any:
        return forward(*args, **_renamed(inputs, of_parameter))

    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in parameters.values()]
    vars(with_names)["__signature__"] = inspect.Signature([*remaining, *added])
    vars(model)["forward"] = with_names
    return parameters


def _renamed(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in values.items()}


def _named(model: nn.Module, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs by parameter name of ``forward``, in the order of the graph."""
    names = [name for name in inspect.signature(model.forward).parameters if name not in keywords]
    return {**dict(zip(names, args, strict=False)), **keywords}


def _output_of(model: nn.Module, example: Any) -> Any:
    args, keywords = _split(example, _dtype_of(model))
    try:
        with torch.no_grad(), untouched(model):
            return model(*args, **keywords)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        raise ExportError(f"{type(model).__name__}.forward fails for the example: {error}") from error


def _output_names(output: Any) -> list[str] | None:
    """Return the names of the output tensors of a mapping or dataclass; None lets the exporter name them.

    The tensors in a tuple of it are numbered: ``hidden_states.0``. Fields of a dataclass may be None or plain values,
    which a graph does not return.
    """
    # Keys may have any type. _check_output_names refuses keys with equal text.
    fields = output if isinstance(output, Mapping) else fields_of(output)
    if fields is None:
        return None
    names: list[str] = []
    for name, value in fields.items():
        inside = leaves(value)
        if isinstance(value, Tensor):
            names.append(str(name))
        elif inside and all(isinstance(leaf, Tensor) for leaf in inside):
            names += [f"{name}.{number}" for number in range(len(inside))]
        elif isinstance(output, Mapping) or any(isinstance(leaf, Tensor) for leaf in inside):
            # The exporter counts plain values of a mapping as outputs.
            return None
    return names


def _is_known_to_torch(output: Any) -> bool:
    """Return whether torch knows the container classes of an output."""
    return (isinstance(output, Mapping) or fields_of(output) is None) and len(_pytree.tree_leaves(output)) == len(
        leaves(output)
    )


def _return_part(model: nn.Module) -> None:
    """Make ``forward`` return the outputs in ``exported_outputs`` alone."""
    forward = model.forward

    @wraps(forward)
    def part_of(*args: Any, **inputs: Any) -> Any:
        return exported_part(model, forward(*args, **inputs))

    vars(model)["forward"] = part_of


def _return_tensors(model: nn.Module) -> None:
    """Make ``forward`` return a tuple of its output tensors: the exporter does not know classes of users."""
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
                # The exporter takes a dictionary at the end for keywords.
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
            # Name outputs last: the exporter would rename an input that is also an output.
            optimize(program.model, output_names)
            return program
        except (torch.onnx.errors.OnnxExporterError, RuntimeError, TypeError, ValueError) as error:
            if (reason := _reason(error)) is not None:
                raise ExportError(f"{type(model).__name__} cannot be exported: {reason}") from error
            raise ExportError(
                f"{type(model).__name__} cannot be exported: {_first_line(error)}; "
                f"see the exception above for the exporter's report{hint(error)}{_gradient_advice(error)}"
            ) from error


def _with_containers(dynamic: Mapping[str, Any], values: Sequence[Any]) -> dict[str, Any]:
    """Return ``dynamic`` with entries for tensors inside dictionaries and lists; their batch axis is dynamic.

    The batch size comes from the plain tensor inputs, or from the first nested tensor if there are none.
    """
    named = zip(dynamic.values(), values, strict=True)
    batches = [
        (value.shape[axis], dim) for axes, value in named for axis, dim in (axes or {}).items() if _is_batch(dim)
    ]
    nested = [leaf for leaf in _pytree.tree_leaves(values) if isinstance(leaf, Tensor) and leaf.dim()]
    if nested and not any(isinstance(value, Tensor) for value in values):
        batches = [(nested[0].shape[0], torch.export.Dim("batch", min=1))]

    def entry(leaf: Any) -> Any:
        if not batches or not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != batches[0][0]:
            return None
        return {0: batches[0][1]}

    return {
        name: shapes if isinstance(value, Tensor) or shapes is not None else _pytree.tree_map(entry, value)
        for (name, shapes), value in zip(dynamic.items(), values, strict=True)
    }


def _is_batch(dimension: Any) -> bool:
    return bool(dimension.__name__ == "batch")


def _gradient_advice(error: BaseException) -> str:
    """Return advice if the exporter failed on tensors of a gradient computation, else an empty text."""
    if "fake tensor in the exported program" not in _first_line(error):
        return ""
    return "; gradients in forward (torch.autograd.grad) cannot be exported: run the result of quantize(model)"


def _reason(error: BaseException) -> str | None:
    """Return why a model cannot be exported and what to do; None if the exporter's message is enough."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, ExportError):
        return str(error)
    if type(error).__name__ not in _DATA_DEPENDENT and "data-dependent" not in str(error):
        return None
    line = _line(error)
    return (
        f"its control flow depends on the values of its inputs{f' at {line}' if line else ''}: Python reads a number "
        "from a tensor for a branch, a loop or a size, such as float(y.mean()) or int(y.argmax()). A file has one path "
        "for all inputs: use torch.where, or move this part out of the model"
    )


def _line(error: BaseException) -> str:
    """Return the innermost line of the user's code in the traceback of an error; empty if there is none."""
    line = ""
    for frame in traceback.extract_tb(error.__traceback__):
        # Rewritten functions keep the line numbers of their source file.
        name = frame.filename.removeprefix("<quantizer ").removesuffix(">")
        if os.path.isabs(name) and not name.startswith(_LIBRARY_FOLDERS):
            line = f"{name}:{frame.lineno}"
    return line


def _first_line(error: BaseException) -> str:
    """Return the first line of the innermost cause; the exporter's own first line only names its stage."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence warnings about the exporter's future and optional packages, on which users cannot act."""
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

_MIN_SEQUENCE = 2
"""Minimum length of a sequence: torch.export specializes axes of length 1."""

_OVERRIDE = "set dynamic_axes= to change this"
_SHAPE_ERRORS = ("ConstraintViolationError", "UserError")


def usual_axes(
    inputs: Mapping[str, Any], preferred: DataSizes | None = None, data: DataSizes | None = None
) -> DataSizes:
    """Return the default dynamic axes: of ``preferred`` or ``data`` if they fit, else of the example."""
    if preferred is not None and _fits(inputs, preferred.axes):
        return preferred
    sizes = data if data is not None and _fits(inputs, data.axes) else DataSizes.of([inputs])
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() > 0}
    batch = next((value.shape[0] for value in tensors.values()), 1)
    for name, value in tensors.items():
        axes = sizes.axes.get(name, {})
        if 0 not in axes and value.shape[0] not in (1, batch):
            logger.warning(
                "export: axis 0 of %r is fixed at %d, because the batch size of the example is %d; %s",
                name,
                value.shape[0],
                batch,
                _OVERRIDE,
            )
        if value.dim() == 2 and not value.is_floating_point() and 1 not in axes and value.shape[1] == 1:
            logger.warning("export: axis 1 of %r is fixed at 1, as in the example; %s", name, _OVERRIDE)
    return sizes


def _fits(inputs: Mapping[str, Any], axes: Axes) -> bool:
    """Return whether an example has the dynamic axes of the data, and one size per dimension."""
    shapes = {name: value.shape for name, value in inputs.items() if isinstance(value, Tensor) and value.dim() > 0}
    if shapes.keys() != axes.keys() or any(len(shapes[name]) <= axis for name in axes for axis in axes[name]):
        return False
    sizes = {(dimension, shapes[name][axis]) for name in axes for axis, dimension in axes[name].items()}
    return len(sizes) == len({dimension for dimension, _ in sizes})


def asked_axes(axes: Axes, inputs: Mapping[str, Any]) -> Axes:
    """Return the caller's axes after checks against the inputs."""
    lengths: dict[str, tuple[str, int]] = {}
    for name, named in axes.items():
        if name not in inputs:
            raise ExportError(f"dynamic_axes names the input {name!r}; the example has: {', '.join(inputs)}")
        shape = inputs[name].shape if isinstance(inputs[name], Tensor) else ()
        for axis, dimension in named.items():
            if not 0 <= axis < len(shape):
                raise ExportError(f"dynamic_axes: {name!r} has no axis {axis}; expected 0 to {len(shape) - 1}")
            if not dimension.isidentifier():
                raise ExportError(
                    f"dynamic_axes: {dimension!r} is not a valid dimension name; expected an identifier such as 'batch'"
                )
            position = f"axis {axis} of {name!r}"
            first, length = lengths.setdefault(dimension, (position, shape[axis]))
            if length != shape[axis]:
                raise ExportError(
                    f"dynamic_axes: {dimension!r} is {length} in the example at {first} and {shape[axis]} at "
                    f"{position}; use different names for different lengths"
                )
    return axes


def widened(inputs: Mapping[str, Any], sizes: DataSizes) -> dict[str, Any]:
    """Return an example whose dynamic axes have a size above 1 if the data contains larger sizes.

    torch takes broadcasting at size 1 for a property of the model, and fixes the axis.
    """
    minimal = {
        dimension: min(size for size in observed if size > 1)
        for dimension, observed in sizes.seen.items()
        if max(observed, default=1) > 1
        and any(_has_size_1(inputs.get(name), axis) for name, axis in _axes_of(sizes, dimension))
    }
    return sizes.resized(inputs, minimal)


def _axes_of(sizes: DataSizes, dimension: str) -> list[tuple[str, int]]:
    return [(name, axis) for name, axes in sizes.axes.items() for axis, label in axes.items() if label == dimension]


def _has_size_1(value: Any, axis: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > axis and value.shape[axis] == 1


def dynamic_shapes(inputs: Mapping[str, Any], sizes: DataSizes) -> dict[str, Any]:
    """Return the ``dynamic_shapes`` argument of ``torch.export``: one entry per input."""
    axes = sizes.axes
    dimensions: dict[str, Any] = {}

    def entry(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() == 0:
            return None
        for axis, dimension in axes.get(name, {}).items():
            least = min(value.shape[axis], _MIN_SEQUENCE, *sizes.seen.get(dimension, ()))
            dimensions.setdefault(dimension, torch.export.Dim(dimension, min=1 if dimension == BATCH else least))
        return {axis: dimensions[dimension] for axis, dimension in axes.get(name, {}).items()}

    return {name: entry(name, value) for name, value in inputs.items()}


def check_dynamic(model: Any, axes: Axes, *, explicit: bool, log: bool = True) -> None:
    """Log dynamic axes that torch fixed in the graph; raise if the caller asked for them."""
    shapes = {value.name: value.shape for value in model.graph.inputs}
    for name, named in axes.items():
        shape = shapes.get(name)
        for axis, dimension in named.items():
            if shape is None or axis >= len(shape) or not isinstance(shape[axis], int):
                continue
            fact = f"the model only works if axis {axis} of {name!r} is {shape[axis]}"
            if explicit:
                raise ExportError(f"dynamic_axes: {fact}, so it cannot be {dimension!r}; remove it from dynamic_axes")
            if log:
                logger.warning("export: %s, so it is fixed in the file", fact)


def hint(error: BaseException) -> str:
    """Return advice on ``dynamic_axes`` for an error about shapes, else an empty text."""
    while error.__cause__ is not None:
        error = error.__cause__
    if type(error).__name__ not in _SHAPE_ERRORS:
        return ""
    return "; set dynamic_axes= to choose the dynamic axes of the inputs ({} for none)"
