"""The built-in English-German corpus: a lexicon, a grammar, and sentences chosen at random from a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from enum import Enum, IntEnum
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from deepspeed_nmt.errors import DataError
from deepspeed_nmt.files import atomic_write_text

Case = IntEnum("Case", "NOMINATIVE ACCUSATIVE DATIVE", start=0)
Gender = IntEnum("Gender", "MASCULINE FEMININE NEUTER PLURAL", start=0)  # columns of endings
Person = IntEnum("Person", "I YOU SHE WE THEY", start=0)  # "you" is always "du"
HABEN, SEIN = ("habe", "hast", "hat", "haben", "haben"), ("bin", "bist", "ist", "sind", "sind")


class Noun(NamedTuple):
    """A noun; ``english_plural`` is "" for mass nouns, ``singular`` and ``plural`` are German, by case."""

    english: str
    english_plural: str
    gender: Gender
    singular: tuple[str, ...]
    plural: tuple[str, ...]


class Slot(NamedTuple):
    """A complement of a verb: prepositions or "", the German case, and the kinds of nouns that suit it."""

    english: str
    german: str
    case: Case
    kinds: tuple[str, ...] = ()


class Verb(NamedTuple):
    """A verb: the kinds of its subjects, its complements, its forms, and by person the auxiliary of the perfect.

    German main clauses put the ``prefix`` last ("ab" in "abholen"); the infinitive and the present are without it.
    """

    subjects: list[str]
    slots: list[Slot]
    english: str = ""
    past: str = ""
    prefix: str = ""
    infinitive: str = ""
    present: tuple[str, ...] = ()
    participle: str = ""
    perfect: tuple[str, ...] = ()


def _entries(table: str) -> list[Any]:
    """Return the words of each entry of a table; ``_`` is a space inside an expression."""
    return [tuple(word.replace("_", " ") for word in entry.split()) for entry in table.split(",")]


def _add_s(expression: str) -> str:
    # An English plural or third person: the first word with its ending ("throws away").
    word, *rest = expression.split()
    word = re.sub(r"(?<=[^aeiou])y$", "ie", word)
    return " ".join([word + ("es" if re.search(r"(s|sh|ch|x|o)$", word) else "s"), *rest])


def _conjugate(infinitive: str, changed: str) -> tuple[str, ...]:
    """Return the German present by person; ``changed`` is the stem of du and er ("sieh"), or "" if it is the same."""
    stem = re.sub(r"e?n$", "", infinitive)
    link = "e" if not changed and re.search(r"([td]|[^aeioulrhm][nm]|chn)$", stem) else ""
    changed = changed or stem
    second = changed + link + ("t" if re.search(r"[sßz]$", changed) else "st")
    return f"{stem}e", second, f"{changed}{link}t", infinitive, infinitive


def _read_noun(english: str, german: str, gender: str, plural: str = "") -> Noun:
    """Read ``english[/plural] German gender [plural]``; a mass noun has no plural.

    A German plural that begins with ``-`` is an ending. ``w`` marks a weak noun (der Junge, den Jungen).
    """
    english, _, english_plural = english.partition("/")
    english_plural = (english_plural or _add_s(english)) if plural else ""
    plural = german + plural[1:] if plural.startswith("-") else plural
    oblique = plural if gender.endswith("w") else german
    forms = (german, oblique, oblique), (plural, plural, plural if plural.endswith(("n", "s")) else f"{plural}n")
    return Noun(english, english_plural, Gender("mfn".index(gender[0])), *forms)


def _read_verbs(frame: str, table: str) -> list[Verb]:
    """Read ``english past [prefix+]infinitive[/stem of du and er] [*]participle``; * marks a perfect with "sein".

    ``frame`` is ``subject kinds [> slot [> slot]]``, a slot ``[English preposition:German preposition:]case kinds``.
    """
    subjects, *complements = (part.split() for part in frame.split(" > "))
    slots = []
    for role, *kinds in complements:
        english, german, case = role.split(":") if ":" in role else ("", "", role)
        slots.append(Slot(english, german, Case.DATIVE if case == "dat" else Case.ACCUSATIVE, tuple(kinds)))
    verbs = []
    for english, past, german, participle in _entries(table):
        prefix, _, forms = german.rpartition("+")
        infinitive, _, changed = forms.partition("/")
        forms = (infinitive, _conjugate(infinitive, changed), participle.lstrip("*"))
        perfect = SEIN if participle.startswith("*") else HABEN
        verbs.append(Verb(subjects, slots, english, past, prefix, *forms, perfect))
    return verbs


_NOUNS = {
    "person": """man/men Mann m Männer, woman/women Frau f -en, boy Junge mw -n, girl Mädchen n -, teacher Lehrer m -,
        child/children Kind n -er, doctor Arzt m Ärzte, student Student mw -en, neighbor Nachbar mw -n,
        friend Freund m -e, colleague Kollege mw -n, baker Bäcker m -, guest Gast m Gäste, farmer Bauer mw -n,
        tourist Tourist mw -en, actress Schauspielerin f -nen, waitress Kellnerin f -nen, mayor Bürgermeister m -,
        queen Königin f -nen, brother Bruder m Brüder, sister Schwester f -n, daughter Tochter f Töchter,
        lawyer Anwalt m Anwälte, nurse Pflegerin f -nen, king König m -e, thief/thieves Dieb m -e,
        uncle Onkel m -, aunt Tante f -n, painter Maler m -, singer Sängerin f -nen, soldier Soldat mw -en""",
    "animal": """dog Hund m -e, cat Katze f -n, horse Pferd n -e, cow Kuh f Kühe, bird Vogel m Vögel, duck Ente f -n,
        mouse/mice Maus f Mäuse, rabbit Kaninchen n -, pig Schwein n -e, bear Bär mw -en, wolf/wolves Wolf m Wölfe""",
    "food": """apple Apfel m Äpfel, orange Orange f -n, tomato Tomate f -n, egg Ei n -er, sausage Wurst f Würste,
        cake Kuchen m -, roll Brötchen n -, bread Brot n, cheese Käse m, meat Fleisch n, rice Reis m, soup Suppe f""",
    "drink": "water Wasser n, milk Milch f, tea Tee m, coffee Kaffee m, beer Bier n, wine Wein m, juice Saft m",
    "text": """book Buch n Bücher, letter Brief m -e, newspaper Zeitung f -en, poem Gedicht n -e, report Bericht m -e,
        story Geschichte f -n, novel Roman m -e, postcard Postkarte f -n, song Lied n -er, play Stück n -e""",
    "thing": """bag Tasche f -n, key Schlüssel m -, cup Tasse f -n, plate Teller m -, ball Ball m Bälle,
        knife/knives Messer n -, basket Korb m Körbe, gift Geschenk n -e, picture Bild n -er, chair Stuhl m Stühle,
        box Kiste f -n, coat Mantel m Mäntel, jacket Jacke f -n, dress Kleid n -er, hat Hut m Hüte, bed Bett n -en,
        shoe Schuh m -e, skirt Rock m Röcke, lamp Lampe f -n, car Auto n -s, bicycle Fahrrad n Fahrräder,
        umbrella Regenschirm m -e, bottle Flasche f -n, clock Uhr f -en, candle Kerze f -n, mirror Spiegel m -""",
    "place": """park Park m -s, city Stadt f Städte, forest Wald m Wälder, village Dorf n Dörfer, school Schule f -n,
        library Bibliothek f -en, museum Museum n Museen, church Kirche f -n, hotel Hotel n -s, store Laden m Läden,
        hospital Krankenhaus n Krankenhäuser, kitchen Küche f -n, house Haus n Häuser, garden Garten m Gärten,
        restaurant Restaurant n -s, castle Schloss n Schlösser, office Büro n -s, factory Fabrik f -en""",
}
_ADJECTIVES = {
    "person": "rich reich, friendly freundlich, famous berühmt, clever klug, brave mutig, lazy faul, polite höflich",
    "person animal": "young jung, strong stark, tired müde, hungry hungrig, thirsty durstig, sad traurig, shy scheu",
    "animal thing place": "big groß, small klein, beautiful schön, ugly hässlich, dangerous gefährlich, huge riesig",
    "animal thing": "black schwarz, white weiß, brown braun, gray grau, golden golden, light leicht",
    "text thing place": "old alt, new neu, popular beliebt, strange seltsam, modern modern, cheap billig",
    "text": "interesting interessant, boring langweilig, long lang, short kurz, important wichtig, funny lustig",
    "thing": "red rot, blue blau, green grün, yellow gelb, heavy schwer, round rund, elegant elegant, broken kaputt",
    "food drink": "fresh frisch, good gut, delicious lecker, cold kalt, warm warm, healthy gesund",
    "place": "quiet ruhig, empty leer, clean sauber, noisy laut, cozy gemütlich, bright hell, safe sicher",
}
_VERBS = {
    "person": """work worked arbeiten gearbeitet, laugh laughed lachen gelacht, cry cried weinen geweint,
        dance danced tanzen getanzt, sing sang singen gesungen, get_up got_up auf+stehen *aufgestanden""",
    "person animal": """sleep slept schlafen/schläf geschlafen, arrive arrived an+kommen *angekommen,
        wake_up woke_up auf+wachen *aufgewacht, fall_asleep fell_asleep ein+schlafen/schläf *eingeschlafen""",
    "person animal > to:in:acc place": """go went gehen *gegangen, run ran laufen/läuf *gelaufen,
        come came kommen *gekommen, hurry hurried eilen *geeilt, come_back came_back zurück+kommen *zurückgekommen""",
    "person > acc person": """visit visited besuchen besucht, meet met treffen/triff getroffen,
        invite invited ein+laden/läd eingeladen, call called an+rufen angerufen, greet greeted grüßen gegrüßt""",
    "person > dat person": """thank thanked danken gedankt, answer answered antworten geantwortet,
        help helped helfen/hilf geholfen, follow followed folgen *gefolgt, trust trusted vertrauen vertraut""",
    "person animal > acc person animal thing": "see saw sehen/sieh gesehen, hear heard hören gehört",
    "person > acc animal": "feed fed füttern gefüttert, catch caught fangen/fäng gefangen",
    "person > acc text": "write wrote schreiben geschrieben, translate translated übersetzen übersetzt",
    "person > acc thing": "repair repaired reparieren repariert, clean cleaned putzen geputzt",
    "person > acc thing text": """buy bought kaufen gekauft, need needed brauchen gebraucht,
        steal stole stehlen/stiehl gestohlen, hide hid verstecken versteckt, find found finden gefunden,
        lose lost verlieren verloren, throw_away threw_away weg+werfen/wirf weggeworfen,
        take_along took_along mit+nehmen/nimm mitgenommen""",
    "person > acc food": "eat ate essen/iss gegessen, order ordered bestellen bestellt",
    "animal > acc food": "eat ate fressen/friss gefressen, smell smelled riechen gerochen",
    "person > acc drink": "drink drank trinken getrunken, spill spilled verschütten verschüttet",
    "person > dat person > acc text food drink thing": """give gave geben/gib gegeben, show showed zeigen gezeigt,
        send sent schicken geschickt, offer offered an+bieten angeboten, sell sold verkaufen verkauft""",
    "person > to::dat person": "listen listened zu+hören zugehört",
    "person > for:auf:acc person": "wait waited warten gewartet",
    "person > about:über:acc text person": "talk talked sprechen/sprich gesprochen",
    "person > of:von:dat person animal thing": "dream dreamed träumen geträumt",
    "person > after:auf:acc person animal thing": "look looked auf+passen aufgepasst",
}
_CLAUSE_VERBS = {
    "that": "say said sagen gesagt, believe believed glauben geglaubt, hope hoped hoffen gehofft",
    "whether": "ask asked fragen gefragt, find_out found_out heraus+finden herausgefunden",
    "to": "try tried versuchen versucht, promise promised versprechen/versprich versprochen",
}
_TIMES = {
    "PRESENT": "today heute, every_day jeden_Tag, this_week diese_Woche, in_winter im_Winter, at_night in_der_Nacht",
    "PAST": "yesterday gestern, last_week letzte_Woche, last_year letztes_Jahr, yesterday_evening gestern_Abend",
    "FUTURE": "tomorrow morgen, next_week nächste_Woche, next_month nächsten_Monat, soon bald, tonight heute_Abend",
}
_WEEKDAYS = """on_Monday am_Montag, on_Tuesday am_Dienstag, on_Wednesday am_Mittwoch, on_Thursday am_Donnerstag,
    on_Friday am_Freitag, on_Saturday am_Samstag, on_Sunday am_Sonntag"""

NOUNS = {kind: [_read_noun(*entry) for entry in _entries(table)] for kind, table in _NOUNS.items()}
ADJECTIVES = {
    kind: [entry for kinds, table in _ADJECTIVES.items() if kind in kinds.split() for entry in _entries(table)]
    for kind in NOUNS
}
VERBS = [verb for frame, table in _VERBS.items() for verb in _read_verbs(frame, table)]
CLAUSE_VERBS = {conjunction: _read_verbs("person", table) for conjunction, table in _CLAUSE_VERBS.items()}
COPULA = Verb([], [])  # its forms are tenses
TIMES = {tense: _entries(f"{_WEEKDAYS}, {table}") for tense, table in _TIMES.items()}
# English subject and object; German nominative, accusative and dative; person.
_PRONOUNS = _entries("""I me ich mich mir I, you you du dich dir YOU, he him er ihn ihm SHE, she her sie sie ihr SHE,
    we us wir uns uns WE, they them sie sie ihnen THEY""")
_NAMES = _entries("""Anna, Maria, Julia, Laura, Emma, Sophie, Clara, Helena, Irene, Nora, Peter, Paul, Martin, David,
    Felix, Simon, Robert, Oscar, Daniel, Victor""")
_POSSESSIVES = _entries("my mein, your dein, his sein, her ihr, our unser, their ihr")
_NUMBERS = _entries("two zwei, three drei, four vier, five fünf, six sechs, seven sieben, eight acht, nine neun")
COMPOUNDS = _entries("""winter Winter, summer Sommer, spring Frühlings, night Nacht, Sunday Sonntags, island Insel,
    Christmas Weihnachts, mountain Berg, harbor Hafen, market Markt, farm Bauernhof, desert Wüsten, luxury Luxus,
    monastery Kloster, family Familien, dream Traum, toy Spielzeug, festival Fest, travel Reise, theater Theater""")
DEGREES = _entries("very sehr, too zu, really wirklich, not nicht")


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
        german = _words(slot.german, self.german[slot.case])
        german = re.sub(r"^\w+ \w+\b", lambda match: CONTRACTIONS.get(match[0], match[0]), german)
        return Part(_words(slot.english, self.object), german, Field.PREPOSITION if slot.german else self.field)


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


def _words(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _definite(case: int, gender: Gender) -> str:
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
        article = _definite(case, gender) if determiner == THE else determiner.german + ("" if bare else strong)
        ending = strong if bare else weak
        german.append(_words(article, adjective[1] and adjective[1].rstrip("e") + ending, form))
    english = _words(determiner.english, adjective[0], noun.english_plural if plural else noun.english)
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
    english = _words(auxiliary, negation, verb.english)
    if simple and not negative:
        present = _add_s(verb.english) if person == Person.SHE else verb.english
        english = present if tense is Tense.PRESENT else verb.past
    rest = _words(*(part.english for part in parts))

    if tense is Tense.PRESENT:
        finite, final = verb.present[person], verb.prefix
    elif tense is Tense.PAST:
        finite, final = verb.perfect[person], verb.participle
    else:
        finite, final = tense.value[1].split()[person], verb.prefix + verb.infinitive
    german = subject.german[Case.NOMINATIVE]
    middle = _words(*(part.german for part in sorted(parts, key=lambda part: part.field)))
    return Clause(
        subject,
        tense,
        statement=_words(subject.subject, english, rest),
        question=_words(auxiliary, subject.subject, negation, verb.english, rest),
        base=_words(verb.english, rest),
        main=_words(german, finite, middle, final),
        inverted=_words(finite, german, middle, final),
        subordinate=_words(german, middle, final + finite if tense is Tense.PRESENT else _words(final, finite)),
        infinitive=_words(middle, f"{verb.prefix}zu{verb.infinitive}" if verb.prefix else f"zu {verb.infinitive}"),
    )


SPLITS = ("train", "valid", "test")
LANGUAGES = ("en", "de")
MAX_PAIRS = 1_000_000
"""The most pairs that can be asked for; of so many, 2% are drawn twice, and memory is 330 MB."""

T = TypeVar("T")
PRONOUNS = [
    NounPhrase(subject, other, tuple(german), Person[person], field=Field.PRONOUN)
    for subject, other, *german, person in _PRONOUNS
]
NAMES = [NounPhrase(name, name, (name, name, name)) for (name,) in _NAMES]
# Determiners by the noun that follows; frequent ones are repeated.
POSSESSIVES = [Determiner(english, german, "ein") for english, german in _POSSESSIVES]
SINGULAR = [THE, Determiner("a", "ein", "ein")] * 8 + [*POSSESSIVES, Determiner("this", "dies", "der")]
PLURAL = [THE, Determiner("", "")] * 6 + [*POSSESSIVES, Determiner("these", "dies", "der")]
MASS = [THE, Determiner("", "")] * 6 + POSSESSIVES
NUMBERS = [Determiner(*pair) for pair in _NUMBERS + [(str(n), str(n)) for n in range(13, 1000)]]
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
            noun = compound(self.pick(COMPOUNDS), noun)
        countable = noun.english_plural != ""
        plural = countable and self.random() < 0.3
        if negative:
            determiners = [THE, Determiner("a" if countable and not plural else "", "kein", "ein")]
        elif plural:
            determiners = NUMBERS if self.random() < 0.2 else PLURAL
        else:
            determiners = SINGULAR if countable else MASS
        return noun_phrase(noun, self.pick(determiners), adjective, plural)

    def subject(self, kinds: Sequence[str]) -> NounPhrase:
        """Return a subject, perhaps with a relative clause ("the man who sleeps")."""
        kind = self.pick(kinds)
        phrase = self.phrase(kind, pronouns=0.3)
        if phrase in PRONOUNS + NAMES or self.random() < 0.8:
            return phrase
        german = _definite(Case.NOMINATIVE, phrase.gender)
        pronoun = NounPhrase("who" if kind == "person" else "that", "", (german,), phrase.person)
        verbs = [verb for verb in VERBS if kind in verb.subjects]
        relative = self.clause(verbs, TENSES, pronoun)
        german = f"{phrase.german[Case.NOMINATIVE]}, {relative.subordinate},"
        return phrase._replace(subject=f"{phrase.subject} {relative.statement}", german=(german,))

    def time(self, tense: Tense) -> Part:
        """Return a time that suits the tense."""
        hour, minute = int(self.random() * 24), 10 + int(self.random() * 50)
        times = TIMES[tense.name if tense in SIMPLE else "FUTURE"]
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
        return clause(subject, verb, tense, parts, negative)

    def state(self, tense: Tense) -> Clause:
        """Return how something is ("the house is very old")."""
        kind = self.pick(list(NOUNS))
        degree, adjective = self.pick(DEGREES), self.pick(ADJECTIVES[kind])
        state = Part(f"{degree[0]} {adjective[0]}", f"{degree[1]} {adjective[1]}", Field.STATE)
        tense = Tense.IS if tense is Tense.PRESENT else Tense.WAS
        return clause(self.phrase(kind), COPULA, tense, [state])

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
    """Write pairs to ``directory``/train.en, ``directory``/train.de, and so on for the other splits.

    Without ``overwrite``, files of these names that have other content are refused; then nothing is written.
    """
    counts = dict(zip(SPLITS, (train, valid, test), strict=True))
    for name, count in counts.items():
        if count < 0:
            raise DataError(f"{count} pairs of {name}; ask for 0 or more")
    if (total := sum(counts.values())) > MAX_PAIRS:
        raise DataError(f"{total:,} pairs are more than {MAX_PAIRS:,}; ask for fewer")
    pairs = sentence_pairs(seed)
    # Held-out pairs come first: they stay the same when more training pairs are asked for.
    chosen = {name: list(islice(pairs, counts[name])) for name in reversed(SPLITS)}
    texts = {
        directory / f"{name}.{language}": "".join(f"{pair[side]}\n" for pair in chosen[name])
        for name in SPLITS
        for side, language in enumerate(LANGUAGES)
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path in texts:
            if path.exists() and not path.is_file():
                raise DataError(f"{path} is a directory or a device; move it away, or choose another --out")
        old = {path: path.read_bytes() == text.encode() for path, text in texts.items() if path.is_file()}
        if not overwrite and not all(old.values()):
            others = ", ".join(path.name for path, is_same in old.items() if not is_same)
            raise DataError(
                f"--out {directory} has other text in {others}; give --overwrite to replace it, or choose another "
                "--out"
            )
        for path, text in texts.items():
            if not old.get(path):
                atomic_write_text(path, text)
    except OSError as error:
        raise DataError(f"--out {directory} cannot be written ({error.strerror}); choose another") from None
