"""Pipelines of the papers' data, tested with small archives of the same layout."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
import json
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType

import pytest

from tests.support import ROOT

pytest.importorskip("sacremoses", reason="needs sacremoses")
LINES = 60
WORDS = {"en": "The well-known house", "de": "Das wohl-bekannte Haus", "fr": "La maison bien-connue"}


@pytest.fixture(scope="module")
def pipeline() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pipeline", ROOT / "launch/data/pipeline.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pipeline"] = module
    spec.loader.exec_module(module)
    return module


def content(member: str, language: str) -> bytes:
    """Return the content of a file of an archive."""
    name = member.rsplit("/", 1)[-1].split(".")[0]
    lines = [f"{WORDS[language]} „No. {number}“ of {name} & Co. costs {number},50 €." for number in range(LINES)]
    if member.endswith(".xml"):
        text = "<mteval>\n" + "".join(
            f'<seg id="{n}"> {line.replace("&", "&amp;")} </seg>\n' for n, line in enumerate(lines)
        )
    elif "train.tags." in member:
        head = "<url>http://x</url>\n<keywords>talks</keywords>\n<talkid>1</talkid>\n<title>A House</title>\n"
        text = head + "\n".join(lines) + "\n"
    elif member.startswith("wmt"):
        text = "\n".join(lines) + "\n"
    else:
        # One pair without a line feed, one with an empty side.
        lines[3] = " ".join(["word"] * 300)
        lines[4] = "" if language == "de" else lines[4]
        text = "\n".join(lines) + "\n"
    return gzip.compress(text.encode()) if member.endswith(".gz") else text.encode()


def write_archives(pipeline: ModuleType, task: str, directory: Path) -> None:
    """Write the archives of a task, and beside them the cache of sacreBLEU with its test sets."""
    directory.mkdir()
    plan = pipeline.TASKS[task]
    members: dict[str, dict[str, bytes]] = {}
    for part in [*plan.train, *plan.valid, *plan.test]:
        if isinstance(part, str):
            folder = directory.parent / "sacrebleu" / part
            folder.mkdir(parents=True)
            for field in ("src", "ref", "docid", "genre", "origlang"):
                text = content(part, plan.target if field == "ref" else plan.source).replace(b"&", b"&amp;")
                name = f"{part.replace('/', '_')}.{plan.source}-{plan.target}.{field}"
                (folder / name).write_bytes(text)
            continue
        for side, language in enumerate((plan.source, plan.target)):
            member = part.member(side, language)
            members.setdefault(part.archive, {})[member] = content(member, language)
    for archive, files in members.items():
        with tarfile.open(directory / archive, "w:gz" if archive.endswith("gz") else "w") as tar:
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


def go(task: str, *words: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run a script. It cannot fetch anything."""
    command = [str(ROOT / f"launch/data/{task}.sh"), "--threads", "1", *words]
    environment = {"PATH": "/usr/bin:/bin", "VENV": sys.prefix, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment |= {"SACREBLEU": str(cache), "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("task", ["wmt14_ende", "wmt14_enfr", "wmt18_ende", "iwslt14_deen"])
def test_from_archives_to_a_data_directory(pipeline: ModuleType, task: str, tmp_path: Path) -> None:
    write_archives(pipeline, task, tmp_path / "archives")
    words = ["--from", str(tmp_path / "archives"), "--out", str(tmp_path / "out"), "--vocab-size", "300"]
    words += ["--text", "moses"] if task == "iwslt14_deen" else []
    words += ["--normalise"] if task == "wmt14_ende" else []
    done = go(task, *words, cache=tmp_path / "sacrebleu")
    assert done.returncode == 0, done.stderr
    plan = pipeline.TASKS[task]
    text = tmp_path / "out" / ("moses-normalised" if "--normalise" in words else "moses")
    sizes = {split: len(lines(text / f"{split}.{plan.source}")) for split in ("train", "valid", "test")}
    for split, size in sizes.items():
        assert len(lines(text / f"{split}.{plan.target}")) == size
    parts = {"train": len(plan.train), "valid": len(plan.valid), "test": len(plan.test)}
    title = 1 if task == "iwslt14_deen" else 0
    assert sizes == {split: count * LINES + title * (split == "train") for split, count in parts.items()}
    if title:
        assert lines(text / "train.en")[0] == "a house"
    sample = lines(text / f"test.{plan.target}")[7]
    start = WORDS[plan.target]
    if "--normalise" in words:
        start = start.replace("-", " @-@ ")
    assert sample.startswith(start.lower() if plan.lowercase else start)
    assert ("&quot;" if "--normalise" in words else "„") in sample
    assert "&amp;" in sample and "&amp; amp" not in sample and sample.endswith("€ .")
    meta = json.loads((tmp_path / "out/data/meta.json").read_text())
    assert meta["text"] == {"form": "moses", "source_lang": plan.source, "target_lang": plan.target}
    cleaning = meta["options"]["cleaning"]
    assert cleaning["keep_duplicates"] and cleaning["max_length"] == plan.max_length
    assert meta["options"]["normalization"] == "none", "Moses' tokens are segmented as they are"
    # Only a line of 300 words and an empty side of German are removed, and by the ratio what is limited by it.
    removed = {reason: count for reason, count in meta["removed"].items() if count}
    expected = {"empty": len(plan.train)} if plan.target == "de" else {}
    assert removed == ({} if title else {"too_long": len(plan.train), **expected})
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    again = go(task, *words, cache=tmp_path / "sacrebleu")
    assert again.returncode == 0 and "nothing to do" in again.stderr, again.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_options_reach_prepare_and_defaults_are_those_of_the_papers(pipeline: ModuleType, tmp_path: Path) -> None:
    for task, plan in pipeline.TASKS.items():
        script = (ROOT / f"launch/data/{task}.sh").read_text()
        shown = " ".join(script.replace("\n#", " ").split())
        of_moses = f"{plan.vocabulary['moses']} --normalization none"
        assert f"state: {pipeline.defaults(plan, plan.text)} Train:" in shown or (
            f"paper's: {pipeline.defaults(plan, plan.text)} With --text moses: {of_moses} instead" in shown
        ), task
    write_archives(pipeline, "wmt16_ende", tmp_path / "archives")
    cache = tmp_path / "sacrebleu"
    words = ["--from", str(tmp_path / "archives"), "--out", str(tmp_path / "out"), "--vocab-size", "300"]
    more = ["--max-length", "100", "--ratio", "1.5", "--dedup", "--text", "raw", "--remove-identical"]
    done = go("wmt16_ende", *words, *more, cache=cache)
    assert done.returncode == 0, done.stderr
    assert f"defaults of wmt16_ende: {pipeline.defaults(pipeline.TASKS['wmt16_ende'], 'raw')}" in done.stderr
    meta = json.loads((tmp_path / "out/data/meta.json").read_text())
    assert meta["text"]["form"] == "raw" and not (tmp_path / "out/moses").exists()
    options = {"max_length": 100, "max_ratio": 1.5, "keep_duplicates": False, "remove_identical": True}
    assert options.items() <= meta["options"]["cleaning"].items()
    assert lines(tmp_path / "out/data/test.target")[7].startswith("Das wohl-bekannte Haus „No. 7“ of full & Co.")
    again = go("wmt16_ende", *words, "--text", "moses", cache=cache)
    assert again.returncode == 2 and "--overwrite" in again.stderr


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--dedup extra", "extra"),
        ("--vocab-size -5", "--vocab-size -5"),
        ("--threads 0", "--threads 0"),
        ("--test-target=x", "--test-target"),
        ("--train-s x", "--train-s"),
        ("--ratio 1.5 --max-ratio 3", "--max-ratio --ratio"),
        ("--text raw --normalise", "--normalise raw"),
        ("--vocab-from nowhere", "nowhere"),
        ("--out ", "empty"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_fetched(
    pipeline: ModuleType,
    words: str,
    names: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def fetched(*_: object, **__: object) -> None:
        raise AssertionError("fetched")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pipeline, "_get_archives", fetched)
    monkeypatch.setattr(sys, "argv", ["pipeline.py", "wmt14_ende", *words.split(" ")])
    with pytest.raises(SystemExit) as ended:
        pipeline.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and all(name in said for name in names.split()), said
    assert len(said.splitlines()) == 1, said
    assert not list(tmp_path.iterdir())


def test_missing_and_damaged_archives_are_named(pipeline: ModuleType, tmp_path: Path) -> None:
    archives, cache = tmp_path / "archives", tmp_path / "sacrebleu"
    words = ["--from", str(archives), "--out", str(tmp_path / "out"), "--vocab-size", "300"]

    def refused(task: str, *names: str, words: list[str] = words, cache: Path = cache) -> None:
        done = go(task, *words, cache=cache)
        assert done.returncode == 2 and all(name in done.stderr for name in names), done.stderr

    archives.mkdir()
    refused("wmt16_ende", "--from", "training-parallel-europarl-v7.tgz")
    archives.rmdir()
    write_archives(pipeline, "iwslt14_deen", archives)
    words += ["--text", "moses"]
    assert go("iwslt14_deen", *words, cache=cache).returncode == 0
    archive = archives / "de-en.tgz"
    archive.write_bytes(archive.read_bytes()[:-20])
    refused("iwslt14_deen", "SHA-256", str(archive))
    write_archives(pipeline, "iwslt14_deen", tmp_path / "others")
    with tarfile.open(tmp_path / "others/de-en.tgz", "w:gz"):
        pass
    words = ["--from", str(tmp_path / "others"), "--out", str(tmp_path / "elsewhere")]
    refused("iwslt14_deen", "de-en/train.tags.de-en.de", words=words)


class Half(BaseHTTPRequestHandler):
    """Server that sends only half of a file, unless a request has a range."""

    body = bytes(range(256)) * 400

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
        if start >= len(self.body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(self.body)}")
            self.end_headers()
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(self.body) - start))
        self.end_headers()
        self.wfile.write(self.body[start:] if asked else self.body[: len(self.body) // 2])

    def log_message(self, *words: object) -> None:
        return


@pytest.fixture
def address() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Half)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()


def test_downloads_are_resumed(pipeline: ModuleType, address: str, tmp_path: Path) -> None:
    path, part = tmp_path / "file.tgz", tmp_path / "file.tgz.part"
    with pytest.raises(OSError, match="start again to resume"):
        pipeline._fetch(f"{address}/file.tgz", path)
    assert not path.exists() and part.stat().st_size == len(Half.body) // 2
    pipeline._fetch(f"{address}/file.tgz", path)
    assert path.read_bytes() == Half.body
    digest = hashlib.sha256(Half.body).hexdigest()
    pipeline._verify(path, published=digest, given=False, checksums=tmp_path / "SHA256SUMS")
    with pytest.raises(ValueError, match=r"has the SHA-256 .* instead of 00"):
        pipeline._verify(path, published="00", given=False, checksums=tmp_path / "others")
    path.unlink()
    part.write_bytes(Half.body)
    pipeline._fetch(f"{address}/file.tgz", path)
    assert path.read_bytes() == Half.body, "a complete part is kept"
    part.write_bytes(Half.body + b"!")
    with pytest.raises(OSError, match="not a part of"):
        pipeline._fetch(f"{address}/file.tgz", path)
    assert not part.exists(), "a longer one is removed"
