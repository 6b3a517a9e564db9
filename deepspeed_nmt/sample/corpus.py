"""The sentences of the sample corpus, chosen at random from a seed, and its files.

The same options give the same bytes on every machine and version of Python: of ``random.Random``, only ``random()``
is used, whose numbers Python promises to keep for a seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import atomic_write_text
from deepspeed_nmt.sample import grammar, lexicon
from deepspeed_nmt.sample.grammar import THE, Clause, Determiner, Field, NounPhrase, Part, Tense
from deepspeed_nmt.sample.lexicon import ADJECTIVES, CLAUSE_VERBS, NOUNS, VERBS, Case, Person, Slot, Verb

SPLITS = ("train", "valid", "test")
LANGUAGES = ("en", "de")
MAX_PAIRS = 1_000_000
"""The most pairs that can be asked for; of so many, 2% are drawn twice, and memory is 330 MB."""

T = TypeVar("T")
PRONOUNS = [
    NounPhrase(subject, other, tuple(german), Person[person], field=Field.PRONOUN)
    for subject, other, *german, person in lexicon.PRONOUNS
]
NAMES = [NounPhrase(name, name, (name, name, name)) for (name,) in lexicon.NAMES]
# Determiners by the noun that follows; frequent ones are repeated.
POSSESSIVES = [Determiner(english, german, "ein") for english, german in lexicon.POSSESSIVES]
SINGULAR = [THE, Determiner("a", "ein", "ein")] * 8 + [*POSSESSIVES, Determiner("this", "dies", "der")]
PLURAL = [THE, Determiner("", "")] * 6 + [*POSSESSIVES, Determiner("these", "dies", "der")]
MASS = [THE, Determiner("", "")] * 6 + POSSESSIVES
NUMBERS = [Determiner(*pair) for pair in lexicon.NUMBERS + [(str(n), str(n)) for n in range(13, 1000)]]
NICHT = Part("", "nicht", Field.NEGATION)  # "not" belongs to the English verb
IN = Slot("in", "in", Case.DATIVE)
SIMPLE = [Tense.PRESENT, Tense.PAST]
TENSES = [*SIMPLE * 3, Tense.WILL, Tense.CAN, Tense.MUST]
PATTERNS = [
    pattern
    for frequency, *pattern in (
        (8, "{0.statement}.", "{0.main}.", "action"),
        (4, "{1.english} {0.statement}.", "{1.german} {0.inverted}.", "untimed time"),
        (3, "{0.statement}.", "{0.main}.", "fact"),
        (3, "{0.question}?", "{0.inverted}?", "fact"),
        (1, "why {0.question}?", "warum {0.inverted}?", "action"),
        (1, "how {0.question}?", "wie {0.inverted}?", "action"),
        (1, "when {0.question}?", "wann {0.inverted}?", "untimed"),
        (2, "{0.statement} because {1.statement}.", "{0.main}, weil {1.subordinate}.", "fact fact"),
        (2, "because {1.statement}, {0.statement}.", "weil {1.subordinate}, {0.inverted}.", "fact fact"),
        (2, "although {1.statement}, {0.statement}.", "obwohl {1.subordinate}, {0.inverted}.", "fact fact"),
        (2, "{0.statement} that {1.statement}.", "{0.main}, dass {1.subordinate}.", "that fact"),
        (2, "{0.statement} whether {1.statement}.", "{0.main}, ob {1.subordinate}.", "whether fact"),
        (2, "{0.statement} to {1.base}.", "{0.main}, {1.infinitive}.", "to aim"),
    )
    for _ in range(frequency)
]
"""Patterns of sentences: English, German, and the kinds of the pieces that fill them (see :meth:`Author.piece`)."""


class Author:
    """Chooses words and patterns of sentences at random; the grammar inflects and orders them.

    A sentence has one translation, because an adverbial always belongs to the nearest clause.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(f"deepspeed_nmt sample {seed}").random

    def pick(self, items: Sequence[T]) -> T:
        """Return one of the items."""
        return items[int(self.random() * len(items))]

    def phrase(self, kind: str, pronouns: float = 0, negative: bool = False) -> NounPhrase:
        """Return a noun phrase, for a person perhaps a pronoun or a name; if ``negative``, with "the" or "kein"."""
        if kind == "person" and not negative and self.random() < pronouns + 0.2:
            return self.pick(PRONOUNS if pronouns and self.random() < 0.7 else NAMES)
        noun, adjective = self.pick(NOUNS[kind]), self.pick(ADJECTIVES[kind]) if self.random() < 0.4 else ("", "")
        if self.random() < 0.3:
            noun = grammar.compound(self.pick(lexicon.COMPOUNDS), noun)
        countable = noun.english_plural != ""
        plural = countable and self.random() < 0.3
        if negative:
            determiners = [THE, Determiner("a" if countable and not plural else "", "kein", "ein")]
        elif plural:
            determiners = NUMBERS if self.random() < 0.2 else PLURAL
        else:
            determiners = SINGULAR if countable else MASS
        return grammar.noun_phrase(noun, self.pick(determiners), adjective, plural)

    def subject(self, kinds: Sequence[str]) -> NounPhrase:
        """Return a subject, perhaps with a relative clause ("the man who sleeps")."""
        kind = self.pick(kinds)
        phrase = self.phrase(kind, pronouns=0.3)
        if phrase in PRONOUNS + NAMES or self.random() < 0.8:
            return phrase
        german = grammar.definite(Case.NOMINATIVE, phrase.gender)
        pronoun = NounPhrase("who" if kind == "person" else "that", "", (german,), phrase.person)
        verbs = [verb for verb in VERBS if kind in verb.subjects]
        relative = self.clause(verbs, TENSES, pronoun)
        german = f"{phrase.german[Case.NOMINATIVE]}, {relative.subordinate},"
        return phrase._replace(subject=f"{phrase.subject} {relative.statement}", german=(german,))

    def time(self, tense: Tense) -> Part:
        """Return a time that suits the tense."""
        hour, minute = int(self.random() * 24), 10 + int(self.random() * 50)
        times = lexicon.TIMES[tense.name if tense in SIMPLE else "FUTURE"]
        clock = f"at {hour}:{minute}", f"um {hour}:{minute} Uhr"
        english, german = clock if self.random() < 0.2 else self.pick(times)
        return Part(english, german, Field.TIME)

    def clause(
        self, verbs: list[Verb], tenses: list[Tense], subject: NounPhrase | None = None, time: float = 0.5
    ) -> Clause:
        """Return a clause, perhaps negated, perhaps with a place, and with a time of this probability."""
        verb, tense = self.pick(verbs), self.pick(tenses)
        subject = subject or self.subject(verb.subjects)
        negative = tense in SIMPLE and self.random() < 0.15
        pronouns = 0.3 if subject.person == Person.SHE else 0  # Beside "I", for one, "me" would have to be reflexive.
        parts = []
        for slot in verb.slots:
            phrase = self.phrase(self.pick(slot.kinds), pronouns, negative and slot is verb.slots[-1])
            parts.append(phrase.complement(slot))
        if negative and not any(" kein" in f" {part.german}" for part in parts):
            parts.append(NICHT)
        if self.random() < 0.3 and not any("place" in slot.kinds for slot in verb.slots):
            parts.append(self.phrase("place").complement(IN)._replace(field=Field.PLACE))
        if self.random() < time:
            parts.append(self.time(tense))
        return grammar.clause(subject, verb, tense, parts, negative)

    def state(self, tense: Tense) -> Clause:
        """Return how something is ("the house is very old")."""
        kind = self.pick(list(NOUNS))
        degree, adjective = self.pick(lexicon.DEGREES), self.pick(ADJECTIVES[kind])
        state = Part(f"{degree[0]} {adjective[0]}", f"{degree[1]} {adjective[1]}", Field.STATE)
        tense = Tense.IS if tense is Tense.PRESENT else Tense.WAS
        return grammar.clause(self.phrase(kind), lexicon.COPULA, tense, [state])

    def piece(self, kind: str, tense: Tense, previous: list[Any]) -> Clause | Part:
        """Return a piece of a sentence, which may depend on the tense of the sentence and on its previous pieces."""
        if kind == "action":
            return self.clause(VERBS, TENSES)
        if kind == "untimed":
            return self.clause(VERBS, TENSES, time=0)
        if kind == "time":
            return self.time(previous[0].tense)
        if kind == "fact":
            return self.state(tense) if self.random() < 0.2 else self.clause(VERBS, [tense])
        if kind == "aim":
            verbs = [verb for verb in VERBS if "person" in verb.subjects]
            return self.clause(verbs, [Tense.WILL], previous[0].subject)
        return self.clause(CLAUSE_VERBS[kind], [tense], self.phrase("person", pronouns=0.3), time=0.1)

    def sentence(self) -> tuple[str, str]:
        """Return a sentence of any pattern and its translation."""
        english, german, kinds = self.pick(PATTERNS)
        tense = self.pick(SIMPLE)
        pieces: list[Any] = []
        for kind in kinds.split():
            pieces.append(self.piece(kind, tense, pieces))
        english, german = english.format(*pieces), german.format(*pieces)
        # Where two clauses end, one comma is enough; before the final mark, there is none.
        german = re.sub(r",+(?=[,.?])", "", german)
        return english[0].upper() + english[1:], german[0].upper() + german[1:]


def sentence_pairs(seed: int) -> Iterator[tuple[str, str]]:
    """Yield English sentences with their German translations without end; none comes twice in either language."""
    author = Author(seed)
    seen: set[str] = set()
    while True:
        pair = author.sentence()
        if seen.isdisjoint(pair):
            seen.update(pair)
            yield pair


def write_sample(directory: Path, train: int, valid: int, test: int, seed: int, *, overwrite: bool = False) -> None:
    """Write ``train``, ``valid`` and ``test`` pairs to ``directory``/train.en, ``directory``/train.de, and so on.

    Args:
        directory: of the files; made if missing.
        train: pairs of train.en and train.de; ``valid`` and ``test`` likewise.
        valid: see ``train``.
        test: see ``train``.
        seed: of the sentences.
        overwrite: replaces files of these names. Without it, those that have other content are refused.

    Raises:
        DataError: if a count is negative, the pairs are more than MAX_PAIRS, ``directory`` cannot be written, or has
            other files of these names; then nothing is written.
    """
    counts = dict(zip(SPLITS, (train, valid, test), strict=True))
    for name, count in counts.items():
        if count < 0:
            raise DataError(f"the number of {name} pairs must be 0 or more, but is {count}")
    if (total := sum(counts.values())) > MAX_PAIRS:
        raise DataError(f"the number of pairs must be {MAX_PAIRS:,} or less in all, but is {total:,}; ask for fewer")
    pairs = sentence_pairs(seed)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Held-out pairs come first: they stay the same when more training pairs are asked for.
        chosen = {name: list(islice(pairs, counts[name])) for name in reversed(SPLITS)}

        def text_of(path: Path) -> str:
            return "".join(f"{pair[LANGUAGES.index(path.suffix[1:])]}\n" for pair in chosen[path.stem])

        paths = [directory / f"{name}.{language}" for name in SPLITS for language in LANGUAGES]
        old = [path for path in paths if path.is_file()]
        same = {path for path in old if path.read_bytes() == text_of(path).encode("utf-8")}
        if not overwrite and (others := [path.name for path in old if path not in same]):
            raise DataError(
                f"--out must have no other text by the names of the sample, but {directory} has {', '.join(others)}; "
                "give --overwrite to replace it, or choose another --out"
            )
        for path in paths:
            if path not in same:
                atomic_write_text(path, text_of(path))
    except OSError as error:
        problem = f"--out must be a writable directory, but {directory} is not ({error.strerror})"
        raise DataError(f"{problem}; choose another") from None
