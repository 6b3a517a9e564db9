"""`prepare` with vocabularies of all kinds, symbols, tags and segmentations, and contradicting options."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece

from deepspeed_nmt.cli import main
from deepspeed_nmt.commands.prepare import _describe_vocabulary, report
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.errors import EXIT_USER_ERROR
from deepspeed_nmt.sample import sentence_pairs
from deepspeed_nmt.text import NO_TAGS, Tags


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training text of 300 pairs and a validation text of three, with an empty line."""
    path = tmp_path_factory.mktemp("text")
    pairs = list(itertools.islice(sentence_pairs(3), 302))
    for side, column in (("source", 0), ("target", 1)):
        lines = [pair[column] for pair in pairs]
        (path / f"train.{side}").write_text("\n".join(lines[:300]) + "\n", encoding="utf-8")
        (path / f"valid.{side}").write_text("\n".join([lines[300], "", lines[301]]) + "\n", encoding="utf-8")
    return path


def prepared(text: Path, out: Path, *options: str) -> DataDirectory:
    words = [
        word for each in ("train", "valid") for side in ("source", "target")
        for word in (f"--{each}-{side}", str(text / f"{each}.{side}"))
    ]  # fmt: skip
    assert main(["prepare", *words, "--out", str(out), *options]) == 0
    return DataDirectory.open(out)


def test_tags_are_in_the_corpus_and_not_in_the_text(text: Path, tmp_path: Path) -> None:
    options = ["--vocab-size", "300", "--symbols", "<2de>", "<bt>", "<go>"]
    data = prepared(text, tmp_path / "a", *options, "--tag-source", "<bt>", "--tag-target", "<go>")
    bare = prepared(text, tmp_path / "b", *options)
    tokenizer = data.tokenizer()
    assert tokenizer.digest == bare.tokenizer().digest and data.fingerprint != bare.fingerprint
    assert data.tags == Tags("<bt>", "<go>") and bare.tags == NO_TAGS
    source, target = tokenizer.symbol("source", "<bt>"), tokenizer.symbol("target", "<go>")
    for split, pairs in (("train", 300), ("valid", 3)):
        tagged, plain = data.corpus(split), bare.corpus(split)
        assert len(tagged) == len(plain) == pairs
        for index in range(pairs):
            front = ([source], [target]) if len(plain.source(index)) else ([], [])
            assert tagged.source(index).tolist() == front[0] + plain.source(index).tolist()
            assert tagged.target(index).tolist() == front[1] + plain.target(index).tolist()
    assert data.text("valid", "source").read_bytes() == (text / "valid.source").read_bytes()
    assert all(each.changed == 0 for each in data.meta.round_trips.values())
    # The tag of the corpus is that of a line which the user has typed.
    first = (text / "train.source").read_text(encoding="utf-8").splitlines()[0]
    assert tokenizer.encode(f"<bt> {first}") == data.corpus("train").source(0).tolist()


@pytest.mark.long
def test_segmentations_are_of_the_same_pairs(text: Path, tmp_path: Path) -> None:
    options = ["--vocab-size", "300", "--segmentations", "3", "--segmentation-alpha", "0.3"]
    data = prepared(text, tmp_path / "a", *options, "--threads", "1")
    assert prepared(text, tmp_path / "b", *options, "--threads", "2").fingerprint == data.fingerprint
    assert prepared(text, tmp_path / "c", *options, "--seed", "2").fingerprint != data.fingerprint
    assert data.segmentations == 3
    corpora, tokenizer = data.training_corpora(), data.tokenizer()
    for index in range(300):
        for side in ("source", "target"):
            sentences = [getattr(corpus, side)(index).tolist() for corpus in corpora]
            assert len({tokenizer.decode(each, side) for each in sentences}) == 1  # type: ignore[arg-type]
    assert len({corpus.source_lengths.tobytes() for corpus in corpora}) == 3
    assert data.longest_source == max(int(corpus.source_lengths.max()) - 1 for corpus in corpora)
    valid = (text / "valid.source").read_text(encoding="utf-8").splitlines()
    assert data.corpus("valid").source(0).tolist() == tokenizer.encode(valid[0]), "validation text is not sampled"
    assert "train.2 target" in report(data.meta, data.path)

    # A pair that is too long in one segmentation is in none.
    longest = sorted(max(int(c.source_lengths[i]), int(c.target_lengths[i])) - 1 for c in corpora for i in range(300))
    bound = longest[-2]
    cut = prepared(text, tmp_path / "d", *options, "--max-length", str(bound))
    assert len({len(corpus) for corpus in cut.training_corpora()}) == 1
    removed = cut.meta.removed["too_long"]
    assert 1 <= removed == 300 - len(cut.training_corpora()[2])
    for corpus in cut.training_corpora():
        assert max(corpus.source_lengths.max(), corpus.target_lengths.max()) - 1 <= bound


def sentencepiece_normal(model: Path, text: str) -> str:
    """Return text as a model normalises it."""
    normalizer = sentencepiece.SentencePieceNormalizer(model_file=str(model))
    return str(normalizer.normalize(text)).removeprefix("▁").replace("▁", " ")


def test_vocabularies_of_each_side_and_of_other_types(text: Path, tmp_path: Path) -> None:
    separate = prepared(text, tmp_path / "a", "--vocab-size", "290", "--separate-vocabularies")
    assert separate.tokenizer().vocabulary.source is not separate.tokenizer().vocabulary
    assert "290 and 290 tokens (SentencePiece, --normalization nfc)" in report(separate.meta, separate.path)
    for side in ("source", "target"):  # by default, either vocabulary keeps compatibility variants
        assert sentencepiece_normal(separate.path / f"vocabulary.{side}.model", "70º … ｱ e\u0301") == "70º … ｱ é"
    words = prepared(text, tmp_path / "b", "--segmented", "--separate-vocabularies", "--symbols", "<bt>")
    assert words.meta.source_vocabulary_size != words.meta.vocabulary_size
    assert "<bt>" in words.tokenizer().all_pieces("source") and words.tokenizer().symbol("target", "<bt>") > 3
    again = prepared(text, tmp_path / "c", "--vocab-from", str(tmp_path / "a"), "--segmentations", "2")
    assert again.tokenizer().digest == separate.tokenizer().digest and again.segmentations == 2
    other = ["--vocab-size", "560", "--vocabulary-type", "unigram", "--byte-fallback", "--symbols", "<bt>"]
    unigram = prepared(text, tmp_path / "d", *other)
    shown = report(unigram.meta, unigram.path)
    assert "560 tokens (SentencePiece, unigram, byte fallback, --normalization nfc, symbols <bt>)" in shown

    # The user's models are those of other directories here.
    models = [str(tmp_path / "a" / f"vocabulary.{side}.model") for side in ("source", "target")]
    own = prepared(text, tmp_path / "e", "--sentencepiece", *models, "--symbols", "<x>", "--tag-source", "<x>")
    assert own.meta.vocabulary_size == own.meta.source_vocabulary_size == 291
    assert own.corpus("train").source(0)[1:].tolist() == separate.corpus("train").source(0).tolist()
    one = prepared(text, tmp_path / "f", "--sentencepiece", models[1])
    assert one.tokenizer().vocabulary.own_source is None and "tokens (SentencePiece, given)" in report(
        one.meta, one.path
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--symbols a a", "--symbols has a more than once"),
        ("--symbols <s>", "--symbols: '<s>' is the text of a special token"),
        ("--symbols |a b|", "'a b' has white space"),
        ("--symbols <a> --tag-target <b>", "--tag-target '<b>' is none of --symbols (<a>)"),
        ("--vocab-from {data} --tag-source <b>", "the tag '<b>' is no symbol of the source's vocabulary"),
        ("--vocab-from {data} --byte-fallback --normalization nfc", "leave out --byte-fallback, --normalization"),
        ("--vocab-from {data} --character-coverage 0.9995", "leave out --character-coverage"),
        ("--segmented --character-coverage 0.9995", "leave out --character-coverage"),
        ("--sentencepiece {model} --vocab-from {data}", "--sentencepiece brings its own vocabularies for raw text"),
        ("--sentencepiece {model} {model} {model}", "--sentencepiece: 3 models"),
        ("--sentencepiece {text}", "is no model of SentencePiece"),
        ("--segmented --byte-fallback --normalization nfkc", "leave out --normalization, --byte-fallback"),
        ("--segmentation-alpha 0.2", "--segmentation-alpha without sampled"),
        ("--segmentations 2 --segmentation-alpha 0", "--segmentation-alpha "),
    ],
)
def test_contradictions_are_one_sentence(
    options: str, message: str, text: Path, tmp_path: Path, given: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = options.format(data=given, model=given / "vocabulary.model", text=text / "train.source").split()
    words = "\0".join(words).replace("|a\0b|", "a b").split("\0")
    files = [
        word for each in ("train", "valid") for side in ("source", "target")
        for word in (f"--{each}-{side}", str(text / f"{each}.{side}"))
    ]  # fmt: skip
    assert main(["prepare", *files, "--out", str(tmp_path / "out"), *words]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert message in error and error.count("error: ") == 1 and error.split("error: ")[1].count("\n") == 1, error
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def given(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose vocabulary is given."""
    return prepared(text, tmp_path_factory.mktemp("given") / "data", "--vocab-size", "300").path


@pytest.mark.parametrize(
    ("files", "described"),
    [
        ({"vocabulary.source.json": 1, "vocabulary.target.json": 1}, "70 tokens (of a BERT)"),
        ({"vocabulary.source.json": 1, "vocabulary.target.json": 2}, "80 and 70 tokens (of two BERTs)"),
        (
            {"vocabulary.numbers.json": 1, "vocabulary.target_numbers.json": 2},
            "80 and 70 tokens (SentencePiece, given)",
        ),
        ({"vocabulary.source.txt": 1, "vocabulary.target.txt": 2}, "80 and 70 tokens (SentencePiece, given)"),
        ({"vocabulary.source.txt": 1}, "70 tokens (SentencePiece, given)"),
    ],
)
def test_a_vocabulary_is_described_by_its_sides(files: dict[str, int], described: str) -> None:
    meta: Any = SimpleNamespace(
        files=files, source_vocabulary_size=80, vocabulary_size=70, options={"vocab_from": "a"}, segmented=False
    )
    assert _describe_vocabulary(meta) == described
