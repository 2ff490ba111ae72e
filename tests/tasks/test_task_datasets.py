"""Data sets: rows as they stand in the file, parts of them, and what is said about bad ones."""

from __future__ import annotations

import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from quantizer.errors import TaskError
from quantizer.tasks import Pair, Text, load_rows
from quantizer.tasks.datasets import builtin

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
    assert load_rows("stsb-csv", path=path) == [Pair("A plane.", "One, two.", 5.0), Pair("A cat.", "A dog.", 0.8)]


def test_sst2_reads_labelled_texts(write):
    path = write("1 a fine , moving film\n\n0 not my taste\n")
    assert load_rows("sst2-text", path=str(path)) == [Text("a fine , moving film", 1), Text("not my taste", 0)]


def test_text_csv_takes_columns_in_any_order(write):
    path = write('\ufefflabel,id,text\n2,x,"Fast, cheap"\n0,y,Slow\n')
    assert load_rows("text-csv", path=path) == [Text("Fast, cheap", 2), Text("Slow", 0)]


def test_rows_and_offset_cut_out_a_part(write):
    path = write("".join(f"1 text {index}\n" for index in range(5)))
    assert [row.text for row in load_rows("sst2-text", path=path, samples=2, offset=3)] == ["text 3", "text 4"]
    assert len(load_rows("sst2-text", path=path, offset=1)) == 4
    with pytest.raises(TaskError, match=r"has 5 samples, fewer than offset=3 and samples=3 ask for \(6\)"):
        load_rows("sst2-text", path=path, samples=3, offset=3)
    with pytest.raises(TaskError, match="has 5 samples, so offset=5 leaves none"):
        load_rows("sst2-text", path=path, offset=5)
    with pytest.raises(TaskError, match="samples=0 and offset=0, expected samples >= 1"):
        load_rows("sst2-text", path=path, samples=0)


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


def vader_rows(**options):
    return load_rows("vader", subset=SUBSET, **options)


def test_vader_splits_share_no_row_and_no_document(archive):
    splits = {split: {row.text for row in vader_rows(path=archive, split=split)} for split in builtin.SPLITS}
    everything = {row.text for row in vader_rows(path=archive)}
    assert set().union(*splits.values()) == everything
    assert sum(len(texts) for texts in splits.values()) == len(everything)
    documents = {split: {int(text.split()[-1][:-1]) // 3 for text in texts} for split, texts in splits.items()}
    assert not documents["head"] & documents["evaluation"]
    assert not documents["head"] & documents["calibration"]
    assert not documents["calibration"] & documents["evaluation"]
    shares = {split: len(texts) / len(everything) for split, texts in splits.items()}
    assert shares == pytest.approx({"head": 0.5, "calibration": 0.1, "evaluation": 0.4}, abs=0.06)


def test_vader_labels_are_the_sign_and_neutral_rows_are_left_out(archive):
    rows = vader_rows(path=archive)
    assert len({row.text for row in rows}) == len(rows) == 800
    for row in rows:
        rating = (int(row.text.split()[-1][:-1]) % 9 - 4) / 2
        assert row.label == (rating > 0)
        assert abs(rating) >= 0.5


def test_vader_order_is_fixed_and_mixed(archive):
    rows = vader_rows(path=archive)
    assert rows == vader_rows(path=archive)
    numbers = [int(row.text.split()[-1][:-1]) for row in rows]
    assert numbers != sorted(numbers)
    # The order does not depend on the split either: a split is a part of the whole in the same order.
    head = vader_rows(path=archive, split="head")
    assert [row for row in rows if row in set(head)] == head


def test_vader_is_fetched_once(pip, tmp_path):
    first = vader_rows(split="head")
    assert vader_rows(split="head") == first
    assert len(pip) == 1
    assert pip[0][1:5] == ["-P", "-m", "pip", "download"]
    assert [path.name for path in (tmp_path / "cache" / "quantizer").iterdir()] == [builtin.ARCHIVE]


def test_vader_without_pip_says_what_to_do(archive, tmp_path, monkeypatch):
    def run(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: no such network\n")

    monkeypatch.setattr(builtin.subprocess, "run", run)
    with pytest.raises(TaskError, match=r"pip could not fetch vaderSentiment.*no such network.*copy the file to"):
        vader_rows()
    assert list((tmp_path / "cache" / "quantizer").iterdir()) == []


def test_vader_slow_index_is_an_error(archive, monkeypatch):
    def run(command, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(builtin.subprocess, "run", run)
    with pytest.raises(TaskError, match=r"pip did not fetch vaderSentiment==3\.3\.2 within 600 s"):
        vader_rows()


def test_vader_interrupted_leaves_nothing(archive, tmp_path, monkeypatch):
    def run(command, **options):
        (Path(command[command.index("--dest") + 1]) / builtin.ARCHIVE).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(builtin.subprocess, "run", run)
    with pytest.raises(KeyboardInterrupt):
        vader_rows()
    assert list((tmp_path / "cache" / "quantizer").iterdir()) == []


def test_vader_refuses_another_file(pip, archive, tmp_path, monkeypatch):
    monkeypatch.setattr(builtin, "SHA256", "0" * 64)
    with pytest.raises(TaskError, match=r"is not the expected file: its SHA-256 is .*expected 0000"):
        vader_rows()
    assert list((tmp_path / "cache" / "quantizer").iterdir()) == []
    with pytest.raises(TaskError, match="is not the expected file"):
        vader_rows(path=archive)


def test_vader_cache_that_cannot_be_made(archive, tmp_path, monkeypatch):
    (tmp_path / "cache").write_text("a file is in the way")
    with pytest.raises(TaskError, match=r"cannot keep vaderSentiment-3\.3\.2\.tar\.gz.*XDG_CACHE_HOME"):
        vader_rows()


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
        load_rows("vader", **options)


def test_cache_folder_ignores_a_relative_setting(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert builtin.cache_folder() == Path.home() / ".cache" / "quantizer"
