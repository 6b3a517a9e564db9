"""Pipeline from published archives to a data directory: fetch, verify, extract, preprocess, split, `prepare`.

Each script beside this file runs it for one task. A step whose output exists is skipped. Requires sacremoses
(`pip install sacremoses`).
"""

from __future__ import annotations

import argparse
import gzip
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
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deepspeed_nmt.files import atomic_text_writer, sha256_of

_BLOCK_LINES = 2000
"""Lines that a worker tokenises at a time."""
_BLOCKS_AHEAD = 32
"""Blocks that are tokenised ahead of the reader. The limit bounds the memory for files of any size."""

STATMT = "http://www.statmt.org"
DATA = "http://data.statmt.org"

# Name -> (URL of its directory, published SHA-256). Without a published one, the first SHA-256 seen is recorded.
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
    # The test sets of all years up to 2019.
    "dev.tgz": (
        f"{DATA}/wmt19/translation-task", "7a7deccf82ebb05ba508dba5eb21356492224e8f630ec4f992132b029b4b25e7",
    ),
    "de-en.tgz": ("http://dl.fbaipublicfiles.com/fairseq/data/iwslt14", ""),
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """Two aligned files of an archive, one for each side.

    Attributes:
        archive: name of the archive.
        source: name of the source side's file in it; {} stands for the language.
        target: name of the target side's file; empty if it differs from ``source`` in the language only.
    """

    archive: str
    source: str
    target: str = ""

    def member(self, side: int, language: str) -> str:
        """Return the name of the file of a side (0 source, 1 target) in the archive."""
        return (self.target if side and self.target else self.source).format(language)


@dataclass(frozen=True)
class Task:
    """The data of a paper.

    Attributes:
        source, target: language codes.
        train, test, valid: parts of each split.
        every: every k-th training pair belongs to the validation set instead; 0 for none.
        lowercase: True if the text is lowercased.
        normalise: True to preprocess as for WMT: normalise punctuation, remove control characters, split at dashes.
        vocab_size: tokens of the joint vocabulary.
        longest: largest number of Moses tokens on either side of a training pair.
        ratio: largest ratio of the lengths of the two sides of a training pair.
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
    """Return the test set of a year in SGML, from English."""
    name = f"dev/newstest{year}-{pair}"
    return Part("dev.tgz", f"{name}-src.en.sgm", f"{name}-ref.{foreign}.sgm")


def _common(pair: str) -> list[Part]:
    """Return Europarl and Common Crawl, which all WMT tasks use."""
    return [
        Part("training-parallel-europarl-v7.tgz", f"training/europarl-v7.{pair}.{{}}"),
        Part("training-parallel-commoncrawl.tgz", f"commoncrawl.{pair}.{{}}"),
    ]


_NEWSTEST_2012_2013 = [Part("dev.tgz", f"dev/newstest{year}.{{}}") for year in (2012, 2013)]
_V9, _V11, _V13 = (f"training-parallel-nc-v{version}.tgz" for version in (9, 11, 13))
_TALKS = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
TASKS = {
    "wmt14_ende": Task(
        "en", "de", [*_common("de-en"), Part(_V9, "training/news-commentary-v9.de-en.{}")],
        [_sgm(2014, "deen", "de")], _NEWSTEST_2012_2013,
    ),
    "wmt14_enfr": Task(
        "en", "fr",
        [
            *_common("fr-en"),
            Part("training-parallel-un.tgz", "un/undoc.2000.fr-en.{}"),
            Part(_V9, "training/news-commentary-v9.fr-en.{}"),
            Part("training-giga-fren.tar", "giga-fren.release2.fixed.{}.gz"),
        ],
        [_sgm(2014, "fren", "fr")], _NEWSTEST_2012_2013,
    ),
    "wmt16_ende": Task(
        "en", "de", [*_common("de-en"), Part(_V11, "training-parallel-nc-v11/news-commentary-v11.de-en.{}")],
        [_sgm(2014, "deen", "de")], _NEWSTEST_2012_2013[1:], vocab_size=32_000,
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
    """Run the pipeline of the task that the first argument names."""
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
        return _complain("sacremoses must be installed, but is not; run `pip install sacremoses`")
    try:
        paths = _get_archives(task, out, arguments.archives)
        _extract(task, paths, out / "raw")
        _record_checksums(paths, out / "SHA256SUMS")
        _preprocess(task, out / "raw", out / "text", arguments.threads)
    except (OSError, EOFError, ValueError, zlib.error, tarfile.TarError, http.client.HTTPException) as error:
        return _complain(str(error))
    return _prepare(task, out, arguments.vocab_size or task.vocab_size, arguments.threads)


def _say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def _complain(text: str) -> int:
    sys.stderr.write(f"error: {text}\n")
    return 2


def _get_archives(task: Task, out: Path, given: Path | None) -> dict[str, Path]:
    """Fetch the missing archives of a task and verify all of them.

    Args:
        task: the task.
        out: output directory of the pipeline.
        given: directory with all archives, from which nothing is fetched; None to fetch into ``out``.

    Returns:
        The path of each archive.

    Raises:
        ValueError: if ``given`` lacks an archive, or an archive has another checksum.
        OSError: if an archive cannot be fetched or read.
    """
    names = list(dict.fromkeys(part.archive for part in [*task.train, *task.valid, *task.test]))
    directory = given or out / "archives"
    if given is not None:
        if not given.is_dir():
            raise ValueError(f"--from must be a directory with {', '.join(names)}, but {given} is not a directory")
        missing = [name for name in names if not (given / name).is_file()]
        if missing:
            raise ValueError(f"--from must contain {', '.join(names)}, but {given} lacks {', '.join(missing)}")
    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        if not (directory / name).is_file():
            _fetch(f"{ARCHIVES[name][0]}/{name}", directory / name)
        _verify(directory / name, ARCHIVES[name][1], given=given is not None, checksums=out / "SHA256SUMS")
    return {name: directory / name for name in names}


def _fetch(url: str, path: Path) -> None:
    """Download a file. An interrupted download is resumed.

    Raises:
        OSError: if the download fails.
    """
    part = path.with_name(f"{path.name}.part")
    start = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    _say(f"fetching {url}{f' from byte {start:,}' if start else ''}")
    try:
        with urllib.request.urlopen(request, timeout=60) as response, part.open("ab") as file:
            resumed = response.status == 206
            if start and not resumed:  # the server ignores the range and sends the whole file
                file.truncate(0)
            shutil.copyfileobj(response, file, 2**20)
            promised, received = response.headers.get("Content-Length"), file.tell()
            if promised is not None and received < int(promised) + (start if resumed else 0):
                raise OSError(f"the connection was lost after {received:,} bytes")
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise OSError(f"{url} cannot be fetched ({error}); download it yourself and use --from") from error
        if error.headers.get("Content-Range") != f"bytes */{start}":  # equal if the part is the complete file
            part.unlink()
            raise OSError(f"{part} was not a part of {url} and is removed; start again") from error
    except OSError as error:
        raise OSError(f"{url} cannot be fetched ({error}); start again to resume, or use --from") from error
    part.rename(path)


def _read_checksums(checksums: Path) -> dict[str, str]:
    """Read the recorded SHA-256 of each archive."""
    lines = checksums.read_text().splitlines() if checksums.exists() else []
    return {name: digest for digest, name in (line.split() for line in lines)}


def _verify(path: Path, published: str, given: bool, checksums: Path) -> None:
    """Compare the SHA-256 of an archive with the recorded one, or with the published one of a download.

    Args:
        path: the archive.
        published: published SHA-256; empty if there is none.
        given: True if the archive was given by the user. It may then differ from the published one.
        checksums: file with the recorded SHA-256 of each archive.

    Raises:
        ValueError: if they differ.
    """
    found = sha256_of(path)
    expected = _read_checksums(checksums).get(path.name) or ("" if given else published)
    if expected and found != expected:
        raise ValueError(f"{path} must have the SHA-256 {expected}, but has {found}; remove it and get it again")
    if given and published and found != published:
        _say(f"{path.name} is not the published archive (SHA-256 {found}); it is used as it is")


def _record_checksums(paths: dict[str, Path], checksums: Path) -> None:
    """Append the SHA-256 of each new archive, so that a later start detects changed archives.

    Called after the extraction: only archives with the expected content are recorded.
    """
    known = _read_checksums(checksums)
    with checksums.open("a") as out:
        for name, path in paths.items():
            if name not in known:
                out.write(f"{sha256_of(path)}  {name}\n")


def _extract(task: Task, paths: dict[str, Path], raw: Path) -> None:
    """Write one file for each split and language, one sentence a line, without mark-up."""
    raw.mkdir(parents=True, exist_ok=True)
    splits = {"train": task.train, "valid": task.valid, "test": task.test}
    for (split, parts), side in itertools.product(splits.items(), (0, 1)):
        language = (task.source, task.target)[side]
        path = raw / f"{split}.{language}"
        if not parts or path.exists():
            continue
        _say(f"extracting {path.name}")
        with atomic_text_writer(path) as out:
            for part in parts:
                for line in _read_lines(paths[part.archive], part.member(side, language)):
                    out.write(line + "\n")


def _read_lines(archive: Path, member: str) -> Iterator[str]:
    """Yield the sentences of a file in an archive, without mark-up."""
    with tarfile.open(archive) as content:
        entry = next((entry for entry in content if entry.name.removeprefix("./") == member), None)
        if entry is None:
            raise ValueError(f"{archive} must contain {member}, but does not; get the published archive")
        stream = content.extractfile(entry)
        assert stream is not None
        binary = gzip.GzipFile(fileobj=stream) if member.endswith(".gz") else stream
        text = io.TextIOWrapper(binary, encoding="utf-8", errors="replace", newline="\n")  # type: ignore[arg-type]
        if member.endswith((".sgm", ".xml")):
            yield from _read_segments(text)
        elif "train.tags." in member:
            yield from _read_talks(text)
        else:
            yield from (line.rstrip("\r\n") for line in text)


def _read_segments(lines: Iterable[str]) -> Iterator[str]:
    """Yield the sentences of a test set in SGML or XML. A sentence may extend over several lines."""
    for segment in re.findall(r"<seg[^>]*>(.*?)</seg>", "".join(lines), re.DOTALL | re.IGNORECASE):
        yield " ".join(html.unescape(segment).split())


def _read_talks(lines: Iterable[str]) -> Iterator[str]:
    """Yield the sentences of the IWSLT training text: talks, titles and descriptions, without other metadata."""
    for line in lines:
        if not any(mark in line for mark in ("<url>", "<talkid>", "<keywords>")):
            yield re.sub(r"</?(title|description)>", "", line).strip()


def _preprocess(task: Task, raw: Path, text: Path, threads: int) -> None:
    """Normalise, tokenise and filter. Take the validation set from the training text if the task has no other."""
    text.mkdir(parents=True, exist_ok=True)
    languages = (task.source, task.target)
    for split in ["train", "valid", "test"] if task.valid else ["train", "test"]:
        outputs = ["train", "valid"] if split == "train" and task.every else [split]
        files = [text / f"{output}.{language}" for output in outputs for language in languages]
        if all(file.exists() for file in files):
            continue
        _say(f"preprocessing {split}")
        with ProcessPoolExecutor(threads) as pool:
            sides = [_tokenise_file(raw / f"{split}.{language}", language, task, pool) for language in languages]
            _write_pairs(zip(*sides, strict=True), files, task if split == "train" else None)


def _tokenise_file(path: Path, language: str, task: Task, pool: ProcessPoolExecutor) -> Iterator[str]:
    """Yield the tokenised lines of a file, in order."""
    work = partial(_tokenise, language=language, lowercase=task.lowercase, normalise=task.normalise)
    pending: deque[Future[list[str]]] = deque()
    with path.open(encoding="utf-8", newline="\n") as file:
        while block := list(itertools.islice(file, _BLOCK_LINES)):
            pending.append(pool.submit(work, block))
            if len(pending) > _BLOCKS_AHEAD:
                yield from pending.popleft().result()
    for future in pending:
        yield from future.result()


def _tokenise(lines: list[str], language: str, lowercase: bool, normalise: bool) -> list[str]:
    """Apply Moses' tokenizer.perl to lines, then lowercase.perl if ``lowercase``.

    If ``normalise``, apply normalize-punctuation.perl and remove-non-printing-char.perl before, and the tokenizer's
    option -a, which splits words at dashes.
    """
    import regex
    from sacremoses import MosesPunctNormalizer, MosesTokenizer

    normalizer = MosesPunctNormalizer(language)
    tokenizer = MosesTokenizer(language)
    tokenised = []
    for line in lines:
        text = line.strip()
        if normalise:  # control characters become spaces, so that words are not joined
            text = regex.sub(r"\p{C}", " ", normalizer.normalize(text))
        tokens = tokenizer.tokenize(text, aggressive_dash_splits=normalise, return_str=True, escape=True)
        tokenised.append(tokens.lower() if lowercase else tokens)
    return tokenised


def _write_pairs(pairs: Iterable[tuple[str, str]], files: list[Path], task: Task | None) -> None:
    """Write sentence pairs to files.

    Args:
        pairs: source and target sentences.
        files: source and target file, then those of the validation set if the task takes it from these pairs.
        task: task whose filter and validation set apply; None to write all pairs to the first two files.
    """
    kept = total = 0
    with ExitStack() as stack:
        outputs = [stack.enter_context(atomic_text_writer(file)) for file in files]
        for source, target in pairs:
            total += 1
            if task is not None and not _passes_filter(source, target, task):
                continue
            kept += 1
            first = 2 if task is not None and task.every and kept % task.every == 0 else 0
            outputs[first].write(source + "\n")
            outputs[first + 1].write(target + "\n")
    _say(f"{kept:,} of {total:,} pairs kept")


def _passes_filter(source: str, target: str, task: Task) -> bool:
    """Return True if Moses' clean-corpus-n.perl keeps a pair: no side is empty, too long or much the longer one."""
    shorter, longer = sorted((len(source.split()), len(target.split())))
    return shorter >= 1 and longer <= min(task.longest, task.ratio * shorter)


def _prepare(task: Task, out: Path, vocab_size: int, threads: int) -> int:
    """Make the data directory with `deepspeed-nmt prepare`. Duplicates are kept, as in the papers."""
    from deepspeed_nmt.cli import main as deepspeed_nmt

    if (out / "data" / "meta.json").exists():
        _say(f"{out / 'data'} exists already")
        return 0
    words = ["prepare", "--out", str(out / "data"), "--vocab-size", str(vocab_size), "--threads", str(threads)]
    words += ["--keep-duplicates", "--max-ratio", "9", "--overwrite"]
    for split in ("train", "valid", "test"):
        for side, language in (("source", task.source), ("target", task.target)):
            words += [f"--{split}-{side}", str(out / "text" / f"{split}.{language}")]
    return deepspeed_nmt(words)


if __name__ == "__main__":
    sys.exit(main())
