"""What the rules call an error and a target refuses at once, that target refuses; what is mended, it reads."""

from __future__ import annotations

import pytest
from test_check_rules import CASES, TENSORRT, Case

trt = pytest.importorskip("tensorrt_rtx_bindings", reason="needs enginequant[tensorrt-rtx]")

REFUSED = {"onnx-checker", "zero-point", "scale-value", "foreign-operator", "mixed-types", "element-type"}
"""Rules whose broken graphs TensorRT-RTX refuses to read. Those of other rules it builds, and they cost."""


def _reads(data: bytes) -> bool:
    logger = trt.Logger(trt.Logger.INTERNAL_ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    return bool(trt.OnnxParser(network, logger).parse(data))


@pytest.mark.parametrize("case", [case for case in CASES if case.target == TENSORRT], ids=str)
def test_tensorrt_rtx_reads_what_is_mended(case: Case) -> None:
    assert _reads(case.mended().proto().SerializeToString())
    infinite = "inf" in case.variant and case.rule == "scale-value"  # read, and no number comes out
    assert _reads(case.broken().proto().SerializeToString()) == (case.rule not in REFUSED or infinite)
