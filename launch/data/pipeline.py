"""Pipeline from published archives to a data directory: fetch, verify, extract, tokenise, `prepare`.

Each script beside this file runs it for one task. A step whose output exists is skipped. Test sets that sacreBLEU has
come from it, by its cache in $SACREBLEU (~/.sacrebleu). `prepare` filters the training text, and reports what it
removes.
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
import shlex
import shutil
import sys
import tarfile
import urllib.error
import urllib.request
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from deepspeed_nmt.cli import main as deepspeed_nmt
from deepspeed_nmt.commands import prepare
from deepspeed_nmt.console import logger, setup_logging
from deepspeed_nmt.data.data_directory import open_tokenizer
from deepspeed_nmt.errors import UserError
from deepspeed_nmt.files import atomic_writer, sha256_of
from deepspeed_nmt.text import sacremoses, tokenise

_BLOCK_LINES = 2000
"""Lines that a worker tokenises at a time."""
_BLOCKS_AHEAD = 32
"""Blocks that are tokenised ahead of the reader. The limit bounds the memory for files of any size."""

_FAILURES = (OSError, EOFError, ValueError, zlib.error, tarfile.TarError, http.client.HTTPException, UserError)
"""Errors that end the pipeline with a message."""

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
    """The data of a paper, with the paper's settings as defaults.

    Attributes:
        source, target: language codes.
        train: parts of the training text.
        valid, test: parts, or names of sacreBLEU's test sets.
        text: form of the text: raw, or tokenised by Moses' rules.
        lowercase: True if tokenised text is lowercased.
        vocabulary: options of `prepare` for the vocabulary, by form of the text.
        max_length: most tokens on either side of a training pair.
        ratio: largest ratio of the two sides' tokens; None for any.
    """

    source: str
    target: str
    train: Sequence[Part]
    valid: Sequence[Part | str]
    test: Sequence[Part | str]
    text: str = "moses"
    lowercase: bool = False
    vocabulary: Mapping[str, str] = field(default_factory=dict)
    max_length: int = 250
    ratio: float | None = None


def _common(pair: str) -> list[Part]:
    """Return Europarl and Common Crawl, which all WMT tasks use."""
    return [
        Part("training-parallel-europarl-v7.tgz", f"training/europarl-v7.{pair}.{{}}"),
        Part("training-parallel-commoncrawl.tgz", f"commoncrawl.{pair}.{{}}"),
    ]


def _joint(size: int) -> dict[str, str]:
    """Return the options of a joint vocabulary."""
    return dict.fromkeys(("moses", "raw"), f"--vocab-size {size}")


def _talks(*names: str) -> list[Part]:
    """Return test sets of IWSLT 2014."""
    return [Part("de-en.tgz", f"de-en/IWSLT14.{name}.de-en.{{}}.xml") for name in names]


_V9, _V11, _V13 = (f"training-parallel-nc-v{version}.tgz" for version in (9, 11, 13))
# Of newstest2014, papers use all 3,003 sentences; `wmt14` has only those of the shared task, 2,737 for German.
_NEWSTEST_2014 = "wmt14/full"
TASKS = {
    "wmt14_ende": Task(
        "en", "de", [*_common("de-en"), Part(_V9, "training/news-commentary-v9.de-en.{}")],
        ["wmt12", "wmt13"], [_NEWSTEST_2014], vocabulary=_joint(40_000),
    ),
    "wmt14_enfr": Task(
        "en", "fr",
        [
            *_common("fr-en"),
            Part("training-parallel-un.tgz", "un/undoc.2000.fr-en.{}"),
            Part(_V9, "training/news-commentary-v9.fr-en.{}"),
            Part("training-giga-fren.tar", "giga-fren.release2.fixed.{}.gz"),
        ],
        ["wmt12", "wmt13"], [_NEWSTEST_2014], vocabulary=_joint(40_000), ratio=1.5,
    ),
    "wmt16_ende": Task(
        "en", "de", [*_common("de-en"), Part(_V11, "training-parallel-nc-v11/news-commentary-v11.de-en.{}")],
        ["wmt13"], [_NEWSTEST_2014], vocabulary=_joint(32_000),
    ),
    "wmt18_ende": Task(
        "en", "de",
        [
            *_common("de-en"),
            Part(_V13, "training-parallel-nc-v13/news-commentary-v13.de-en.{}"),
            Part("rapid2016.tgz", "rapid2016.de-en.{}"),
        ],
        ["wmt17"], ["wmt18"], lowercase=True, vocabulary=_joint(32_000),
    ),
    "iwslt14_deen": Task(
        "de", "en", [Part("de-en.tgz", "de-en/train.tags.de-en.{}")],
        _talks("TED.dev2010", "TEDX.dev2012"), _talks("TED.tst2010", "TED.tst2011", "TED.tst2012"),
        text="raw", lowercase=True, max_length=400,
        vocabulary={
            "raw": "--tokenizer hf:dbmdz/bert-base-german-uncased,bert-base-uncased",
            "moses": "--vocab-size 10000",
        },
    ),
}  # fmt: skip


_OWNED = {
    **{f"--{split}-{side}": "leave it out" for split in ("train", "valid", "test") for side in ("source", "target")},
    "--source-lang": "leave it out",
    "--target-lang": "leave it out",
    "--segmented": "leave it out",
    "--max-ratio": "give --ratio",
    "--keep-duplicates": "give --no-dedup",
}
"""Options of `prepare` that a script sets, with remedies."""


def defaults(task: Task, text: str) -> str:
    """Return the settings of a task as options of its script."""
    ratio = "" if task.ratio is None else f" --ratio {task.ratio:g}"
    vocabulary = f"{task.vocabulary[text]}{' --normalization none' if text == 'moses' else ''}"
    return f"--text {text} {vocabulary} --max-length {task.max_length}{ratio} --no-dedup --no-normalise"


def main() -> int:
    """Run the pipeline of the task that the first argument names."""
    parser, task_name = _parser(), sys.argv[1] if len(sys.argv) > 1 else ""
    parser.prog = f"launch/data/{task_name}.sh"
    arguments, more = parser.parse_known_args()
    task = TASKS[arguments.task]
    out: Path = arguments.out or Path("data", arguments.task)
    text = arguments.text or task.text
    words = _prepare_words(task, text, arguments, more, out)
    setup_logging()
    _check(parser, arguments, more, text, words)
    logger.info(f"defaults of {arguments.task}: {defaults(task, text)}")
    logger.info(f"prepare {shlex.join(words)}")
    try:
        if text == "moses":
            sacremoses()
        paths = _get_archives(task, out, arguments.archives)
        _extract(task, paths, out / "raw", fetches=arguments.archives is None)
        _record_checksums(paths, out / "SHA256SUMS")
        if text == "moses":
            _tokenise_files(task, out / "raw", _text_directory(out, text, arguments.normalise), arguments)
    except _FAILURES as error:
        logger.error("error: %s", error)
        return 2
    return deepspeed_nmt(["prepare", *words])


def _parser() -> argparse.ArgumentParser:
    """Return the parser of a script's options, all but those of `prepare`."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    parser.add_argument("task", choices=list(TASKS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--from", type=Path, dest="archives", metavar="DIR")
    parser.add_argument("--text", choices=("raw", "moses"))
    parser.add_argument("--normalise", action=argparse.BooleanOptionalAction, default=False)
    vocabulary = parser.add_mutually_exclusive_group()
    for option in ("--vocab-size", "--vocab-from", "--tokenizer"):
        vocabulary.add_argument(option)
    parser.add_argument("--max-length", type=int)
    parser.add_argument("--ratio", type=float)
    parser.add_argument("--dedup", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    return parser


def _check(
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    more: Sequence[str],
    text: str,
    words: Sequence[str],
) -> None:
    """End the program with a message if an option is wrong, before anything is fetched.

    Args:
        parser: parser of the script's options.
        arguments: options of the script.
        more: other words of the user, for `prepare`.
        text: form of the text.
        words: arguments of `prepare`.
    """
    if "" in sys.argv:
        parser.error("an argument is empty; is a variable of the shell unset?")
    for word in more:
        name = word.partition("=")[0]
        if name in _OWNED:
            parser.error(f"{name} is set by the script; {_OWNED[name]}")
    if arguments.normalise and text == "raw":
        parser.error("--normalise is for --text moses, but the text is raw; leave it out, or give --text moses")
    setup = argparse.ArgumentParser(prog=parser.prog, usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    prepare.add_arguments(setup)
    try:
        options = prepare.read_options(vars(setup.parse_args(words)))
        if options.vocab_from is not None:
            open_tokenizer(options.vocab_from)
    except UserError as error:
        parser.error(str(error).replace("--max-ratio", "--ratio").replace("--workers", "--threads"))


def _text_directory(out: Path, text: str, normalise: bool) -> Path:
    """Return the directory of the text that is prepared; text of other settings has another one."""
    return out / ("raw" if text == "raw" else "moses-normalised" if normalise else "moses")


def _prepare_words(task: Task, text: str, arguments: argparse.Namespace, more: Sequence[str], out: Path) -> list[str]:
    """Return the arguments of `prepare`: those of the task, replaced by those of the user."""
    given = {name: getattr(arguments, name.replace("-", "_")) for name in ("vocab-size", "vocab-from", "tokenizer")}
    vocabulary = [word for name, value in given.items() if value is not None for word in (f"--{name}", value)]
    length = task.max_length if arguments.max_length is None else arguments.max_length
    ratio = task.ratio if arguments.ratio is None else arguments.ratio
    if ratio is None:
        ratio = float(max(1, length))  # removes nothing: a ratio cannot exceed the length
    models = any(word.partition("=")[0] == "--sentencepiece" for word in more)  # the user's, with rules of their own
    if not vocabulary and not models:
        vocabulary = task.vocabulary[text].split()
    # The papers segment Moses' tokens as they are: NFKC would rewrite characters that their BPE keeps.
    if text == "moses" and "--vocab-size" in vocabulary:
        vocabulary += ["--normalization", "none"]
    # Words of the user stand where no option takes several values, which would take a stray word for one more.
    words = ["--ratio-from", "1", *vocabulary, *more, "--out", str(out / "data")]
    words += ["--max-length", str(length), "--max-ratio", f"{ratio:g}"]
    words += ["--workers", str(arguments.threads)]
    words += [] if arguments.dedup else ["--keep-duplicates"]
    words += ["--text", text, "--source-lang", task.source, "--target-lang", task.target]
    directory = _text_directory(out, text, arguments.normalise)
    for split in ("train", "valid", "test"):
        for side, language in (("source", task.source), ("target", task.target)):
            words += [f"--{split}-{side}", str(directory / f"{split}.{language}")]
    return words


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
    parts = [part for part in [*task.train, *task.valid, *task.test] if isinstance(part, Part)]
    names = list(dict.fromkeys(part.archive for part in parts))
    directory = given or out / "archives"
    if given is not None:
        if not given.is_dir():
            raise ValueError(f"--from {given} is no directory; give one with {', '.join(names)}")
        missing = [name for name in names if not (given / name).is_file()]
        if missing:
            raise ValueError(f"--from {given} lacks {', '.join(missing)}; give a directory with {', '.join(names)}")
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
    logger.info(f"fetching {url}{f' from byte {start:,}' if start else ''}")
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
        raise ValueError(f"{path} has the SHA-256 {found} instead of {expected}; remove it and get it again")
    if given and published and found != published:
        logger.info(f"{path.name} is not the published archive (SHA-256 {found}); it is used as it is")


def _record_checksums(paths: dict[str, Path], checksums: Path) -> None:
    """Append the SHA-256 of each new archive, so that a later start detects changed archives.

    Called after the extraction: only archives with the expected content are recorded.
    """
    known = _read_checksums(checksums)
    with checksums.open("a") as out:
        for name, path in paths.items():
            if name not in known:
                out.write(f"{sha256_of(path)}  {name}\n")


def _extract(task: Task, paths: dict[str, Path], raw: Path, *, fetches: bool) -> None:
    """Write one file for each split and language, one sentence a line, without mark-up."""
    raw.mkdir(parents=True, exist_ok=True)
    splits = {"train": task.train, "valid": task.valid, "test": task.test}
    for (split, parts), side in itertools.product(splits.items(), (0, 1)):
        language = (task.source, task.target)[side]
        path = raw / f"{split}.{language}"
        if path.exists():
            continue
        logger.info(f"extracting {path.name}")
        with atomic_writer(path, "w") as out:
            for part in parts:
                if isinstance(part, Part):
                    lines = _read_lines(paths[part.archive], part.member(side, language))
                else:
                    lines = _read_test_set(part, f"{task.source}-{task.target}", side, fetches=fetches)
                for line in lines:
                    out.write(line + "\n")


def _read_test_set(name: str, pair: str, side: int, *, fetches: bool) -> Iterator[str]:
    """Yield the sentences of one side of a test set of sacreBLEU, which fetches it if its cache does not have it.

    Args:
        name: name of the set.
        pair: languages, such as en-de.
        side: 0 for the source, 1 for the reference.
        fetches: False to refuse a set that the cache does not have.

    Raises:
        ValueError: if the set is not in the cache, and ``fetches`` is False.
        OSError: if it cannot be fetched.
    """
    from sacrebleu.dataset import DATASETS
    from sacrebleu.utils import SACREBLEU_DIR, get_reference_files, get_source_file

    cache = Path(SACREBLEU_DIR, name)
    files = [cache / f"{name.replace('/', '_')}.{pair}.{field}" for field in DATASETS[name].fieldnames(pair)]
    missing = [file for file in files if not file.is_file()]
    if missing and not fetches:
        raise ValueError(
            f"no {missing[0]} in sacreBLEU's cache for the test set {name}, and --from fetches nothing; run "
            f"`sacrebleu -t {name} -l {pair} --echo src ref` where there is a network, copy its cache here, and set "
            "SACREBLEU to the copy"
        )
    try:
        path = Path(get_source_file(name, pair) if side == 0 else get_reference_files(name, pair)[0])
    except OSError as error:
        raise OSError(
            f"sacreBLEU cannot fetch the test set {name} ({error}); remove {cache}, and start again"
        ) from error
    with path.open(encoding="utf-8", newline="\n") as file:
        yield from (html.unescape(line.rstrip("\n")) for line in file)


def _read_lines(archive: Path, member: str) -> Iterator[str]:
    """Yield the sentences of a file in an archive, without mark-up."""
    with tarfile.open(archive) as content:
        entry = next((entry for entry in content if entry.name.removeprefix("./") == member), None)
        if entry is None:
            raise ValueError(f"{archive} lacks {member}; get the published archive")
        stream = content.extractfile(entry)
        assert stream is not None
        binary = gzip.GzipFile(fileobj=stream) if member.endswith(".gz") else stream
        text = io.TextIOWrapper(binary, encoding="utf-8", errors="replace", newline="\n")  # type: ignore[arg-type]
        if member.endswith(".xml"):
            yield from _read_segments(text)
        elif "train.tags." in member:
            yield from _read_talks(text)
        else:
            yield from (line.rstrip("\r\n") for line in text)


def _read_segments(lines: Iterable[str]) -> Iterator[str]:
    """Yield the sentences of a test set in XML. A sentence may extend over several lines."""
    for segment in re.findall(r"<seg[^>]*>(.*?)</seg>", "".join(lines), re.DOTALL | re.IGNORECASE):
        yield " ".join(html.unescape(segment).split())


def _read_talks(lines: Iterable[str]) -> Iterator[str]:
    """Yield the sentences of the IWSLT training text: talks, titles and descriptions, without other metadata."""
    for line in lines:
        if not any(mark in line for mark in ("<url>", "<talkid>", "<keywords>")):
            yield html.unescape(re.sub(r"</?(title|description)>", "", line)).strip()


def _tokenise_files(task: Task, raw: Path, text: Path, arguments: argparse.Namespace) -> None:
    """Tokenise all files by Moses' rules."""
    text.mkdir(parents=True, exist_ok=True)
    for split, language in itertools.product(("train", "valid", "test"), (task.source, task.target)):
        path = text / f"{split}.{language}"
        if path.exists():
            continue
        logger.info(f"tokenising {path.name}")
        work = partial(_tokenise, language=language, lowercase=task.lowercase, normalise=arguments.normalise)
        with ProcessPoolExecutor(arguments.threads) as pool, atomic_writer(path, "w") as out:
            for block in _in_order(pool, work, raw / path.name):
                out.writelines(line + "\n" for line in block)


def _in_order(pool: ProcessPoolExecutor, work: Callable[[list[str]], list[str]], path: Path) -> Iterator[list[str]]:
    """Yield the results for the blocks of lines of a file, in order."""
    pending: deque[Future[list[str]]] = deque()
    with path.open(encoding="utf-8", newline="\n") as file:
        while block := list(itertools.islice(file, _BLOCK_LINES)):
            pending.append(pool.submit(work, block))
            if len(pending) > _BLOCKS_AHEAD:
                yield pending.popleft().result()
    for future in pending:
        yield future.result()


def _tokenise(lines: list[str], language: str, lowercase: bool, normalise: bool) -> list[str]:
    """Apply Moses' tokenizer.perl to lines, then lowercase.perl if ``lowercase``.

    If ``normalise``, apply normalize-punctuation.perl and remove-non-printing-char.perl before, and the tokenizer's
    option -a, which splits words at dashes, as fairseq's scripts for WMT do.
    """
    lines = [line.strip() for line in lines]
    if normalise:  # control characters become spaces, so that words are not joined
        import regex

        normalizer = sacremoses().MosesPunctNormalizer(language)
        lines = [regex.sub(r"\p{C}", " ", normalizer.normalize(line)) for line in lines]
    tokens = tokenise(lines, language, dashes=normalise)
    return [line.lower() for line in tokens] if lowercase else list(tokens)


if __name__ == "__main__":
    sys.exit(main())
