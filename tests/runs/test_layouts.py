"""Layouts for other clients: file names and metadata, and what is refused. The clients: tests/clients."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

for _package in ("transformers", "onnx", "openvino"):
    pytest.importorskip(_package, reason="layouts need enginequant[hf,onnx,openvino]")

import onnx
import transformers
from helpers import openvino_core, read_json
from served_engine import write_onnx
from tiny_run import tiny_run

import quantizer
import quantizer.pipeline.layouts as layouts_module
from quantizer.cli.main import main
from quantizer.config import RunConfig
from quantizer.config.layouts import LAYOUTS, backends_of, layout_of, left_out
from quantizer.config.schema import check_run
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.engines.openvino.engine import OpenVINOBackend
from quantizer.errors import ConfigError, EngineError, QuantizerError, TaskError
from quantizer.export.qdq.structure import read_signature
from quantizer.pipeline.client_code import client_code
from quantizer.pipeline.convert_options import conversion_configs
from quantizer.pipeline.fastest_engine import variants_of
from quantizer.pipeline.layouts import check_layouts, first_token, write_layout_cards, write_layouts
from quantizer.pipeline.preflight import ready_to_run
from quantizer.pipeline.run import RUN
from quantizer.plan.targets import profiles
from quantizer.plan.targets.clients import OF_ANY_BACKEND, OF_MODULES
from quantizer.tasks import tasks
from quantizer.tasks.outputs import SentencePooling
from quantizer.tasks.zero_shot import TextTower
from quantizer.utils.registry import TASKS_IN_PARTS

OF_CHECKPOINTS = [name for name in LAYOUTS if name not in OF_MODULES]
"""The layouts here; those of modules are in test_ultralytics_layout.py."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny classifier, its tokenizer and data."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_run(folder)
    return folder


def job_of(checkpoint: Path, target: Path, task: str, backend: str, *layouts: str, **changes: Any) -> Any:
    """The parts of a job that layouts are written from, with a graph of one operator."""
    write_onnx(target / "model.onnx")
    config = {"deliver": layouts, "quantizer": SimpleNamespace(backend=backend)}
    config["model"] = SimpleNamespace(max_length=48, source=str(checkpoint / "model"))
    facts = {
        "config": SimpleNamespace(**config),
        "target": target,
        "among": None,
        "model": transformers.AutoModel.from_pretrained(checkpoint / "model"),
        "context": SimpleNamespace(
            task=SimpleNamespace(name=task),
            processor=transformers.AutoTokenizer.from_pretrained(checkpoint / "model"),
        ),
        "only_sizes": (),
    }
    return SimpleNamespace(**{**facts, **changes})


def with_weights(job: Any, **options: Any) -> None:
    """Add the quantized model to the parts of a job."""
    job.quantizer = quantizer.Quantizer(preset="plain", backend="openvino", **options)
    batch = dict(job.context.processor(["the film was good", "a dull plot"], padding=True, return_tensors="pt"))
    job.quantizer.calibrate(job.model.eval(), [batch], progress=False)
    job.frozen = job.quantizer.quantize(job.model)


def written(target: Path) -> set[str]:
    """The files below a folder, without the graph that they were written from."""
    paths = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    return paths - {"model.onnx"}


HUB = {"config.json", "tokenizer.json", "tokenizer_config.json"}
"""What transformers writes beside a graph."""


@pytest.mark.parametrize(
    ("backend", "layout", "graphs"),
    [
        ("openvino", "openvino", {"model.xml", "model.bin", *(f"tokenizer/{name}" for name in HUB)}),
        ("onnxruntime", "onnx", {"model.onnx", *(f"tokenizer/{name}" for name in HUB)}),
        ("openvino-avx2", "optimum", {"openvino_model.xml", "openvino_model.bin", *HUB}),
        ("onnxruntime-avx2", "optimum", {"model.onnx", *HUB}),
        ("onnxruntime", "transformers-js", {"onnx/model_quantized.onnx", *HUB}),
        ("onnxruntime", "sentence-transformers", {"onnx/model.onnx", *HUB}),
        ("openvino", "sentence-transformers", {"openvino/openvino_model.xml", "openvino/openvino_model.bin", *HUB}),
        ("torch", "compressed-tensors", {"model.safetensors", *HUB}),
    ],
)
def test_the_files_of_a_layout(checkpoint: Path, tmp_path: Path, backend: str, layout: str, graphs: set[str]) -> None:
    job = job_of(checkpoint, tmp_path, "sequence-classification", backend, "processor", layout)
    if layout == "compressed-tensors":
        with_weights(job)
    check_layouts(job)
    write_layouts(job, {"model": tmp_path / "model.onnx"}, quantized=True)
    assert written(tmp_path) == {f"{layout}/{name}" for name in graphs}
    if graphs >= HUB:
        assert read_json(tmp_path / layout / "config.json")["model_type"] == "bert"


def test_a_float_model_is_not_called_quantized(checkpoint: Path, tmp_path: Path) -> None:
    job = job_of(checkpoint, tmp_path, "sequence-classification", "onnxruntime", "transformers-js")
    write_layouts(job, {"model": tmp_path / "model.onnx"}, quantized=False)
    assert written(tmp_path) == {f"transformers-js/{name}" for name in {"onnx/model.onnx", *HUB}}


@pytest.mark.parametrize(
    ("pooling", "modules"),
    [
        (None, ["Transformer", "Pooling", "Normalize"]),
        (SentencePooling(("cls", "max"), normalize=False, similarity="dot"), ["Transformer", "Pooling"]),
    ],
)
def test_the_modules_of_sentence_transformers(
    checkpoint: Path, tmp_path: Path, pooling: SentencePooling | None, modules: list[str]
) -> None:
    job = job_of(checkpoint, tmp_path, "sentence-similarity", "openvino", "sentence-transformers")
    if pooling is not None:
        job.model.sentence_pooling = pooling
    write_layouts(job, {"model": tmp_path / "model.onnx"}, quantized=True)
    folder = tmp_path / "sentence-transformers"
    entries = read_json(folder / "modules.json")
    assert [entry["type"].rpartition(".")[2] for entry in entries] == modules
    assert all((folder / entry["path"]).is_dir() for entry in entries)
    expected = "mean" if pooling is None else ["cls", "max"]
    settings = {"word_embedding_dimension": 32, "pooling_mode": expected, "include_prompt": True}
    assert read_json(folder / "1_Pooling/config.json") == settings
    assert read_json(folder / "sentence_bert_config.json")["max_seq_length"] == 48
    similarity = "cosine" if pooling is None else "dot"
    assert read_json(folder / "config_sentence_transformers.json") == {"similarity_fn_name": similarity}


def test_a_tokenizer_that_transformers_4_reads(checkpoint: Path, tmp_path: Path) -> None:
    job = job_of(checkpoint, tmp_path, "fill-mask", "onnxruntime", "optimum")
    file = str(checkpoint / "model" / "tokenizer.json")
    job.context.processor = transformers.PreTrainedTokenizerFast(
        tokenizer_file=file, pad_token="[PAD]", unk_token="[UNK]", additional_special_tokens=["the"]
    )
    write_layouts(job, {"model": tmp_path / "model.onnx"}, quantized=True)
    settings = read_json(tmp_path / "optimum" / "tokenizer_config.json")
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["the"]
    assert "extra_special_tokens" not in settings
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "optimum")
    assert again("the film").input_ids == job.context.processor("the film").input_ids


def test_an_empty_cache_of_the_browser(checkpoint: Path, tmp_path: Path) -> None:
    """transformers.js knows the batch dimension of a cache by its name; other layouts and graphs keep theirs."""
    job = job_of(checkpoint, tmp_path, "text-generation-with-past", "onnxruntime", "onnx", "transformers-js")
    write_layouts(job, {"model": tmp_path / "model.onnx"}, quantized=True)
    plain, other = tmp_path / "onnx" / "model.onnx", "onnx/model_quantized.onnx"
    assert plain.samefile(tmp_path / "transformers-js" / other)
    shutil.rmtree(tmp_path / "onnx")
    shutil.rmtree(tmp_path / "transformers-js")
    model = onnx.load(tmp_path / "model.onnx")
    model.graph.input[0].name = model.graph.node[0].input[0] = "past_key_values.0.key"
    onnx.save(model, tmp_path / "model.onnx")
    write_layouts(job, {"model": tmp_path / "model.onnx"}, quantized=True)
    sizes = [read_signature(path).inputs[0].shape for path in (plain, tmp_path / "transformers-js" / other)]
    assert sizes == [("batch", 4), ("batch_size", 4)]


PARTS = ("encoder_model", "decoder_model", "decoder_with_past_model")


@pytest.mark.parametrize(
    ("backend", "plain", "expected"),
    [
        ("openvino", "openvino", {f"openvino/{part}.{suffix}" for part in PARTS for suffix in ("xml", "bin")}),
        ("onnxruntime", "onnx", {f"onnx/{part}.onnx" for part in PARTS}),
    ],
)
def test_the_files_of_an_encoder_decoder(
    checkpoint: Path, tmp_path: Path, backend: str, plain: str, expected: set[str]
) -> None:
    """The ONNX files of several graphs lie in the folder of the layout ``onnx`` from the start."""
    job = job_of(checkpoint, tmp_path, "text-to-text", backend, plain, "optimum")
    job.model.generation_config = transformers.GenerationConfig(num_beams=3)
    (tmp_path / "onnx").mkdir()
    graphs = {part: write_onnx(tmp_path / "onnx" / f"{part}.onnx") for part in PARTS}
    check_layouts(job)
    write_layouts(job, graphs, quantized=True)
    start = "openvino_" if backend == "openvino" else ""
    optimum = {f"optimum/{start}{Path(path).name}" for path in expected} | {f"optimum/{name}" for name in HUB}
    sources = {f"onnx/{part}.onnx" for part in PARTS}
    beside = {f"{plain}/tokenizer/{name}" for name in HUB}
    assert written(tmp_path) == expected | optimum | sources | beside | {"optimum/generation_config.json"}
    assert read_json(tmp_path / "optimum" / "generation_config.json")["num_beams"] == 3
    with pytest.raises(QuantizerError, match="is a layout for another client, without an engine"):
        quantizer.load_converted(tmp_path / "optimum")
    for path in sorted(expected):
        assert (tmp_path / path).samefile(tmp_path / "optimum" / f"{start}{Path(path).name}")


def test_layouts_share_their_weights(checkpoint: Path, tmp_path: Path) -> None:
    job = job_of(checkpoint, tmp_path, "sentence-similarity", "openvino", "openvino", "optimum")
    write_layouts(job, {"model": tmp_path / "model.onnx"}, quantized=True)
    for suffix in ("xml", "bin"):
        assert (tmp_path / f"openvino/model.{suffix}").samefile(tmp_path / f"optimum/openvino_model.{suffix}")


def test_prompts_go_along(checkpoint: Path, tmp_path: Path) -> None:
    job = job_of(checkpoint, tmp_path, "retrieval", "onnxruntime", "sentence-transformers")
    shutil.copytree(checkpoint / "model", source := tmp_path / "source")
    job.config.model.source = str(source)
    prompts = {"prompts": {"query": "q: ", "passage": "p: ", "": ""}, "default_prompt_name": "query"}
    (source / "config_sentence_transformers.json").write_text(json.dumps({**prompts, "similarity_fn_name": "dot"}))
    job.model.sentence_pooling = SentencePooling(("cls",), normalize=True, include_prompt=False)
    write_layouts(job, {"model": tmp_path / "model.onnx"}, quantized=True)
    folder = tmp_path / "sentence-transformers"
    assert read_json(folder / "config_sentence_transformers.json") == {**prompts, "similarity_fn_name": "cosine"}
    assert read_json(folder / "1_Pooling" / "config.json")["include_prompt"] is False


def test_each_backend_that_may_be_chosen_is_checked(checkpoint: Path, tmp_path: Path) -> None:
    job = job_of(checkpoint, tmp_path, "automatic-speech-recognition", "openvino", "optimum")
    job.context.feed = SimpleNamespace(example=lambda: {"input_values": None, "attention_mask": None})
    check_layouts(job)
    job.among = ("openvino", "onnxruntime")
    with pytest.raises(TaskError, match=r"'optimum' loads task .* which passes no attention mask, but .* needs one"):
        check_layouts(job)


def test_weights_are_not_rounded_to_half(tmp_path: Path) -> None:
    OpenVINOBackend().write_graph(write_onnx(tmp_path / "model.onnx"), tmp_path / "model.xml")
    graph = openvino_core().read_model(tmp_path / "model.xml")
    stored = {node.get_element_type().get_type_name() for node in graph.get_ops() if "Constant" in node.get_type_name()}
    assert stored == {"f32"}
    assert graph.get_rt_info(["runtime_options", "DYNAMIC_QUANTIZATION_GROUP_SIZE"]).astype(str) == "128"


def test_a_graph_that_openvino_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"damaged")
    with pytest.raises(EngineError, match=r"OpenVINO cannot write .*model\.onnx as model\.xml: "):
        OpenVINOBackend().write_graph(tmp_path / "model.onnx", tmp_path / "model.xml")


def test_the_weights_of_the_quantized_model(checkpoint: Path, tmp_path: Path) -> None:
    job = job_of(checkpoint, tmp_path, "sequence-classification", "torch", "compressed-tensors")
    with_weights(job, exclude={"names": ["**.query"]})
    # They do not depend on the sizes of the engine.
    job.only_sizes = ({"batch": 1},)
    write_layouts(job, {"model": tmp_path / "model.onnx"}, quantized=True)
    config = read_json(tmp_path / "compressed-tensors" / "config.json")["quantization_config"]
    assert config["format"] == "int-quantized"
    assert config["ignore"] == ["encoder.layer.0.attention.self.query"]


def test_layers_that_stay_in_floating_point_are_named(checkpoint: Path, tmp_path: Path) -> None:
    said: list[str] = []
    job = job_of(
        checkpoint, tmp_path, "fill-mask", "torch", "compressed-tensors", timer=SimpleNamespace(say=said.append)
    )
    with_weights(job, activations={"smoothquant_alpha": 0.5})
    write_layouts(job, {"model": tmp_path / "model.onnx"}, quantized=True)
    (message,) = said
    assert "'compressed-tensors' keeps" in message or "no quantized linear layer can be expressed" in message
    assert "factors of SmoothQuant or AWQ, which the format does not have" in message


@pytest.mark.parametrize("alpha", [None, 0.5])
def test_the_preset_has_no_factors_where_the_layout_has_none(alpha: float | None) -> None:
    assert run_of("fill-mask", "torch").quantizer.activations.smoothquant_alpha == "auto"
    given = {} if alpha is None else {"activations": {"smoothquant_alpha": alpha}}
    config = run_of("fill-mask", "torch", "compressed-tensors", **given)
    assert config.quantizer.activations.smoothquant_alpha == alpha
    assert config.quantizer.activations.calibrator == "output"


@pytest.mark.parametrize("layouts", [[], ["openvino"], ["compressed-tensors"]])
def test_a_run_says_that_smoothquant_is_left_out(checkpoint: Path, tmp_path: Path, layouts: list[str]) -> None:
    config = run_of("sequence-classification", "openvino", *layouts)
    data = config.data.model_copy(
        update={"calibration": config.data.calibration.model_copy(update={"path": str(checkpoint / "calibration.csv")})}
    )
    model = config.model.model_copy(update={"source": str(checkpoint / "model")})
    ready = ready_to_run(config.model_copy(update={"data": data, "model": model}), tmp_path / "out", RUN, force=False)
    notes = [note for note in ready.notes if "SmoothQuant" in note]
    expected = "SmoothQuant is left out, in the engine too, because the format of compressed-tensors has no factors"
    assert [note.startswith(expected) for note in notes] == [True] * ("compressed-tensors" in layouts)


def test_a_preset_without_smoothquant_leaves_nothing_out() -> None:
    assert left_out(run_of("fill-mask", "openvino", "compressed-tensors", preset="plain")) is None
    kept = run_of("fill-mask", "openvino", "compressed-tensors", activations={"smoothquant_alpha": 0.5})
    assert left_out(kept) is None


@pytest.mark.parametrize("calibrator", [{}, {"calibrator": "max"}])
def test_only_what_the_program_leaves_out_is_noted(calibrator: dict[str, str]) -> None:
    by_program = run_of("fill-mask", "openvino", "compressed-tensors", activations=calibrator)
    by_user = run_of(
        "fill-mask", "openvino", "compressed-tensors", activations={**calibrator, "smoothquant_alpha": None}
    )
    assert by_program == by_user
    assert left_out(by_program) is not None
    assert left_out(by_user) is None
    assert left_out(RunConfig.model_validate(by_program.model_dump(exclude_unset=True))) is not None


# -- the model cards ---------------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "serve-with.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("layout", "backend", "task"),
    [
        ("openvino", "openvino", "sequence-classification"),
        ("onnx", "onnxruntime", "sequence-classification"),
        ("sentence-transformers", "openvino", "sentence-similarity"),
        ("sentence-transformers", "onnxruntime", "sentence-similarity"),
        ("sentence-transformers", "onnxruntime", "sequence-classification"),
        ("optimum", "openvino", "sequence-classification"),
        ("optimum", "onnxruntime", "sequence-classification"),
        ("transformers-js", "onnxruntime", "sequence-classification"),
        ("compressed-tensors", "openvino", "sequence-classification"),
    ],
)
def test_the_code_of_a_card_is_that_of_the_guide(layout: str, backend: str, task: str) -> None:
    name = "my-embedder" if task == "sentence-similarity" else "my-classifier"
    above = f"converted/{name}/{backend}"
    place = above if layout in ("openvino", "onnx", "transformers-js") else f"{above}/{layout}"
    code = client_code(layout, backend, task, place)
    assert code is not None
    # The guide starts from the folder above, which has the tokenizer.
    text = code.code
    for graph in ("model.xml", "model.onnx"):
        text = text.replace(f"{{folder}}/{graph}", f"{{folder}}/{layout}/{graph}")
    assert f"```{'js' if code.language == 'js' else 'py'}\n{text}```" in PAGE


@pytest.mark.parametrize("layout", OF_CHECKPOINTS)
def test_each_task_of_a_layout_has_code(layout: str) -> None:
    (backend,) = backends_of([layout])[-1:]
    known = layout_of(layout, backend)
    assert known is not None
    for task in known.classes or tasks.names():
        code = client_code(layout, backend, task, ".", start=7)
        assert code is not None
        # What the code imports is named.
        assert ("import soundfile" in code.code) == ("`soundfile`" in code.needs)
        assert ("from PIL" in code.code) == ("`pillow`" in code.needs)
        if code.language == "python":
            compile(code.code, layout, "exec")


@pytest.mark.parametrize(("layout", "backend"), [("openvino", "openvino"), ("onnx", "onnxruntime")])
def test_the_code_of_graphs_with_a_cache(layout: str, backend: str) -> None:
    steps = client_code(layout, backend, "text-generation-with-past", ".")
    assert steps is not None
    assert 'startswith("past_key_values")' in steps.code
    writes = client_code(layout, backend, "speech-to-text", ".", start=50258)
    assert writes is not None
    assert "numpy.full((len(hidden), 1), 50258)" in writes.code
    assert 'AutoProcessor.from_pretrained(f"{folder}/processor")' in writes.code


@pytest.mark.parametrize(
    ("backend", "task", "graph"),
    [
        ("openvino", "text-to-text", "translator"),
        ("onnxruntime", "text-generation-with-past", "writer"),
    ],
)
def test_optimum_generates_as_in_the_guide(backend: str, task: str, graph: str) -> None:
    code = client_code("optimum", backend, task, f"converted/my-{graph}/{backend}/optimum")
    assert code is not None
    assert f"```py\n{code.code}```" in PAGE


def test_the_first_token_of_a_decoder() -> None:
    config = SimpleNamespace(decoder_start_token_id=2)
    assert first_token(SimpleNamespace(config=config)) == 2
    own = SimpleNamespace(decoder_start_token_id=3)
    assert first_token(SimpleNamespace(config=config, generation_config=own)) == 3
    assert first_token(SimpleNamespace(config=config, generation_config=SimpleNamespace())) == 2


def test_a_task_without_code() -> None:
    assert client_code("optimum", "openvino", "depth-estimation", ".") is None


def test_the_card_of_each_layout(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written_cards: dict[str, tuple[str, str, str]] = {}

    def write_card(_: Any, folder: Path, client: Any, code: str, *, of: str) -> None:
        assert folder == tmp_path / client.layout
        written_cards[client.layout] = (client.library, code, of)

    monkeypatch.setattr(layouts_module, "write_layout_card", write_card)
    layouts = ["onnx", "optimum", "transformers-js", "compressed-tensors", "sentence-transformers"]
    job = job_of(checkpoint, tmp_path, "sequence-classification", "onnxruntime", *layouts)
    job.graphs = SimpleNamespace(several=False)
    with_weights(job)
    write_layouts(job, {"model": tmp_path / "model.onnx"}, quantized=False)
    shutil.rmtree(tmp_path / "sentence-transformers")
    write_layout_cards(job, None, quantized=False)  # type: ignore[arg-type]
    assert {layout: (library, of) for layout, (library, _, of) in written_cards.items()} == {
        "onnx": ("onnx", "float"),
        "optimum": ("optimum", "float"),
        "transformers-js": ("transformers.js", "float"),
        "compressed-tensors": ("transformers", "weights"),
    }
    assert 'dtype: "fp32"' in written_cards["transformers-js"][1]


# -- what is refused ---------------------------------------------------------------------------------------------------


def run_of(task: str, backend: str | list[str], *layouts: str, **quantizer: Any) -> RunConfig:
    data = {"calibration": {"name": "text-csv", "path": "a.csv"}}
    model = {"source": "my-model", "task": task}
    values = {"model": model, "data": data, "quantizer": {"backend": backend, **quantizer}, "deliver": list(layouts)}
    return RunConfig.model_validate(values)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            run_of("sequence-classification", "torch", "openvino"),
            "deliver: 'openvino' does not exist for backend torch; expected openvino",
        ),
        (
            run_of("sequence-classification", ["openvino", "torch"], "optimum"),
            "deliver: 'optimum' does not exist for backend torch; expected openvino or onnxruntime",
        ),
        (
            run_of("sequence-classification", "auto", "sentence-transformers"),
            "does not exist for every backend of 'auto'; expected quantizer.backend: [openvino, onnxruntime]",
        ),
        (
            run_of("depth-estimation", "openvino", "optimum"),
            "deliver: 'optimum' has no class for task 'depth-estimation' with backend openvino; remove it, or use one",
        ),
        (
            run_of("text-to-text", "onnxruntime", "transformers-js"),
            "deliver: 'transformers-js' has no class for task 'text-to-text' with backend onnxruntime; remove it, or",
        ),
        (
            run_of("fill-mask", "openvino", "compressed-tensors").model_copy(update={"quantize": False}),
            "deliver: 'compressed-tensors' holds a quantized model, but quantize is false; remove it",
        ),
        (
            run_of("multiple-choice", "auto", "compressed-tensors"),
            "deliver: 'compressed-tensors' has no class for task 'multiple-choice' with backend auto; remove it",
        ),
        (
            run_of("fill-mask", "onnxruntime", "transformers-js", activations={"ranges": "dynamic"}),
            "deliver: 'transformers-js' needs ranges from calibration, but activations are 'dynamic'; remove one",
        ),
    ],
)
def test_a_layout_that_does_not_exist(config: RunConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_run(config)


def test_a_layout_that_exists() -> None:
    check_run(run_of("sequence-classification", ["openvino", "onnxruntime"], "optimum", "sentence-transformers"))
    check_run(run_of("depth-estimation", "openvino", "openvino", "triton"))
    check_run(run_of("speech-to-text", ["openvino", "onnxruntime"], "optimum"))
    check_run(run_of("text-generation-with-past", "onnxruntime", "onnx", "optimum", "transformers-js"))


def test_an_unknown_layout() -> None:
    with pytest.raises(
        ValueError, match="'processor', 'triton', 'gpu_check', 'openvino', 'sentence-transformers', 'optimum'"
    ):
        run_of("fill-mask", "openvino", "torchscript")


def test_the_choice_of_an_engine_keeps_ranges_static_where_the_layout_needs_it() -> None:
    (backend,), _ = cpu_candidates(("onnxruntime",))
    for layouts in ((), ("transformers-js",)):
        config = run_of("fill-mask", [backend], *layouts)
        dynamic = any(variant.dynamic for variant in variants_of(config, [backend]))
        assert dynamic is (not layouts and profiles[backend].dynamic is not None)


def options(checkpoint: Path, *layouts: str, **changes: Any) -> Mapping[str, Any]:
    data = f"text-csv:{checkpoint / 'calibration.csv'}"
    model = str(checkpoint / "model")
    given = {"model": model, "quantization": True, "calibration": data, "output": Path("out"), "deliver": layouts}
    return {**given, **changes}


@pytest.mark.parametrize(
    ("layouts", "changes", "said"),
    [
        (
            ("torchscript",),
            {},
            "--deliver torchscript: expected different names out of openvino, ",
        ),
        (("onnx", "onnx"), {}, "--deliver onnx onnx: expected different names out of"),
        (("onnx", "openvino"), {}, "--deliver onnx openvino: no backend writes all of these; name several with"),
        (
            ("openvino", "transformers-js"),
            {"backend": ("openvino",)},
            "--deliver transformers-js does not exist for --backend openvino; expected onnxruntime",
        ),
    ],
)
def test_options_that_do_not_fit(
    checkpoint: Path, layouts: tuple[str, ...], changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        conversion_configs(options(checkpoint, *layouts, **changes))


def test_layouts_are_for_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model in ("my_pkg.nets:build", "my-net.onnx"):
        assert main(["convert", "-m", model, "--deliver", "onnx", "-o", str(tmp_path / "out")]) != 0
        assert "--deliver is only for checkpoints, but" in " ".join(capsys.readouterr().err.split())


def test_each_backend_writes_the_layouts_that_it_has(checkpoint: Path) -> None:
    several = conversion_configs(
        options(checkpoint, "openvino", "onnx", "optimum", backend=("openvino", "onnxruntime"))
    )
    common = ("processor", "triton", "gpu_check")
    assert [config.deliver for config in several] == [(*common, "openvino", "optimum"), (*common, "onnx", "optimum")]
    (chosen,) = conversion_configs(options(checkpoint, "optimum"))
    assert chosen.quantizer.candidates == ("openvino", "onnxruntime")
    (alone,) = conversion_configs(options(checkpoint, "transformers-js"))
    assert alone.quantizer.candidates == ("onnxruntime",)
    (anywhere,) = conversion_configs(options(checkpoint, "compressed-tensors"))
    assert (anywhere.quantizer.backend, anywhere.quantizer.candidates) == ("auto", ())
    (both,) = conversion_configs(options(checkpoint, "compressed-tensors", "onnx"))
    assert both.quantizer.candidates == ("onnxruntime",)


def test_a_text_tower_has_no_class(checkpoint: Path, tmp_path: Path) -> None:
    job = job_of(checkpoint, tmp_path, "sentence-similarity", "openvino", "openvino", "optimum")
    job.model = TextTower.__new__(TextTower)
    torch.nn.Module.__init__(job.model)
    job.model.config = transformers.CLIPTextConfig()
    with pytest.raises(TaskError, match="deliver: 'optimum' has no class for the text tower of clip_text_model"):
        check_layouts(job)


def test_a_mask_that_the_class_does_not_pass(checkpoint: Path, tmp_path: Path) -> None:
    job = job_of(checkpoint, tmp_path, "automatic-speech-recognition", "onnxruntime", "optimum")
    job.context.feed = SimpleNamespace(example=lambda: {"input_values": torch.zeros(2, 400)})
    check_layouts(job)
    job.context.feed.example = lambda: {"input_values": torch.zeros(2, 400), "attention_mask": torch.ones(2, 400)}
    with pytest.raises(TaskError, match=r"passes no attention mask, but .* needs one; remove"):
        check_layouts(job)


def test_a_tokenizer_without_the_file_that_the_browser_reads(checkpoint: Path, tmp_path: Path) -> None:
    job = job_of(checkpoint, tmp_path, "fill-mask", "onnxruntime", "transformers-js")
    job.context.processor = SimpleNamespace(is_fast=False)
    with pytest.raises(TaskError, match=r"needs a tokenizer\.json, but the tokenizer of .* is SimpleNamespace"):
        check_layouts(job)


def test_a_model_without_a_tokenizer(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(checkpoint / "model", tmp_path / "model")
    for file in (tmp_path / "model").glob("*token*"):
        file.unlink()
    words = ["--quantization", "--calibration", f"text-csv:{checkpoint / 'calibration.csv'}", "--deliver", "onnx"]
    assert main(["convert", "-m", str(tmp_path / "model"), *words, "-o", str(tmp_path / "out")]) != 0
    assert "it has no tokenizer, or one without a vocabulary; save the" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_exists(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quantization", "--calibration", f"text-csv:{checkpoint / 'calibration.csv'}", "--deliver", "openvino"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "model.xml").write_text("mine")
    assert main(["convert", "-m", str(checkpoint / "model"), *words, "-o", str(tmp_path / "out"), "--force"]) != 0
    assert "contains 'model.xml'" in " ".join(capsys.readouterr().err.split())
    assert (tmp_path / "out" / "model.xml").read_text() == "mine"


def test_an_engine_for_some_sizes_has_no_layouts(checkpoint: Path, tmp_path: Path) -> None:
    said: list[str] = []
    timer = SimpleNamespace(say=said.append)
    job = job_of(checkpoint, tmp_path, "fill-mask", "openvino", "openvino", only_sizes=({"batch": 1},), timer=timer)
    write_layouts(job, {"model": tmp_path / "model.onnx"}, quantized=True)
    assert said == ["warning: deliver: 'openvino' is not written, because the engine accepts only some sizes"]
    assert written(tmp_path) == set()


@pytest.mark.parametrize("layout", OF_CHECKPOINTS)
def test_a_layout_is_not_loaded_as_an_engine(checkpoint: Path, tmp_path: Path, layout: str) -> None:
    (backend,) = backends_of([layout])[-1:]
    job = job_of(checkpoint, tmp_path, "sequence-classification", backend, layout)
    if layout == "compressed-tensors":
        with_weights(job)
    write_layouts(job, {"model": tmp_path / "model.onnx"}, quantized=True)
    for load in (quantizer.load, quantizer.load_converted):
        with pytest.raises(QuantizerError, match=rf"{layout} is a layout for another client, without an engine; load"):
            load(tmp_path / layout)


def test_the_tables_name_what_there_is() -> None:
    assert {name for name in tasks.names() if tasks[name].in_parts} == set(TASKS_IN_PARTS)
    for name in profiles.names():
        layouts = profiles[name].layouts
        assert all(set(layouts[one].classes) <= set(tasks.names()) for one in layouts if one in OF_CHECKPOINTS)
    graphs = {"openvino", "onnx", "sentence-transformers", "optimum", "transformers-js"}
    assert set(OF_CHECKPOINTS) == {*graphs, "compressed-tensors"}
    assert set(OF_ANY_BACKEND["compressed-tensors"].classes) <= set(tasks.names())
    for task, auto_class in OF_ANY_BACKEND["compressed-tensors"].classes.items():
        assert tasks[task].auto_class == auto_class
    assert layout_of("optimum", "torch") is None
