"""The sample corpus: reproducible, without repeated pairs, with one translation for a sentence and correct German."""

from __future__ import annotations

import hashlib
import re
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_nmt import cli, sample
from deepspeed_nmt.sample import (
    SPLITS,
    THE,
    Author,
    Case,
    Clause,
    Determiner,
    Field,
    NounPhrase,
    Part,
    Slot,
    Tense,
    sentence_pairs,
    write_sample,
)

NOUNS = {noun.english: noun for nouns in sample.NOUNS.values() for noun in nouns}
ADJECTIVES = {"": "", **dict(pair for pairs in sample.ADJECTIVES.values() for pair in pairs)}
VERBS = {verb.prefix + verb.infinitive: verb for verb in sample.VERBS}
A, THIS, BARE = Determiner("a", "ein", "ein"), Determiner("this", "dies", "der"), Determiner("", "")


def phrase(determiner: Determiner, adjective: str, noun: str, plural: bool = False) -> NounPhrase:
    return sample.noun_phrase(NOUNS[noun], determiner, (adjective, ADJECTIVES[adjective]), plural)


@pytest.mark.parametrize(
    ("found", "english", "german"),
    [
        # After "der", after "ein", and alone: weak, mixed and strong endings of adjectives.
        (phrase(THE, "old", "coat"), "the old coat", "der alte Mantel, den alten Mantel, dem alten Mantel"),
        (phrase(THE, "small", "house"), "the small house", "das kleine Haus, das kleine Haus, dem kleinen Haus"),
        (phrase(A, "old", "coat"), "an old coat", "ein alter Mantel, einen alten Mantel, einem alten Mantel"),
        (phrase(A, "young", "woman"), "a young woman", "eine junge Frau, eine junge Frau, einer jungen Frau"),
        (phrase(BARE, "cold", "wine"), "cold wine", "kalter Wein, kalten Wein, kaltem Wein"),
        (phrase(THIS, "tired", "child"), "this tired child", "dieses müde Kind, dieses müde Kind, diesem müden Kind"),
        # Plurals: "-n" in the dative, but not after "-n" or "-s".
        (phrase(THE, "", "apple", True), "the apples", "die Äpfel, die Äpfel, den Äpfeln"),
        (phrase(THE, "new", "park", True), "the new parks", "die neuen Parks, die neuen Parks, den neuen Parks"),
        (phrase(BARE, "", "woman", True), "women", "Frauen, Frauen, Frauen"),
        # Weak nouns.
        (phrase(A, "big", "bear"), "a big bear", "ein großer Bär, einen großen Bären, einem großen Bären"),
    ],
)
def test_noun_phrase(found: NounPhrase, english: str, german: str) -> None:
    assert found.subject == found.object == english
    assert ", ".join(found.german) == german


def test_compound_is_one_word_in_german() -> None:
    coat = sample.compound(("winter", "Winter"), NOUNS["coat"])
    found = sample.noun_phrase(coat, THE, ("old", "alt"), plural=True)
    assert (found.subject, found.german[Case.DATIVE]) == ("the old winter coats", "den alten Wintermänteln")
    assert not sample.compound(("night", "Nacht"), NOUNS["milk"]).english_plural, "still a mass noun"


ICH, DU, ER, _, _, SIE = sample.PRONOUNS
ANNA, BOY, COAT = sample.NAMES[0], phrase(THE, "", "boy"), phrase(THE, "", "coat")
OBJECT, DATIVE = Slot("", "", Case.ACCUSATIVE), Slot("", "", Case.DATIVE)
FOR = Slot("for", "auf", Case.ACCUSATIVE)
TODAY = Part("today", "heute", Field.TIME)


def clause(subject: NounPhrase, verb: str, tense: Tense, *parts: Part) -> Clause:
    return sample.clause(subject, VERBS[verb], tense, list(parts), negative=sample.NICHT in parts)


@pytest.mark.parametrize(
    ("found", "english", "german"),
    [
        (clause(ANNA, "sehen", Tense.PRESENT, COAT.complement(OBJECT), TODAY),
         ("Anna sees the coat today", "does Anna see the coat today"),
         ("Anna sieht heute den Mantel", "sieht Anna heute den Mantel", "Anna heute den Mantel sieht")),
        # The perfect with haben and with sein, and modal verbs.
        (clause(DU, "ankommen", Tense.PAST),
         ("you arrived", "did you arrive"),
         ("du bist angekommen", "bist du angekommen", "du angekommen bist")),
        (clause(SIE, "helfen", Tense.CAN, BOY.complement(DATIVE)),
         ("they can help the boy", "can they help the boy"),
         ("sie können dem Jungen helfen", "können sie dem Jungen helfen", "sie dem Jungen helfen können")),
        # Separable verbs; a pronoun stands before the time.
        (clause(BOY, "einladen", Tense.PRESENT, ICH.complement(OBJECT), TODAY),
         ("the boy invites me today", "does the boy invite me today"),
         ("der Junge lädt mich heute ein", "lädt der Junge mich heute ein", "der Junge mich heute einlädt")),
        # Prepositions, with and without contraction; negation.
        (clause(ANNA, "warten", Tense.PRESENT, ER.complement(FOR), sample.NICHT),
         ("Anna does not wait for him", "does Anna not wait for him"),
         ("Anna wartet nicht auf ihn", "wartet Anna nicht auf ihn", "Anna nicht auf ihn wartet")),
        (clause(ANNA, "arbeiten", Tense.MUST, phrase(THE, "", "house").complement(sample.IN)),
         ("Anna must work in the house", "must Anna work in the house"),
         ("Anna muss im Haus arbeiten", "muss Anna im Haus arbeiten", "Anna im Haus arbeiten muss")),
        (sample.clause(DU, sample.COPULA, Tense.WAS, [Part("very tired", "sehr müde", Field.STATE)]),
         ("you were very tired", "were you very tired"),
         ("du warst sehr müde", "warst du sehr müde", "du sehr müde warst")),
    ],
)  # fmt: skip
def test_clause(found: Clause, english: tuple[str, ...], german: tuple[str, ...]) -> None:
    assert (found.statement, found.question) == english
    assert (found.main, found.inverted, found.subordinate) == german


def test_verbs_and_adjectives_refer_to_existing_kinds_of_nouns() -> None:
    assert all(sample.ADJECTIVES[kind] for kind in sample.NOUNS)
    for verb in sample.VERBS:
        for kinds in (verb.subjects, *(slot.kinds for slot in verb.slots)):
            assert kinds and set(kinds) <= set(sample.NOUNS)
        assert all(slot.case in (Case.ACCUSATIVE, Case.DATIVE) for slot in verb.slots)


def test_first_thousand_pairs_are_the_same_everywhere() -> None:
    text = "".join(f"{english}\t{german}\n" for english, german in islice(sentence_pairs(1), 1000))
    # The hash changes only with the grammar or the words.
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    assert digest == "e0cec916cf54aab3663e7f288750ab2888263518ff5c42d4b89bdd7b307faa2b"
    assert len({next(sentence_pairs(seed)) for seed in (-1, 0, 1, 2)}) == 4


def test_a_sentence_has_one_translation() -> None:
    author = Author(seed=7)
    translations: dict[str, str] = {}
    repeated = 0
    for _ in range(20_000):
        english, german = author.sentence()
        repeated += english in translations
        assert translations.setdefault(english, german) == german
    assert repeated > 10, "too few repetitions to test anything"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers())
def test_sentences_are_clean(seed: int) -> None:
    for pair in islice(sentence_pairs(seed), 50):
        for text in pair:
            assert re.fullmatch(r"[A-ZÄÖÜ0-9][A-Za-zÄÖÜäöüß0-9:, ]+[.?]", text)
            assert not re.search(r"  | ,|,[^ ]|,[.?]", text)
        assert pair[0].endswith("?") == pair[1].endswith("?")
        assert not re.search(r"\ba [aeiou]", pair[0])


def test_splits_share_no_sentence_and_write_the_same_bytes(tmp_path: Path) -> None:
    write_sample(tmp_path / "one", 1000, 200, 300, seed=5)
    write_sample(tmp_path / "two", 1500, 200, 300, seed=5)
    for language in ("en", "de"):
        lines = [(tmp_path / "one" / f"{name}.{language}").read_text("utf-8").splitlines() for name in SPLITS]
        assert [len(part) for part in lines] == [1000, 200, 300]
        assert len(set().union(*lines)) == 1500
        for name in ("valid", "test"):
            held_out = f"{name}.{language}"
            assert (tmp_path / "one" / held_out).read_bytes() == (tmp_path / "two" / held_out).read_bytes()
        small, large = ((tmp_path / name / f"train.{language}").read_bytes() for name in ("one", "two"))
        assert large.startswith(small)
    expected = sorted(f"{name}.{language}" for name in SPLITS for language in ("en", "de"))
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == expected, "no temporary file is left"


def test_no_sentence_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    script = iter([("A.", "X."), ("B.", "X."), ("A.", "Y."), ("A.", "X."), ("B.", "Y.")])
    monkeypatch.setattr(Author, "sentence", lambda self: next(script))
    assert list(islice(sentence_pairs(1), 2)) == [("A.", "X."), ("B.", "Y.")]


def test_text_of_the_user_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sample-data", "--out", str(tmp_path), "--train", "3", "--valid", "2", "--test", "0"]
    assert cli.main(command) == 0
    assert f"{tmp_path / 'train'}.en and .de: 3 pairs" in capsys.readouterr().out
    assert (tmp_path / "test.de").read_bytes() == b"" and (tmp_path / "train.de").read_bytes().count(b"\n") == 3
    (sample := tmp_path / "train.en").chmod(0o400)
    before = {path.name: path.stat().st_ino for path in tmp_path.iterdir()}
    assert cli.main(command) == 0, "the same content"
    assert {path.name: path.stat().st_ino for path in tmp_path.iterdir()} == before

    (mine := tmp_path / "valid.de").write_text("Meins.\n")
    sample.unlink()
    capsys.readouterr()
    assert cli.main(command) == 2
    assert f"--out {tmp_path} has other text in valid.de" in capsys.readouterr().err
    assert mine.read_text() == "Meins.\n" and not sample.exists(), "nothing is written"
    assert cli.main([*command, "--overwrite"]) == 0
    assert mine.read_text() != "Meins.\n" and sample.exists()
