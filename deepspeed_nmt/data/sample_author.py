"""Chooses the words of the sample corpus' clauses at random; the grammar sees to their form.

What keeps a sentence's translation unique: a time always belongs to the outermost clause it could belong to, relative
clauses have no adverbials, and the tense shows in the English verb form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from deepspeed_nmt.data import sample_grammar as g
from deepspeed_nmt.data import sample_lexicon as lexicon
from deepspeed_nmt.data.sample_grammar import (
    NOTHING,
    PRICES,
    TIMES,
    Clause,
    Pair,
    Phrase,
    pairs_of,
    prepositional,
    words,
)
from deepspeed_nmt.data.sample_words import (
    ACCUSATIVE,
    ADJECTIVE_POOLS,
    DATIVE,
    FIRST,
    GENITIVE,
    NOMINATIVE,
    NOUNS,
    PEOPLE,
    SECOND,
    SHARED_VERBS,
    THEY,
    THIRD,
    WE,
    Noun,
    Verb,
    noun_pool,
    nouns_of,
    verbs_for,
)

T = TypeVar("T")

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

WILL = g.MODALS[-1]


class Complement(NamedTuple):
    """What a verb demands: English in its order, German by place in the clause (see :class:`Clause`).

    Attributes:
        english_goal, goal: a direction, a prepositional object or an amount, which German puts last.
        negated: "kein" is in it, so that there is no "nicht".
    """

    english: str
    english_goal: str
    negated: bool = False
    early: str = ""
    definite: str = ""
    indefinite: str = ""
    goal: str = ""


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
            if choice < 0.52:
                noun = self._pick(noun_pool(PEOPLE))
                phrase = self._noun_phrase(noun, NOMINATIVE)
                # After "the son of the teacher" it would not be clear whom the clause describes.
                return phrase if " of " in phrase.english else self.with_relative_clause(noun, phrase)
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

    def with_relative_clause(self, noun: Noun, phrase: Phrase) -> Phrase:
        """``phrase`` (made from ``noun``) with a relative clause; German closes it with a comma."""
        is_person = noun.table in PEOPLE
        choice = self._random()
        objects = verbs_for("object", noun.table)
        if is_person and choice < 0.2:
            clause = self.clause(self._pick(SHARED_VERBS), self._person(NOMINATIVE), adverbials="")
            relative = words("with whom", clause.english())
            german = words("mit", g.RELATIVE[DATIVE][phrase.column], clause.german_subordinate())
        elif objects and (choice < 0.5 or not verbs_for("subject", noun.table)):
            verb = self._pick(objects)
            clause = self.clause(verb, self._simple_subject(), adverbials="", omit=True)
            relative = words("whom" if is_person else "that", clause.english())
            german = words(g.RELATIVE[verb.case][phrase.column], clause.german_subordinate())
        else:
            verb = self._pick(verbs_for("subject", noun.table))
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
        manner = companion = place = cause = NOTHING
        if not negative:
            if "m" in may and random() < 0.2 * amount:
                manner = self._pick(MANNERS)
            elif "w" in may and random() < 0.25 * amount:
                companion = self._companion(subject)
            if "p" in may and random() < 0.45 * amount:
                place = self._city(going=False) if subject is IT else self._place()  # it rains out of doors
        if "t" in may and random() < 0.06 * amount:
            cause = self._cause()

        complement = self._complement(verb, subject, negative, obj, omit)
        if front:
            if place is not NOTHING and random() < 0.3:
                result.front, place = place, NOTHING
            else:
                result.front, result.time = result.time, NOTHING
        negation = "nicht" if negative and not complement.negated else ""
        result.rest = words(
            complement.english,
            manner.english,
            complement.english_goal,
            companion.english,
            place.english,
            cause.english,
        )
        result.early = complement.early
        result.late = words(
            cause.german,
            complement.definite,
            manner.german,
            companion.german,
            negation,
            place.german,
            complement.indefinite,
            complement.goal,
        )
        return result

    def _complement(self, verb: Verb, subject: Phrase, negative: bool, obj: Phrase | None, omit: bool) -> Complement:
        """What ``verb`` demands; with ``omit``, all but what the question asks for."""
        frame = verb.frame
        english = early = goal = english_goal = ""
        if obj is None and not omit and frame in ("acc", "dat", "give", "put"):
            obj = self._object(verb, subject, verb.case, negative)
        if verb.reflexive:
            early = g.REFLEXIVE[subject.person]
        if frame == "give":
            recipient = self._pronoun(subject, DATIVE) if self._random() < 0.35 else self._person(DATIVE)
            english, early = recipient.english, recipient.german
        if not omit:
            english_goal, goal = self._goal(verb)
            if verb.objects and frame not in ("acc", "dat", "give", "put", "in"):  # the frame is a preposition
                phrase = self._object(verb, subject, verb.case, negative=False)
                english, goal = phrase.english, prepositional(frame, phrase.german)
        if obj is None:
            return Complement(english, english_goal, early=early, goal=goal)
        english = words(english, obj.english)
        if obj.pronoun or (frame == "dat" and obj.definite):
            early = words(early, obj.german)
            return Complement(english, english_goal, early=early, goal=goal)
        if obj.definite:
            return Complement(english, english_goal, early=early, definite=obj.german, goal=goal)
        return Complement(english, english_goal, obj.negated, early, indefinite=obj.german, goal=goal)

    def _goal(self, verb: Verb) -> Pair:
        """The place that ``verb`` leads to or is at, or the price."""
        frame = verb.frame
        if frame == "far":
            city = self._city(going=True)
            if verb.english != "travel" or self._random() < 0.6:
                return city
            vehicle = self._pick(VEHICLE_MANNERS)
            return Pair(words(city.english, vehicle.english), words(vehicle.german, city.german))
        if frame == "to":
            return self._place(ACCUSATIVE, rooms=verb.english != "drive")
        if frame == "in":
            return self._place(among=verb.objects)
        if frame in ("lie", "put"):
            return self._on_furniture(DATIVE if frame == "lie" else ACCUSATIVE)
        if frame == "price":
            english, german = self._pick(PRICES)
            return Pair(f"{english} euros", f"{german} Euro")
        return NOTHING
