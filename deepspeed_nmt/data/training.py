"""The data that a run is trained on: one data directory, or several with weights and tags."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import NamedTuple

from deepspeed_nmt.console import logger
from deepspeed_nmt.data.corpus import Corpora, CorpusPart
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.data.mixture import MixtureConfig, Phase, Stream, Weight
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.errors import ConfigError, DataError, shown
from deepspeed_nmt.registry import Config
from deepspeed_nmt.text import NO_TAGS, Tags, TextForm

_WEIGHT = re.compile(r"([+-]?(?:[0-9.]+(?:e[+-]?[0-9]+)?|inf|nan))(?::([0-9]+)-([0-9]*))?", re.IGNORECASE)
_FORM = "DIR, DIR=WEIGHT, DIR=WEIGHT:FIRST-LAST,WEIGHT:FIRST-LAST, each with @TAG or without"


class DataOption(NamedTuple):
    """A value of ``--data``: a directory, weights of its corpus by update, and a tag in front of its sentences."""

    path: Path
    weights: tuple[Weight, ...] = (Weight(value=1.0),)
    tag: str | None = None

    @classmethod
    def parse(cls, text: str) -> DataOption:
        """Read a value of the form ``DIR[=WEIGHT[:FIRST-LAST],...][@TAG]``.

        A directory whose name contains ``=`` or ``@`` is taken as it is, if it exists. A tag may contain ``/``.
        """
        if Path(text).is_dir():
            return cls(Path(text))
        head, at, tag = text.rpartition("@")
        if not at or ("/" in tag and not Path(head.partition("=")[0]).is_dir()):
            head, at, tag = text, "", ""
        path, equals, weights = head.rpartition("=")
        if not equals or "/" in weights:
            path, equals, weights = head, "", ""
        if not path or (at and not tag):
            raise ConfigError(f"--data is {shown(text)}, which is none of {_FORM}")
        return cls(Path(path), _weights(weights, text) if equals else (Weight(value=1.0),), tag or None)

    def __str__(self) -> str:
        weights = ",".join(map(str, self.weights))
        return f"{self.path}{'' if weights == '1' else f'={weights}'}{f'@{self.tag}' if self.tag else ''}"


@dataclass(frozen=True)
class DataPart:
    """A corpus of a run, by its name in the log."""

    name: str
    directory: DataDirectory
    weights: tuple[Weight, ...]
    tag: str | None

    @property
    def identity(self) -> str:
        """Text that tells this corpus from others: equal ones give equal sentences."""
        return f"{self.directory.fingerprint}{f' {self.tag}' if self.tag else ''}"

    def corpus(self, tokenizer: Tokenizer, config: MixtureConfig) -> CorpusPart:
        """Open the corpus; raise a DataError if its tag is no token of the vocabulary."""
        tags = {} if self.tag is None else {f"{config.tag}_tag": tokenizer.symbol(config.tag, self.tag)}
        key = int.from_bytes(hashlib.sha256(self.identity.encode()).digest()[:8], "little")
        return CorpusPart(self.name, tuple(self.directory.training_corpora()), key=key, **tags)


class CorpusRecord(Config):
    """Record of a corpus in a run."""

    path: str
    fingerprint: str
    weights: tuple[Weight, ...]
    tag: str | None = None

    @property
    def option(self) -> DataOption:
        """The value of ``--data`` for this corpus."""
        return DataOption(Path(self.path), self.weights, self.tag)


def is_mixture(parts: Sequence[DataPart | CorpusRecord]) -> bool:
    """Return True for several corpora, and for one whose weight changes."""
    return len(parts) > 1 or any(part.weights != (Weight(value=part.weights[0].value),) for part in parts)


class TrainingData:
    """Data directories of a run. The first one gives the vocabulary and the validation set.

    Raises:
        DataError: if one is missing or damaged, or their vocabularies or forms of text differ.
        ConfigError: if a corpus is given twice.
    """

    def __init__(self, options: Sequence[DataOption]) -> None:
        self.options = tuple(options)
        directories = [DataDirectory.open(option.path) for option in options]
        names = _names([directory.path for directory in directories])
        self.parts = tuple(
            DataPart(name, directory, option.weights, option.tag)
            for name, directory, option in zip(names, directories, options, strict=True)
        )
        self._check()

    @property
    def main(self) -> DataDirectory:
        """The first data directory, which gives the vocabulary and the validation set."""
        return self.parts[0].directory

    @property
    def is_mixture(self) -> bool:
        """True if updates are drawn from shares of corpora, instead of the epochs of one."""
        return is_mixture(self.parts)

    @property
    def records(self) -> tuple[CorpusRecord, ...]:
        """Record of each corpus of a mixture; none for a single corpus as it is."""
        if not self.is_mixture and self.parts[0].tag is None:
            return ()
        return tuple(
            CorpusRecord(
                path=str(part.directory.path.resolve()),
                fingerprint=part.directory.fingerprint,
                weights=part.weights,
                tag=part.tag,
            )
            for part in self.parts
        )

    @property
    def tags(self) -> Tags:
        """Tags in front of all sentences; none if the data directories differ in them."""
        tags = {part.directory.tags for part in self.parts}
        return tags.pop() if len(tags) == 1 else NO_TAGS

    @property
    def common_form(self) -> TextForm:
        """Form of all text, without languages in which the data directories differ."""
        forms = [part.directory.text_form for part in self.parts]
        sources, targets = ({form.source_lang for form in forms}, {form.target_lang for form in forms})
        languages = (codes.pop() if len(codes) == 1 else None for codes in (sources - {None}, targets - {None}))
        return TextForm(forms[0].form, *languages)

    @property
    def longest_source(self) -> int:
        """Tokens of the longest source sentence of the training text, without EOS."""
        return max(part.directory.longest_source + (part.tag is not None) for part in self.parts)

    def corpora(self, config: MixtureConfig) -> Corpora:
        """Open the training text; raise a DataError if a tag is no token of the vocabulary."""
        tokenizer = self.main.tokenizer()
        return Corpora([part.corpus(tokenizer, config) for part in self.parts])

    def phase(self, corpora: Corpora, config: MixtureConfig, first: int) -> Phase:
        """Return the mixture from the update ``first`` on, of the text that :meth:`corpora` returns."""
        streams = tuple(
            Stream(corpus=part.identity, pairs=len(text), tokens=text.mean_target_tokens, weights=part.weights)
            for part, text in zip(self.parts, corpora.parts, strict=True)
        )
        return Phase(first=first, temperature=config.temperature, tag=config.tag, streams=streams)

    def __str__(self) -> str:
        return ", ".join(map(str, self.options))

    def verify_hashes(self) -> Future[None]:
        """Compare the files of all directories with their hashes in a thread, which takes seconds per gigabyte.

        A difference is a DataError of the result. The program does not wait for it to end.
        """
        result: Future[None] = Future()

        def verify() -> None:
            try:
                for directory in {part.directory.path: part.directory for part in self.parts}.values():
                    directory.verify_hashes()
                result.set_result(None)
            except Exception as error:  # whatever it is: training waits for the result
                result.set_exception(error)

        Thread(target=verify, name="hashes", daemon=True).start()
        return result

    def check_same(self) -> None:
        """Check that the directories are still those that were opened."""
        for part in self.parts:
            part.directory.check_same()

    def _check(self) -> None:
        main = self.main
        for part in self.parts[1:]:
            if part.directory.vocabulary != main.vocabulary:
                raise DataError(
                    f"{part.directory.path} has another vocabulary than {main.path}; run `prepare --vocab-from "
                    f"{main.path}` for it"
                )
            if part.directory.text_form.form != main.text_form.form:
                raise DataError(
                    f"{part.directory.path} has text of the form {part.directory.text_form.form}, but {main.path} "
                    f"{main.text_form.form}; prepare them alike"
                )
            tags = [(p.tag, p.directory.tags) for p in (part, self.parts[0])]
            if part.directory.text_form.contradicts(main.text_form) and tags[0] == tags[1]:
                path = part.directory.path
                logger.warning(
                    f"{path} is {part.directory.text_form}, but {main.path} is {main.text_form}, and no tag tells "
                    f"them apart; give one a tag, such as --data '{path}@<2fr>'"
                )
        identity, count = Counter(part.identity for part in self.parts).most_common(1)[0]
        if count > 1:
            twice = [str(part.directory.path) for part in self.parts if part.identity == identity]
            raise ConfigError(
                f"{' and '.join(twice)} are the same corpus with the same tag; give it once, with a larger weight"
            )


def _names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each directory, all different: its last part, with a number if several have it."""
    names = [path.resolve().name or "data" for path in paths]
    different: list[str] = []
    for name in names:
        numbered = (f"{name}-{number}" for number in itertools.count(1))
        free = (new for new in numbered if new not in {*names, *different})
        different.append(name if names.count(name) == 1 else next(free))
    return different


def _weights(text: str, option: str) -> tuple[Weight, ...]:
    """Read the weights of a ``--data``."""
    weights: list[Weight] = []
    for piece in text.split(","):
        if (matched := _WEIGHT.fullmatch(piece.strip())) is None:
            raise ConfigError(f"--data is {shown(option)}, which is none of {_FORM}")
        value, first, last = matched.groups()
        try:
            weights.append(Weight(value=float(value), first=int(first or 1), last=int(last) if last else None))
        except ValueError as error:
            raise ConfigError(
                f"{shown(piece)} in {shown(option)} is no weight above 0, from an update of 1 or more on; leave a "
                "corpus out of some updates by a schedule such as =1:1-50000"
            ) from error
    weights.sort(key=lambda weight: weight.first)
    for weight, after in zip(weights, [*weights[1:], None], strict=True):
        if weight.last is not None and weight.last < weight.first:
            raise ConfigError(f"{weight} in {shown(option)} ends before it begins")
        if after is not None and (weight.last is None or after.first <= weight.last):
            raise ConfigError(
                f"update {after.first:,} has both weights {weight} and {after} in {shown(option)}; let them follow "
                "one another"
            )
    return tuple(weights)
