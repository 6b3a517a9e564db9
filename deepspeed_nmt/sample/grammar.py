"""Noun phrases and clauses, in English and German at once.

A clause is its subject, its verb, and its other parts in English order. German sorts these parts by topological
field, puts the finite verb second, first or last, and the rest of the verb last.
"""

from __future__ import annotations

import re
from enum import Enum, IntEnum
from typing import NamedTuple

from deepspeed_nmt.sample.lexicon import Case, Gender, Noun, Person, Slot, Verb, add_s

Field = IntEnum("Field", "PRONOUN TIME OBJECT NEGATION PLACE PREPOSITION STATE", start=0)  # in German order
STRONG = (("er", "e", "es", "e"), ("en", "e", "es", "e"), ("em", "er", "em", "en"))
"""Endings by case and gender of determiners, and of adjectives that no determiner with an ending precedes."""
CONTRACTIONS = {"in dem": "im", "in das": "ins", "von dem": "vom"}


class Part(NamedTuple):
    """A part of a clause in both languages, and its field in German."""

    english: str
    german: str
    field: Field


class NounPhrase(NamedTuple):
    """A noun phrase, name or pronoun: English as a subject and as an object, German by case."""

    subject: str
    object: str
    german: tuple[str, ...]
    person: Person = Person.SHE
    gender: Gender = Gender.PLURAL
    field: Field = Field.OBJECT

    def complement(self, slot: Slot) -> Part:
        """Return the phrase as an object, or after prepositions ("in dem Park" becomes "im Park")."""
        german = words(slot.german, self.german[slot.case])
        german = re.sub(r"^\w+ \w+\b", lambda match: CONTRACTIONS.get(match[0], match[0]), german)
        return Part(words(slot.english, self.object), german, Field.PREPOSITION if slot.german else self.field)


class Determiner(NamedTuple):
    """A word before a noun; its German endings are those of "der" or of "ein", or it has none."""

    english: str
    german: str
    endings: str = ""


THE = Determiner("the", "d", "der")


class Tense(Enum):
    """A tense or modal: the English and German auxiliaries by person.

    German has none in the PRESENT, and in the PAST that of the verb's perfect. IS and WAS are for the copula.
    """

    PRESENT = "do do does do do", ""
    PAST = "did did did did did", ""
    IS = "am are is are are", "bin bist ist sind sind"
    WAS = "was were was were were", "war warst war waren waren"
    WILL = "will will will will will", "werde wirst wird werden werden"
    CAN = "can can can can can", "kann kannst kann können können"
    MUST = "must must must must must", "muss musst muss müssen müssen"


def words(*parts: str) -> str:
    """Join the parts that are not empty by spaces."""
    return " ".join(filter(None, parts))


def definite(case: int, gender: Gender) -> str:
    """Return a form of "der", the article and relative pronoun."""
    ending = STRONG[case][gender]
    return "d" + {"e": "ie", "es": "as"}.get(ending, ending)


def noun_phrase(noun: Noun, determiner: Determiner, adjective: tuple[str, str], plural: bool = False) -> NounPhrase:
    """Return determiner, adjective (or two empty strings) and noun in agreement."""
    gender = Gender.PLURAL if plural else noun.gender
    german = []
    for case, form in enumerate(noun.plural if plural else noun.singular):
        strong = STRONG[case][gender]
        weak = "e" if gender != Gender.PLURAL and (case == Case.NOMINATIVE or strong in ("e", "es")) else "en"
        # "ein alter Mann", "ein altes Haus": the adjective takes the ending that "ein" lacks.
        lacks_ending = determiner.endings == "ein" and case != Case.DATIVE and strong in ("er", "es")
        bare = lacks_ending or not determiner.endings
        article = definite(case, gender) if determiner == THE else determiner.german + ("" if bare else strong)
        ending = strong if bare else weak
        german.append(words(article, adjective[1] and adjective[1].rstrip("e") + ending, form))
    english = words(determiner.english, adjective[0], noun.english_plural if plural else noun.english)
    english = re.sub(r"^a (?=[aeiou])", "an ", english)
    return NounPhrase(english, english, tuple(german), Person.THEY if plural else Person.SHE, gender)


def compound(first: tuple[str, str], noun: Noun) -> Noun:
    """Return a compound: two words in English, one in German, which is inflected like its second part."""
    english, german = first
    singular, plural = (tuple(german + form.lower() for form in forms) for forms in (noun.singular, noun.plural))
    english_plural = f"{english} {noun.english_plural}" if noun.english_plural else ""
    return Noun(f"{english} {noun.english}", english_plural, noun.gender, singular, plural)


class Clause(NamedTuple):
    """A clause in all its orders.

    ``statement``, ``question`` and ``base`` (the infinitive) are English. German has its finite verb second in
    ``main``, first in ``inverted``, last in ``subordinate``, and none in ``infinitive``.
    """

    subject: NounPhrase
    tense: Tense
    statement: str
    question: str
    base: str
    main: str
    inverted: str
    subordinate: str
    infinitive: str


def clause(subject: NounPhrase, verb: Verb, tense: Tense, parts: list[Part], negative: bool = False) -> Clause:
    """Return the clause; ``parts`` are in English order, and a German negation is one of them."""
    person, simple = subject.person, tense in (Tense.PRESENT, Tense.PAST)
    auxiliary, negation = tense.value[0].split()[person], "not" if negative else ""
    english = words(auxiliary, negation, verb.english)
    if simple and not negative:
        present = add_s(verb.english) if person == Person.SHE else verb.english
        english = present if tense is Tense.PRESENT else verb.past
    rest = words(*(part.english for part in parts))

    if tense is Tense.PRESENT:
        finite, final = verb.present[person], verb.prefix
    elif tense is Tense.PAST:
        finite, final = verb.perfect[person], verb.participle
    else:
        finite, final = tense.value[1].split()[person], verb.prefix + verb.infinitive
    german = subject.german[Case.NOMINATIVE]
    middle = words(*(part.german for part in sorted(parts, key=lambda part: part.field)))
    return Clause(
        subject,
        tense,
        statement=words(subject.subject, english, rest),
        question=words(auxiliary, subject.subject, negation, verb.english, rest),
        base=words(verb.english, rest),
        main=words(german, finite, middle, final),
        inverted=words(finite, german, middle, final),
        subordinate=words(german, middle, final + finite if tense is Tense.PRESENT else words(final, finite)),
        infinitive=words(middle, f"{verb.prefix}zu{verb.infinitive}" if verb.prefix else f"zu {verb.infinitive}"),
    )
