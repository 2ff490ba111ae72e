"""Target profiles as data: the types, granularity, opset and kinds of site that suit each backend, and its limits.

``profiles.add(name)(TargetProfile(...))``, in a file of its own, adds one. The rules for Q/DQ graphs stand here with
their severities, and so does what NVIDIA's Triton takes of each engine, from the documents and sources of its backends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from quantizer.plan.reasons import ReasonCode, RuleKind
from quantizer.utils.registry import Registry

if TYPE_CHECKING:
    import torch

Severity = Literal["error", "warning"]
"""An error: the backend refuses the file, computes other results than the file describes, or runs a product in another
precision than the file or the target demands. A warning: the file works, but slower, larger or less exactly."""

ALWAYS: Mapping[str, Severity] = {
    "onnx-checker": "error",
    "external-data": "error",
    "opset-format": "error",
    "scale-value": "error",
    "scale-constant": "warning",
    "dynamic-range": "warning",
    "scale-type": "warning",
    "pair-differs": "warning",
    "format": "warning",
    "dead-quantizer": "warning",
    "quantize-alone": "warning",
    "float-reader": "warning",
    "cast-between": "warning",
    "scaled-operand": "warning",
    "moved-operand": "warning",
    "half-site": "warning",
    "quantized-bias": "warning",
    "quantized-mask": "warning",
    "weight-axis": "warning",
    "activation-channels": "warning",
    "float-weight": "warning",
    "turned-weight": "warning",
    "shared-input": "warning",
    "site-kind": "warning",
    "saturating-weight": "warning",
    "foreign-operator": "error",
    "mixed-types": "error",
    "element-type": "error",
    "mask-range": "warning",
}
"""The rules for Q/DQ graphs of every backend."""

OPERATOR_FORMAT = frozenset({"QLinearMatMul", "QLinearConv", "MatMulInteger", "ConvInteger", "DynamicQuantizeLinear"})
"""Operators that compute in quantized types themselves, instead of Q/DQ around float operators."""


@dataclass(frozen=True, kw_only=True)
class GraphRules:
    """The rules for the graphs of one backend.

    Attributes:
        severities: the severity of each rule that applies, by its name.
        opsets: the first and the last opset that the backend reads; None: its runtime reports an unknown opset itself.
        integer_bias: the backend expects an INT32 bias with a DequantizeLinear.
        refused: operators of ONNX that the backend cannot read.
        own_domains: domains of operators outside ONNX that the backend runs.
        narrow_inputs: element types that only a Cast may read.
        absent_floats: float types that the backend does not compute in.
        signed_cost: the cost of a signed activation, for messages, if the profile prefers unsigned activations.
    """

    severities: Mapping[str, Severity] = field(default_factory=lambda: ALWAYS)
    opsets: tuple[int, int] | None = None
    integer_bias: bool = True
    refused: frozenset[str] = frozenset()
    own_domains: frozenset[str] = frozenset()
    narrow_inputs: frozenset[str] = frozenset()
    absent_floats: frozenset[str] = frozenset()
    signed_cost: str = ""


@dataclass(frozen=True, kw_only=True)
class TritonServer:
    """The one of Triton's backends that runs the engines of a target.

    Attributes:
        chosen_by: the line of a configuration that names it.
        file: the name of the file that it loads.
        takes: what that file is: our engine's, the ONNX file, or the engine without the line after it; None: another
            one, which has to be built on a GPU.
        kind: the kind of its instances.
        batches: whether requests of any size up to ``max_batch_size`` run as they are, and may be put together.
        basic_level: its number of the level of basic optimizations, for engine files that run as here at that one;
            None: it has no levels.
        parameters: its parameters by name; ``{threads}`` stands for the number of threads.
        hints: further parameters, by the inference precision of the engine.
        remarks: what a configuration says of itself.
        unhinted: what it says besides where there are no hints for the precision.
        gpu_tool: the program that runs the engines from the command line; None: they run on a CPU.
    """

    chosen_by: str
    file: str
    takes: Literal["engine", "onnx", "plan"] | None
    kind: Literal["KIND_CPU", "KIND_GPU"]
    batches: bool = True
    basic_level: str | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)
    hints: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    unhinted: tuple[str, ...] = ()
    gpu_tool: str | None = None


_LARGE_TABLE = 2**18
"""The numbers of a table of embeddings from which codes save a noteworthy part of a file: 768 KiB."""

_OF_NO_PLAN = {"name", "graph_rules", "triton", "library", "packages", "file_magic", "file_domains"}
_OF_NO_PLAN |= {"auto_rank", "fixed_sizes", "ahead_of_time", "exact_variant", "weight_dtypes", "dynamic", "recurrences"}
# A plan without any choice shows what they do.
_OF_NO_PLAN |= {"float_convolutions", "quantizes_outputs"}
# Of files alone.
_OF_NO_PLAN |= {"even_pairs", "unfused_rectifiers"}

TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})

FloatDtype = Literal["float16", "bfloat16", "float32"]
SiteKind = Literal["linear", "conv", "matmul", "residual_add", "embedding", "output"]


@dataclass(frozen=True, kw_only=True)
class AttentionLimits:
    """The sizes with which a target fuses attention in one format; with others, quantizing it costs more than it gains.

    Attributes:
        head_sizes: the head sizes that have a kernel; None: any.
        head_multiple: a number of which head sizes must be multiples.
        sequence: the longest sequence; None: any.
    """

    head_sizes: frozenset[int] | None = None
    head_multiple: int = 1
    sequence: int | None = None


@dataclass(frozen=True, kw_only=True)
class DynamicRanges:
    """The kernels of a target that take the range of an activation from its values at each run.

    Attributes:
        kinds: the kinds of site that have such a kernel.
        dtype: the format of the codes.
        block_size: how many neighbours along the last axis of an activation share a range, in each row; the engine then
            rounds by itself where a weight is stored in codes, and the file says nothing of it. None: all values of a
            tensor share one, and the file has a DynamicQuantizeLinear.
    """

    kinds: frozenset[SiteKind] = frozenset({"linear"})
    dtype: str = "uint8"
    block_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class WrongConvolutions:
    """Convolutions with a weight that a library computes wrongly in integers on some CPUs.

    Attributes:
        multiple: the width of the kernel is a multiple of this.
        channels: there are fewer input channels than this, in a group.
        product: width times channels is this or more.
        where: the CPUs, in words.
    """

    multiple: int
    channels: int
    product: int
    where: str


@dataclass(frozen=True, kw_only=True)
class Recurrences:
    """The recurrent layers that a target runs in low precision, and no slower than in one float kernel.

    Attributes:
        kinds: the names of their cells: ``lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu``.
        at_run_time: whether their kernel takes all ranges at run time, in UINT8, and has no projections. Otherwise the
            file has a Scan, with any ranges and formats.
        weights: a layer is not quantized if its recurrent product has fewer weights.
    """

    kinds: frozenset[str] = frozenset()
    at_run_time: bool = False
    weights: int = 0


@dataclass(frozen=True, kw_only=True)
class TargetProfile:
    """The preferences and limits of one backend.

    Attributes:
        name: the backend's name in configurations.
        float_dtype: the type of everything that is not quantized, scales included.
        site_kinds: the kinds of site that are worth quantizing.
        activation_dtypes: the formats of activations that it computes with.
        weight_dtypes: the formats of weights that it accepts.
        weight_qmax: the largest code of an INT8 weight; None: that of the format.
        min_gemm_dim: a product of [M, K] and [K, N] is not quantized if K or N is smaller; None: no limit.
        float_vectors: a product is not quantized if M is 1 for every batch size.
        float_convolutions: the names of operations (``conv_transpose2d``) for which it has no integer kernel.
        wrong_convolutions: the convolutions that are not quantized, since their results would be wrong; None: there
            are none.
        quantizes_outputs: whether it runs a convolution in integers only where its result is quantized, and the adds
            and other operators behind it where all their operands are.
        one_sided_adds: a residual add may be quantized on the side of its product only; the engine then reads the other
            operand as float.
        attention: the sizes with which attention is fused, by format; formats without an entry have no limit.
        capabilities: the compute capabilities for which it builds ahead of time, without such a GPU (89: sm89).
        inference_precisions: the types that can be set for everything that is not quantized; empty: none can, the types
            of the file apply.
        fp8_from: the first compute capability that has FP8; None: the target is no GPU.
        opset: the ONNX opset to write.
        unsigned_activations: the INT8 activations stored as UINT8 with zero point 128, with the same values: none,
            those that feed a product with a weight, or all.
        unfused_reductions: the operators whose results its files pass through a Max, since it would compute them in the
            type of the next Q.
        misread_reductions: the operators for which they do so where it would multiply the result by the factors of
            other channels, see ``export/qdq/openvino.py``.
        unfused_products: whether its files pass what it would multiply by factors of channels wrongly through a Max
            before it is rounded, see ``export/qdq/openvino.py``, and so what it would apply along another axis, with a
            copy of a weight that is read both ways, see ``export/qdq/openvino.py``.
        unfused_rectifiers: whether its files rectify a product by a Max, see
            ``export/passes/onnxruntime.py``.
        unshared_products: whether its files pass a quantized product that several nodes read through a Clip, see
            ``export/qdq/openvino.py``, and add the bias of a convolution behind it.
        kept_axes: whether its files keep the axis that an index takes out behind a product, and squeeze it behind that,
            and keep a Gather apart from a product with a zero point, and a concatenation from a Q with one, see
            ``export/qdq/openvino.py``.
        even_pairs: whether its files store INT4 weights with an odd number of inputs as INT8, see
            ``export/passes/codes.py``.
        row_codes: whether its files look up rows of a table in codes, and dequantize those; otherwise they dequantize a
            whole table, which some engines do at each run.
        zero_points: the kinds of site whose activations are UINT8 with a zero point of their own where INT8 is asked
            for, because the kernels take one at no cost.
        dynamic: its kernels that take the range of an activation at run time; None: it has none.
        recurrences: the recurrent layers that it runs in low precision.
        graph_rules: the rules for its Q/DQ files.
        library: the module that its engine imports to load a file; imported before memory is measured, so that the
            memory of the library itself does not count.
        packages: the distributions whose versions a report names.
        file_magic: a regular expression that matches the first 256 bytes of its engine files; None: they are ONNX files
            or have no known beginning.
        file_domains: domains of operators that occur only in its engine files, if those are ONNX files.
        fixed_sizes: whether its engines have models for fixed sizes of their inputs, so that one can do without that
            for all sizes.
        ahead_of_time: the backend of the same library that builds for GPUs of other machines, if this one does not.
        auto_rank: its place among the backends of its device where ``auto`` measures nothing; the lowest comes first.
        exact_variant: the backend to use on CPUs that add products of bytes in 16 bits, if this one's files saturate
            there.
        triton: what Triton is told of its engines; None: Triton has no backend for them.
    """

    name: str
    float_dtype: FloatDtype
    site_kinds: frozenset[SiteKind]
    activation_dtypes: frozenset[str] = frozenset({"int8"})
    weight_dtypes: frozenset[str] = frozenset({"int8"})
    weight_qmax: int | None = None
    min_gemm_dim: int | None = None
    float_vectors: bool = False
    float_convolutions: frozenset[str] = frozenset()
    wrong_convolutions: WrongConvolutions | None = None
    quantizes_outputs: bool = False
    one_sided_adds: bool = True
    attention: Mapping[str, AttentionLimits] = field(default_factory=dict)
    capabilities: frozenset[int] = frozenset()
    inference_precisions: frozenset[FloatDtype] = frozenset()
    fp8_from: int | None = None
    opset: int = 20
    unsigned_activations: Literal["none", "weighted", "all"] = "none"
    unfused_reductions: frozenset[str] = frozenset()
    misread_reductions: frozenset[str] = frozenset()
    unfused_products: bool = False
    unfused_rectifiers: bool = False
    unshared_products: bool = False
    kept_axes: bool = False
    even_pairs: bool = False
    row_codes: bool = False
    zero_points: frozenset[SiteKind] = frozenset()
    dynamic: DynamicRanges | None = None
    recurrences: Recurrences = Recurrences()
    graph_rules: GraphRules = field(default_factory=GraphRules)
    library: str | None = None
    packages: tuple[str, ...] = ()
    file_magic: bytes | None = None
    file_domains: frozenset[str] = frozenset()
    fixed_sizes: bool = False
    ahead_of_time: str | None = None
    auto_rank: int = 0
    exact_variant: str | None = None
    triton: TritonServer | None = None

    @property
    def reads_dynamic(self) -> bool:
        """True if its files may have a DynamicQuantizeLinear."""
        return self.dynamic is not None and self.dynamic.block_size is None

    @property
    def plan_traits(self) -> dict[str, object]:
        """The fields that plans depend on: backends with equal ones have plans that differ in words alone.

        That is with ranges of calibration and formats that both have, and without recurrent layers.
        """
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _OF_NO_PLAN}

    @property
    def torch_dtype(self) -> torch.dtype:
        """``float_dtype`` as a torch type."""
        import torch

        found: torch.dtype = getattr(torch, self.float_dtype)
        return found

    @property
    def rule(self) -> str:
        """The rule that a coverage report names for decisions of this profile."""
        return RuleKind.TARGET.text(key=self.name)

    def gemm_reason(self, k: int, n: int, rows: int = 0) -> str | None:
        """Return why a product of [rows, k] and [k, n] is not quantized on this target; None if it may be quantized."""
        if self.float_vectors and rows == 1:
            return ReasonCode.VECTOR.text(target=self.name)
        if self.min_gemm_dim is None or min(k, n) >= self.min_gemm_dim:
            return None
        axis, size = ("K", k) if k < self.min_gemm_dim else ("N", n)
        return ReasonCode.SMALL_PRODUCT.text(axis=axis, size=size, least=self.min_gemm_dim, target=self.name)

    def kernel_reason(self, operation: str) -> str | None:
        """Return why an operation of the catalogue is not quantized on this target; None if it has a kernel for it."""
        return (
            ReasonCode.NO_KERNEL.text(target=self.name, operation=operation)
            if operation in self.float_convolutions
            else None
        )

    def convolution_reason(self, channels: int, width: int) -> str | None:
        """Return why a convolution is not quantized on this target; None if it may be quantized."""
        wrong = self.wrong_convolutions
        if wrong is None or width % wrong.multiple or channels >= wrong.channels or width * channels < wrong.product:
            return None
        return ReasonCode.WRONG_CONVOLUTION.text(width=width, channels=channels, target=self.name, where=wrong.where)

    def dynamic_reason(self, kind: SiteKind, k: int) -> str | None:
        """Return why a site cannot have ranges at run time on this target; None if it can."""
        if self.dynamic is None or kind not in self.dynamic.kinds:
            return ReasonCode.NO_DYNAMIC.text(target=self.name)
        block = self.dynamic.block_size
        if block is not None and (k == 0 or k % block):
            return ReasonCode.DYNAMIC_BLOCKS.text(size=k, block=block, target=self.name)
        return None

    def recurrence_reason(self, kind: str, weights: int, *, projects: bool) -> str | None:
        """Return why a recurrent layer is not quantized on this target; None if it may be quantized."""
        if kind in self.recurrences.kinds and not (projects and self.recurrences.at_run_time):
            # No engine has a float kernel with projections.
            least = 0 if projects else self.recurrences.weights
            small = ReasonCode.SMALL_RECURRENCE.text(weights=weights, least=least, target=self.name)
            return small if weights < least else None
        layer = f"{kind}-with-projections" if projects else kind
        return ReasonCode.RECURRENCE.text(target=self.name, kind=layer)

    def table_reason(self, numbers: int | None) -> str | None:
        """Return why the table of an embedding is not worth to be stored in codes; None if it is."""
        if not self.row_codes:
            return ReasonCode.NO_GAIN.text(target=self.name)
        if numbers is None or numbers >= _LARGE_TABLE:
            return None
        return ReasonCode.SMALL_TABLE.text(numbers=numbers, least=_LARGE_TABLE)

    def add_reason(self, skipping: str, why: str) -> str | None:
        """Return why the output of a product is not quantized in a residual add; None if it may be quantized."""
        if self.one_sided_adds:
            return None
        return ReasonCode.ONE_SIDED_ADD.text(skipping=skipping, why=why, target=self.name)

    def attention_reason(self, dtype: str, head: int, sequence: int) -> str | None:
        """Return why an attention is not quantized on this target; None if it may be in ``dtype``."""
        limits = self.attention.get(dtype)
        if limits is None:
            return None
        if limits.head_sizes is not None and head and head not in limits.head_sizes:
            sizes = ", ".join(map(str, sorted(limits.head_sizes)))
            return ReasonCode.HEAD_SIZE.text(head=head, sizes=sizes, target=self.name, dtype=dtype)
        if head % limits.head_multiple:
            multiple = limits.head_multiple
            return ReasonCode.HEAD_MULTIPLE.text(head=head, multiple=multiple, target=self.name, dtype=dtype)
        if limits.sequence is not None and sequence > limits.sequence:
            longest = limits.sequence
            return ReasonCode.SEQUENCE.text(sequence=sequence, longest=longest, target=self.name, dtype=dtype)
        return None

    def precision_reason(self, precision: str) -> str | None:
        """Return why ``precision`` cannot be set for this target; None if it can."""
        if not self.inference_precisions:
            return f"{self.name} computes in the types of the ONNX file; leave {precision!r} out, or set fallback_dtype"
        if precision not in self.inference_precisions:
            return f"{precision!r} is unknown to {self.name}; expected {' or '.join(sorted(self.inference_precisions))}"
        return None

    def stripping_reason(self) -> str | None:
        """Return why engines cannot be built without their weights; None if they can."""
        return f"{self.name} keeps the weights in its engines; leave it out" if self.fp8_from is None else None

    def capability_reason(self, capability: str, formats: Collection[str]) -> str | None:
        """Return why no engine can be built for a compute capability; None if one can."""
        if self.fp8_from is None:
            return f"{self.name} runs on a CPU, which has no compute capability; leave {capability!r} out"
        if not self.capabilities:
            other = "" if self.ahead_of_time is None else f", or take {self.ahead_of_time}"
            return f"{self.name} builds for the GPU of this machine; leave {capability!r} out{other}"
        number = int(capability.removeprefix("sm"))
        if number not in self.capabilities:
            known = ", ".join(f"sm{entry}" for entry in sorted(self.capabilities))
            return f"{capability!r} is unknown to {self.name}; expected one of {known}"
        if "fp8" in formats and number < self.fp8_from:
            return f"{capability!r} has no FP8: it came with sm{self.fp8_from}; take that or later, or int8"
        return None


AUTO = "auto"
"""In place of a backend's name: the one whose engine is the fastest here."""

profiles: Registry[TargetProfile] = Registry(
    "backend", reserved=(AUTO,), of="object", has=("site_kinds", "float_dtype")
)


def profile(name: str, float_dtype: FloatDtype | None = None) -> TargetProfile:
    """Return the profile of a backend."""
    found = profiles[name]
    return found if float_dtype is None else replace(found, float_dtype=float_dtype)


class Problem(NamedTuple):
    """A problem, and the setting that causes it: a key of a configuration or an option of a command."""

    place: str
    text: str


def engine_problems(
    targets: Sequence[TargetProfile],
    *,
    formats: Set[str] = frozenset(),
    capabilities: Sequence[str] = (),
    precision: str | None = None,
    strip_weights: bool = False,
) -> Iterator[Problem]:
    """Yield the options that targets do not support."""
    for capability in capabilities:
        for target in targets:
            if (reason := target.capability_reason(capability, formats)) is not None:
                yield Problem("compute_capability", reason)
    if precision is not None and targets:
        reasons = [target.precision_reason(precision) for target in targets]
        # The setting applies to the targets that support it; others compute in the types of their files.
        if None not in reasons:
            yield Problem("inference_precision", str(reasons[0]))
    if strip_weights:
        for target in targets:
            if (reason := target.stripping_reason()) is not None:
                yield Problem("strip_weights", reason)
