"""Chooses the words of the sample corpus' clauses at random; the grammar sees to their form.

What keeps a sentence's translation unique: a time always belongs to the outermost clause it could belong to, relative
clauses have no adverbials, and the tense shows in the English verb form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

from deepspeed_nmt.data import sample_grammar as g
from deepspeed_nmt.data import sample_lexicon as lexicon
from deepspeed_nmt.data.sample_grammar import NOTHING, Clause, Pair, Phrase, prepositional, words
from deepspeed_nmt.data.sample_words import (
    ACCUSATIVE,
    ADJECTIVES,
    CLAUSE_VERBS,
    COMPOUND_NOUNS,
    DATIVE,
    FIRST,
    GENITIVE,
    NOMINATIVE,
    NOUNS,
    SECOND,
    THEY,
    THIRD,
    VERBS,
    WE,
    Noun,
    Verb,
    nouns_of,
    rows_of,
)

T = TypeVar("T")


def pairs_of(table: str) -> list[Pair]:
    """The rows of a table of English words and German words."""
    return [Pair(english.replace("_", " "), german.replace("_", " ")) for english, german in rows_of(table)]


# English subject and object; German nominative, accusative, dative; person.
PRONOUNS = (
    ("I", "me", "ich", "mich", "mir", FIRST),
    ("you", "you", "du", "dich", "dir", SECOND),
    ("he", "him", "er", "ihn", "ihm", THIRD),
    ("she", "her", "sie", "sie", "ihr", THIRD),
    ("we", "us", "wir", "uns", "uns", WE),
    ("they", "them", "sie", "sie", "ihnen", THEY),
)
IT = Phrase("it", "es")
PEOPLE = ("person", "relative")
# Class of the noun: English and German preposition for being there; the German one and its case for going there.
PLACES = {
    "in": ("in", "in", "in", ACCUSATIVE),
    "room": ("in", "in", "in", ACCUSATIVE),
    "at": ("at", "an", "zu", DATIVE),
    "by": ("at", "an", "an", ACCUSATIVE),
    "on": ("on", "auf", "auf", ACCUSATIVE),
}
POSITIONS = pairs_of("on auf, under unter, behind hinter, next_to neben, in_front_of vor, on auf")
MANNERS, VEHICLE_MANNERS = pairs_of(lexicon.MANNERS), pairs_of(lexicon.VEHICLE_MANNERS)
FREQUENCIES = pairs_of(lexicon.FREQUENCIES)
CITIES, NAMES = pairs_of(lexicon.CITIES), [name.replace("_", " ") for name in lexicon.NAMES.split()]

_WEEKDAYS = [Pair(f"on {english}", f"am {german}") for english, german in pairs_of(lexicon.WEEKDAYS)]
_MONTHS = [Pair(f"in {english}", f"im {german}") for english, german in pairs_of(lexicon.MONTHS)]
_DATES = [
    Pair(f"on {english} {day}", f"am {day}. {german}")
    for english, german in pairs_of(lexicon.MONTHS)
    for day in range(1, 31, 3)
]
_NUMBERS = pairs_of(lexicon.NUMBERS)
_CLOCK = [Pair(f"at {english} o'clock", f"um {german} Uhr") for english, german in _NUMBERS]
_CLOCK += [Pair(f"at {hour}:{minute}", f"um {hour}:{minute} Uhr") for hour in range(6, 23) for minute in (15, 30, 45)]
_YEARS = [Pair(f"in {year}", f"im Jahr {year}") for year in range(1950, 2020)]
_UNITS = pairs_of("days Tagen, weeks Wochen, months Monaten, years Jahren, hours Stunden")
_AGO = [Pair(f"{n.english} {u.english} ago", f"vor {n.german} {u.german}") for n in _NUMBERS for u in _UNITS]
_HENCE = [Pair(f"in {n.english} {u.english}", f"in {n.german} {u.german}") for n in _NUMBERS for u in _UNITS]
TIMES = {
    "present": [*[pairs_of(lexicon.TIMES["present"])] * 3, _CLOCK],
    "past": [*[pairs_of(lexicon.TIMES["past"])] * 3, _CLOCK, _WEEKDAYS, _MONTHS, _DATES, _YEARS, _AGO],
    "future": [*[pairs_of(lexicon.TIMES["future"])] * 3, _CLOCK, _WEEKDAYS, _DATES, _HENCE],
}
PRICES = [(f"{n}.50", f"{n},50") for n in range(2, 30)] + [(f"{n}", f"{n}") for n in range(20, 1000, 15)]
PRICES += [(f"{n},{rest}", f"{n}.{rest}") for n in range(1, 10) for rest in ("200", "500", "750")]

ADJECTIVE_POOLS = {
    table: [ADJECTIVES[word] for word in names.split()] for table, names in lexicon.ADJECTIVES_OF.items()
}
GRADABLE_POOLS = {table: [word for word in pool if word.comparative] for table, pool in ADJECTIVE_POOLS.items()}
PAST_VERBS = [verb for verb in VERBS if verb.past]
PERSON_VERBS = [verb for verb in VERBS if "relative" in verb.subjects]
OBJECT_VERBS = [verb for verb in PERSON_VERBS if verb.frame in ("acc", "dat")]
THING_VERBS = [verb for verb in OBJECT_VERBS if not set(PEOPLE) & set(verb.objects)]
PEOPLE_VERBS = [verb for verb in OBJECT_VERBS if "person" in verb.objects]
MOTION_VERBS = [verb for verb in PERSON_VERBS if verb.frame in ("to", "far")]
ACTION_VERBS = [verb for verb in PERSON_VERBS if "p" in verb.adverbials]
SHARED_VERBS = [verb for verb in PERSON_VERBS if "w" in verb.adverbials]
TIMED_VERBS = [verb for verb in PERSON_VERBS if "t" in verb.adverbials]
CLAUSE_VERBS_OF = {frame: [v for v in CLAUSE_VERBS if v.frame == frame] for frame in ("that", "whether", "zu")}
WILL = g.MODALS[-1]


@cache
def noun_pool(classes: tuple[str, ...]) -> list[Noun]:
    """The nouns of some classes; simple ones twice, so that compounds do not crowd them out."""
    simple = [noun for name in classes for noun in nouns_of(name)]
    return simple * 2 + [noun for noun in COMPOUND_NOUNS if noun.table in classes]


@cache
def _verbs_for(role: str, table: str) -> list[Verb]:
    """Verbs that take nouns of a class as their "subject" or "object"."""
    if role == "subject":
        return [verb for verb in VERBS if table in verb.subjects and verb.frame not in ("price",)]
    return [verb for verb in OBJECT_VERBS if table in verb.objects]


class ClauseAuthor:
    """Writes phrases and clauses; every choice comes from one stream of random numbers.

    Args:
        rng: gives numbers in [0, 1).
    """

    def __init__(self, rng: Callable[[], float]) -> None:
        self._random = rng

    def _pick(self, items: Sequence[T]) -> T:
        return items[int(self._random() * len(items))]

    # ------------------------------------------------------------ noun phrases

    def _noun_phrase(self, noun: Noun, case: int) -> Phrase:
        pool = ADJECTIVE_POOLS.get(noun.table)
        adjective = self._pick(pool) if pool and self._random() < 0.3 else None
        choice = self._random()
        plural = noun.countable and self._random() < 0.25
        if noun.table == "relative":
            if choice > 0.88 and not plural:
                return self._with_owner(noun, "person", case)
            return g.noun_phrase(
                noun, self._pick(g.POSSESSIVES if choice < 0.7 else g.OWNERS), case, adjective, plural
            )
        if noun.table == "part" and choice > 0.6 and not plural:
            return self._with_owner(noun, "building", case)
        if choice < 0.46 or noun.table == "cause":
            determiner = g.THE
        elif choice < 0.51:
            determiner = g.THIS
        elif choice < 0.65 and noun.ownable:
            determiner = self._pick(g.POSSESSIVES)
        elif choice < 0.7 and noun.ownable:
            determiner = self._pick(g.OWNERS)
        elif noun.mass:
            determiner = g.BARE
        elif not plural:
            determiner = g.A
        elif choice < 0.86:
            determiner = g.BARE
        else:
            determiner = self._pick(g.NUMERALS if choice < 0.96 else g.DIGITS)
        return g.noun_phrase(noun, determiner, case, adjective, plural)

    def _with_owner(self, noun: Noun, owners: str, case: int) -> Phrase:
        """ "The roof of the old house", "the son of the teacher"."""
        phrase = g.noun_phrase(noun, g.THE, case)
        possessor = self._pick(nouns_of(owners))
        adjective = self._pick(ADJECTIVE_POOLS[possessor.table]) if self._random() < 0.3 else None
        return g.genitive(phrase, g.noun_phrase(possessor, g.THE, GENITIVE, adjective))

    def _person(self, case: int) -> Phrase:
        if self._random() < 0.4:
            return g.name_phrase(self._pick(NAMES), case)
        return self._noun_phrase(self._pick(noun_pool(PEOPLE)), case)

    def _subject(self, classes: tuple[str, ...]) -> Phrase:
        if classes[0] == "weather":
            return IT
        if "relative" in classes:
            choice = self._random()
            if choice < 0.27:
                english, _, german, _, _, person = self._pick(PRONOUNS)
                return Phrase(english, german, person)
            if choice < 0.45:
                return g.name_phrase(self._pick(NAMES), NOMINATIVE)
            if choice < 0.55:
                noun = self._pick(noun_pool(PEOPLE))
                return self._with_relative_clause(noun, self._noun_phrase(noun, NOMINATIVE))
        return self._noun_phrase(self._pick(noun_pool(classes)), NOMINATIVE)

    def _object(self, verb: Verb, subject: Phrase, case: int, negative: bool) -> Phrase:
        noun = self._pick(noun_pool(verb.objects))
        choice = self._random()
        if noun.table in PEOPLE and choice < 0.5:
            # "picks us up" would need another English order.
            if choice < 0.3 and verb.english.rpartition(" ")[2] not in ("up", "along"):
                return self._pronoun(subject, case)
            return g.name_phrase(self._pick(NAMES), case)
        if noun.table == "drink" and choice < 0.35 and not negative:
            container = NOUNS["cup" if noun.english in ("tea", "coffee") else "bottle" if choice < 0.15 else "glass"]
            return g.measure(container, self._pick((g.A, g.A, *g.NUMERALS[:3])), noun, case)
        if negative and choice < 0.7 and noun.table != "relative":
            plural = noun.countable and choice > 0.6
            return g.negated(noun, case, plural)
        while True:
            phrase = self._noun_phrase(noun, case)
            if not negative or phrase.definite:
                return phrase

    def _pronoun(self, subject: Phrase, case: int) -> Phrase:
        """A personal pronoun as an object; not one that would have to be reflexive beside ``subject``."""
        clash = (FIRST, WE) if subject.person in (FIRST, WE) else (subject.person,)
        while True:
            pronoun = self._pick(PRONOUNS)
            if pronoun[5] not in clash or subject.person == THIRD:
                german = pronoun[3] if case == ACCUSATIVE else pronoun[4]
                return Phrase(pronoun[1], german, pronoun[5], pronoun=True)

    def _with_relative_clause(self, noun: Noun, phrase: Phrase) -> Phrase:
        """``phrase`` (made from ``noun``) with a relative clause; German closes it with a comma."""
        is_person = noun.table in PEOPLE
        choice = self._random()
        objects = _verbs_for("object", noun.table)
        if is_person and choice < 0.2:
            clause = self.clause(self._pick(SHARED_VERBS), self._person(NOMINATIVE), adverbials="")
            relative = words("with whom", clause.english())
            german = words("mit", g.RELATIVE[DATIVE][phrase.column], clause.german_subordinate())
        elif objects and (choice < 0.5 or not _verbs_for("subject", noun.table)):
            verb = self._pick(objects)
            clause = self.clause(verb, self._simple_subject(), adverbials="", omit=True)
            relative = words("whom" if is_person else "that", clause.english())
            german = words(g.RELATIVE[verb.case][phrase.column], clause.german_subordinate())
        else:
            verb = self._pick(_verbs_for("subject", noun.table))
            pronoun = Phrase("who" if is_person else "that", g.RELATIVE[NOMINATIVE][phrase.column], phrase.person)
            clause = self.clause(verb, pronoun, adverbials="")
            relative, german = clause.english(), clause.german_subordinate()
        return phrase._replace(english=f"{phrase.english} {relative}", german=f"{phrase.german}, {german},")

    def _simple_subject(self) -> Phrase:
        choice = self._random()
        if choice < 0.4:
            english, _, german, _, _, person = self._pick(PRONOUNS)
            return Phrase(english, german, person)
        return self._person(NOMINATIVE)

    # ------------------------------------------------------------ adverbials

    def _time(self, tense: str) -> Pair:
        return self._pick(self._pick(TIMES[tense]))

    def _city(self, going: bool) -> Pair:
        english, german = self._pick(CITIES)
        return Pair(f"{'to' if going else 'in'} {english}", g.city(german, going))

    def _place(self, case: int = DATIVE, rooms: bool = True, among: tuple[str, ...] = ()) -> Pair:
        """Where something is (dative) or, with the accusative, where to; ``among`` are noun classes to keep to."""
        choice = self._random()
        if choice < 0.2 and case == DATIVE:
            return self._city(going=False)
        if among:
            noun = self._pick(noun_pool(among))
        elif choice < 0.4 and rooms:
            noun = self._pick(noun_pool(("room",)))
        else:
            noun = self._pick(noun_pool(("in", "in", "at", "by", "on")))
        english, being, going, going_case = PLACES[noun.table]
        adjective = (
            self._pick(ADJECTIVE_POOLS[noun.table]) if choice > 0.8 and noun.table in ADJECTIVE_POOLS else None
        )
        if case == DATIVE:
            phrase = g.noun_phrase(noun, g.THE, DATIVE, adjective)
            return Pair(f"{english} {phrase.english}", prepositional(being, phrase.german))
        phrase = g.noun_phrase(noun, g.THE, going_case, adjective)
        return Pair(f"to {phrase.english}", prepositional(going, phrase.german))

    def _companion(self, subject: Phrase) -> Pair:
        phrase = self._pronoun(subject, DATIVE) if self._random() < 0.2 else self._person(DATIVE)
        return Pair(f"with {phrase.english}", f"mit {phrase.german}")

    def _cause(self) -> Pair:
        phrase = self._noun_phrase(self._pick(noun_pool(("cause",))), GENITIVE)
        return Pair(f"because of {phrase.english}", f"wegen {phrase.german}")

    def _on_furniture(self, case: int) -> Pair:
        """On, under, behind a piece of furniture; the case tells whether something lies there or is put there."""
        english, german = self._pick(POSITIONS)
        adjective = self._pick(ADJECTIVE_POOLS["furniture"]) if self._random() < 0.3 else None
        phrase = g.noun_phrase(self._pick(noun_pool(("furniture",))), g.THE, case, adjective)
        return Pair(f"{english} {phrase.english}", f"{german} {phrase.german}")

    # ------------------------------------------------------------ clauses

    def _tense(self, verb: Verb, past: bool | None) -> tuple[bool, g.Modal | None]:
        choice = self._random()
        if past is not None or choice < 0.7 or "t" not in verb.adverbials:
            return (bool(verb.past) and (choice < 0.32 if past is None else past)), None
        return False, self._pick(g.MODALS) if "relative" in verb.subjects else WILL

    def clause(
        self,
        verb: Verb,
        subject: Phrase | None = None,
        *,
        past: bool | None = None,
        adverbials: str = "tfpmw",
        amount: float = 1.0,
        front: bool = False,
        negatable: bool = False,
        infinitive: bool = False,
        omit: bool = False,
        obj: Phrase | None = None,
    ) -> Clause:
        """A clause around ``verb``.

        Args:
            subject: chosen to suit the verb if None.
            past: which tense; any, or a modal verb, if None.
            adverbials: letters of those it may have (see :class:`Verb`); f is for a frequency ("often").
            amount: how likely each of them is, relative to a simple sentence.
            front: move one of them to the beginning.
            negatable: it may be negative.
            infinitive: it will be used without its subject and tense.
            omit: leave the object out (a question asks for it).
            obj: the object, chosen to suit the verb if None.
        """
        random = self._random
        subject = subject or self._subject(verb.subjects)
        may = [letter for letter in verb.adverbials if letter in adverbials]
        was, modal = (False, None) if infinitive else self._tense(verb, past)
        negative = negatable and random() < 0.14 and (modal is None or modal.negatable)
        result = Clause(verb, subject, was, modal, negative)
        if "t" in may:
            if modal is None and not negative and not front and "f" in adverbials and random() < 0.15:
                result.frequency = self._pick(FREQUENCIES)
            elif random() < 0.5 * amount or front:
                result.time = self._time("past" if was else "present" if modal is None else "future")
                while negative and result.time.english.startswith("every"):  # "not every day" is another sentence
                    result.time = self._time("present")
        manner = companion = place = cause = vehicle = NOTHING
        if not negative:
            if "m" in may and random() < 0.2 * amount:
                manner = self._pick(MANNERS)
            elif "w" in may and random() < 0.25 * amount:
                companion = self._companion(subject)
            if "p" in may and random() < 0.45 * amount:
                place = self._place()
        if "t" in may and random() < 0.06 * amount:
            cause = self._cause()

        early = [g.REFLEXIVE[subject.person]] if verb.reflexive else []
        definite = indefinite = complement = target = english_object = ""
        frame = verb.frame
        if obj is None and not omit and frame in ("acc", "dat", "give", "put"):
            obj = self._object(verb, subject, verb.case, negative)
        if frame == "give":
            recipient = self._pronoun(subject, DATIVE) if random() < 0.35 else self._person(DATIVE)
            english_object = recipient.english
            early.append(recipient.german)
        if obj is not None:
            english_object = words(english_object, obj.english)
            if obj.pronoun or (verb.frame == "dat" and obj.definite):
                early.append(obj.german)
            elif obj.definite:
                definite = obj.german
            else:
                indefinite = obj.german
        elif frame == "price":
            english, german = self._pick(PRICES)
            target, complement = f"{english} euros", f"{german} Euro"
        elif omit:
            pass
        elif frame in ("to", "far", "in"):
            if frame == "far":
                target, complement = self._city(going=True)
                vehicle = self._pick(VEHICLE_MANNERS) if verb.english == "travel" and random() < 0.4 else NOTHING
            elif frame == "to":
                target, complement = self._place(ACCUSATIVE, rooms=verb.english != "drive")
            else:
                target, complement = self._place(among=verb.objects)
        elif frame == "lie":
            target, complement = self._on_furniture(DATIVE)
        elif frame not in ("acc", "dat", "give", "put") and verb.objects:  # the frame is a preposition
            phrase = self._object(verb, subject, verb.case, False)
            english_object, complement = phrase.english, prepositional(frame, phrase.german)
        if frame == "put" and not omit:
            target, complement = self._on_furniture(ACCUSATIVE)

        if front:
            if place is not NOTHING and random() < 0.3:
                result.front, place = place, NOTHING
            else:
                result.front, result.time = result.time, NOTHING
        negation = "nicht" if negative and not (obj is not None and obj.negated) else ""
        result.rest = words(
            english_object, manner.english, target, vehicle.english, companion.english, place.english, cause.english
        )
        result.early = words(*early)
        result.late = words(
            cause.german,
            definite,
            manner.german,
            companion.german,
            negation,
            vehicle.german,
            place.german,
            indefinite,
            complement,
        )
        return result
