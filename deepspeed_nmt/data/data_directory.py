"""Data directories: corpus, vocabulary and raw text, and ``meta.json``, which records hashes of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from deepspeed_nmt.core.vocabulary import SIDES
from deepspeed_nmt.data.bert_tokenizer import BertTokenizer, side_file
from deepspeed_nmt.data.corpus import Corpus, SplitStats
from deepspeed_nmt.data.fairseq import DICTIONARY_FILES, FairseqTokenizer
from deepspeed_nmt.data.filters import EXAMPLES
from deepspeed_nmt.data.inputs import InputRecord
from deepspeed_nmt.data.marian_tokenizer import MODEL_FILES, NUMBERS_FILES, MarianTokenizer
from deepspeed_nmt.data.sentencepiece import MODEL_FILE, SIDE_MODEL_FILES, SentencePieceTokenizer
from deepspeed_nmt.data.tokenizer import INFO_FILE, Count, Tokenizer, VocabularyInfo, split_name
from deepspeed_nmt.errors import DataError, UserError
from deepspeed_nmt.files import check_utf8_name, read_regular
from deepspeed_nmt.manifest import MANIFEST_FILE, DamagedRecordError, FileRecord, PlainName, read_files, read_record
from deepspeed_nmt.registry import Config, problems_of
from deepspeed_nmt.text import Tags, TextForm


class RoundTrip(Config):
    """Lines of one side of a split that encoding and decoding changes, apart from white space.

    ``lines`` were tried, ``changed`` of them change; ``examples`` has the first, each with what it becomes.
    """

    lines: Count = 0
    changed: Count = 0
    examples: tuple[tuple[str, str], ...] = ()

    def followed_by(self, other: RoundTrip) -> RoundTrip:
        """Return the sum of this and of later lines."""
        return RoundTrip(
            lines=self.lines + other.lines,
            changed=self.changed + other.changed,
            examples=(self.examples + other.examples)[:EXAMPLES],
        )


META_FILE = "meta.json"
VOCABULARY_FILES = (
    *(INFO_FILE, MODEL_FILE, *SIDE_MODEL_FILES.values(), *map(side_file, SIDES)),
    *(*MODEL_FILES.values(), *NUMBERS_FILES.values(), *DICTIONARY_FILES.values()),
)
"""Names of the files that a vocabulary of any kind may have."""
FORMAT: Literal[1] = 1


class Meta(Config):
    """The content of ``meta.json``.

    Attributes:
        format: version of the format; it changes when other directories can no longer be read.
        options: options that decide the content; equal options and inputs give equal data.
        inputs: input files by ``<split>.<side>``, in order.
        tags: symbols in front of all sentences; the raw text does not have them.
        vocabulary_size: tokens of the target's side, including special ones.
        removed: removed training pairs by reason and by filter, zeros included; some are ``removed_examples``.
        repaired: lines of the training text that a Unicode rule changed, by rule and side.
        splits: statistics of ``train`` and ``valid``, which is not cleaned; ``train.1``, ``train.2`` and so on are
            further segmentations of the training text.
        round_trips: lines that encoding and decoding changes, by ``<split>.<side>``.
        files: every file of the directory except ``meta.json``.
    """

    format: Literal[1]
    version: str
    options: dict[str, Any]
    inputs: dict[str, tuple[InputRecord, ...]]
    segmented: bool
    text: TextForm
    tags: Tags
    vocabulary_size: Count
    source_vocabulary_size: Count
    pairs_read: Count
    removed: dict[str, Count]
    removed_examples: dict[str, tuple[tuple[str, str], ...]]
    repaired: dict[str, dict[str, Count]]
    splits: dict[str, SplitStats]
    round_trips: dict[str, RoundTrip]
    files: dict[PlainName, FileRecord]


def open_tokenizer(path: Path) -> Tokenizer:
    """Open the vocabulary of a data or run directory, after comparing it with the directory's record of its files."""
    record = path / (META_FILE if (path / META_FILE).exists() else MANIFEST_FILE)
    try:
        records = read_files(record) if record.exists() else {}
    except DamagedRecordError as error:
        raise DataError(f"{record} is damaged ({error}); restore it from a copy") from error
    problems = [
        f"{name} {problem}"
        for name, file in records.items()
        if name.startswith("vocabulary.") and (problem := file.problem(path / name))
    ]
    if problems:
        raise DataError(f"damaged vocabulary in {path}: {' and '.join(problems)}; restore it from a copy")
    try:
        info = VocabularyInfo.model_validate_json(read_regular(path / INFO_FILE))
        match info.kind:
            case "bert":
                return BertTokenizer.read(path, info)
            case "marian":
                return MarianTokenizer.read(path, info)
            case "fairseq":
                return FairseqTokenizer.read(path)
        return SentencePieceTokenizer.read(path, info)
    except ValidationError as error:
        problem = problems_of(error, whole="the file")[0]
        raise DataError(f"a JSON file of the vocabulary in {path} is damaged ({problem}); restore it") from error
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise DataError(
            f"no vocabulary in {path} ({error}); give a directory that `prepare` has made, or import the model again"
        ) from error


class DataDirectory:
    """A directory made by `prepare`; see :meth:`open`."""

    def __init__(self, path: Path, meta: Meta) -> None:
        self.path = path
        self.meta = meta

    @classmethod
    def open(cls, path: Path) -> DataDirectory:
        """Open a directory: read ``meta.json`` and check the sizes of all files, without reading them."""
        meta_path = path / META_FILE
        check_utf8_name(path.absolute(), "a data directory")
        if not meta_path.is_file():
            what = f"has no {META_FILE}" if path.is_dir() else "does not exist"
            raise DataError(f"{path} {what}; run `prepare --out {path}`")
        try:
            meta = Meta.model_validate_json(read_record(meta_path))
        except DamagedRecordError as error:
            raise DataError(f"{error}; restore {path}, or move it away and run `prepare` again") from error
        except ValidationError as error:
            raise DataError(
                f"{meta_path} is not what this version's `prepare` writes: {problems_of(error, whole='the file')[0]} "
                f"({error.error_count()} such); move it away and run `prepare` again"
            ) from error
        directory = cls(path, meta)
        directory._check(verify=False)
        return directory

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) of vocabulary and corpus: equal fingerprints train equal models."""
        digest = hashlib.sha256()
        for name, record in sorted(self.meta.files.items()):
            if name.endswith(".bin") or name.startswith("vocabulary."):
                digest.update(f"{name} {record.sha256}\n".encode())
        return digest.hexdigest()

    @property
    def vocabulary(self) -> dict[str, FileRecord]:
        """Records of the vocabulary's files by name."""
        return {name: record for name, record in self.meta.files.items() if name.startswith("vocabulary.")}

    @property
    def segmentations(self) -> int:
        """Number of segmentations of each training sentence."""
        return sum(name.startswith("train") for name in self.meta.splits)

    @property
    def longest_source(self) -> int:
        """Tokens of the longest source sentence of the training text in any segmentation, without EOS."""
        return max(self.meta.splits[split_name(number)].source.longest for number in range(self.segmentations))

    @property
    def tags(self) -> Tags:
        """Symbols in front of all sentences of the corpus, which the raw text does not have."""
        return self.meta.tags

    @property
    def text_form(self) -> TextForm:
        """Form of the text."""
        return self.meta.text

    def tokenizer(self) -> Tokenizer:
        """Open the vocabulary."""
        return open_tokenizer(self.path)

    def corpus(self, split: str) -> Corpus:
        """Open the token numbers of ``train`` or ``valid``."""
        stats = self.meta.splits[split]
        return Corpus(self.path, split, (stats.source.longest, stats.target.longest))

    def training_corpora(self) -> list[Corpus]:
        """Open the training corpus in all its segmentations: the same pairs in the same order, with other tokens."""
        return [self.corpus(split_name(number)) for number in range(self.segmentations)]

    def text(self, split: str, side: str) -> Path:
        """Return the path of the unchanged raw text of ``valid`` or ``test``, ``source`` or ``target``."""
        name = f"{split}.{side}"
        if name not in self.meta.files:
            raise DataError(f"no text {name} in {self.path}; give it to `prepare` (--{split}-{side})")
        return self.path / name

    def verify_hashes(self, split: str = "") -> None:
        """Compare the SHA-256 of files with ``meta.json``, which takes seconds per gigabyte.

        ``split`` limits it to the files of ``train``, ``valid`` or ``test``, and the vocabulary.
        """
        self._check(verify=True, names=(f"{split}.", "vocabulary.") if split else ("",))

    def check_same(self) -> None:
        """Raise a DataError if `prepare`, which replaces a directory as a whole, has done so since it was opened."""
        if DataDirectory.open(self.path).meta != self.meta:
            raise DataError(f"`prepare` has replaced {self.path} while a run opened it; start again")

    def _check(self, *, verify: bool, names: tuple[str, ...] = ("",)) -> None:
        """Check the files whose names begin with one of ``names``."""
        problems = [
            f"{name} {problem}"
            for name, record in sorted(self.meta.files.items())
            if name.startswith(names) and (problem := record.problem(self.path / name, verify))
        ]
        if problems:
            raise DataError(
                f"{self.path} was changed since `prepare`: {'; '.join(problems)}; restore it, or move it away and "
                "run `prepare` again"
            )
