"""Target profiles as data: the types, granularity, opset, kinds of site and limits of each backend.

``profiles.add(name)(TargetProfile(...))`` registers a profile. This file also lists the rules for Q/DQ graphs with
their severities, and the settings of NVIDIA Triton for each engine, from the documents and sources of its backends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from quantizer.plan.reasons import ReasonCode, RuleKind
from quantizer.plan.targets.clients import Layout
from quantizer.utils.registry import Registry

if TYPE_CHECKING:
    import torch

Severity = Literal["error", "warning"]
"""Error: the backend rejects the file, computes other results than the file describes, or runs an operation in another
precision than the file requires. Warning: the file works, but is slower, larger or less accurate."""

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
    """The rules for the ONNX graphs of one backend.

    Attributes:
        severities: the severity of each rule that applies, by its name.
        opsets: the first and the last opset that the backend reads; None: its runtime reports an unknown opset itself.
        integer_bias: whether the backend accepts an INT32 bias with a DequantizeLinear.
        refused: ONNX operators that the backend cannot read.
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
    """The Triton backend that runs the engines of a target.

    Attributes:
        chosen_by: the configuration line that selects it.
        file: the name of the file that it loads.
        takes: the kind of that file: our engine, the ONNX file, or the engine without the line after it; None: another
            file, which has to be built on a GPU.
        kind: the kind of its instances.
        batches: whether requests of any size up to ``max_batch_size`` run as they are and may be batched.
        basic_level: its number for basic graph optimizations, so that engines run as they do here; None: it has no
            levels.
        parameters: its parameters by name; ``{threads}`` stands for the number of threads.
        hints: further parameters, by the inference precision of the engine.
        remarks: comments for every configuration.
        unhinted: further comments if there are no hints for the precision.
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
"""The number of elements from which quantizing an embedding table saves noteworthy space: 768 KiB."""

_OF_NO_PLAN = {"name", "graph_rules", "triton", "layouts", "library", "packages", "file_magic", "file_domains"}
_OF_NO_PLAN |= {"auto_rank", "fixed_sizes", "ahead_of_time", "exact_variant", "weight_dtypes", "dynamic", "recurrences"}
_OF_NO_PLAN |= {"strips_weights"}
# The effect of these shows in a plan without any choice.
_OF_NO_PLAN |= {"float_convolutions", "quantizes_outputs"}
# These concern files only.
_OF_NO_PLAN |= {"even_pairs", "unfused_rectifiers"}

TRANSPOSED = frozenset({"conv_transpose1d", "conv_transpose2d", "conv_transpose3d"})

FloatDtype = Literal["float16", "bfloat16", "float32"]
SiteKind = Literal["linear", "conv", "matmul", "residual_add", "embedding", "output"]


@dataclass(frozen=True, kw_only=True)
class AttentionLimits:
    """The sizes for which a target has a fused attention kernel in one format; others are slower quantized than in
    float.

    Attributes:
        head_sizes: the head sizes that have a kernel; None: any.
        head_multiple: head sizes must be multiples of this number.
        sequence: the longest sequence; None: any.
    """

    head_sizes: frozenset[int] | None = None
    head_multiple: int = 1
    sequence: int | None = None


@dataclass(frozen=True, kw_only=True)
class DynamicRanges:
    """The dynamic quantization kernels of a target, which compute the range of an activation at each run.

    Attributes:
        kinds: the kinds of site that have such a kernel.
        dtype: the format of the quantized values.
        block_size: the number of neighbors along the last axis of an activation that share a range. The engine then
            quantizes activations by itself if a weight is stored as integers, and the file contains no operators for
            it. None: all values of a tensor share one range, and the file contains a DynamicQuantizeLinear.
    """

    kinds: frozenset[SiteKind] = frozenset({"linear"})
    dtype: str = "uint8"
    block_size: int | None = None


@dataclass(frozen=True, kw_only=True)
class WrongConvolutions:
    """Convolutions for which a library computes wrong integer results on some CPUs.

    Attributes:
        multiple: the width of the kernel is a multiple of this.
        channels: a group has fewer input channels than this.
        product: width times channels is at least this.
        where: the CPUs, in words.
    """

    multiple: int
    channels: int
    product: int
    where: str


@dataclass(frozen=True, kw_only=True)
class Recurrences:
    """The recurrent layers that a target runs in low precision at least as fast as in one float kernel.

    Attributes:
        kinds: the names of their cells: ``lstm``, ``gru``, ``rnn_tanh`` and ``rnn_relu``.
        at_run_time: whether the kernel computes all ranges at run time, in UINT8, without projections. Otherwise the
            file contains a Scan, with any ranges and formats.
        weights: layers with fewer recurrent weights are not quantized.
    """

    kinds: frozenset[str] = frozenset()
    at_run_time: bool = False
    weights: int = 0


@dataclass(frozen=True, kw_only=True)
class TargetProfile:
    """The preferences and limits of one backend.

    Attributes:
        name: the backend's name in configurations.
        float_dtype: the type of non-quantized operations and of scales.
        site_kinds: the kinds of site that are worth quantizing.
        activation_dtypes: the formats of activations that it computes with.
        weight_dtypes: the formats of weights that it accepts.
        weight_qmax: the largest value of an INT8 weight; None: that of the format.
        min_gemm_dim: a multiplication of [M, K] and [K, N] is not quantized if K or N is smaller; None: no limit.
        float_vectors: a multiplication is not quantized if M is 1 for every batch size.
        float_convolutions: the names of operations (``conv_transpose2d``) without an integer kernel.
        wrong_convolutions: the convolutions that are not quantized because their results would be wrong; None: none.
        quantizes_outputs: whether a convolution runs in integers only if its output is quantized, and adds and other
            operators after it only if all their operands are.
        one_sided_adds: whether a residual add may be quantized on the layer's side only; the engine then reads the
            other operand in float.
        attention: the sizes for which attention is fused, by format; formats without an entry have no limit.
        capabilities: the compute capabilities for which it builds engines without such a GPU (89: sm89).
        inference_precisions: the types that can be set for non-quantized operations; empty: the types of the file
            apply.
        fp8_from: the first compute capability with FP8; None: the target is not a GPU.
        strips_weights: whether it can write engines without their weights.
        opset: the ONNX opset to write.
        unsigned_activations: the INT8 activations stored as UINT8 with zero point 128, with the same values: none, the
            inputs of layers with weights, or all.
        unfused_reductions: the operators whose results pass through a Max in its files, because the backend would
            otherwise compute them in the type of the next Q.
        misread_reductions: the operators whose results pass through a Max because the backend would otherwise multiply
            them by the factors of other channels, see ``export/qdq/openvino.py``.
        unfused_products: whether its files insert a Max, or a copy of a weight, where the backend would otherwise apply
            factors of channels along a wrong axis, see ``export/qdq/openvino.py``.
        unfused_rectifiers: whether its files replace the ReLU after a MatMul or Conv by a Max, see
            ``export/passes/onnxruntime.py``.
        unshared_products: whether its files pass a quantized result that several nodes read through a Clip, and add the
            bias of a convolution after it, see ``export/qdq/openvino.py``.
        kept_axes: whether its files keep the axis that an index removes after a MatMul and squeeze it later, and
            separate a Gather or a concatenation from zero points, see ``export/qdq/openvino.py``.
        even_pairs: whether its files store INT4 weights with an odd number of inputs as INT8, see
            ``export/passes/codes.py``.
        row_codes: whether its files look up rows of an integer table and dequantize the rows; otherwise they dequantize
            the whole table, which some engines do at each run.
        zero_points: the kinds of site whose INT8 activations become UINT8 with a computed zero point, because the
            kernels apply zero points at no cost.
        dynamic: its dynamic quantization kernels; None: it has none.
        recurrences: the recurrent layers that it runs in low precision.
        graph_rules: the rules for its Q/DQ files.
        library: the module that its engine imports to load a file; it is imported before memory is measured, so that
            the memory of the library does not count.
        packages: the distributions whose versions a report lists.
        file_magic: a regular expression that matches the first 256 bytes of its engine files; None: they are ONNX files
            or have no known beginning.
        file_domains: operator domains that occur only in its engine files, if those are ONNX files.
        fixed_sizes: whether its engines contain models for fixed input sizes, so that an engine may lack the model for
            all sizes.
        ahead_of_time: the backend of the same library that builds for GPUs of other machines, if this one does not.
        auto_rank: its rank among the backends of its device if ``auto`` measures nothing; the lowest comes first.
        exact_variant: the backend for CPUs that add products of bytes in 16 bits, if files of this one saturate there.
        triton: the Triton settings of its engines; None: Triton has no backend for them.
        layouts: the layouts of ``deliver`` that it writes for other clients, by name.
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
    strips_weights: bool = False
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
    layouts: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The device of its engines."""
        return "cpu" if self.fp8_from is None else "cuda"

    @property
    def reads_dynamic(self) -> bool:
        """True if its files may contain a DynamicQuantizeLinear."""
        return self.dynamic is not None and self.dynamic.block_size is None

    @property
    def plan_traits(self) -> dict[str, object]:
        """The fields that plans depend on: with equal traits, the plans of two backends differ in words only.

        This holds for static ranges, formats that both backends have, and models without recurrent layers.
        """
        return {item.name: getattr(self, item.name) for item in fields(self) if item.name not in _OF_NO_PLAN}

    @property
    def torch_dtype(self) -> torch.dtype:
        """``float_dtype`` as a torch type."""
        import torch

        dtype: torch.dtype = getattr(torch, self.float_dtype)
        return dtype

    @property
    def float_model_dtype(self) -> torch.dtype:
        """The type of the ONNX file of a float model, which a backend with ``inference_precisions`` casts itself."""
        import torch

        return torch.float32 if self.inference_precisions else self.torch_dtype

    @property
    def rule(self) -> str:
        """The rule that the coverage shows for decisions of this profile."""
        return RuleKind.TARGET.text(key=self.name)

    def gemm_reason(self, k: int, n: int, rows: int = 0) -> str | None:
        """Return why a multiplication of [rows, k] and [k, n] is not quantized on this target; None if it can be."""
        if self.float_vectors and rows == 1:
            return ReasonCode.VECTOR.text(target=self.name)
        if self.min_gemm_dim is None or min(k, n) >= self.min_gemm_dim:
            return None
        axis, size = ("K", k) if k < self.min_gemm_dim else ("N", n)
        return ReasonCode.SMALL_PRODUCT.text(axis=axis, size=size, least=self.min_gemm_dim, target=self.name)

    def kernel_reason(self, operation: str) -> str | None:
        """Return why an operation lacks an integer kernel on this target; None if there is one."""
        return (
            ReasonCode.NO_KERNEL.text(target=self.name, operation=operation)
            if operation in self.float_convolutions
            else None
        )

    def convolution_reason(self, channels: int, width: int) -> str | None:
        """Return why a convolution is not quantized on this target; None if it can be."""
        wrong = self.wrong_convolutions
        if wrong is None or width % wrong.multiple or channels >= wrong.channels or width * channels < wrong.product:
            return None
        return ReasonCode.WRONG_CONVOLUTION.text(width=width, channels=channels, target=self.name, where=wrong.where)

    def dynamic_reason(self, kind: SiteKind, k: int) -> str | None:
        """Return why a site cannot be dynamically quantized on this target; None if it can."""
        if self.dynamic is None or kind not in self.dynamic.kinds:
            return ReasonCode.NO_DYNAMIC.text(target=self.name)
        block = self.dynamic.block_size
        if block is not None and (k == 0 or k % block):
            return ReasonCode.DYNAMIC_BLOCKS.text(size=k, block=block, target=self.name)
        return None

    def recurrence_reason(self, kind: str, weights: int, *, projects: bool) -> str | None:
        """Return why a recurrent layer is not quantized on this target; None if it can be."""
        if kind in self.recurrences.kinds and not (projects and self.recurrences.at_run_time):
            # No engine has a float kernel with projections.
            least = 0 if projects else self.recurrences.weights
            small = ReasonCode.SMALL_RECURRENCE.text(weights=weights, least=least, target=self.name)
            return small if weights < least else None
        layer = f"{kind}-with-projections" if projects else kind
        return ReasonCode.RECURRENCE.text(target=self.name, kind=layer)

    def table_reason(self, numbers: int | None) -> str | None:
        """Return why an embedding table is not quantized on this target; None if it can be."""
        if not self.row_codes:
            return ReasonCode.NO_GAIN.text(target=self.name)
        if numbers is None or numbers >= _LARGE_TABLE:
            return None
        return ReasonCode.SMALL_TABLE.text(numbers=numbers, least=_LARGE_TABLE)

    def add_reason(self, skipping: str, why: str) -> str | None:
        """Return why a residual add is not quantized on the layer's side only; None if it can be."""
        if self.one_sided_adds:
            return None
        return ReasonCode.ONE_SIDED_ADD.text(skipping=skipping, why=why, target=self.name)

    def attention_reason(self, dtype: str, head: int, sequence: int) -> str | None:
        """Return why an attention is not quantized to ``dtype`` on this target; None if it can be."""
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
            return f"{self.name} uses the types of the ONNX file; remove {precision!r}, or set fallback_dtype"
        if precision not in self.inference_precisions:
            return (
                f"{self.name} does not support {precision!r}; expected {' or '.join(sorted(self.inference_precisions))}"
            )
        return None

    def stripping_reason(self) -> str | None:
        """Return why engines cannot be built without their weights; None if they can."""
        return (
            None if self.strips_weights else f"{self.name} always stores the weights in its engines; remove the option"
        )

    def capability_reason(self, capability: str, formats: Collection[str]) -> str | None:
        """Return why no engine can be built for a compute capability; None if it can be."""
        if self.fp8_from is None:
            return f"{self.name} runs on a CPU, which has no compute capability; remove {capability!r}"
        if not self.capabilities:
            other = "" if self.ahead_of_time is None else f", or use {self.ahead_of_time}"
            return f"{self.name} builds for the GPU of this machine; remove {capability!r}{other}"
        number = int(capability.removeprefix("sm"))
        if number not in self.capabilities:
            known = ", ".join(f"sm{entry}" for entry in sorted(self.capabilities))
            return f"{self.name} does not support {capability!r}; expected one of {known}"
        if "fp8" in formats and number < self.fp8_from:
            return f"{capability!r} has no FP8; use sm{self.fp8_from} or later, or int8"
        return None


AUTO = "auto"
"""Select the backend whose engine is fastest on this machine."""

profiles: Registry[TargetProfile] = Registry(
    "backend", reserved=(AUTO,), of="object", has=("site_kinds", "float_dtype")
)


def profile(name: str, float_dtype: FloatDtype | None = None) -> TargetProfile:
    """Return the profile of a backend, with another float type if ``float_dtype`` is given."""
    selected = profiles[name]
    return selected if float_dtype is None else replace(selected, float_dtype=float_dtype)


class Problem(NamedTuple):
    """An unsupported setting: a configuration key or command option, and the message."""

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
    """Yield the options that the targets do not support."""
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
