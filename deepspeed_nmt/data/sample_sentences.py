"""The shapes of the sample corpus' sentences: statements, questions, and clauses within clauses."""

from __future__ import annotations

from deepspeed_nmt.data import sample_grammar as g
from deepspeed_nmt.data.sample_author import ClauseAuthor
from deepspeed_nmt.data.sample_grammar import NOTHING, Clause, Pair, Phrase, pairs_of, sentence, words
from deepspeed_nmt.data.sample_words import (
    ACCUSATIVE,
    ACTION_VERBS,
    ADJECTIVE_POOLS,
    BE,
    CLAUSE_VERBS_OF,
    DATIVE,
    GRADABLE_POOLS,
    MOTION_VERBS,
    NOMINATIVE,
    PAST_VERBS,
    PEOPLE_VERBS,
    PERSON_VERBS,
    THEY,
    THING_VERBS,
    THIRD,
    TIMED_VERBS,
    VERBS,
    Noun,
    Verb,
    noun_pool,
)

IT_BY_GENDER = ("er", "sie", "es", "sie")
DESCRIBED = (
    "person",
    "relative",
    "animal",
    "clothing",
    "furniture",
    "vehicle",
    "in",
    "room",
    "text",
    "dish",
    "event",
)
RANKED = ("person", "animal", "vehicle", "in", "event")
REASONS = pairs_of("because weil, although obwohl, because weil, if wenn")
TIMINGS = pairs_of("while während, before bevor, when wenn, when wenn, as_soon_as sobald")
PAST_ACTION_VERBS = [verb for verb in ACTION_VERBS if verb.past]
AIM_VERBS = [verb for verb in TIMED_VERBS if verb.frame != "um"]  # not "um um Wasser zu bitten"
COUNTED_VERBS = [verb for verb in THING_VERBS if {"thing", "clothing"} & set(verb.objects)]


class Author(ClauseAuthor):
    """Writes whole sentences."""

    def statement(self) -> tuple[str, str]:
        """One main clause, with the subject or an adverbial in front."""
        clause = self.clause(self._pick(VERBS), front=self._random() < 0.35, negatable=True)
        return sentence(clause.english(), clause.german())

    def question(self) -> tuple[str, str]:
        """A question for yes or no."""
        clause = self.clause(self._pick(PERSON_VERBS))
        return sentence(clause.english_question(), clause.german_question(), "?")

    def question_for(self) -> tuple[str, str]:
        """A question that begins with who, what, where, when, why or how many."""
        choice = self._random()
        if choice < 0.2:
            subject = Phrase("who", "wer")
            clause = self.clause(self._pick(PERSON_VERBS), subject)
            return sentence(clause.english(), clause.german(), "?")
        if choice < 0.35:
            clause = self.clause(self._pick(THING_VERBS), omit=True)
            asked = Pair("what", "was")
        elif choice < 0.5:
            verb = self._pick(PEOPLE_VERBS)
            clause = self.clause(verb, omit=True)
            asked = Pair("whom", "wem" if verb.case == DATIVE else "wen")
        elif choice < 0.6:
            clause = self.clause(self._pick(MOTION_VERBS), omit=True)
            asked = Pair("where", "wohin")
        elif choice < 0.7:
            clause = self.clause(self._pick(ACTION_VERBS), adverbials="tm")
            asked = Pair("where", "wo")
        elif choice < 0.8:
            clause = self.clause(self._pick(TIMED_VERBS), adverbials="pw")
            asked = Pair("when", "wann")
        elif choice < 0.9:
            clause = self.clause(self._pick(PERSON_VERBS), adverbials="tpm")
            asked = Pair("why", "warum")
        else:
            verb = self._pick(COUNTED_VERBS)
            clause = self.clause(verb, omit=True)
            noun = self._pick([noun for noun in noun_pool(verb.objects) if not noun.mass])
            phrase = g.noun_phrase(noun, g.BARE, verb.case, plural=True)
            asked = Pair(f"how many {phrase.english}", f"wie viele {phrase.german}")
        return sentence(
            f"{asked.english} {clause.english_question()}", f"{asked.german} {clause.german_question()}", "?"
        )

    def description(self) -> tuple[str, str]:
        """What somebody or something is like, or is more or most of."""
        clause = self._description()
        if self._random() < 0.15:
            return sentence(clause.english_question(), clause.german_question(), "?")
        return sentence(clause.english(), clause.german())

    def _description(self, past: bool | None = None) -> Clause:
        table = self._pick(DESCRIBED)
        noun = self._pick(noun_pool((table,)))
        choice = self._random()
        if table == "person" and choice > 0.7:
            subject = self._simple_subject()
        else:
            subject = self._noun_phrase(noun, NOMINATIVE)
        if past is None:
            past = self._random() < 0.4
        if choice < 0.25 and subject.person == THIRD and subject.definite and table in RANKED:
            predicate = self._superlative(noun)
        elif choice < 0.5 and GRADABLE_POOLS[table]:
            adjective = self._pick(GRADABLE_POOLS[table])
            other = self._noun_phrase(self._pick(noun_pool((table,))), NOMINATIVE)
            predicate = Pair(
                f"{adjective.english_comparative} than {other.english}", f"{adjective.comparative} als {other.german}"
            )
        else:
            predicate = self._adjective(table)
        negative = self._random() < 0.15
        late = words("nicht" if negative else "", predicate.german)
        return Clause(BE, subject, past, negative=negative, rest=predicate.english, late=late)

    def _superlative(self, noun: Noun) -> Pair:
        place = self._city(going=False)
        best = g.superlative(noun, self._pick(GRADABLE_POOLS[noun.table]), NOMINATIVE)
        return Pair(f"{best.english} {place.english}", f"{best.german} {place.german}")

    def _adjective(self, table: str) -> Pair:
        adjective = self._pick(ADJECTIVE_POOLS[table])
        english, german = self._pick((NOTHING, NOTHING, Pair("very", "sehr"), Pair("too", "zu")))
        return Pair(words(english, adjective.english), words(german, adjective.german))

    def existence(self) -> tuple[str, str]:
        """ "There is a dog in the garden"."""
        noun = self._pick(noun_pool(("animal", "person", "furniture", "thing", "vehicle")))
        plural = self._random() < 0.5
        table = ADJECTIVE_POOLS[noun.table]
        adjective = self._pick(table) if self._random() < 0.5 else None
        if plural:
            determiner = self._pick((g.BARE, g.NO, *g.NUMERALS[:4], self._pick(g.DIGITS)))
        else:
            determiner = g.A if self._random() < 0.85 else g.NO
        phrase = g.noun_phrase(noun, determiner, ACCUSATIVE, adjective, plural)
        place = self._place()
        past = self._random() < 0.4
        be = ("were" if plural else "was") if past else "are" if plural else "is"
        es = "es gab" if past else "es gibt"
        return sentence(f"there {be} {phrase.english} {place.english}", f"{es} {place.german} {phrase.german}")

    def _simple(self, past: bool | None, front: bool = False) -> Clause:
        if self._random() < 0.15:
            return self._description(past)
        return self.clause(self._verb(past), past=past, amount=0.4, front=front, negatable=True)

    def _verb(self, past: bool | None) -> Verb:
        return self._pick(PAST_VERBS if past else VERBS)

    def complex_sentence(self) -> tuple[str, str]:
        """A main clause with a subordinate clause after it or before it."""
        past: bool | None = self._random() < 0.45
        if self._random() < 0.45:
            english, german = self._pick(TIMINGS)
            verbs = PAST_ACTION_VERBS if past else ACTION_VERBS
            sub = self.clause(self._pick(verbs), past=past, adverbials="pmw", amount=0.3)
            if english == "when" and past:
                german = "als"
        else:
            english, german = self._pick(REASONS)
            past = past and english != "if"
            sub = self._simple(past)
        main = self._simple(past)
        if self._random() < 0.4:
            return sentence(
                f"{english} {sub.english()}, {main.english()}",
                f"{german} {sub.german_subordinate()}, {main.german_question()}",
            )
        return sentence(
            f"{main.english()} {english} {sub.english()}", f"{main.german()}, {german} {sub.german_subordinate()}"
        )

    def judgement(self) -> tuple[str, str]:
        """ "The woman buys the coat because it is cheap": a pronoun that agrees with what it stands for."""
        verb = self._pick(THING_VERBS)
        noun = self._pick(noun_pool(verb.objects))
        while noun.table not in ADJECTIVE_POOLS:
            verb = self._pick(THING_VERBS)
            noun = self._pick(noun_pool(verb.objects))
        phrase = self._noun_phrase(noun, verb.case)
        main = self.clause(verb, obj=phrase, amount=0.3)
        adjective = self._adjective(noun.table)
        plural = phrase.person == THEY
        be, ist = (
            (("were", "waren") if plural else ("was", "war"))
            if main.past
            else ("are", "sind")
            if plural
            else ("is", "ist")
        )
        return sentence(
            f"{main.english()} because {'they' if plural else 'it'} {be} {adjective.english}",
            f"{main.german()}, weil {IT_BY_GENDER[phrase.column]} {adjective.german} {ist}",
        )

    def report(self) -> tuple[str, str]:
        """What somebody says, thinks or asks."""
        past = self._random() < 0.4
        frame, conjunction = ("that", "dass") if self._random() < 0.75 else ("whether", "ob")
        main = self.clause(self._pick(CLAUSE_VERBS_OF[frame]), self._simple_subject(), past=past, adverbials="")
        sub = self._simple(True if past else None)
        return sentence(
            f"{main.english()} {frame} {sub.english()}", f"{main.german()}, {conjunction} {sub.german_subordinate()}"
        )

    def intention(self) -> tuple[str, str]:
        """What somebody tries, promises or forgets to do, or does something in order to do."""
        aim = self._random() < 0.4
        if aim:
            verbs = self._pick((MOTION_VERBS, ACTION_VERBS))
            main = self.clause(self._pick(verbs), self._simple_subject(), amount=0.5, front=self._random() < 0.3)
        else:
            main = self.clause(self._pick(CLAUSE_VERBS_OF["zu"]), self._simple_subject())
            if self._random() < 0.3:
                main.front = self._time("past" if main.past else "present")
        sub = self.clause(self._pick(AIM_VERBS), main.subject, adverbials="pmw", infinitive=True)
        return sentence(
            f"{main.english()} {'in order to' if aim else 'to'} {sub.english_infinitive()}",
            f"{main.german()}, {'um ' if aim else ''}{sub.german_infinitive()}",
        )

    def pair_of_clauses(self) -> tuple[str, str]:
        """Two things one subject does, or two clauses with "but"."""
        past = self._random() < 0.45
        verbs = PAST_ACTION_VERBS if past else ACTION_VERBS
        first = self.clause(self._pick(verbs), past=past, amount=0.4)
        if self._random() < 0.6:
            second = self.clause(self._pick(verbs), first.subject, past=past, amount=0.4)
            return sentence(
                f"{first.english()} and {second.english_predicate()}",
                f"{first.german()} und {second.german_predicate(elided=first.shares_auxiliary(second))}",
            )
        second = self._simple(past)
        return sentence(f"{first.english()}, but {second.english()}", f"{first.german()}, aber {second.german()}")

    def sentence(self) -> tuple[str, str]:
        """Any sentence and its translation."""
        return self._pick(SHAPES)(self)


SHAPES = (
    *[Author.statement] * 16,
    *[Author.question] * 4,
    *[Author.question_for] * 4,
    *[Author.description] * 3,
    *[Author.existence] * 2,
    *[Author.complex_sentence] * 9,
    *[Author.judgement] * 2,
    *[Author.report] * 4,
    *[Author.intention] * 3,
    *[Author.pair_of_clauses] * 4,
)
