"""What is left of ``quantize_model`` the next morning: the saved folder, its engine, and fixes that can be given."""

from __future__ import annotations

import ast
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

for _package in ("onnx", "onnxscript", "onnxruntime", "jinja2"):
    pytest.importorskip(_package, reason="quantize_model needs enginequant[onnx,onnxruntime,report]")

import quantizer
from quantizer.cli.convert import Convert
from quantizer.cli.output import parser_of
from quantizer.engines import load_engine
from quantizer.engines.for_this_cpu import cpu_candidates
from quantizer.errors import ConfigError, EngineError, QuantizerError, SensitivityError
from quantizer.pipeline.convert_options import conversion_configs
from quantizer.pipeline.engine_module import CALL
from quantizer.pipeline.scores import FunctionMetric
from quantizer.report.record import shown_setting
from quantizer.report.terminal import diagnosis_lines
from quantizer.utils.records import Diagnosis, Fix

ONNXRUNTIME = next(name for name in cpu_candidates()[0] if name.startswith("onnxruntime"))

pytestmark = pytest.mark.usefixtures("exact_byte_products")


class Parts(nn.Module):
    """Two inputs, one of them by its name alone; a mapping of a tuple, with None in it, and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x: Tensor, *, weight: Tensor) -> dict[str, Any]:
        hidden = torch.relu(self.first(x))
        return {"hidden": (hidden, None), "out": [self.second(hidden * weight[:, None])]}


def _parts() -> Parts:
    torch.manual_seed(1)
    return Parts().eval()


def _batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        {"x": torch.randn(4, 16, generator=generator), "weight": torch.rand(4, generator=generator)} for _ in range(3)
    ]


def _score(model: nn.Module) -> float:
    with torch.no_grad():
        return -float(torch.cat([model(**batch)["out"][0] for batch in _batches()]).abs().mean())


@pytest.fixture(scope="module")
def made() -> Any:
    torch.set_num_threads(1)
    budget = {"max_drop": 1.0}
    return quantizer.quantize_model(_parts(), _batches(), score=_score, backend=ONNXRUNTIME, fallback=budget)


@pytest.fixture(scope="module")
def saved(made: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert 'not yet: result.save("FOLDER")' in made.summary(), "before it is saved, no path is shown"
    assert str(made.folder) not in made.summary()
    assert repr(made).endswith("not saved)")
    folder: Path = made.save(tmp_path_factory.mktemp("results") / "parts")
    return folder


def test_a_saved_engine_is_called_as_the_model(made: Any, saved: Path) -> None:
    batch = _batches()[1]
    engine, plain = quantizer.load(saved), quantizer.load(saved, float_engine=True, threads=1)
    given = engine(batch["x"], weight=batch["weight"])
    assert list(given) == ["hidden", "out"]
    assert isinstance(given["hidden"], tuple)
    assert given["hidden"][1] is None
    assert torch.equal(given["out"][0], made.engine(**batch)["out"][0])
    with torch.no_grad():
        expected = made.model(**batch)
    torch.testing.assert_close(plain(**batch)["out"], expected["out"], rtol=1e-4, atol=1e-4)
    with pytest.raises(EngineError, match=r"the input does not fit Parts.forward\(x, \*, weight\)"):
        engine(batch["x"], batch["weight"])
    with pytest.raises(EngineError, match=r"x is a numpy array; expected a tensor: convert it with torch\.from_numpy"):
        engine(batch["x"].numpy(), weight=batch["weight"])


def test_the_parent_of_a_folder_that_can_be_loaded_leads_to_it(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantizerError, match=r'it contains a run: quantizer\.load\(".*parts"\)$'):
        quantizer.load(saved.parent)
    (tmp_path / "openvino").mkdir()
    (tmp_path / "openvino" / "model.engine").touch()
    (tmp_path / "openvino" / "config.json").touch()
    with pytest.raises(QuantizerError, match=r'load_converted\(".*openvino"\) loads the engine that `quantizer conv'):
        quantizer.load(tmp_path)


def test_the_folder_of_a_module_is_for_load(saved: Path) -> None:
    with pytest.raises(QuantizerError, match=r'the engine of a module, .* load it with quantizer\.load\(".*parts"\)$'):
        quantizer.load_converted(saved)


def test_a_file_of_another_backend_is_named(saved: Path) -> None:
    other = "torch" if ONNXRUNTIME.startswith("onnx") else "onnxruntime"
    message = rf"model.engine is an engine of onnxruntime.*, not of {other}: call load_engine"
    with pytest.raises(EngineError, match=message):
        load_engine(other, saved / "model.engine")


def test_a_score_without_a_name_is_called_score() -> None:
    assert FunctionMetric(lambda _: 1.0, higher_is_better=True).name == "score"


def test_after_save_the_saved_paths_are_shown(made: Any, saved: Path) -> None:
    said = made.summary(width=400)
    assert str(made.folder) not in said
    assert str(saved / "model.engine") in said
    assert str(saved / "report.html") in said
    assert f"quantizer.load({json.dumps(str(saved))})" in said
    assert repr(made).endswith(f"saved in {saved})")


def test_a_folder_without_the_form_of_the_call_is_called_by_names(saved: Path, tmp_path: Path) -> None:
    former = tmp_path / "former"
    former.mkdir()
    for name in ("config.yaml", "model.engine"):
        (former / name).write_bytes((saved / name).read_bytes())
    engine, batch = quantizer.load(former), _batches()[0]
    given = engine(**{name: batch[name] for name in engine.engine.input_names})
    assert list(given) == list(engine.engine.output_names)
    for damaged in ("{", "[]", '{"format": 2}', '{"format": 1, "model": "M", "arguments": [], "output": {"x": 1}}'):
        (former / CALL).write_text(damaged, encoding="utf-8")
        with pytest.raises(QuantizerError, match=r"call.json is damaged"):
            quantizer.load(former)
    (former / "config.yaml").write_text("quantizer: {backend: 3}\n", encoding="utf-8")
    with pytest.raises(QuantizerError, match=r"config.yaml cannot be read"):
        quantizer.load(former)
    (former / "config.yaml").rename(former / "config.json")
    with pytest.raises(QuantizerError, match=r"no config.yaml; .*load_converted loads what `quantizer convert` wrote"):
        quantizer.load(former)


def test_the_ranking_of_the_run_is_the_quantizers(made: Any, saved: Path) -> None:
    assert made.quantizer.sensitivity.rows == made.record.sensitivity
    assert len(made.quantizer.sensitivity.search) == len(made.record.fallback.evaluations)
    loaded = quantizer.Quantizer.load(saved / "quantizer")
    with pytest.raises(SensitivityError, match="a saved quantizer contains no ranking; the ranking of a run"):
        _ = loaded.sensitivity
    again = made.quantizer
    again.calibrate(made.model, _batches(), progress=False)
    with pytest.raises(SensitivityError, match="nothing was measured yet"):
        _ = again.sensitivity  # that of the run belongs to the former calibration


def test_what_goes_back_can_be_given_as_the_report_says(made: Any, tmp_path: Path) -> None:
    page = made.report(tmp_path / "r.html").read_text(encoding="utf-8")
    (shown,) = re.findall(r"<code>(fallback=.*?)</code> as an argument of <code>quantize_model", page)
    group = made.record.sensitivity[0].group
    setting = _keywords(shown.replace("&#34;", '"').replace("...", group))
    back = quantizer.quantize_model(_parts(), _batches(), backend=ONNXRUNTIME, **setting)
    assert back.record.fallback.groups == (group,)
    assert any(site.name == group and not site.quantized for site in back.record.coverage)


def test_a_cure_can_be_given_as_it_is_shown() -> None:
    fix = Fix(setting="exclude: {names: [head], sites: [second.forward.linear_0]}", gain_db=3.0, gain_alone_db=4.0)
    cause = Diagnosis(group="second.forward.linear_0", sqnr_db=9.0, findings=("far",), fix=fix)
    (line,) = diagnosis_lines([cause], form="python")
    (shown,) = re.findall(r"fix: (exclude=\{.*?\}), output", line)
    assert _keywords(shown) == {"exclude": {"names": ["head"], "sites": ["second.forward.linear_0"]}}
    excluded = quantizer.Quantizer(**_keywords(shown)).config.exclude
    (line,) = diagnosis_lines([cause])
    (shown,) = re.findall(r"fix: (quantizer: .*?), output", line)
    assert quantizer.Quantizer(yaml.safe_load(shown)).config.exclude == excluded
    assert yaml.safe_load(shown_setting("fallback: {names: [a]}", "yaml")) == {"fallback": {"names": ["a"]}}


def test_a_fix_can_be_pasted_into_convert() -> None:
    fix = Fix(setting="exclude: {names: [head], sites: ['second.{a,b}']}", gain_db=3.0, gain_alone_db=4.0)
    (line,) = diagnosis_lines([Diagnosis(group="head", sqnr_db=9.0, findings=("far",), fix=fix)], form="options")
    (shown,) = re.findall(r"fix: (--set .*?), output", line)
    (only,) = diagnosis_lines(
        [
            Diagnosis(
                group="stem", sqnr_db=9.0, fix=Fix(setting="exclude: {names: [stem]}", gain_db=3.0, gain_alone_db=4.0)
            )
        ],
        form="options",
    )
    assert "fix: --set 'quantizer.exclude.names=[stem]', output SQNR +3.0 dB" in only
    arguments = parser_of([Convert()]).parse_args(["convert", "-m", "a:net", "--quantization", *shlex.split(shown)])
    (config,) = conversion_configs(
        {"model": "a:net", "quantization": True, "inputs": "a:data", "output": Path("out"), "set": arguments.set},
        function=True,
    )
    assert config.quantizer.exclude.names == ("head",)
    assert config.quantizer.exclude.sites == ("second.{a,b}",)


@pytest.mark.parametrize(
    ("fallback", "said"),
    [
        ({"max_drop": 0.1}, "expected score=, a function of the model"),
        ({"num": 0}, "fallback.num: got the whole number 0"),
        ({"nums": 3}, "did you mean 'num'"),
        ({}, "none of num"),
    ],
)
def test_a_fallback_that_cannot_be(fallback: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        quantizer.quantize_model(_parts(), _batches(), backend=ONNXRUNTIME, fallback=fallback)


def _keywords(shown: str) -> dict[str, Any]:
    """Return the keywords of a call, which are literals."""
    call = ast.parse(f"f({shown})", mode="eval").body
    assert isinstance(call, ast.Call)
    return {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
