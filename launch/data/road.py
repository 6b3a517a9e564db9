"""The road from published archives to a data directory: fetch, verify, extract, Moses steps, splits, `prepare`.

Called by the scripts beside this file; every step that is done is not done again. Needs sacremoses
(`pip install sacremoses`).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import html
import http.client
import io
import itertools
import os
import re
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO

STATMT = "http://www.statmt.org"
DATA = "http://data.statmt.org"

# Name: where it is, and its SHA-256 where one is known. Others are written down when they are first seen.
ARCHIVES = {
    "training-parallel-europarl-v7.tgz": (
        f"{STATMT}/wmt13", "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
    ),
    "training-parallel-commoncrawl.tgz": (
        f"{STATMT}/wmt13", "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
    ),
    "training-parallel-un.tgz": (f"{STATMT}/wmt13", ""),
    "training-parallel-nc-v9.tgz": (
        f"{STATMT}/wmt14", "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
    ),
    "training-parallel-nc-v11.tgz": (
        f"{DATA}/wmt16/translation-task", "cfe8ab047e05043476e498ee765c98e939c7b7d6d294e856344c84476b619d6a",
    ),
    "training-parallel-nc-v13.tgz": (
        f"{DATA}/wmt18/translation-task", "17992b7e919cfb754c60f4e754148bc23b80706ad0ed7b34150831a554b40c91",
    ),
    "rapid2016.tgz": (
        f"{DATA}/wmt18/translation-task", "41557dd5d8f0ed3a6d98bce3b798b1a9d3b68361eb99d902329ddbb943a6b55a",
    ),
    "training-giga-fren.tar": (f"{STATMT}/wmt10", ""),
    # Every year's test sets, those before it among them.
    "dev.tgz": (
        f"{DATA}/wmt19/translation-task", "7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
    ),
    "de-en.tgz": ("http://dl.fbaipublicfiles.com/fairseq/data/iwslt14", ""),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Files of one archive: a name for each side, or one with {} for the language."""

    archive: str
    source: str
    target: str = ""

    def member(self, side: int, language: str) -> str:
        """The file of a side."""
        return (self.target if side and self.target else self.source).format(language)


@dataclass(frozen=True)
class Task:
    """A paper's data.

    Attributes:
        every: this many training pairs, the last of each, are the validation set instead; 0 none.
        normalise: as is usual for WMT: punctuation normalised, control characters removed, words split at dashes.
        longest, ratio: of a training pair, in Moses' tokens.
    """

    source: str
    target: str
    train: list[Part]
    test: list[Part]
    valid: list[Part] = field(default_factory=list)
    every: int = 0
    lowercase: bool = False
    normalise: bool = True
    vocab_size: int = 40_000
    longest: int = 250
    ratio: float = 9.0


def _sgm(year: int, pair: str, foreign: str) -> Part:
    name = f"dev/newstest{year}-{pair}"
    return Part("dev.tgz", f"{name}-src.en.sgm", f"{name}-ref.{foreign}.sgm")


def _common(pair: str) -> list[Part]:
    return [
        Part("training-parallel-europarl-v7.tgz", f"training/europarl-v7.{pair}.{{}}"),
        Part("training-parallel-commoncrawl.tgz", f"commoncrawl.{pair}.{{}}"),
    ]


_OLD = [Part("dev.tgz", f"dev/newstest{year}.{{}}") for year in (2012, 2013)]
_V9, _V11, _V13 = (f"training-parallel-nc-v{version}.tgz" for version in (9, 11, 13))
_TALKS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
TASKS = {
    "wmt14_ende": Task(
        "en", "de", [*_common("de-en"), Part(_V9, "training/news-commentary-v9.de-en.{}")],
        [_sgm(2014, "deen", "de")], _OLD,
    ),
    "wmt14_enfr": Task(
        "en", "fr",
        [
            *_common("fr-en"),
            Part("training-parallel-un.tgz", "un/undoc.2000.fr-en.{}"),
            Part(_V9, "training/news-commentary-v9.fr-en.{}"),
            Part("training-giga-fren.tar", "giga-fren.release2.fixed.{}.gz"),
        ],
        [_sgm(2014, "fren", "fr")], _OLD,
    ),
    "wmt16_ende": Task(
        "en", "de", [*_common("de-en"), Part(_V11, "training-parallel-nc-v11/news-commentary-v11.de-en.{}")],
        [_sgm(2014, "deen", "de")], _OLD[1:], vocab_size=32_000,
    ),
    "wmt18_ende": Task(
        "en", "de",
        [
            *_common("de-en"),
            Part(_V13, "training-parallel-nc-v13/news-commentary-v13.de-en.{}"),
            Part("rapid2016.tgz", "rapid2016.de-en.{}"),
        ],
        [_sgm(2018, "ende", "de")], [_sgm(2017, "ende", "de")], lowercase=True, vocab_size=32_000,
    ),
    "iwslt14_deen": Task(
        "de", "en", [Part("de-en.tgz", "de-en/train.tags.de-en.{}")],
        [Part("de-en.tgz", f"de-en/IWSLT14.{talk}.de-en.{{}}.xml") for talk in _TALKS],
        every=23, lowercase=True, normalise=False, vocab_size=10_000, longest=175, ratio=1.5,
    ),
}  # fmt: skip


def main() -> int:
    """Go the road of one task."""
    task_name = sys.argv[1] if len(sys.argv) > 1 else ""
    parser = argparse.ArgumentParser(
        prog=f"launch/data/{task_name}.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--out DIR] [--from DIR] [--vocab-size N] [--threads N]",
    )
    parser.add_argument("task", choices=list(TASKS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--from", type=Path, dest="archives", metavar="DIR")
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    task = TASKS[arguments.task]
    out: Path = arguments.out or Path("data", arguments.task)
    try:
        import sacremoses  # noqa: F401
    except ImportError:
        return _complain("sacremoses is required, but is not installed: pip install sacremoses")
    try:
        paths = _archives(task, out, arguments.archives)
        _extract(task, paths, out / "raw")
        _note(paths, out / "SHA256SUMS")
        _moses(task, out / "raw", out / "text", arguments.threads)
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError, http.client.HTTPException) as problem:
        return _complain(str(problem))
    return _prepare(task, out, arguments.vocab_size or task.vocab_size, arguments.threads)


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def _complain(text: str) -> int:
    sys.stderr.write(f"error: {text}\n")
    return 2


def _archives(task: Task, out: Path, given: Path | None) -> dict[str, Path]:
    """Where each archive is, fetched and verified."""
    names = list(dict.fromkeys(part.archive for part in [*task.train, *task.valid, *task.test]))
    directory = given or out / "archives"
    if given is not None:
        if not given.is_dir():
            raise ValueError(f"--from must be a directory with {', '.join(names)}, but {given} is none")
        missing = [name for name in names if not (given / name).is_file()]
        if missing:
            raise ValueError(f"--from {given} must hold {', '.join(names)}, but lacks {', '.join(missing)}")
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (directory / name).is_file():
            _fetch(f"{ARCHIVES[name][0]}/{name}", directory / name)
        _verify(directory / name, published=ARCHIVES[name][1], ours=given is not None, notes=out / "SHA256SUMS")
    return {name: directory / name for name in names}


def _fetch(url: str, path: Path) -> None:
    """Download a file, going on where an earlier try stopped."""
    part = path.with_name(f"{path.name}.part")
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    _say(f"fetching {url}{f', from byte {have:,} on' if have else ''}")
    try:
        with urllib.request.urlopen(request, timeout=60) as answer, part.open("ab") as file:
            if have and answer.status != 206:  # the server sends all of it again
                file.truncate(0)
            shutil.copyfileobj(answer, file, 2**20)
            promised, has = answer.headers.get("Content-Length"), file.tell()
            if promised is not None and has < int(promised) + (have if answer.status == 206 else 0):
                raise OSError(f"the connection broke off after {has:,} bytes")
    except urllib.error.HTTPError as problem:
        if problem.code != 416:
            raise OSError(f"{url} cannot be fetched ({problem}); fetch it by hand and use --from") from problem
        if problem.headers.get("Content-Range") != f"bytes */{have}":  # if so, nothing is left to send
            part.unlink()
            raise OSError(f"{part} was no part of {url}, and is removed; start again") from problem
    except OSError as problem:
        raise OSError(f"{url} cannot be fetched ({problem}); start again to go on, or use --from") from problem
    part.rename(path)


def _verify(path: Path, published: str, ours: bool, notes: Path) -> None:
    """Compare an archive with its published checksum, or with what was noted when it was first seen."""
    with path.open("rb") as file:
        found = _sha256(file)
    noted = dict(reversed(line.split()) for line in notes.read_text().splitlines()) if notes.exists() else {}
    wanted = noted.get(path.name) or ("" if ours else published)
    if wanted and found != wanted:
        raise ValueError(
            f"{path} must have the SHA-256 {wanted}, but has {found}; it is damaged or another file: remove it"
        )
    if ours and published and found != published:
        _say(f"{path.name} is not the published archive (SHA-256 {found}); it is taken as it is")


def _note(paths: dict[str, Path], notes: Path) -> None:
    """Write down the checksums of archives that held what they should, so that others by their names are noticed."""
    noted = {line.split()[1] for line in notes.read_text().splitlines()} if notes.exists() else set()
    for name, path in paths.items():
        if name not in noted:
            with path.open("rb") as file, notes.open("a") as out:
                out.write(f"{_sha256(file)}  {name}\n")


def _sha256(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := file.read(2**20):
        digest.update(block)
    return digest.hexdigest()


def _extract(task: Task, paths: dict[str, Path], raw: Path) -> None:
    """One file for each split and side, one sentence a line, cleaned of mark-up."""
    raw.mkdir(parents=True, exist_ok=True)
    splits = {"train": task.train, "valid": task.valid, "test": task.test}
    for split, side in itertools.product(splits, (0, 1)):
        language = (task.source, task.target)[side]
        if not splits[split]:
            continue
        with _written(raw / f"{split}.{language}") as out:
            if out is None:
                continue
            _say(f"extracting {split}.{language}")
            for part in splits[split]:
                for line in _lines(paths[part.archive], part.member(side, language)):
                    out.write(line + "\n")


def _lines(archive: Path, member: str) -> Iterator[str]:
    with tarfile.open(archive) as content:
        found = next((each for each in content if each.name.removeprefix("./") == member), None)
        if found is None:
            raise ValueError(f"{archive} must hold {member}, but does not")
        stream = content.extractfile(found)
        assert stream is not None
        binary = gzip.GzipFile(fileobj=stream) if member.endswith(".gz") else stream
        text = io.TextIOWrapper(binary, encoding="utf-8", errors="replace", newline="\n")  # type: ignore[arg-type]
        if member.endswith((".sgm", ".xml")):
            yield from _segments(text)
        elif "train.tags." in member:
            yield from _talk_lines(text)
        else:
            yield from (line.rstrip("\r\n") for line in text)


def _segments(lines: Iterable[str]) -> Iterator[str]:
    """The sentences of a test set in SGML or XML; a sentence may run over several lines."""
    for segment in re.findall(r"<seg[^>]*>(.*?)</seg>", "".join(lines), re.DOTALL | re.IGNORECASE):
        yield " ".join(html.unescape(segment).split())


def _talk_lines(lines: Iterable[str]) -> Iterator[str]:
    """The training text of IWSLT: talks, their titles and descriptions, without what else is told of them."""
    for line in lines:
        if not any(mark in line for mark in ("<url>", "<talkid>", "<keywords>")):
            yield re.sub(r"</?(title|description)>", "", line).strip()


def _moses(task: Task, raw: Path, text: Path, threads: int) -> None:
    """Normalise, tokenise and filter; cut the validation set out of the training text where there is no other."""
    text.mkdir(parents=True, exist_ok=True)
    languages = (task.source, task.target)
    splits = ["train", "valid", "test"] if task.valid else ["train", "test"]
    for split in splits:
        wanted = ["train", "valid"] if split == "train" and task.every else [split]
        files = [text / f"{each}.{language}" for each in wanted for language in languages]
        if all(file.exists() for file in files):
            continue
        _say(f"Moses: {split}")
        with ProcessPoolExecutor(threads) as pool:
            sides = [_tokenised(raw / f"{split}.{language}", language, task, pool) for language in languages]
            _split(zip(*sides, strict=True), files, task if split == "train" else None)


def _tokenised(path: Path, language: str, task: Task, pool: ProcessPoolExecutor) -> Iterator[str]:
    """Its lines, in order; a few blocks ahead of the reader and no more, whatever the file's size."""

    def blocks() -> Iterator[list[str]]:
        with path.open(encoding="utf-8", newline="\n") as file:
            while block := list(itertools.islice(file, 2000)):
                yield block

    work = partial(_tokenise, language=language, lowercase=task.lowercase, normalise=task.normalise)
    pending = []
    for block in blocks():
        pending.append(pool.submit(work, block))
        if len(pending) > 32:
            yield from pending.pop(0).result()
    for done in pending:
        yield from done.result()


def _tokenise(lines: list[str], language: str, lowercase: bool, normalise: bool) -> list[str]:
    """normalize-punctuation, remove-non-printing-char and tokenizer -a, or tokenizer alone; and lowercase."""
    import regex
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normalizer = MosesPunctNormalizer(language)
    tokenizer = MosesTokenizer(language)
    found = []
    for line in lines:
        text = line.strip()
        if normalise:  # a control character becomes a space: what it stood between stays apart
            text = regex.sub(r"\p{C}", " ", normalizer.normalize(text))
        tokens = tokenizer.tokenize(text, aggressive_dash_splits=normalise, return_str=True, escape=True)
        found.append(tokens.lower() if lowercase else tokens)
    return found


def _split(pairs: Iterable[tuple[str, str]], files: list[Path], task: Task | None) -> None:
    """Write pairs to train (and valid), filtered and cut as the task says, or all of them to one split."""
    temporary = [file.with_name(f".{file.name}.tmp") for file in files]
    handles = [file.open("w", encoding="utf-8", newline="\n") for file in temporary]
    kept = read = 0
    try:
        for source, target in pairs:
            read += 1
            if task is not None and not _good(source, target, task):
                continue
            kept += 1
            into = 2 if task is not None and task.every and kept % task.every == 0 else 0
            handles[into].write(source + "\n")
            handles[into + 1].write(target + "\n")
    finally:
        for handle in handles:
            handle.close()
    for before, after in zip(temporary, files, strict=True):
        before.rename(after)
    _say(f"{kept:,} of {read:,} pairs kept")


def _good(source: str, target: str, task: Task) -> bool:
    """clean-corpus-n: neither side empty or too long, nor much longer than the other."""
    one, other = len(source.split()), len(target.split())
    return min(one, other) >= 1 and max(one, other) <= min(task.longest, task.ratio * min(one, other))


def _prepare(task: Task, out: Path, vocab_size: int, threads: int) -> int:
    """The data directory. Duplicates stay: the papers kept them."""
    from deepspeed_nmt.cli import main as program

    if (out / "data" / "meta.json").exists():
        _say(f"{out / 'data'} is there already")
        return 0
    words = ["prepare", "--out", str(out / "data"), "--vocab-size", str(vocab_size), "--threads", str(threads)]
    words += ["--keep-duplicates", "--max-ratio", "9", "--overwrite"]
    for split in ("train", "valid", "test"):
        for side, language in (("source", task.source), ("target", task.target)):
            words += [f"--{split}-{side}", str(out / "text" / f"{split}.{language}")]
    return program(words)


class _written:  # noqa: N801  # a context manager, used like a function
    """A file that appears when it is complete; None where it is there already."""

    def __init__(self, path: Path) -> None:
        self._path, self._temporary = path, path.with_name(f".{path.name}.tmp")
        self._file: IO[str] | None = None

    def __enter__(self) -> IO[str] | None:
        if not self._path.exists():
            self._file = self._temporary.open("w", encoding="utf-8", newline="\n")
        return self._file

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._file is not None:
            self._file.close()
            if kind is None:
                self._temporary.rename(self._path)


if __name__ == "__main__":
    sys.exit(main())
