"""The grammar of the sample corpus: builds noun phrases, and orders clauses in both languages.

German articles and adjective endings are tables indexed by case and by column (the three genders, then the plural);
verbs are tuples indexed by person. A clause is built once, as a :class:`Clause`, and both languages are read off it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deepspeed_nmt.data.sample_lexicon import MODAL_TABLE, MONTHS, NAMES, NUMBERS, TIME_TABLES, WEEKDAYS
from deepspeed_nmt.data.sample_words import (
    BE,
    FIRST,
    NEUTER,
    NOMINATIVE,
    PLURAL,
    THEY,
    THIRD,
    Adjective,
    Noun,
    Verb,
    rows_of,
)


@dataclass(frozen=True)
class Determiner:
    """An article, possessive or number: German by [case][column], with the adjective endings that follow it."""

    english: str
    english_plural: str
    forms: tuple[tuple[str, ...], ...]
    endings: tuple[tuple[str, ...], ...]
    definite: bool = True


class Phrase(NamedTuple):
    """A noun phrase in both languages, in one case.

    Attributes:
        person: what a verb agrees with.
        definite: whether German puts it early in the clause.
        column: the gender, or PLURAL: what articles and pronouns agree with.
        pronoun: it is a personal pronoun.
        negated: German has "kein" where English negates the verb.
    """

    english: str
    german: str
    person: int = THIRD
    definite: bool = True
    column: int = NEUTER
    pronoun: bool = False
    negated: bool = False


Table = tuple[tuple[str, ...], ...]


def _table(*rows: str) -> Table:
    return tuple(tuple(cell.strip("-") for cell in row.split()) for row in rows)


def _join(stem: str, endings: Table) -> Table:
    return tuple(tuple(stem + ending for ending in row) for row in endings)


# Rows: nominative, accusative, dative, genitive. Columns: masculine, feminine, neuter, plural.
DER = _table("der die das die", "den die das die", "dem der dem den", "des der des der")
RELATIVE = _table("der die das die", "den die das die", "dem der dem denen", "dessen deren dessen deren")
EIN_ENDINGS = _table("- e - e", "en e - e", "em er em en", "es er es er")
DIES_ENDINGS = _table("er e es e", "en e es e", "em er em en", "es er es er")
WEAK = _table("e e e en", "en e e en", "en en en en", "en en en en")
MIXED = _table("er e es en", "en e es en", "en en en en", "en en en en")
STRONG = _table("er e es e", "en e es e", "em er em en", "en er en er")


def _fixed(word: str) -> Table:
    return ((word,) * 4,) * 4


def _owner(name: str) -> Determiner:
    german = "Frau Weber" if name == "Mrs Weber" else "Herrn Weber" if name == "Mr Weber" else name
    return Determiner(f"{name}'s", f"{name}'s", _fixed(german + ("'" if german[-1] in "sßxz" else "s")), STRONG)


THE = Determiner("the", "the", DER, WEAK)
A = Determiner("a", "", _join("ein", EIN_ENDINGS), MIXED, definite=False)
BARE = Determiner("", "", _fixed(""), STRONG, definite=False)
NO = Determiner("no", "no", _join("kein", EIN_ENDINGS), MIXED, definite=False)
THIS = Determiner("this", "these", _join("dies", DIES_ENDINGS), WEAK)
POSSESSIVES = tuple(
    Determiner(english, english, _join(german, EIN_ENDINGS), MIXED)
    for english, german in rows_of("my mein, your dein, his sein, her ihr, our unser, their ihr")
)
OWNERS = tuple(_owner(name.replace("_", " ")) for name in NAMES.split())


def number(english: str, german: str) -> Determiner:
    """A numeral from two on; the noun after it is plural."""
    return Determiner(english, english, _fixed(german), STRONG, definite=False)


NUMERALS = tuple(number(*row) for row in rows_of(NUMBERS))
DIGITS = tuple(number(str(n), str(n)) for n in range(13, 50))


def noun_phrase(
    noun: Noun, determiner: Determiner, case: int, adjective: Adjective | None = None, plural: bool = False
) -> Phrase:
    """A noun with its determiner and adjective, inflected for ``case``."""
    column = PLURAL if plural else noun.gender
    german = noun.plural[case] if plural else noun.singular[case]
    english = noun.english_plural if plural else noun.english
    if adjective is not None:
        german = f"{adjective.stem}{determiner.endings[case][column]} {german}"
        english = f"{adjective.english} {english}"
    article = determiner.forms[case][column]
    if article:
        german = f"{article} {german}"
    word = determiner.english_plural if plural else determiner.english
    if word:
        english = f"an {english}" if word == "a" and english[0] in "aeiou" else f"{word} {english}"
    return Phrase(english, german, THEY if plural else THIRD, determiner.definite, column)


def superlative(noun: Noun, adjective: Adjective, case: int) -> Phrase:
    """ "The oldest house"."""
    highest = Adjective(adjective.english_superlative, "", adjective.superlative)
    return noun_phrase(noun, THE, case, highest)


def genitive(phrase: Phrase, owner: Phrase) -> Phrase:
    """``phrase`` followed by its owner, which is in the genitive: "das Dach des Hauses"."""
    return phrase._replace(english=f"{phrase.english} of {owner.english}", german=f"{phrase.german} {owner.german}")


def measure(container: Noun, determiner: Determiner, drink: Noun, case: int) -> Phrase:
    """ "Three cups of coffee": drei Tassen Kaffee."""
    phrase = noun_phrase(container, determiner, case, plural=determiner is not A)
    return phrase._replace(
        english=f"{phrase.english} of {drink.english}", german=f"{phrase.german} {drink.singular[NOMINATIVE]}"
    )


def negated(noun: Noun, case: int, plural: bool) -> Phrase:
    """An indefinite object of a negated verb: "(does not buy) a coat", "keinen Mantel"."""
    determiner = BARE if plural or noun.mass else A
    english = noun_phrase(noun, determiner, case, plural=plural).english
    return noun_phrase(noun, NO, case, plural=plural)._replace(english=english, negated=True)


def name_phrase(name: str, case: int) -> Phrase:
    """A person's name; only Herr is inflected."""
    german = name.replace("Mrs", "Frau").replace("Mr", "Herr" if case == NOMINATIVE else "Herrn")
    return Phrase(name, german)


def city(name: str, going: bool) -> str:
    """In or to a town or country: "nach Berlin", but "in die Türkei"."""
    if not name.startswith("die "):
        return f"{'nach' if going else 'in'} {name}"
    return f"in {name}" if going else f"in der{name[3:]}"


CONTRACTIONS = {
    ("in", "dem"): "im", ("an", "dem"): "am", ("zu", "dem"): "zum", ("zu", "der"): "zur", ("von", "dem"): "vom",
    ("in", "das"): "ins", ("an", "das"): "ans",
}  # fmt: skip


def prepositional(preposition: str, german: str) -> str:
    """A preposition before a noun phrase that is in its case already: "in", "dem Haus" -> "im Haus"."""
    article, _, rest = german.partition(" ")
    contracted = CONTRACTIONS.get((preposition, article))
    return f"{contracted} {rest}" if contracted else f"{preposition} {german}"


class Pair(NamedTuple):
    """The same words in both languages."""

    english: str
    german: str


NOTHING = Pair("", "")


def pairs_of(table: str) -> list[Pair]:
    """The rows of a table of English words and German words."""
    return [Pair(english.replace("_", " "), german.replace("_", " ")) for english, german in rows_of(table)]


_WEEKDAYS = [Pair(f"on {english}", f"am {german}") for english, german in pairs_of(WEEKDAYS)]
_MONTHS = [Pair(f"in {english}", f"im {german}") for english, german in pairs_of(MONTHS)]
_DATES = [
    Pair(f"on {english} {day}", f"am {day}. {german}")
    for english, german in pairs_of(MONTHS)
    for day in range(3, 31, 6)
]
_NUMBERS = pairs_of(NUMBERS)
_CLOCK = [Pair(f"at {english} o'clock", f"um {german} Uhr") for english, german in _NUMBERS]
_CLOCK += [Pair(f"at {hour}:{minute}", f"um {hour}:{minute} Uhr") for hour in range(7, 22) for minute in (15, 30)]
_YEARS = [Pair(f"in {year}", f"im Jahr {year}") for year in range(1990, 2020)]
_UNITS = pairs_of("days Tagen, weeks Wochen, months Monaten, years Jahren, hours Stunden")
_AGO = [Pair(f"{n.english} {u.english} ago", f"vor {n.german} {u.german}") for n in _NUMBERS for u in _UNITS]
_HENCE = [Pair(f"in {n.english} {u.english}", f"in {n.german} {u.german}") for n in _NUMBERS for u in _UNITS]
# Lists to choose from: the fixed expressions three times as often as each kind of generated ones.
TIMES = {
    "present": [*[pairs_of(TIME_TABLES["present"])] * 3, _CLOCK],
    "past": [*[pairs_of(TIME_TABLES["past"])] * 3, _CLOCK, _WEEKDAYS, _MONTHS, _DATES, _YEARS, _AGO],
    "future": [*[pairs_of(TIME_TABLES["future"])] * 3, _CLOCK, _WEEKDAYS, _DATES, _HENCE],
}
PRICES = [(f"{n}.50", f"{n},50") for n in range(2, 30)] + [(f"{n}", f"{n}") for n in range(20, 1000, 15)]
PRICES += [(f"{n},{rest}", f"{n}.{rest}") for n in range(1, 10) for rest in ("200", "500", "750")]
REFLEXIVE = ("mich", "dich", "sich", "uns", "sich")


@dataclass(frozen=True)
class Modal:
    """A modal verb or the future's "will"; ``full_verb`` if English forms its question with "do"."""

    english: str
    full_verb: bool
    present: tuple[str, ...]
    negatable: bool


MODALS = tuple(
    Modal(row[0].replace("_", " "), row[1] == "verb", tuple(row[2:7]), len(row) == 7) for row in rows_of(MODAL_TABLE)
)


def words(*parts: str) -> str:
    """The parts that are not empty, joined by spaces."""
    return " ".join([part for part in parts if part])


@dataclass
class Clause:
    """One clause, from which every word order of both languages is read.

    Attributes:
        past: simple past in English; perfect (or, for sein and haben, preterite) in German.
        modal: a modal verb, in the present, or None.
        front: an adverbial that begins a main clause, and turns the German subject behind the verb.
        rest: what follows the English verb, except the time.
        early: what precedes the time in the German middle field: reflexive and personal pronouns, dative nouns.
        late: what follows it.
    """

    verb: Verb
    subject: Phrase
    past: bool = False
    modal: Modal | None = None
    negative: bool = False
    frequency: Pair = NOTHING
    front: Pair = NOTHING
    time: Pair = NOTHING
    rest: str = ""
    early: str = ""
    late: str = ""

    def _english_verb(self, question: bool) -> tuple[str, str]:
        """What stands before the subject in a question, and the verb after it."""
        verb, person, often = self.verb, self.subject.person, self.frequency.english
        negation = "not" if self.negative else ""
        third = person == THIRD
        base = verb.english
        if self.modal is not None and not self.modal.full_verb:
            first, _, more = self.modal.english.partition(" ")
            if first == "can" and self.negative:
                first, negation = "cannot", ""
            return first, words(negation, often, more, base)
        if self.modal is not None:
            base = f"{self.modal.english} {base}"
        if verb is BE:
            if self.past:
                return "was" if person in (FIRST, THIRD) else "were", words(negation, often)
            return "am" if person == FIRST else "is" if third else "are", words(negation, often)
        if question or self.negative:
            return "did" if self.past else "does" if third else "do", words(negation, often, base)
        if self.past:
            return "", words(often, verb.past)
        if not third:
            return "", words(often, base)
        return "", words(often, "wants" + base[4:] if self.modal is not None else verb.third)

    def english_predicate(self) -> str:
        """A statement without its subject."""
        return words(*self._english_verb(question=False), self.rest, self.time.english)

    def english(self) -> str:
        """A statement, in main and subordinate clauses alike."""
        return words(self.front.english, self.subject.english, self.english_predicate())

    def english_question(self) -> str:
        """A question, from its auxiliary on."""
        first, verb = self._english_verb(question=True)
        return words(first, self.subject.english, verb, self.rest, self.time.english)

    def english_infinitive(self) -> str:
        """What follows "to"."""
        return words(self.verb.english, self.rest, self.time.english)

    def _german_verb(self) -> tuple[str, str]:
        """The finite verb, and the infinitive or participle that goes with it."""
        verb, person = self.verb, self.subject.person
        if self.modal is not None:
            return self.modal.present[person], verb.prefix + verb.infinitive
        if not self.past:
            return verb.present[person], ""
        if verb.preterite:
            return verb.preterite[person], ""
        return verb.perfect[person], verb.participle

    def _middle(self) -> str:
        return words(self.early, self.frequency.german, self.time.german, self.late)

    def german(self) -> str:
        """A main clause: the verb is second, its prefix or its infinite part last."""
        if self.front.german:
            return f"{self.front.german} {self.german_question()}"
        return f"{self.subject.german} {self.german_predicate()}"

    def german_predicate(self, elided: bool = False) -> str:
        """A main clause without its subject, and without its finite verb too if that is ``elided``."""
        finite, infinite = self._german_verb()
        return words("" if elided else finite, self._middle(), infinite or self.verb.prefix.strip())

    def shares_auxiliary(self, other: Clause) -> bool:
        """Whether one "hat" can serve both clauses: "hat gesungen und getanzt"."""
        (finite, infinite), (other_finite, other_infinite) = self._german_verb(), other._german_verb()
        return finite == other_finite and bool(infinite and other_infinite)

    def german_question(self) -> str:
        """Verb first: a question, or what follows a fronted adverbial, question word or subordinate clause."""
        finite, infinite = self._german_verb()
        return words(finite, self.subject.german, self._middle(), infinite or self.verb.prefix.strip())

    def german_subordinate(self) -> str:
        """The finite verb last, a separable prefix joined to it."""
        finite, infinite = self._german_verb()
        if not infinite:
            finite = self.verb.prefix + finite
        return words(self.subject.german, self._middle(), infinite, finite)

    def german_infinitive(self) -> str:
        """An infinitive clause with "zu": "das Fenster zu öffnen", "früh aufzustehen"."""
        verb = self.verb
        joined = verb.prefix and not verb.prefix.endswith(" ")
        return words(self._middle(), f"{verb.prefix}zu{'' if joined else ' '}{verb.infinitive}")


def sentence(english: str, german: str, mark: str = ".") -> tuple[str, str]:
    """Two finished sentences: capitalised, with the end mark, and a relative clause's closing comma resolved."""
    if "," in german:
        german = german.rstrip(",").replace(",,", ",")
    return english[0].upper() + english[1:] + mark, german[0].upper() + german[1:] + mark
