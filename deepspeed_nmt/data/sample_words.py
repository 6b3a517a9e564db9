"""The sample corpus' words in all their forms, made from the tables of `sample_lexicon`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from deepspeed_nmt.data.sample_lexicon import (
    ACQUAINTANCES,
    ADJECTIVE_TABLE,
    ADJECTIVES_OF,
    CLAUSE_VERB_TABLE,
    COMPOUNDS,
    MASS_CLASSES,
    NARROW_CLASSES,
    NOUN_TABLES,
    SINGLE_RELATIVES,
    UNOWNED_CLASSES,
    VERB_TABLE,
)

NOMINATIVE, ACCUSATIVE, DATIVE, GENITIVE = range(4)
CASES = {"acc": ACCUSATIVE, "dat": DATIVE, "gen": GENITIVE}
MASCULINE, FEMININE, NEUTER, PLURAL = range(4)
FIRST, SECOND, THIRD, WE, THEY = range(5)  # persons as verbs agree with them; "you" is always the singular du


@dataclass(frozen=True)
class Noun:
    """A noun in all its forms; ``singular`` and ``plural`` are German, indexed by case."""

    english: str
    english_plural: str
    gender: int
    singular: tuple[str, ...]
    plural: tuple[str, ...]
    table: str

    @property
    def mass(self) -> bool:
        """Whether it has neither plural nor indefinite article."""
        return self.table in MASS_CLASSES

    @property
    def countable(self) -> bool:
        """Whether the sample uses its plural."""
        return self.table not in MASS_CLASSES and self.english not in SINGLE_RELATIVES.split()

    @property
    def ownable(self) -> bool:
        """Whether "my" suits it."""
        if self.table == "person":
            return self.english.split()[-1] in ACQUAINTANCES.split()
        return self.table not in UNOWNED_CLASSES


@dataclass(frozen=True)
class Adjective:
    """An adjective: ``german`` stands alone ("dunkel"), ``stem`` takes endings ("dunkl-"); degrees may be ""."""

    english: str
    german: str
    stem: str
    english_comparative: str = ""
    comparative: str = ""
    english_superlative: str = ""
    superlative: str = ""


@dataclass(frozen=True)
class Verb:
    """A verb in all its forms.

    Attributes:
        english: the base form; a particle or fixed object belongs to it ("turn on", "play the piano").
        third: "turns on".
        past: "turned on", or "" where English would be ambiguous ("put") and the sample has no past.
        prefix: what stands at the end of a German main clause ("ein", "Klavier "), joined elsewhere.
        infinitive: German, without the prefix.
        present: German, without the prefix, indexed by person.
        preterite: used instead of the perfect tense if not empty, indexed by person.
        participle: German, with the prefix.
        perfect: the present of haben or sein, indexed by person.
        reflexive: whether it takes "sich".
        subjects: noun classes.
        frame: what completes it: "", acc, dat, give, to, far, in, put, lie, price, that, whether, zu,
            or else a German preposition.
        case: the case of the object, or the one the preposition governs.
        objects: noun classes.
        adverbials: letters for what may be added: time, place, manner, with somebody.
    """

    english: str
    third: str
    past: str
    prefix: str
    infinitive: str
    present: tuple[str, ...]
    preterite: tuple[str, ...]
    participle: str
    perfect: tuple[str, ...]
    reflexive: bool
    subjects: tuple[str, ...]
    frame: str
    case: int
    objects: tuple[str, ...]
    adverbials: str


HABEN = ("habe", "hast", "hat", "haben", "haben")
SEIN = ("bin", "bist", "ist", "sind", "sind")
HATTE = ("hatte", "hattest", "hatte", "hatten", "hatten")
WAR = ("war", "warst", "war", "waren", "waren")


def rows_of(table: str) -> list[list[str]]:
    """The words of each row of a table whose rows end in a comma; ``_`` is not yet a space."""
    return [row.split() for row in table.split(",") if row.strip()]


def _english_plural(word: str) -> str:
    if re.search(r"(s|x|ch|sh)$", word):
        return word + "es"
    return word[:-1] + "ies" if re.search(r"[^aeiou]y$", word) else word + "s"


def _third_person(base: str) -> str:
    first, _, rest = base.partition(" ")
    if first == "go":
        third = "goes"
    elif first == "have":
        third = "has"
    else:
        third = _english_plural(first)
    return f"{third} {rest}" if rest else third


def _genitive(german: str, plural: str) -> str:
    if german[-2:] == "us" and plural == german + "se":
        return german + "ses"
    one_syllable = len(re.findall("[aeiouyäöüé]+", german.lower())) == 1
    loan = plural == german + "s"
    if re.search("[sßxz]$", german) or (one_syllable and not loan and not re.search("[aeiou]$", german)):
        return german + "es"
    return german + "s"


def inflect_noun(row: list[str], table: str) -> Noun:
    """All forms of one row of :data:`NOUN_TABLES`."""
    english, german, gender, plural = row
    singular_english, _, plural_english = english.replace("_", " ").partition("/")
    many = german + plural[1:] if plural.startswith("-") else plural
    dative_plural = many if many[-1] in "ns" else many + "n"
    if gender.endswith("w"):
        weak = german + ("n" if german[-1] == "e" or german in ("Bauer", "Nachbar") else "en")
        singular = (german, weak, weak, weak)
    elif gender == "f":
        singular = (german,) * 4
    else:
        singular = (german, german, german, _genitive(german, many))
    return Noun(
        singular_english,
        plural_english or _english_plural(singular_english),
        "mfn".index(gender[0]),
        singular,
        (many, many, dative_plural, many),
        table,
    )


def _nouns() -> dict[str, Noun]:
    rows = [(row, table) for table, text in NOUN_TABLES.items() for row in rows_of(text)]
    nouns = [inflect_noun(row, table) for row, table in rows]
    found = {noun.english: noun for noun in nouns}
    assert len(found) == len(rows), "an English noun appears twice"
    return found


def compound(english: str, german: str, head: Noun) -> Noun:
    """The noun that ``head`` makes with a first part in front: gender, plural and class are the head's."""
    return Noun(
        f"{english} {head.english}",
        f"{english} {head.english_plural}",
        head.gender,
        tuple(german + form.lower() for form in head.singular),
        tuple(german + form.lower() for form in head.plural),
        head.table,
    )


def conjugate(infinitive: str, changed: str = "") -> tuple[str, ...]:
    """Present tense, indexed by person; ``changed`` is the stem of du and er, or "ich,du,er" written out."""
    if "," in changed:
        return (*changed.split(","), infinitive, infinitive)
    stem = infinitive[:-1] if re.search("e[lr]n$", infinitive) else infinitive[:-2]
    first = (stem[:-2] + "l" if infinitive.endswith("eln") else stem) + "e"
    link = "e" if not changed and re.search("([td]|ch[nm]|[^aeiouäöülrhmn][nm])$", stem) else ""
    stem = changed or stem
    second = stem + ("t" if stem[-1] in "sßzx" else link + "st")
    third = stem if changed and stem.endswith("t") else stem + link + "t"
    return (first, second, third, infinitive, infinitive)


def _verb(row: str) -> Verb:
    english, german, participle, subjects, complement, adverbials = (part.strip() for part in row.split("|"))
    base, past = english.split()
    base = base.replace("_", " ")
    rest = base.partition(" ")[2]
    words = german.replace("sich ", "").split()
    prefix, _, infinitive = words[0].replace("_", " ").rpartition("+")
    frame, *objects = complement.split() or [""]
    case = CASES.get(frame, ACCUSATIVE)
    if objects and objects[0] in CASES:
        case = CASES[objects.pop(0)]
    return Verb(
        base,
        _third_person(base),
        "" if past in ("-", base) else f"{past} {rest}".strip(),
        prefix,
        infinitive,
        conjugate(infinitive, words[1] if len(words) > 1 else ""),
        HATTE if infinitive == "haben" else (),
        participle.lstrip("*").replace("_", " "),
        SEIN if participle.startswith("*") else HABEN,
        german.startswith("sich "),
        tuple(subjects.split()),
        frame,
        case,
        tuple(objects),
        adverbials,
    )


def _adjective(row: list[str]) -> Adjective:
    english, german, *degrees = (word.replace("_", " ") for word in row)
    alone, _, stem = german.partition("/")
    return Adjective(english, alone, stem or alone, *degrees)


NOUNS = _nouns()
COMPOUND_NOUNS = [
    compound(english, german, NOUNS[head]) for english, german, *heads in rows_of(COMPOUNDS) for head in heads
]
ADJECTIVES = {adjective.english: adjective for adjective in map(_adjective, rows_of(ADJECTIVE_TABLE))}
VERBS = [_verb(row) for row in VERB_TABLE.strip().split("\n")]
CLAUSE_VERBS = [_verb(row) for row in CLAUSE_VERB_TABLE.strip().split("\n")]
BE = Verb("be", "is", "was", "", "sein", SEIN, WAR, "gewesen", SEIN, False, (), "", NOMINATIVE, (), "")


def nouns_of(name: str) -> list[Noun]:
    """The simple nouns of a class of :data:`NOUN_TABLES` or :data:`NARROW_CLASSES`."""
    if name in NARROW_CLASSES:
        return [NOUNS[word] for word in NARROW_CLASSES[name].split()]
    return [noun for noun in NOUNS.values() if noun.table == name]


# What to choose from.

PEOPLE = ("person", "relative")
ADJECTIVE_POOLS = {table: [ADJECTIVES[word] for word in names.split()] for table, names in ADJECTIVES_OF.items()}
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


@cache
def noun_pool(classes: tuple[str, ...]) -> list[Noun]:
    """The nouns of some classes; simple ones twice, so that compounds do not crowd them out."""
    simple = [noun for name in classes for noun in nouns_of(name)]
    return simple * 2 + [noun for noun in COMPOUND_NOUNS if noun.table in classes]


@cache
def verbs_for(role: str, table: str) -> list[Verb]:
    """Verbs that take nouns of a class as their "subject" or "object"."""
    if role == "subject":
        return [verb for verb in VERBS if table in verb.subjects and verb.frame != "price"]
    return [verb for verb in OBJECT_VERBS if table in verb.objects]
