"""The sample corpus: the same everywhere, no pair twice, one translation per sentence, and correct German."""

from __future__ import annotations

import hashlib
import random
from itertools import islice
from pathlib import Path

import pytest

from deepspeed_nmt import cli
from deepspeed_nmt.data import sample_grammar as g
from deepspeed_nmt.data.sample import SPLITS, sentence_pairs, write_sample
from deepspeed_nmt.data.sample_grammar import Clause, Pair, Phrase, noun_phrase, prepositional, sentence
from deepspeed_nmt.data.sample_sentences import Author
from deepspeed_nmt.data.sample_words import (
    ACCUSATIVE,
    ADJECTIVES,
    BE,
    COMPOUND_NOUNS,
    DATIVE,
    FIRST,
    GENITIVE,
    NOMINATIVE,
    NOUNS,
    SECOND,
    VERBS,
    WE,
    conjugate,
)
from deepspeed_nmt.errors import DataError, UserError

MY, UNSER = g.POSSESSIVES[0], g.POSSESSIVES[4]
ANNA = Phrase("Anna", "Anna")
I = Phrase("I", "ich", FIRST)  # noqa: E741
DU = Phrase("you", "du", SECOND)
WIR = Phrase("we", "wir", WE)
MODALS = {modal.english: modal for modal in g.MODALS}


def _verb(english):
    return next(verb for verb in VERBS if verb.english == english)


def _german(noun, determiner, case, adjective=None, plural=False):
    compounds = {compound.english: compound for compound in COMPOUND_NOUNS}
    word = NOUNS.get(noun) or compounds[noun]
    return noun_phrase(word, determiner, case, ADJECTIVES[adjective] if adjective else None, plural).german


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        # weak, mixed and strong adjective endings
        (_german("man", g.THE, NOMINATIVE, "old"), "der alte Mann"),
        (_german("man", g.THE, ACCUSATIVE, "old"), "den alten Mann"),
        (_german("man", g.A, NOMINATIVE, "old"), "ein alter Mann"),
        (_german("house", g.A, ACCUSATIVE, "old"), "ein altes Haus"),
        (_german("woman", g.A, DATIVE, "young"), "einer jungen Frau"),
        (_german("milk", g.BARE, ACCUSATIVE, "cold"), "kalte Milch"),
        (_german("wine", g.BARE, ACCUSATIVE, "cold"), "kalten Wein"),
        (_german("apple", g.NO, ACCUSATIVE, "fresh", plural=True), "keine frischen Äpfel"),
        (_german("apple", g.BARE, ACCUSATIVE, "fresh", plural=True), "frische Äpfel"),
        (_german("dog", g.NUMERALS[1], DATIVE, "small", plural=True), "drei kleinen Hunden"),
        (_german("child", g.THIS, NOMINATIVE, "tired"), "dieses müde Kind"),
        (_german("car", UNSER, DATIVE, "new"), "unserem neuen Auto"),
        (_german("coat", g.THE, NOMINATIVE, "expensive"), "der teure Mantel"),
        (_german("room", g.A, NOMINATIVE, "dark"), "ein dunkles Zimmer"),
        # nouns: weak ones, the dative plural, genitives
        (_german("boy", g.THE, ACCUSATIVE), "den Jungen"),
        (_german("student", g.A, DATIVE), "einem Studenten"),
        (_german("woman", g.THE, DATIVE, plural=True), "den Frauen"),
        (_german("car", g.THE, DATIVE, plural=True), "den Autos"),
        (_german("house", g.THE, GENITIVE, "old"), "des alten Hauses"),
        (_german("bus", g.THE, GENITIVE), "des Busses"),
        (_german("river", g.THE, GENITIVE), "des Flusses"),
        (_german("neighbor", g.THE, GENITIVE), "des Nachbarn"),
        (_german("boss", g.THE, GENITIVE), "des Chefs"),
        (g.OWNERS[10].forms[NOMINATIVE][0], "Lukas'"),
        (g.name_phrase("Mr Weber", DATIVE).german, "Herrn Weber"),
        # compounds agree like their head
        (_german("kitchen table", g.THE, DATIVE, "big"), "dem großen Küchentisch"),
        (_german("leather jacket", MY, ACCUSATIVE), "meine Lederjacke"),
        (_german("apple cake", g.A, ACCUSATIVE, plural=False), "einen Apfelkuchen"),
        # prepositions: contraction, and place against direction
        (prepositional("in", _german("park", g.THE, DATIVE, "old")), "im alten Park"),
        (prepositional("in", _german("park", g.THE, ACCUSATIVE)), "in den Park"),
        (prepositional("in", _german("museum", g.THE, ACCUSATIVE)), "ins Museum"),
        (prepositional("zu", _german("bus stop", g.THE, DATIVE)), "zur Haltestelle"),
        (prepositional("mit", _german("dog", g.THE, DATIVE)), "mit dem Hund"),
        (g.city("die Schweiz", going=True), "in die Schweiz"),
        (g.city("die Schweiz", going=False), "in der Schweiz"),
        (g.city("Wien", going=True), "nach Wien"),
        # degrees, amounts, owners
        (g.superlative(NOUNS["house"], ADJECTIVES["old"], NOMINATIVE).german, "das älteste Haus"),
        (g.measure(NOUNS["cup"], g.NUMERALS[1], NOUNS["tea"], ACCUSATIVE).german, "drei Tassen Tee"),
        (g.negated(NOUNS["coat"], ACCUSATIVE, plural=False).german, "keinen Mantel"),
        (
            g.genitive(
                noun_phrase(NOUNS["roof"], g.THE, ACCUSATIVE), noun_phrase(NOUNS["church"], g.THE, GENITIVE)
            ).german,
            "das Dach der Kirche",
        ),
    ],
)
def test_phrase(actual, expected):
    assert actual == expected


@pytest.mark.parametrize(
    ("infinitive", "changed", "expected"),
    [
        ("kaufen", "", "kaufe kaufst kauft kaufen kaufen"),
        ("arbeiten", "", "arbeite arbeitest arbeitet arbeiten arbeiten"),
        ("öffnen", "", "öffne öffnest öffnet öffnen öffnen"),
        ("zeichnen", "", "zeichne zeichnest zeichnet zeichnen zeichnen"),
        ("lernen", "", "lerne lernst lernt lernen lernen"),
        ("reisen", "", "reise reist reist reisen reisen"),
        ("lächeln", "", "lächle lächelst lächelt lächeln lächeln"),
        ("füttern", "", "füttere fütterst füttert füttern füttern"),
        ("spielen", "", "spiele spielst spielt spielen spielen"),
        ("lesen", "lies", "lese liest liest lesen lesen"),
        ("laden", "läd", "lade lädst lädt laden laden"),
        ("mögen", "mag,magst,mag", "mag magst mag mögen mögen"),
    ],
)
def test_present_tense(infinitive, changed, expected):
    assert conjugate(infinitive, changed) == tuple(expected.split())


def _clause(verb, subject=ANNA, **parts):
    if "modal" in parts:
        parts["modal"] = MODALS[parts["modal"]]
    return Clause(BE if verb == "be" else _verb(verb), subject, **parts)


TODAY = Pair("today", "heute")
COAT = {"rest": "the coat", "late": "den Mantel"}
TIRED = {"rest": "tired", "late": "müde"}


@pytest.mark.parametrize(
    ("clause", "english", "german"),
    [
        (_clause("buy", time=TODAY, **COAT), "Anna buys the coat today", "Anna kauft heute den Mantel"),
        # inversion, and the perfect with haben and with sein
        (_clause("buy", front=TODAY, **COAT), "today Anna buys the coat", "heute kauft Anna den Mantel"),
        (_clause("buy", I, past=True, **COAT), "I bought the coat", "ich habe den Mantel gekauft"),
        (_clause("arrive", DU, past=True), "you arrived", "du bist angekommen"),
        (_clause("be", I, past=True, **TIRED), "I was tired", "ich war müde"),
        # separable verbs, and fixed objects that behave like their prefixes
        (_clause("try on", I, **COAT), "I try on the coat", "ich probiere den Mantel an"),
        (_clause("play the piano", I, time=TODAY), "I play the piano today", "ich spiele heute Klavier"),
        # modal verbs and the future
        (_clause("buy", modal="want to", **COAT), "Anna wants to buy the coat", "Anna will den Mantel kaufen"),
        (_clause("fall asleep", I, modal="will"), "I will fall asleep", "ich werde einschlafen"),
        # negation
        (
            _clause("sleep", negative=True, time=TODAY, late="nicht"),
            "Anna does not sleep today",
            "Anna schläft heute nicht",
        ),
    ],
)
def test_main_clause(clause, english, german):
    assert (clause.english(), clause.german()) == (english, german)


@pytest.mark.parametrize(
    ("clause", "german"),
    [
        (_clause("buy", time=TODAY, **COAT), "Anna heute den Mantel kauft"),
        (_clause("get up"), "Anna aufsteht"),
        (_clause("get up", past=True), "Anna aufgestanden ist"),
        (_clause("get up", modal="can"), "Anna aufstehen kann"),
        (_clause("play the piano"), "Anna Klavier spielt"),
    ],
)
def test_subordinate_clause_ends_with_its_verb(clause, german):
    assert clause.german_subordinate() == german


@pytest.mark.parametrize(
    ("clause", "english", "german"),
    [
        (_clause("buy", **COAT), "does Anna buy the coat", "kauft Anna den Mantel"),
        (_clause("arrive", DU, past=True, time=TODAY), "did you arrive today", "bist du heute angekommen"),
        (_clause("sleep", DU, modal="would like to"), "would you like to sleep", "möchtest du schlafen"),
        (_clause("sleep", DU, modal="want to"), "do you want to sleep", "willst du schlafen"),
        (_clause("be", **TIRED), "is Anna tired", "ist Anna müde"),
    ],
)
def test_question(clause, english, german):
    assert (clause.english_question(), clause.german_question()) == (english, german)


@pytest.mark.parametrize(
    ("verb", "german"),
    [("get up", "aufzustehen"), ("play the piano", "Klavier zu spielen"), ("buy", "zu kaufen")],
)
def test_infinitive_with_zu(verb, german):
    clause = _clause(verb)
    assert (clause.english_infinitive(), clause.german_infinitive()) == (verb, german)


def test_one_auxiliary_serves_two_clauses():
    sang, danced = (Clause(_verb(word), ANNA, past=True) for word in ("sing", "dance"))
    arrived = Clause(_verb("arrive"), ANNA, past=True)
    assert sang.shares_auxiliary(danced)
    assert danced.german_predicate(elided=True) == "getanzt"
    assert not sang.shares_auxiliary(arrived), "'hat gesungen und ist angekommen' needs both"


def test_author_reaches_relative_clauses_and_objects_in_the_dative():
    author = Author(random.Random("relative").random)
    for _ in range(200):
        noun = NOUNS["man"]
        phrase = author.with_relative_clause(noun, noun_phrase(noun, g.THE, NOMINATIVE))
        assert phrase.german.startswith(("der Mann, der ", "der Mann, den ", "der Mann, dem ", "der Mann, mit dem "))
        assert phrase.german.endswith(","), "the clause is closed by a comma"
        expected = {"who": "der", "whom": ("den", "dem"), "with whom": "mit dem"}
        words = phrase.english.removeprefix("the man ")
        key = next(key for key in ("with whom", "whom", "who") if words.startswith(key))
        assert phrase.german.removeprefix("der Mann, ").startswith(expected[key])
    verb = _verb("help")
    clause = author.clause(verb, WIR, past=False, adverbials="", obj=noun_phrase(NOUNS["man"], g.THE, DATIVE))
    assert (verb.case, clause.german()) == (DATIVE, "wir helfen dem Mann")


@pytest.mark.parametrize(
    ("german", "expected"),
    [
        ("er besucht den Mann, der schläft,", "Er besucht den Mann, der schläft."),
        ("er sieht den Mann, der schläft,, weil es regnet", "Er sieht den Mann, der schläft, weil es regnet."),
    ],
)
def test_sentence_resolves_commas(german, expected):
    assert sentence("he sleeps", german) == ("He sleeps.", expected)


def test_first_thousand_pairs_are_the_same_everywhere():
    text = "".join(f"{english}\t{german}\n" for english, german in islice(sentence_pairs(1), 1000))
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    # Changes with every change of the grammar, and then only.
    assert digest == "0c11d1c5ed0f074b1d9885071566358c8e082c3529a0ce1700d6f82d03e21ed5"
    assert next(sentence_pairs(2)) != next(sentence_pairs(1))


def test_a_sentence_has_one_translation():
    author = Author(random.Random("translations").random)
    translations: dict[str, str] = {}
    repeated = 0
    for _ in range(50_000):
        english, german = author.sentence()
        repeated += english in translations
        assert translations.setdefault(english, german) == german
    assert repeated > 50, "too few repetitions to have tested anything"


def test_sentences_are_clean_and_of_moderate_length():
    pairs = list(islice(sentence_pairs(3), 5000))
    for side in zip(*pairs, strict=True):
        lengths = [len(text.split()) for text in side]
        assert 9 <= sum(lengths) / len(lengths) <= 13
        assert max(lengths) < 50
        for text in side:
            assert text[0].isupper() or text[0].isdigit()
            assert text[-1] in ".?"
            assert not any(mark in text for mark in ("  ", ",,", " ,", "_", "|", ",.", ",?"))
    german = " ".join(text for _, text in pairs)
    for fragment in (
        ", weil ",
        ", dass ",
        ", um ",
        " nicht ",
        " kein",
        " sich ",
        "ß",
        "ä",
        "ö",
        "ü",
        " im ",
        " zum ",
    ):
        assert fragment in german


def test_lexicon_has_hundreds_of_words():
    assert 350 <= len(NOUNS) + len(COMPOUND_NOUNS) + len(ADJECTIVES) + len(VERBS) <= 550


def test_splits_share_no_sentence_and_write_the_same_bytes(tmp_path: Path):
    write_sample(tmp_path / "one", 3000, 200, 300, seed=5)
    write_sample(tmp_path / "two", 4000, 200, 300, seed=5)
    for language in ("en", "de"):
        lines = [(tmp_path / "one" / f"{name}.{language}").read_text("utf-8").splitlines() for name in SPLITS]
        assert [len(part) for part in lines] == [3000, 200, 300]
        assert len(set().union(*lines)) == 3500
        held_out, train = (f"test.{language}", f"train.{language}")
        assert (tmp_path / "one" / held_out).read_bytes() == (tmp_path / "two" / held_out).read_bytes()
        assert (tmp_path / "two" / train).read_bytes().startswith((tmp_path / "one" / train).read_bytes())
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == sorted(
        f"{name}.{language}" for name in SPLITS for language in ("en", "de")
    ), "no temporary file is left"


def test_write_sample_refuses_negative_counts_and_files_for_directories(tmp_path: Path):
    with pytest.raises(DataError, match=r"valid pairs must be 0 or more, but is -1"):
        write_sample(tmp_path / "out", 1, -1, 1, seed=1)
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="must be a directory"):
        write_sample(tmp_path / "file", 1, 1, 1, seed=1)
    with pytest.raises(UserError, match="must be a directory"):
        write_sample(tmp_path / "file" / "below", 1, 1, 1, seed=1)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "data"
    assert cli.main(["sample-data", "--out", str(out), "--train", "50", "--valid", "5", "--test", "0"]) == 0
    assert f"{out / 'train'}.en and .de: 50 pairs" in capsys.readouterr().out
    assert (out / "test.de").read_bytes() == b""
    assert len((out / "train.de").read_text("utf-8").splitlines()) == 50
    assert cli.main(["sample-data", "--out", str(out), "--train", "-3"]) == 2
    assert "train pairs must be 0 or more, but is -3" in capsys.readouterr().err
