"""Pipelines of the papers' data, tested with small archives of the same layout."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import io
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
    words = {"en": "The well-known house", "de": "Das wohl-bekannte Haus", "fr": "La maison bien-connue"}[language]
    name = member.rsplit("/", 1)[-1].split(".")[0]
    lines = [f"{words} „No. {number}“ of {name} & Co. costs {number},50 €." for number in range(LINES)]
    if member.endswith(".sgm"):
        text = "<refset>\n<doc>\n" + "".join(
            f'<seg id="{number}">\n{line.replace("&", "&amp;")}\n</seg>\n' for number, line in enumerate(lines)
        )
    elif member.endswith(".xml"):
        text = "<mteval>\n" + "".join(
            f'<seg id="{n}"> {line.replace("&", "&amp;")} </seg>\n' for n, line in enumerate(lines)
        )
    elif "train.tags." in member:
        head = "<url>http://x</url>\n<keywords>talks</keywords>\n<talkid>1</talkid>\n<title>A House</title>\n"
        text = head + "\n".join(lines) + "\n"
    else:
        # One pair without a line feed, one with an empty side.
        lines[3] = " ".join(["word"] * 300)
        lines[4] = "" if language == "de" else lines[4]
        text = "\n".join(lines) + "\n"
    return gzip.compress(text.encode()) if member.endswith(".gz") else text.encode()


def write_archives(pipeline: ModuleType, task: str, directory: Path) -> None:
    directory.mkdir()
    plan = pipeline.TASKS[task]
    members: dict[str, dict[str, bytes]] = {}
    for part in [*plan.train, *plan.valid, *plan.test]:
        for side, language in enumerate((plan.source, plan.target)):
            member = part.member(side, language)
            members.setdefault(part.archive, {})[member] = content(member, language)
    for archive, files in members.items():
        with tarfile.open(directory / archive, "w:gz" if archive.endswith("gz") else "w") as tar:
            for name, data in files.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


def go(task: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / f"launch/data/{task}.sh"), "--threads", "1", "--vocab-size", "300", *words]
    environment = {"PATH": "/usr/bin:/bin", "VENV": sys.prefix, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("task", ["wmt14_ende", "wmt14_enfr", "wmt16_ende", "wmt18_ende", "iwslt14_deen"])
def test_from_archives_to_a_data_directory(pipeline: ModuleType, task: str, tmp_path: Path) -> None:
    write_archives(pipeline, task, tmp_path / "archives")
    words = ["--from", str(tmp_path / "archives"), "--out", str(tmp_path / "out")]
    done = go(task, *words)
    assert done.returncode == 0, done.stderr
    plan, text = pipeline.TASKS[task], tmp_path / "out" / "text"
    sizes = {split: len(lines(text / f"{split}.{plan.source}")) for split in ("train", "valid", "test")}
    for split, size in sizes.items():
        assert len(lines(text / f"{split}.{plan.target}")) == size
    if task == "iwslt14_deen":
        assert sizes == {"train": 59, "valid": 2, "test": 5 * LINES}, "every 23rd of 61 lines, including the title"
        assert lines(text / "train.en")[0] == "a house"
    else:
        lost = 2 if plan.target == "de" else 1
        assert sizes["train"] == len(plan.train) * (LINES - lost)
        assert sizes["valid"] == len(plan.valid) * LINES and sizes["test"] == LINES
    sample = lines(text / f"test.{plan.target}")[7]
    expected = {
        "de": "Das wohl @-@ bekannte Haus",
        "en": "The well @-@ known house",
        "fr": "La maison bien @-@ connue",
    }
    start = expected[plan.target]
    if not plan.normalise:
        start = start.replace(" @-@ ", "-")
    assert sample.startswith(start.lower() if plan.lowercase else start)
    assert ("&quot;" if plan.normalise else "„") in sample and "&amp;" in sample and sample.endswith("€ .")
    assert (tmp_path / "out/data/meta.json").is_file()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    again = go(task, *words)
    assert again.returncode == 0 and "exists already" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_missing_and_damaged_archives_are_named(pipeline: ModuleType, tmp_path: Path) -> None:
    archives = tmp_path / "archives"
    words = ["--from", str(archives), "--out", str(tmp_path / "out")]
    done = go("wmt16_ende", *words)
    assert done.returncode == 2 and "--from must be a directory with" in done.stderr, done.stderr
    assert f"but {archives} is not a directory" in done.stderr
    done = go("wmt16_ende", "--outt", "x")
    assert done.returncode == 2 and "usage: launch/data/wmt16_ende.sh [--out DIR]" in done.stderr
    archives.mkdir()
    done = go("wmt16_ende", *words)
    assert done.returncode == 2
    assert "--from must contain training-parallel-europarl-v7.tgz" in done.stderr and " lacks " in done.stderr
    archives.rmdir()
    write_archives(pipeline, "iwslt14_deen", archives)
    assert go("iwslt14_deen", *words).returncode == 0
    archive = archives / "de-en.tgz"
    archive.write_bytes(archive.read_bytes()[:-20])
    done = go("iwslt14_deen", *words)
    assert done.returncode == 2 and "must have the SHA-256" in done.stderr and "remove it" in done.stderr
    write_archives(pipeline, "iwslt14_deen", tmp_path / "others")
    with tarfile.open(tmp_path / "others/de-en.tgz", "w:gz"):
        pass
    done = go("iwslt14_deen", "--from", str(tmp_path / "others"), "--out", str(tmp_path / "elsewhere"))
    assert done.returncode == 2 and "must contain de-en/train.tags.de-en.de, but does not" in done.stderr


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


def test_an_interrupted_download_is_resumed(pipeline: ModuleType, address: str, tmp_path: Path) -> None:
    path = tmp_path / "file.tgz"
    with pytest.raises(OSError, match="start again to resume"):
        pipeline._fetch(f"{address}/file.tgz", path)
    assert not path.exists() and (tmp_path / "file.tgz.part").stat().st_size == len(Half.body) // 2
    pipeline._fetch(f"{address}/file.tgz", path)
    assert path.read_bytes() == Half.body
    notes = tmp_path / "SHA256SUMS"
    digest = hashlib.sha256(Half.body).hexdigest()
    pipeline._verify(path, published=digest, given=False, checksums=notes)
    with pytest.raises(ValueError, match="must have the SHA-256 00"):
        pipeline._verify(path, published="00", given=False, checksums=tmp_path / "others")


def test_a_complete_part_is_kept_and_a_longer_one_removed(pipeline: ModuleType, address: str, tmp_path: Path) -> None:
    path, part = tmp_path / "file.tgz", tmp_path / "file.tgz.part"
    part.write_bytes(Half.body)
    pipeline._fetch(f"{address}/file.tgz", path)
    assert path.read_bytes() == Half.body
    part.write_bytes(Half.body + b"!")
    with pytest.raises(OSError, match="was not a part of"):
        pipeline._fetch(f"{address}/file.tgz", path)
    assert not part.exists()
