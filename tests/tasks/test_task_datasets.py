"""Data sets: rows as they stand in the file, parts of them, and what is said about bad ones."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from quantizer.errors import TaskError
from quantizer.tasks import Pair, Text, load_examples
from quantizer.tasks.datasets import builtin, examples
from quantizer.utils.registry import Registry

SUBSET = "movieReviewSnippets"


@pytest.fixture
def write(tmp_path):
    def write_file(content: str | bytes) -> Path:
        path = tmp_path / "data.txt"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file


def test_stsb_reads_pairs_with_quoted_commas(write):
    path = write('A plane.,"One, two.",5.0\n\nA cat.,A dog.,0.8\r\n')
    assert load_examples("stsb-csv", path=path) == [Pair("A plane.", "One, two.", 5.0), Pair("A cat.", "A dog.", 0.8)]


def test_sst2_reads_labelled_texts(write):
    path = write("1 a fine , moving film\n\n0 not my taste\n")
    assert load_examples("sst2-text", path=str(path)) == [Text("a fine , moving film", 1), Text("not my taste", 0)]


def test_text_csv_takes_columns_in_any_order(write):
    path = write('\ufefflabel,id,text\n2,x,"Fast, cheap"\n0,y,Slow\n')
    assert load_examples("text-csv", path=path) == [Text("Fast, cheap", 2), Text("Slow", 0)]


def test_rows_and_offset_cut_out_a_part(write):
    path = write("".join(f"1 text {index}\n" for index in range(5)))
    assert [example.text for example in load_examples("sst2-text", path=path, samples=2, offset=3)] == [
        "text 3",
        "text 4",
    ]
    assert len(load_examples("sst2-text", path=path, offset=1)) == 4
    with pytest.raises(TaskError, match=r"has 5 samples, fewer than offset=3 and samples=3 ask for \(6\)"):
        load_examples("sst2-text", path=path, samples=3, offset=3)
    with pytest.raises(TaskError, match="has 5 samples, so offset=5 leaves none"):
        load_examples("sst2-text", path=path, offset=5)
    with pytest.raises(TaskError, match="samples=0 and offset=0, expected samples >= 1"):
        load_examples("sst2-text", path=path, samples=0)


# vader: a small archive of the same form stands for the real one


def pack(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """A stand-in for the source distribution, whose hash is the expected one."""
    lines = [f"{index // 3}_{index}\t{(index % 9 - 4) / 2}\tReview \x85 {index}.\r\n" for index in range(900)]
    lines.append("900_1\t2.0\tReview \x85 0.\r\n")  # a text seen before, in another document
    inner = pack({f"hutto_ICWSM_2014/{SUBSET}_GroundTruth.txt": "".join(lines).encode()})
    path = tmp_path / "index" / builtin.ARCHIVE
    path.parent.mkdir()
    path.write_bytes(pack({builtin.INNER_ARCHIVE: inner}))
    monkeypatch.setattr(builtin, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return path


@pytest.fixture
def pip(archive, monkeypatch):
    """pip as a function that copies the stand-in; the calls it got."""
    calls = []

    def run(command, **options):
        calls.append(command)
        target = Path(command[command.index("--dest") + 1]) / builtin.ARCHIVE
        target.write_bytes(archive.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(builtin.subprocess, "run", run)
    return calls


def vader_examples(**options):
    return load_examples("vader", subset=SUBSET, **options)


def test_vader_splits_share_no_row_and_no_document(archive):
    splits = {
        split: {example.text for example in vader_examples(path=archive, split=split)} for split in builtin.SPLITS
    }
    everything = {example.text for example in vader_examples(path=archive)}
    assert set().union(*splits.values()) == everything
    assert sum(len(texts) for texts in splits.values()) == len(everything)
    documents = {split: {int(text.split()[-1][:-1]) // 3 for text in texts} for split, texts in splits.items()}
    assert not documents["head"] & documents["evaluation"]
    assert not documents["head"] & documents["calibration"]
    assert not documents["calibration"] & documents["evaluation"]
    shares = {split: len(texts) / len(everything) for split, texts in splits.items()}
    assert shares == pytest.approx({"head": 0.5, "calibration": 0.1, "evaluation": 0.4}, abs=0.06)


def test_vader_labels_are_the_sign_and_neutral_rows_are_left_out(archive):
    examples = vader_examples(path=archive)
    assert len({example.text for example in examples}) == len(examples) == 800
    for example in examples:
        rating = (int(example.text.split()[-1][:-1]) % 9 - 4) / 2
        assert example.label == (rating > 0)
        assert abs(rating) >= 0.5


def test_vader_order_is_fixed_and_mixed(archive):
    examples = vader_examples(path=archive)
    assert examples == vader_examples(path=archive)
    numbers = [int(example.text.split()[-1][:-1]) for example in examples]
    assert numbers != sorted(numbers)
    # The order does not depend on the split either: a split is a part of the whole in the same order.
    head = vader_examples(path=archive, split="head")
    assert [example for example in examples if example in set(head)] == head


def test_vader_is_fetched_once(pip, tmp_path):
    first = vader_examples(split="head")
    assert vader_examples(split="head") == first
    assert len(pip) == 1
    assert pip[0][1:5] == ["-P", "-m", "pip", "download"]
    assert [path.name for path in (tmp_path / "cache" / "quantizer").iterdir()] == [builtin.ARCHIVE]


def test_vader_without_pip_says_what_to_do(archive, tmp_path, monkeypatch):
    def run(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no such network\n")

    monkeypatch.setattr(builtin.subprocess, "run", run)
    with pytest.raises(TaskError, match=r"pip could not download vaderSentiment.*no such network.*copy the file to"):
        vader_examples()
    assert list((tmp_path / "cache" / "quantizer").iterdir()) == []


def test_vader_slow_index_is_an_error(archive, monkeypatch):
    def run(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(builtin.subprocess, "run", run)
    with pytest.raises(TaskError, match=r"pip did not download vaderSentiment==3\.3\.2 within 600 s"):
        vader_examples()


def test_vader_interrupted_leaves_nothing(archive, tmp_path, monkeypatch):
    def run(command, **options):
        (Path(command[command.index("--dest") + 1]) / builtin.ARCHIVE).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(builtin.subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        vader_examples()
    assert list((tmp_path / "cache" / "quantizer").iterdir()) == []


def test_vader_refuses_another_file(pip, archive, tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "SHA256", "0" * 64)
    with pytest.raises(TaskError, match=r"is not the expected file: its SHA-256 is .*expected 0000"):
        vader_examples()
    assert list((tmp_path / "cache" / "quantizer").iterdir()) == []
    with pytest.raises(TaskError, match="is not the expected file"):
        vader_examples(path=archive)


def test_vader_cache_that_cannot_be_made(archive, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(TaskError, match=r"cannot store vaderSentiment-3\.3\.2\.tar\.gz.*XDG_CACHE_HOME"):
        vader_examples()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"subset": None}, "has no subset None: set 'subset' to one of amazonReviewSnippets", id="none"),
        pytest.param({"subset": "books"}, "has no subset 'books'", id="subset"),
        pytest.param({"subset": SUBSET, "split": "train"}, "has no split 'train'.*head, calibration", id="split"),
    ],
)
def test_vader_names_its_subsets_and_splits(options, message):
    with pytest.raises(TaskError, match=message):
        load_examples("vader", **options)


def test_cache_folder_ignores_a_relative_setting(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert builtin.cache_folder() == Path.home() / ".cache" / "quantizer"


# a reader of your own


def test_a_reader_is_checked_when_it_is_registered() -> None:
    registry = Registry("data set", call=("path", "split", "subset"), returns="a list of examples")

    def numbers(path):
        return []

    expected = r"data set 'numbers': numbers\(\) has the parameters \(path\); expected \(path, split, subset\), which"
    with pytest.raises(ValueError, match=expected):
        registry.add("numbers")(numbers)
    with pytest.raises(ValueError, match="data set 'numbers' is an object of list; expected a function"):
        registry.add("numbers")([])
    registry.add("numbers")(lambda *arguments: [])
    assert registry.names() == ["numbers"]


def test_a_reader_returns_a_list(monkeypatch) -> None:
    def texts(path, split, subset):
        yield Text("good", 1)

    monkeypatch.setattr(examples.datasets, "_entries", {"texts": texts, "broken": lambda *_: {}["key"]})
    with pytest.raises(TaskError, match="data set 'texts' returned an object of generator; expected a list"):
        load_examples("texts")
    with pytest.raises(KeyError, match="key") as caught:
        load_examples("broken")
    assert caught.value.__notes__ == ["in data set 'broken'"]
