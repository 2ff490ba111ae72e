"""The command line: verbs, arguments, exit codes, and what goes to which stream."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from quantizer.cli.main import VERBS, main
from quantizer.config import RunConfig, load_run
from quantizer.errors import EngineError, QuantizerError
from quantizer.tasks.models import Checkpoint

REPOSITORY = Path(__file__).parents[2]
GOOD = """\
model: {source: some/hub-name, task: sentence-similarity}
data: {calibration: {name: a}, evaluation: {name: b}}
"""
BAD = "modle: 3\ndata: {calibration: {name: a}, evaluation: {name: b, samples: x}}\nquantizer: {backend: tensort}\n"


class Calls(list[tuple[Any, ...]]):
    """Arguments of each call of the pipeline; ``error`` is raised by it, if set."""

    error: BaseException | None = None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """A pipeline that only takes notes."""
    calls = Calls()

    def note(verb: str) -> Callable[..., Path]:
        def called(*arguments: object) -> Path:
            calls.append((verb, *arguments))
            if calls.error is not None:
                raise calls.error
            return Path("runs/x")

        return called

    module = ModuleType("quantizer.pipeline.run")
    module.run = note("run")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quantizer.pipeline.run", module)
    monkeypatch.setattr("quantizer.cli.inspect.inspect_model", note("inspect"))
    return calls


@pytest.fixture
def good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration in the current directory, which is a temporary one."""
    monkeypatch.chdir(tmp_path)
    Path("good.yaml").write_text(GOOD)
    Path("bad.yaml").write_text(BAD)
    return "good.yaml"


def test_run(calls: Calls, good: str) -> None:
    assert main(["run", good]) == 0
    ((verb, config, output, force, console),) = calls
    assert verb == "run"
    assert config == load_run(good)
    assert isinstance(config, RunConfig)
    assert output is None
    assert force is False
    assert isinstance(console, Console)


@pytest.mark.parametrize(
    "words",
    [
        "run {} amp.batches=1 quantizer.backend=openvino --output out --force",
        "run --output out {} amp.batches=1 --force quantizer.backend=openvino",
        "run --force {} --output out amp.batches=1 quantizer.backend=openvino",
        "run {} --output=out --force amp.batches=1 quantizer.backend=openvino",
    ],
)
def test_run_takes_overrides_and_options_in_any_order(calls: Calls, good: str, words: str) -> None:
    assert main(words.format(good).split()) == 0
    ((_, config, output, force, _),) = calls
    assert config.amp.batches == 1
    assert config.quantizer.backend == "openvino"
    assert output == Path("out")
    assert force is True


def test_run_removes_a_key(calls: Calls, good: str) -> None:
    assert main(["run", good, "amp.batches=1", "~amp"]) == 0
    assert calls[0][1].amp is None


@pytest.mark.parametrize(("words", "diff"), [([], False), (["--diff"], True), (["--diff", "amp.batches=1"], True)])
def test_inspect(calls: Calls, good: str, words: list[str], diff: bool) -> None:
    assert main(["inspect", good, *words]) == 0
    ((verb, config, asked, console),) = calls
    assert verb == "inspect"
    assert config == load_run(good, [word for word in words if "=" in word])
    assert asked is diff
    assert isinstance(console, Console)


@pytest.mark.parametrize("verb", ["run", "inspect", "validate"])
def test_every_problem_of_a_file(calls: Calls, good: str, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main([verb, "bad.yaml"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    # Data sets that are unknown are told by validate, which looks further.
    assert err.startswith(f"error: {5 if verb == 'validate' else 4} problems in the configuration:\n")
    assert ("bad.yaml: data.calibration: unknown data set 'a'" in err) is (verb == "validate")
    assert "bad.yaml:1: modle: unknown key" in err
    assert "did you mean 'model'?" in err
    assert "bad.yaml:2: data.evaluation.samples: got the text 'x'" in err
    assert "bad.yaml:3: quantizer.backend: got the text 'tensort'" in err
    assert "Traceback" not in err
    assert calls == []


def test_bad_overrides_are_told_with_the_file(calls: Calls, good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "bad.yaml", "export.opset=3", "what"]) == 1
    err = capsys.readouterr().err
    assert "error: 6 problems" in err
    assert "override 'export.opset=3': export.opset: got the whole number 3" in err
    assert "override 'what': is not an override" in err
    assert calls == []


@pytest.mark.parametrize("verb", ["run", "inspect", "validate"])
def test_missing_file(calls: Calls, good: str, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main([verb, "no.yaml"]) == 1
    assert "no.yaml: the file does not exist; expected a YAML file; in that folder: bad.yaml, good.yaml" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("verb", ["run", "inspect"])
def test_an_error_on_purpose_has_no_traceback(
    calls: Calls, good: str, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    calls.error = EngineError("no [bold]engine[/bold]: do this")
    assert main([verb, good]) == 1
    assert capsys.readouterr().err == "error: no [bold]engine[/bold]: do this\n"


def test_a_warning_has_no_place_in_the_code(good: str, monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []

    def doubtful(*_: object) -> None:
        printed.append(warnings.formatwarning("fewer than 32 samples", UserWarning, "bin/quantizer", 6))

    monkeypatch.setattr("quantizer.cli.inspect.inspect_model", doubtful)
    before = warnings.formatwarning
    assert main(["inspect", good]) == 0
    assert printed == ["warning: fewer than 32 samples\n"]
    assert warnings.formatwarning is before


def test_another_error_is_not_hidden(calls: Calls, good: str) -> None:
    calls.error = ZeroDivisionError("ours")
    with pytest.raises(ZeroDivisionError, match="ours"):
        main(["run", good])


@pytest.mark.parametrize("verb", ["run", "inspect"])
def test_interrupted(calls: Calls, good: str, capsys: pytest.CaptureFixture[str], verb: str) -> None:
    calls.error = KeyboardInterrupt()
    assert main([verb, good]) == 130
    assert capsys.readouterr().err == "interrupted: nothing was written\n"


def test_validate(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--file-only", good]) == 0
    assert capsys.readouterr() == ("ok: good.yaml\n", "")


def test_validate_takes_overrides_as_run_does(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--file-only", good, "quantizer.backend=onnxruntime", "-v"]) == 0
    assert "backend: onnxruntime" in capsys.readouterr().out
    assert main(["validate", "--file-only", good, good, "quantizer.backend=onnxrt"]) == 1
    said = capsys.readouterr().err
    assert said.count("override 'quantizer.backend=onnxrt'") == 2
    assert "did you mean 'onnxruntime'" in said
    assert main(["validate", "--file-only", good, "quantizer.backend=torch,openvino"]) == 0
    assert f"ok: {good}, 2 runs" in capsys.readouterr().out


def test_validate_goes_on_after_a_bad_file(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--file-only", "bad.yaml", good, "no.yaml"]) == 1
    out, err = capsys.readouterr()
    assert out == "ok: good.yaml\n"
    assert err.count("error: ") == 2


@pytest.mark.parametrize("words", [["-v", "good.yaml"], ["good.yaml", "--verbose"]])
def test_validate_prints_a_config_that_can_be_read(
    good: str, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert main(["validate", "--file-only", *words]) == 0
    first, _, rest = capsys.readouterr().out.partition("\n")
    assert first == "ok: good.yaml"
    Path("again.yaml").write_text(rest)
    assert load_run("again.yaml") == load_run(good)


def test_validate_takes_files_on_both_sides_of_an_option(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "--file-only", good, "-v", good]) == 0
    assert capsys.readouterr().out.count("ok: good.yaml") == 2


def test_show(good: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Path, Console]] = []
    module = ModuleType("quantizer.report.terminal")
    module.print_summary = lambda folder, console: seen.append((folder, console))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "quantizer.report.terminal", module)
    Path("report.json").write_text("{}")
    assert main(["show", "."]) == 0
    assert seen[0][0] == Path(".")
    assert isinstance(seen[0][1], Console)


@pytest.mark.parametrize(("folder", "what"), [(".", ". does not contain report.json"), ("no", "no is not a folder")])
def test_show_of_something_else(good: str, capsys: pytest.CaptureFixture[str], folder: str, what: str) -> None:
    assert main(["show", folder]) == 1
    err = capsys.readouterr().err
    assert what in err
    assert "expected the folder of a run" in err


def test_show_of_a_file_that_is_no_engine(good: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "good.yaml"]) == 1
    assert "good.yaml is neither an ONNX file nor a recognized engine" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["fly"],
        ["run"],
        ["validate"],
        ["show"],
        ["show", "a", "b"],
        ["run", "a.yaml", "--nothing"],
        ["run", "a.yaml", "--forc"],
        ["run", "a.yaml", "--output"],
    ],
    ids=" ".join,
)
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "usage: quantizer" in err
    assert "error: " in err


@pytest.mark.parametrize(
    ("option", "meant"), [("--rows", "--samples"), ("--callibration=a", "--calibration"), ("--zzz", None)]
)
def test_an_unknown_option_names_a_similar_one(
    option: str, meant: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", "-m", "a", option]) == 2
    end = f"; did you mean {meant}?\n" if meant else ""
    assert capsys.readouterr().err.endswith(f"unrecognized arguments: {option}{end or chr(10)}")


def test_help_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for verb in VERBS:
        assert re.search(rf"^    {verb.name}( |$)", out, flags=re.MULTILINE), verb.name


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_help_of_a_verb_has_an_example(verb: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb.name, "--help"]) == 0
    assert verb.epilog in capsys.readouterr().out
    assert f"  quantizer {verb.name} " in verb.epilog


@pytest.mark.parametrize(
    "verb",
    [verb for verb in VERBS if verb.name not in ("show", "check", "convert", "compare", "diagnose")],
    ids=lambda verb: verb.name,
)
def test_the_examples_work(
    verb: Any, calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(REPOSITORY)
    lines = [line.strip() for line in verb.epilog.splitlines()]
    (at,) = [index for index, line in enumerate(lines) if line.startswith("quantizer ")]
    assert main(lines[at].split()[1:]) == 0
    if verb.name == "validate":
        assert capsys.readouterr().out.splitlines() == lines[at + 1 :]


def test_the_examples_of_convert_ask_for_what_can_be_done(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import quantizer.pipeline.convert_options
    import quantizer.pipeline.run
    from quantizer.pipeline import convert_options as configs

    of_onnx: list[Any] = []
    asked: list[Any] = []
    of_functions: list[Any] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quantizer.pipeline.convert_options, "convert_onnx", lambda given, *_: of_onnx.append(given))
    (tmp_path / "photos").mkdir()
    monkeypatch.setattr(quantizer.pipeline.run, "convert", lambda found, *_: asked.append(found))
    monkeypatch.setattr(quantizer.pipeline.run, "run", lambda config, *_: of_functions.append(config))
    known = Checkpoint("BertForSequenceClassification", "sequence-classification", 512, ("a", "b"), 100)
    seen = Checkpoint("ViTForImageClassification", "image-classification", None, ("a", "b"), None)
    monkeypatch.setattr(configs, "read_checkpoint", lambda name, _: seen if name == "my-vit" else known)
    monkeypatch.setattr(configs, "load_examples", lambda *_, **__: [None] * 200)
    (verb,) = [verb for verb in VERBS if verb.name == "convert"]
    commands = [line.split() for line in verb.epilog.replace("\\\n", " ").splitlines() if "quantizer convert " in line]
    for words in commands:
        assert main(words[1:]) == 0
    pytest.importorskip("openvino", reason="install enginequant[openvino,onnxruntime]")
    pytest.importorskip("onnxruntime", reason="install enginequant[openvino,onnxruntime]")
    backends = [[config.quantizer.backend for config in configs] for configs in asked]
    assert backends == [["auto"], ["openvino", "tensorrt-rtx"], ["auto"], ["auto"]]
    budgets = [None if one.fallback is None else one.fallback.max_drop for one, *_ in asked]
    assert budgets == [None, None, 0.002, None]
    (first,), _, (third,), (fourth,) = asked
    assert (Path(first.data.calibration.path).name, first.data.calibration.samples) == ("texts.txt", 128)
    assert first.data.check.offset == 128
    assert (third.data.tuning.name, Path(third.data.tuning.path).name) == ("text-csv", "dev.csv")
    assert (fourth.data.evaluation.name, Path(fourth.data.evaluation.path).name) == ("image-folder", "labelled")
    assert fourth.data.calibration.name == "images"
    assert first.output == str(Path("converted") / "my-model")
    assert [(given["calibration"], given["output"]) for given in of_onnx] == [
        ("arrays.npz", Path("converted") / "my-model")
    ]
    (config,) = of_functions
    assert (config.model.source, config.model.metric) == ("my_pkg.nets:build", "my_pkg.data:score")
    assert config.quantizer.backend == "auto"
    assert config.output == str(Path("converted") / "my_pkg.nets.build")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("quantizer ")


def test_as_a_module(good: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quantizer", "validate", "bad.yaml"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: 5 problems")


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")]
)
def test_too_little_memory_is_told_plainly(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> int:
        raise error

    monkeypatch.setattr("quantizer.cli.validate.Validate.__call__", fails)
    assert main(["validate", "a.yaml"]) == 1
    assert "error: there is too little memory: use smaller batches" in capsys.readouterr().err
    monkeypatch.setattr("quantizer.cli.validate.Validate.__call__", lambda *_: [][1])
    with pytest.raises(IndexError, match="list index"):
        main(["validate", "a.yaml"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_standard_output_is_told() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "quantizer", "completion", "bash"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert done.stderr.decode().splitlines() == [
        f"error: cannot write to standard output: {os.strerror(errno.ENOSPC)}; free some space, or redirect the output"
    ]


def test_an_error_of_the_work_prints_nothing_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> int:
        raise QuantizerError("the engine could not be written") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("quantizer.cli.validate.Validate.__call__", fails)
    assert main(["validate", "a.yaml"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == "error: the engine could not be written\n"


@pytest.mark.parametrize("encoding", ["ascii:strict", "latin1:strict"])
def test_characters_that_the_terminal_lacks_are_escaped(encoding: str) -> None:
    text = "from quantizer.cli.output import standard_output\nwith standard_output(): print('\\u2192')"
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, check=True, env=environment)
    assert done.stdout.strip() == b"\\u2192"


@pytest.mark.parametrize("verb", ["show", "validate", "check"])
def test_a_path_of_2000_parts(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--target", "openvino"] if verb == "check" else []
    assert main([verb, "/".join("a" * 2000), *more]) == 1
    assert "a/a/a" in capsys.readouterr().err
