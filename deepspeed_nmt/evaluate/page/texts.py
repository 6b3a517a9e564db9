"""Translations of validation sets that a run keeps: samples over time, distributions, and the worst sentences.

The directory ``validation/SET`` of a run holds ``source.txt``, ``reference.txt`` and ``update-0000400.txt`` for each
validation, one sentence a line. The text is whatever the model wrote: nothing of it is trusted.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

VALIDATION = "validation"
_TRANSLATIONS = re.compile(r"update-(\d{1,15})\.txt")
_MAX_SENTENCES = 3000
"""Bound on the sentences that are scored, each one alone; of more, equally many between two are left out."""
_MAX_SHOWN = 600
"""Bound on the characters of a sentence on the page."""
_SAMPLES, _WORST_SAMPLES, _MAX_UPDATES, _WORST = 16, 4, 16, 15


@dataclass(frozen=True)
class Sentence:
    """A sentence with its newest translation.

    Attributes:
        number: line number, from 1.
        source: source sentence; "" if it is not kept.
        reference: reference translation.
        translation: newest translation.
        chrf: sentence chrF of the translation.
    """

    number: int
    source: str
    reference: str
    translation: str
    chrf: float

    @property
    def length_ratio(self) -> float:
        """Characters of the translation for each character of the reference."""
        return len(self.translation) / max(1, len(self.reference))


@dataclass(frozen=True)
class Sample:
    """A sentence with its translations over time.

    Attributes:
        number: line number, from 1.
        source: source sentence; "" if it is not kept.
        reference: reference translation.
        translations: translation and its chrF at each update of the set's ``sampled``.
    """

    number: int
    source: str
    reference: str
    translations: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Signs:
    """Counts that reveal a broken model, over the newest translations of a set.

    Attributes:
        lines: number of translations.
        distinct: number of different translations.
        empty: number of empty ones.
        copies: number of copies of the source.
        length_ratio: characters of all translations for each character of the references.
    """

    lines: int
    distinct: int
    empty: int
    copies: int
    length_ratio: float


class TextSet:
    """Translations of one validation set.

    Args:
        path: directory of the set.
        best: update of the best validation, which is among those sampled.

    Attributes:
        name: name of the set.
        updates: updates after which it was translated.
    """

    def __init__(self, path: Path, best: int = 0) -> None:
        self.name = path.name
        self._path = path
        self._best = best
        found = (_TRANSLATIONS.fullmatch(file.name) for file in path.iterdir())
        self._files = {int(match[1]): match[0] for match in found if match}
        self.updates = sorted(self._files)
        self._sources = _lines(path / "source.txt")
        self._references = _lines(path / "reference.txt")

    @cached_property
    def newest(self) -> list[Sentence]:
        """Sentences with their newest translations, at most _MAX_SENTENCES; none without references."""
        if not self.updates:
            return []
        translations = self._read(self.updates[-1])
        count = min(len(translations), len(self._references))
        step = max(1, -(-count // _MAX_SENTENCES))
        return [self._sentence(index, translations[index]) for index in range(0, count, step)]

    @property
    def worst(self) -> list[Sentence]:
        """Sentences of the lowest chrF, the worst first."""
        return sorted(self.newest, key=lambda sentence: sentence.chrf)[:_WORST]

    @property
    def signs(self) -> Signs | None:
        """Counts over the newest translations; None if there are none."""
        if not self.newest:
            return None
        translations = [each.translation for each in self.newest]
        return Signs(
            lines=len(translations),
            distinct=len(set(translations)),
            empty=sum(not each.strip() for each in translations),
            copies=sum(bool(each.source.strip()) and each.source == each.translation for each in self.newest),
            length_ratio=sum(map(len, translations)) / max(1, sum(len(each.reference) for each in self.newest)),
        )

    @cached_property
    def sampled(self) -> list[int]:
        """Updates whose translations are samples: the first, the last, the best, and some between them."""
        chosen = set(_spread(self.updates, _MAX_UPDATES - 1))
        if self._best in self._files:
            chosen.add(self._best)
        return sorted(chosen)

    def samples(self) -> list[Sample]:
        """Return some sentences, spread over the set, and the worst ones, with their translations over time."""
        numbers = set(_spread([each.number for each in self.newest], _SAMPLES))
        numbers |= {each.number for each in self.worst[:_WORST_SAMPLES]}
        texts = [self._read(update) for update in self.sampled]
        samples = []
        for number in sorted(numbers):
            lines = [text[number - 1] if number <= len(text) else "" for text in texts]
            sentences = [self._sentence(number - 1, line) for line in lines]
            samples.append(
                Sample(
                    number=number,
                    source=shortened(sentences[0].source),
                    reference=shortened(sentences[0].reference),
                    translations=tuple((shortened(each.translation), each.chrf) for each in sentences),
                )
            )
        return samples

    def _read(self, update: int) -> list[str]:
        return _lines(self._path / self._files[update])

    def _sentence(self, index: int, translation: str) -> Sentence:
        source = self._sources[index] if index < len(self._sources) else ""
        reference = self._references[index]
        return Sentence(index + 1, source, reference, translation, _chrf(translation, reference))


def read_texts(run: Path, best: int = 0) -> list[TextSet]:
    """Open the validation sets whose translations a run keeps, the main one first; none if it keeps none.

    Args:
        run: run directory.
        best: update of the best validation.
    """
    try:
        found = [TextSet(path, best) for path in (run / VALIDATION).iterdir() if path.is_dir()]
    except OSError:
        return []
    return sorted((each for each in found if each.updates), key=lambda each: (each.name != "main", each.name))


def shortened(text: str) -> str:
    """Return a sentence as the page shows it."""
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _lines(path: Path) -> list[str]:
    """Return the lines of a text; none if it cannot be read. Only a line feed ends one."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


def _spread(items: Sequence[int], count: int) -> list[int]:
    """Return at most ``count`` items at equal distances, the first and the last among them."""
    if len(items) <= count:
        return list(items)
    return [items[index * (len(items) - 1) // (count - 1)] for index in range(count)]


def _chrf(translation: str, reference: str) -> float:
    from sacrebleu.metrics.chrf import CHRF

    return float(CHRF().sentence_score(translation, [reference]).score)
