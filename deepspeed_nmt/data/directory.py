"""Data directories: corpus, vocabulary and raw text, and ``meta.json``, which records hashes of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from deepspeed_nmt.data.bert_tokenizer import BertTokenizer
from deepspeed_nmt.data.corpus import Corpus, SplitStats
from deepspeed_nmt.data.sentencepiece import SentencePieceTokenizer
from deepspeed_nmt.data.tokenizer import INFO_FILE, Tokenizer
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import sha256_of
from deepspeed_nmt.registry import Config, problem_of

META_FILE = "meta.json"
FORMAT: Literal[1] = 1


class FileRecord(Config):
    """A file of the directory."""

    bytes: int
    sha256: str


class InputRecord(Config):
    """An input file of `prepare`."""

    path: str
    bytes: int
    lines: int
    sha256: str


class Meta(Config):
    """The content of ``meta.json``.

    Attributes:
        format: version of the format; it changes when older directories can no longer be read.
        version: version of the program that made the directory.
        options: options that decide the content; equal options and inputs give equal data.
        inputs: input files by ``<split>.<side>``, in order.
        segmented: True if the text is already segmented in the ``@@ `` style.
        vocabulary_size: tokens of the target's side, including special ones.
        source_vocabulary_size: tokens of the source's side; None in older directories, where both sides are equal.
        pairs_read: training pairs before cleaning.
        removed: removed training pairs by :class:`~deepspeed_nmt.data.clean.Reason`, zeros included.
        splits: statistics of ``train`` and ``valid``; valid is not cleaned.
        files: every file of the directory except ``meta.json``.
    """

    format: Literal[1]
    version: str
    options: dict[str, Any]
    inputs: dict[str, tuple[InputRecord, ...]]
    segmented: bool
    vocabulary_size: int
    source_vocabulary_size: int | None = None
    pairs_read: int
    removed: dict[str, int]
    splits: dict[str, SplitStats]
    files: dict[str, FileRecord]


def open_tokenizer(path: Path) -> Tokenizer:
    """Open the vocabulary of a data or run directory.

    Raises:
        DataError: if it is missing or cannot be read.
        ConfigError: if it needs a package that is not installed.
    """
    try:
        info = json.loads((path / INFO_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        info = None
    if isinstance(info, dict) and info.get("kind") == "bert":
        return BertTokenizer.read(path, info)
    return SentencePieceTokenizer.read(path)


class DataDirectory:
    """A directory made by `prepare`; see :meth:`open`."""

    def __init__(self, path: Path, meta: Meta) -> None:
        self.path = path
        self.meta = meta

    @classmethod
    def open(cls, path: Path) -> DataDirectory:
        """Open a directory: read ``meta.json`` and check the sizes of all files, without reading them.

        Raises:
            DataError: if the directory is missing, incomplete, or was changed.
        """
        meta_path = path / META_FILE
        if not meta_path.is_file():
            what = f"has no {META_FILE}" if path.is_dir() else "does not exist"
            raise DataError(f"{path} must be a directory made by `prepare`, but {what}; run `prepare --out {path}`")
        try:
            meta = Meta.model_validate_json(meta_path.read_bytes())
        except ValidationError as error:
            first = error.errors()[0]
            problem = problem_of(first, ".".join(map(str, first["loc"])) or "the file")
            raise DataError(
                f"{meta_path} must be what this version's `prepare` writes, but {error.error_count()} of its values "
                f"are not ({problem}); run `prepare` again with --overwrite"
            ) from error
        directory = cls(path, meta)
        directory._check(directory._size_problem)
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
    def has_test(self) -> bool:
        """True if raw test text was given to `prepare`."""
        return "test.source" in self.meta.files

    def tokenizer(self) -> Tokenizer:
        """Open the vocabulary."""
        return open_tokenizer(self.path)

    def corpus(self, split: str) -> Corpus:
        """Open the token numbers of ``train`` or ``valid``."""
        return Corpus(self.path, split)

    def text(self, split: str, side: str) -> Path:
        """Return the path of the unchanged raw text of ``valid`` or ``test``, ``source`` or ``target``.

        Raises:
            DataError: if `prepare` was given no such text.
        """
        name = f"{split}.{side}"
        if name not in self.meta.files:
            raise DataError(
                f"{self.path} must hold the text {name}, but does not; give it to `prepare` (--{split}-{side})"
            )
        return self.path / name

    def verify_hashes(self) -> None:
        """Compare the SHA-256 of every file with ``meta.json``, which takes seconds per gigabyte.

        Raises:
            DataError: if files are missing or were changed, all of them at once.
        """
        self._check(lambda name, record: self._size_problem(name, record) or self._hash_problem(name, record))

    def _check(self, problem_of: Callable[[str, FileRecord], str | None]) -> None:
        problems = [
            problem for name, record in sorted(self.meta.files.items()) if (problem := problem_of(name, record))
        ]
        if problems:
            raise DataError(
                f"{self.path} must be as `prepare` left it, but {'; '.join(problems)}; "
                "restore it, or run `prepare` again with --overwrite"
            )

    def _size_problem(self, name: str, record: FileRecord) -> str | None:
        path = self.path / name
        if not path.is_file():
            return f"{name} is missing"
        size = path.stat().st_size
        return None if size == record.bytes else f"{name} has {size} bytes instead of {record.bytes}"

    def _hash_problem(self, name: str, record: FileRecord) -> str | None:
        return None if sha256_of(self.path / name) == record.sha256 else f"the content of {name} has changed"
