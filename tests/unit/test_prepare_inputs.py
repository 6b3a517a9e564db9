"""Inputs of `prepare`: compressed text, TSV, standard input, pipes, URLs and weights, in any number of processes."""

import gzip
import io
import lzma
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import zstandard
from loguru import logger as loguru

from deepspeed_nmt import cli
from deepspeed_nmt.console import logger
from deepspeed_nmt.data import inputs, preparation, stages
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.data_directory import DataDirectory, Meta
from deepspeed_nmt.data.inputs import InputText
from deepspeed_nmt.data.options import PrepareOptions
from deepspeed_nmt.data.stages import Preparation
from deepspeed_nmt.data.tasks import run_task
from deepspeed_nmt.errors import EXIT_USER_ERROR, DataError, UserError
from deepspeed_nmt.files import open_text
from tests.commands import prepare_with as _prepare
from tests.commands import refused

WORDS = ("house", "river", "teacher", "apple", "window", "garden", "letter", "street")
SOURCE = [f"the {a} is near the {b} and the {c}" for a in WORDS for b in WORDS for c in WORDS[:3]]
TARGET = [line.replace("the ", "der ").replace(" is near", " ist nah bei") for line in SOURCE]
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
}


@pytest.fixture(autouse=True)
def _logger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logger, "propagate", True)  # an earlier run of the command line turns it off


@pytest.fixture
def texts(tmp_path: Path) -> dict[str, Any]:
    """Good files, as options."""
    return {
        "out": tmp_path / "data",
        "vocab_size": 60,
        "train_source": (_write(tmp_path / "train.en", SOURCE),),
        "train_target": (_write(tmp_path / "train.de", TARGET),),
        "valid_source": (_write(tmp_path / "valid.en", SOURCE[:3]),),
        "valid_target": (_write(tmp_path / "valid.de", TARGET[:3]),),
    }


def _write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _tsv(texts: dict[str, Any], *paths: Path) -> dict[str, Any]:
    return {**texts, "train_source": (), "train_target": (), "tsv": paths}


def _directories(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.iterdir() if path.is_dir()]


def test_frames_that_are_skipped_and_padding_are_no_text(tmp_path: Path) -> None:
    skipped = b"\x5e\x2a\x4d\x18\x04\0\0\0size"  # as pzstd writes it before each frame
    members = {kind: (compress(b"a\n"), compress(b"b")) for kind, compress in COMPRESS.items()}
    for kind, content in (
        ("zst", skipped.join([b"", *members["zst"], b""])),
        *((kind, (b"\0" * 70_000).join([*both, b""])) for kind, both in members.items()),  # more than is read at once
    ):
        (path := tmp_path / f"text.{kind}").write_bytes(content)
        with InputText(path) as text:
            assert (text.stream.read(), text.lines) == (b"a\nb", 2)
    (tmp_path / "skipped").write_bytes(skipped + members["zst"][0])
    with pytest.raises(DataError, match="is compressed with zstd; run `unzstd"), open_text(tmp_path / "skipped"):
        pass


@pytest.mark.parametrize("kind", sorted(COMPRESS))
def test_compressed_text_is_read(kind: str, texts: dict[str, Any], tmp_path: Path) -> None:
    plain = _prepare(texts, out=tmp_path / "plain")
    compress = COMPRESS[kind]
    for name in ("train_source", "train_target", "valid_source", "valid_target"):
        text = texts[name][0].read_bytes()
        half = len(text) // 2 + 1
        path = tmp_path / f"{name}.{kind}"
        path.write_bytes(compress(text[:half]) + compress(text[half:]))  # of two members, cut within a line
        texts[name] = (path,)
    meta = _prepare(texts)
    assert meta.files == plain.files, "also the copy of the validation text, which is plain"
    record = meta.inputs["train.source"][0]
    assert (record.bytes, record.lines) == (texts["train_source"][0].stat().st_size, len(SOURCE))


@pytest.mark.parametrize(("kind", "name"), [("gz", "train_target"), ("xz", "train_target"), ("zst", "valid_source")])
def test_a_compressed_file_that_ends_early_is_named(
    kind: str, name: str, texts: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / f"text.{kind}"
    content = COMPRESS[kind](texts[name][0].read_bytes())
    texts[name] = (path,)
    for rest, problem in ((content[:-3], "ends early"), (content[:20] + b"\0\xff" * 40, "text\\.")):
        path.write_bytes(rest)
        with pytest.raises(DataError, match=rf"text\.{kind} .*copy it again") as error:
            _prepare(texts)
        assert "\n" not in str(error.value) and problem.rstrip("\\.") in str(error.value)
    assert _directories(tmp_path) == []


def test_tsv_is_the_same_as_two_files(texts: dict[str, Any], tmp_path: Path) -> None:
    two = _prepare(texts, out=tmp_path / "two")
    half = len(SOURCE) // 2
    rows = [f"{source}\t{target}" for source, target in zip(SOURCE, TARGET, strict=True)]
    first, second = _write(tmp_path / "a.tsv", rows[:half]), _write(tmp_path / "b.tsv", rows[half:])
    second.write_bytes(gzip.compress(second.read_bytes().replace(b"\n", b"\r\n")))
    meta = _prepare(_tsv(texts, first, second))
    assert meta.files == two.files
    assert [record.lines for record in meta.inputs["train.tsv"]] == [half, len(SOURCE) - half]
    assert _prepare(_tsv(texts, first, second)) == meta, "nothing to do"
    with pytest.raises(DataError, match=r"differs in train\.tsv text; give --overwrite"):
        _prepare(_tsv(texts, second, first))

    columns = [f"0.9\t{target}\thttp://x\t{source}\t\textra" for source, target in zip(SOURCE, TARGET, strict=True)]
    texts = _tsv(texts, _write(tmp_path / "c.tsv", columns))
    assert _prepare(texts, out=tmp_path / "columns", tsv_columns=(4, 2)).files == two.files
    with pytest.raises(DataError, match=r"line 1 of .*c\.tsv has 6 columns instead of source and target"):
        _prepare(texts, overwrite=True)
    assert sorted(_directories(tmp_path)) == ["columns", "data", "two"]


def test_a_line_without_its_columns_is_named(
    texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "PIECE_BYTES", 500)
    rows = [f"{source}\t{target}" for source, target in zip(SOURCE, TARGET, strict=True)]
    rows[150] = "no tab"
    texts = _tsv(texts, _write(tmp_path / "a.tsv", rows[:20]), _write(tmp_path / "b.tsv", rows[20:]))
    with pytest.raises(DataError, match=r"line 131 of .*b\.tsv has 1 column "):
        _prepare(texts)
    assert _directories(tmp_path) == []


def test_standard_input_has_both_sides(
    texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = _prepare(texts, out=tmp_path / "two")
    rows = "".join(f"{source}\t{target}\n" for source, target in zip(SOURCE, TARGET, strict=True)).encode()

    def given(text: bytes, overwrite: bool = False) -> Meta:
        monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(text)))
        return _prepare(_tsv(texts, Path("-")), overwrite=overwrite)

    meta = given(COMPRESS["zst"](rows))
    assert meta.files == two.files and meta.inputs["train.tsv"][0].path == "-"
    assert given(COMPRESS["zst"](rows)) == meta, "nothing to do"
    with pytest.raises(DataError, match=r"differs in train\.tsv text"):
        given(rows)
    with pytest.raises(DataError, match=r"the zstd data of standard input ends early"):
        given(COMPRESS["zst"](rows)[:-9], overwrite=True)


def test_pipes_are_read(texts: dict[str, Any], tmp_path: Path) -> None:
    two = _prepare(texts, out=tmp_path / "two")
    writers = []
    for name in ("train_source", "train_target", "valid_source"):
        pipe, text = tmp_path / name, texts[name][0].read_bytes()
        os.mkfifo(pipe)
        writers.append(threading.Thread(target=pipe.write_bytes, args=(text,), daemon=True))
        writers[-1].start()
        texts[name] = (pipe,)
    assert _prepare(texts).files == two.files
    with pytest.raises(DataError, match=r"a pipe can be read only once, but .*train_source is given twice; write"):
        _prepare(texts, train_target=texts["train_source"])


def test_an_open_descriptor_is_copied_for_other_processes(texts: dict[str, Any]) -> None:
    path = texts["train_source"][0]
    with path.open("rb") as file:
        assert InputText(path).is_direct and not InputText(Path(f"/dev/fd/{file.fileno()}")).is_direct


def _noisy(tmp_path: Path) -> dict[str, Any]:
    """Return options with text that has duplicates far from each other, faulty pairs, and weights."""
    dice = random.Random(4)
    pairs = list(zip(SOURCE, TARGET, strict=True)) * 3
    dice.shuffle(pairs)
    for place in range(0, len(pairs), 17):
        pairs[place] = (pairs[place][0], dice.choice(["", "\x07", "lang " * 30, "der house ½"]))
    weights = [f"{place + 1}" for place in range(len(pairs))]
    return {
        "train_source": (_write(tmp_path / "noisy.en", [source for source, _ in pairs]),),
        "train_target": (_write(tmp_path / "noisy.de", [target for _, target in pairs]),),
        "train_weights": (_write(tmp_path / "noisy.weights", weights),),
        "normalization": "nfkc",  # changes ½
    }


@pytest.mark.long
def test_any_number_of_workers_makes_the_same_directory(
    texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts |= _noisy(tmp_path)
    expected = _prepare(texts)
    assert expected.removed["duplicate"] > 300 and expected.removed["ratio"] and expected.removed["empty"]
    assert expected.round_trips["train.target"].changed and expected.splits["train"].pairs < 300
    for module in (inputs, stages):
        monkeypatch.setattr(module, "PIECE_BYTES", 700)
    monkeypatch.setattr(stages, "TASK_PIECES", 2)
    for workers in (1, 2, 3):
        out = tmp_path / f"of{workers}"
        assert _prepare(texts, out=out, workers=workers) == expected
        _same_files(out, texts["out"])


def _tasks(texts: dict[str, Any], directory: Path, tasks: int) -> Preparation:
    """Return the work of some tasks, as another process opens it."""
    options = PrepareOptions.model_validate(texts)
    _, vocabulary, sampling = preparation.check_options(options)
    work = preparation.set_up(directory, options, vocabulary, sampling, tasks)
    return Preparation.model_validate_json(work.model_dump_json())


def _same_files(made: Path, expected: Path) -> None:
    for path in expected.iterdir():
        assert (made / path.name).read_bytes() == path.read_bytes(), path.name


@pytest.mark.long
def test_any_number_of_tasks_makes_the_same_directory(
    texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts |= _noisy(tmp_path)
    target = texts["train_target"][0].read_text(encoding="utf-8").split("\n")[:-1]
    links = _write(tmp_path / "links", ["0-0" if line.split() else "" for line in target])
    texts |= {"train_alignments": (links,), "filters": "near_duplicates", "unicode": "nfc", "segmentations": 2}
    source = texts["train_source"][0]
    texts["train_source"] = (_write(tmp_path / "noisy.gz", []),)  # text that has to be copied
    texts["train_source"][0].write_bytes(gzip.compress(source.read_bytes()))
    meta = _prepare({**texts, "cleaning": {"min_length": 8}})
    assert meta.removed["near_duplicates"] == 0 < min(meta.removed[name] for name in ("duplicate", "too_short"))
    monkeypatch.setattr(inputs, "PIECE_BYTES", 4000)
    for tasks in (3, 12):  # of few pieces, so that some have none
        work = _tasks({**texts, "cleaning": {"min_length": 8}}, tmp_path / f"work{tasks}", tasks)
        for stage, count in work.stages.items():
            for task in reversed(range(count)):
                assert run_task(work, stage, task) == run_task(work, stage, task), "the second time changes nothing"
        (out := tmp_path / f"of{tasks}").mkdir()
        assert stages.join(work, out) == meta
        _same_files(out, texts["out"])


def test_a_task_leaves_all_or_nothing_and_trusts_no_changed_file(
    texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _prepare(texts)
    work = _tasks(texts, tmp_path / "work", 2)
    run_task(work, "index", 0)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(
            "deepspeed_nmt.data.tasks.FileRecord.of", lambda path: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        run_task(work, "clean", 1)
    assert not list((tmp_path / "work/clean").iterdir())
    source = texts["train_source"][0]
    content, state = source.read_bytes(), source.stat()
    source.write_bytes(content[:-9])
    with pytest.raises(DataError, match=r"train\.en changed while `prepare` read it"):
        run_task(work, "clean", 1)
    source.write_bytes(content)
    os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns))
    for stage in ("clean", "duplicate", "vocabulary"):
        for task in range(work.stages[stage]):
            run_task(work, stage, task)
    part = work.place("clean", 1) / "target"
    good = part.read_bytes()
    part.write_bytes(good.replace(b"der", b"die", 1))
    with pytest.raises(DataError, match=r"clean/00001 is damaged \(target has other content than was written\)"):
        run_task(work, "encode", 1)
    part.write_bytes(good)
    for task in (0, 1):
        run_task(work, "encode", task)
    (out := tmp_path / "joined").mkdir()
    stages.join(work, out)
    _same_files(out, texts["out"])


def _served(texts: dict[str, Any], at: str) -> dict[str, Any]:
    """Return options with the URLs of the text, by the names of the files."""
    return {
        name: [f"{at}/{path.name}" for path in value] if isinstance(value, tuple) else value
        for name, value in texts.items()
    }


def _put(texts: dict[str, Any], at: str) -> dict[str, Any]:
    """Write the text to a file system of fsspec, and return options with its URLs."""
    for path in (path for paths in texts.values() if isinstance(paths, tuple) for path in paths):
        fsspec.filesystem(at.partition(":")[0]).pipe(f"{at}/{path.name}", path.read_bytes())
    return _served(texts, at)


@pytest.fixture
def words(texts: dict[str, Any]) -> dict[str, Any]:
    """The same files with their words as vocabulary, which takes no time to learn."""
    return {**texts, "segmented": True, "vocab_size": None}


def test_text_by_url_makes_the_same_directory(
    words: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [str(place + 1) for place in range(len(SOURCE))]
    (packed := tmp_path / "train.en.gz").write_bytes(gzip.compress(words["train_source"][0].read_bytes()))
    words |= {
        "train_source": (packed,),
        "test_source": words["valid_source"],
        "test_target": words["valid_target"],
        **{f"train_{name}": (_write(tmp_path / name, lines),) for name in ("weights", "scores")},
        "train_alignments": (_write(tmp_path / "links", ["0-0 1-1"] * len(lines)),),
        "filters": "score=7",
    }
    local = _prepare(words, out=tmp_path / "local")
    urls = _put(words, "memory://bucket/a") | {"valid_target": [f"file://{words['valid_target'][0]}"]}
    monkeypatch.setattr(inputs, "PIECE_BYTES", 700)
    meta = _prepare(urls)
    _same_but_record(words["out"], tmp_path / "local")
    assert meta.inputs["train.source"][0].path == "memory://bucket/a/train.en.gz", "as it was given"

    def anywhere(meta: Meta) -> Meta:
        inputs = {name: tuple(r.model_copy(update={"path": ""}) for r in meta.inputs[name]) for name in meta.inputs}
        return meta.model_copy(update={"inputs": inputs})

    assert anywhere(meta) == anywhere(local)
    assert _prepare(urls) == meta, "nothing to do"

    work = _tasks(urls, tmp_path / "work", 3)
    for stage, count in work.stages.items():
        for task in range(count):
            run_task(work, stage, task)
        fsspec.filesystem("memory").pipe("/bucket/a/train.de", b"other text, after the first stage")
    (out := tmp_path / "joined").mkdir()
    assert stages.join(work, out) == meta
    _same_files(out, words["out"])
    with pytest.raises(DataError, match=r"differs in train\.target text"):
        _prepare(urls)


def _same_but_record(made: Path, expected: Path) -> None:
    names = {path.name for path in expected.iterdir()}
    assert names == {path.name for path in made.iterdir()}
    for name in names - {"meta.json", "meta.json.sha256"}:
        assert (made / name).read_bytes() == (expected / name).read_bytes(), name


def _refuses(words: dict[str, Any], url: str, *expected: str) -> None:
    """Check that a URL is refused by a message that has all ``expected``, and that nothing is left."""
    with pytest.raises(UserError) as error:
        _prepare(words, train_target=(url,))
    message, log = str(error.value), io.StringIO()
    handler = loguru.add(log, diagnose=True)  # as the logs of tasks
    loguru.opt(exception=error.value).error("")
    loguru.remove(handler)
    assert message in log.getvalue() and "HUSH" not in log.getvalue()
    assert "\n" not in message and all(text in message for text in expected), message
    assert not words["out"].exists() and not list(words["out"].parent.glob(".data*"))


def test_urls_that_cannot_be_read(
    words: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _refuses(words, "memory://bucket/none", "memory://bucket/none cannot be read (FileNotFoundError: ")
    _refuses(words, "memroy://bucket/a", "memroy://bucket/a has a scheme that fsspec does not know; did you mean")
    monkeypatch.setitem(sys.modules, "smbclient", None)
    _refuses(words, "smb://host/a", "smb://host/a needs a package", "smbprotocol", "pip install 'fsspec[s3,http]'")

    line = ["prepare", "--train-target", "t", "--valid-source", "v", "--valid-target", "v", "--out"]
    for url in (
        *("s3://KEY:HUSH@bucket/a", "s3://KEY:HU/SH@bucket/a", "s3://KEY:12/HUSH@bucket/a", "https://HUSH@host/a"),
        *("https://host/a?X-Amz-Signature=HUSH", "zip://a::s3://KEY:HUSH@bucket/a.zip"),
    ):
        message = refused([*line, "d", "--train-source", url], capsys, "--train-source is a URL", "environment")
        assert "HU" not in message and message.count("\n") == 1
    assert "HUSH" not in refused(
        [*line, "s3://KEY:HUSH@b/d", "--train-source", "s"], capsys, "--out is a URL", "path"
    )
    refused([*line, "d", "--train-source", "s", "--vocab-from", "s3://b/d"], capsys, "--vocab-from is a URL")
    refused([*line, "d", "--train-source", "s", "--sentencepiece", "s3://b/d"], capsys, "--sentencepiece is a URL")


class _Server(BaseHTTPRequestHandler):
    """A server of files, of which some are refused, break off, or change."""

    files: dict[str, bytes]
    heads = 0

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        kind, name = self.path.split("?")[0].strip("/").split("/")
        content = self.files[name]
        type(self).heads += self.command == "HEAD"
        if kind == "signed" and self.command == "HEAD":  # only reading fails
            kind = "good"
        self.send_response({"none": 404, "refused": 403, "signed": 302}.get(kind, 200))
        self.send_header("Content-Length", str(len(content)))
        if kind == "signed":
            self.send_header("Location", f"/refused/{name}?X-Amz-Signature=HUSH")
        if kind == "changes":
            self.send_header("ETag", f'"{self.heads}"')
        self.end_headers()
        if self.command == "GET" and kind not in ("none", "refused", "signed"):
            self.wfile.write(content[: len(content) // 2] if kind == "dies" else content)

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def server(words: dict[str, Any]) -> Iterator[str]:
    pytest.importorskip("aiohttp")
    paths = [path for name, paths in words.items() if name.startswith(("train", "valid")) for path in paths]
    _Server.files = {path.name: path.read_bytes() for path in paths}
    with ThreadingHTTPServer(("127.0.0.1", 0), _Server) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_http(words: dict[str, Any], server: str, tmp_path: Path) -> None:
    local = _prepare(words, out=tmp_path / "local")
    for kind, problem in (("none", "404"), ("refused", "403"), ("signed", "403"), ("dies", "of 9248 bytes")):
        _refuses(words, f"{server}/{kind}/train.de", f"/{kind}/train.de cannot be read (", problem)
    _refuses(words, f"{server}/changes/train.de", "/changes/train.de changed while `prepare` read it")
    meta = _prepare(_served(words, f"{server}/good"))
    assert meta.files == local.files
    _same_but_record(words["out"], tmp_path / "local")


def test_s3(words: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    local = _prepare(words, out=tmp_path / "local")
    server = moto.ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        for name, value in (
            ("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port())),
            *(("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "HUSH"), ("AWS_DEFAULT_REGION", "us-east-1")),
        ):
            monkeypatch.setenv(name, value)
        fsspec.filesystem("s3").mkdir("bucket")
        meta = _prepare(urls := _put(words, "s3://bucket/text"))
        assert meta.files == local.files and meta.inputs["train.source"][0].path == urls["train_source"][0]
        _same_but_record(words["out"], tmp_path / "local")
        assert "HUSH" not in (words["out"] / "meta.json").read_text()
        words["out"] = tmp_path / "other" / "data"
        _refuses(words, "s3://bucket/none", "s3://bucket/none cannot be read (FileNotFoundError: ")
        _refuses(words, "s3://nobucket/none", "s3://nobucket/none cannot be read")
    finally:
        server.stop()


def test_weights_stay_with_their_pairs(texts: dict[str, Any], tmp_path: Path) -> None:
    plain = _prepare(texts, out=tmp_path / "plain")
    assert Corpus(tmp_path / "plain", "train").weights is None
    texts |= _noisy(tmp_path)
    meta = _prepare(texts)
    directory = DataDirectory.open(texts["out"])
    corpus, tokenizer = directory.corpus("train"), directory.tokenizer()
    assert corpus.weights is not None and corpus.weights.dtype == np.float32
    assert corpus.weights.shape == (len(corpus),) and meta.files["train.weights.bin"].bytes == 4 * len(corpus)
    assert directory.corpus("valid").weights is None
    lines = [texts[name][0].read_text(encoding="utf-8").split("\n") for name in ("train_source", "train_target")]
    for index, weight in enumerate(corpus.weights.tolist()):
        place = int(weight) - 1
        assert tokenizer.decode(corpus.source(index)) == lines[0][place]
        assert tokenizer.decode(corpus.target(index)) == lines[1][place].replace("½", "1⁄2").strip()
    assert corpus.weights.tolist() == sorted(corpus.weights.tolist()), "of duplicates, the first"
    assert directory.fingerprint != DataDirectory(texts["out"], plain).fingerprint

    rows = [f"{weight}\t{source}\t{target}" for weight, source, target in zip(range(1, 577), *lines, strict=False)]
    same = _prepare(
        _tsv({**texts, "train_weights": ()}, _write(tmp_path / "all.tsv", rows)),
        out=tmp_path / "tsv",
        tsv_columns=(2, 3, 1),
    )
    assert same.files == meta.files

    with (texts["out"] / "train.weights.bin").open("ab") as file:
        file.write(b"\0\0\0\0")
    with pytest.raises(DataError, match=r"train\.weights\.bin holds \d+ weights of \d+ pairs"):
        Corpus(texts["out"], "train")


@pytest.mark.long
def test_scores_stay_with_their_pairs(texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (inputs, stages):
        monkeypatch.setattr(module, "PIECE_BYTES", 700)
    monkeypatch.setattr(stages, "TASK_PIECES", 2)
    texts |= _noisy(tmp_path)
    scores = [(-7 * place) % 10 - 7.5 for place in range(3 * len(SOURCE))]
    noisy = _prepare(texts)
    texts |= {
        "train_scores": (_write(tmp_path / "scores", [f" {score:+.1f} " for score in scores]),),
        "filters": "score=-2.5",
    }
    for workers in (1, 2):
        meta = _prepare(texts, out=tmp_path / f"of{workers}", workers=workers)
        weights = Corpus(tmp_path / f"of{workers}", "train").weights
        assert weights is not None and len(weights) > 50
        assert all(scores[int(weight) - 1] >= -2.5 for weight in weights.tolist())
        # Of the pairs without another fault before, whose texts are the same with or without scores.
        faulty = sum(noisy.removed[reason] for reason in ("empty", "bad_character", "undecodable"))
        assert meta.removed["score"] == pytest.approx(0.5 * (len(scores) - faulty), rel=0.05)
        assert len(meta.removed_examples["score"]) == 3
        assert meta.options["filters"] == {"score": {"min_score": -2.5}} and "train.scores" in meta.inputs
    lines = [texts[name][0].read_text(encoding="utf-8").split("\n") for name in ("train_source", "train_target")]
    rows = [f"{source}\t{target}" for source, target in zip(*lines, strict=True)][:-1]
    assert _prepare(_tsv(texts, _write(tmp_path / "all.tsv", rows)), out=tmp_path / "tsv").files == meta.files

    _write(tmp_path / "scores", ["-1"] * (len(scores) - 1))
    with pytest.raises(DataError, match="text and weights and scores have different numbers of lines"):
        _prepare(texts, overwrite=True)


@pytest.mark.parametrize(
    ("kind", "text"),
    [*(("weight", text) for text in ("0", "-1", "nan", "1e39", "1e-60", "", "1_0", "1 2")),
     *(("score", text) for text in ("", "nan", "1,5", "0x1", "1\t2"))],
)  # fmt: skip
def test_a_weight_or_score_that_is_no_number_is_named(
    kind: str, text: str, texts: dict[str, Any], tmp_path: Path
) -> None:
    numbers = ["0.5", " 2 ", "1e-3", "+.25"] * (len(SOURCE) // 4)
    numbers[100] = text
    texts[f"train_{kind}s"] = (_write(tmp_path / "numbers", numbers),)
    texts |= {"filters": "score=-1e9"} if kind == "score" else {}
    with pytest.raises(DataError, match=rf"line 101 of .*numbers has the {kind} '.*', which is no number"):
        _prepare(texts)
    assert _directories(tmp_path) == []


def test_a_disk_without_room_for_the_text_is_refused(
    texts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = _prepare(texts)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=4096))
    with pytest.raises(DataError, match=r"has 4\.0 KiB free, but the training text has .* KiB; free disk space"):
        _prepare(texts, overwrite=True)
    assert DataDirectory.open(texts["out"]).meta == meta
    assert _directories(tmp_path) == ["data"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "no training text; give --train-source"),
        ("--train-source a", "train has 1 source file, but 0 target files"),
        ("--tsv a --train-source b --train-target c", "--tsv has both sides of the training text; leave out"),
        ("--tsv a --tsv-columns 1,1", "--tsv-columns is 1,1; give two or three"),
        ("--tsv a --tsv-columns 0,1", "--tsv-columns .*'0'"),
        ("--train-source a --train-target b --tsv-columns 1,2", "--tsv-columns is for --tsv"),
        ("--tsv a --train-scores w", "--train-scores is for the filter score; give --filters score=MINIMUM"),
        ("--tsv a --tsv b --train-weights w", "--train-weights has 1 file for 2"),
    ],
)
def test_wrong_options_are_refused(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    valid = ["--valid-source", "v", "--valid-target", "v", "--out", str(tmp_path / "out")]
    assert cli.main(["prepare", *words.split(), *valid]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert re.search(message, error), error
