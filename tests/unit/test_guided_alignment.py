"""Guided alignment: its loss, and word alignments from the text to the batch."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.cli import main
from deepspeed_nmt.config import RunConfig, validate
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.data import preparation
from deepspeed_nmt.data.bert_tokenizer import BertTokenizer
from deepspeed_nmt.data.corpus import Corpora, Corpus, CorpusPart
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.data.loader import collate, collate_packed
from deepspeed_nmt.data.packing import PackedPart
from deepspeed_nmt.data.training import DataOption, TrainingData
from deepspeed_nmt.data.word_alignments import token_links, tokens_of_words
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.methods.guided_alignment import alignment_loss
from deepspeed_nmt.methods.transformer import SMALL
from deepspeed_nmt.parity import VOCABULARY, settings_of, write_corpus
from deepspeed_nmt.run.resolve import _check_alignments
from deepspeed_nmt.search.alignment import watched
from tests.support import prepare_sample, write_weights

SETTINGS = {
    "model": {"name": "transformer", **SMALL, "dropout": 0.0},
    "objective": {"guided_alignment": {"layer": 2}},
}


def transcribed(attention_BTS: Tensor, links: list[list[int]]) -> Tensor:
    """Compute the equation of each sentence as it is written."""
    losses = []
    for sentence, attention_TS in enumerate(attention_BTS):
        loss = attention_BTS.new_zeros(())
        for t in range(attention_TS.shape[0]):
            linked = {s for b, of, s in links if (b, of) == (sentence, t)}
            if linked:
                loss = loss - torch.log(sum(attention_TS[t, s] for s in linked))
        losses.append(loss)
    return torch.stack(losses)


def test_the_loss_is_the_equation() -> None:
    torch.manual_seed(1)
    scores = torch.randn(3, 5, 4, dtype=torch.float64, requires_grad=True)
    links = [[0, 0, 1], [0, 0, 3], [0, 2, 0], [0, 2, 0], [2, 4, 2]]
    ours = alignment_loss(scores.softmax(2), torch.tensor(links))
    theirs = transcribed(scores.softmax(2), links)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=0)
    assert ours[1] == 0.0 < ours[2]
    gradients = [torch.autograd.grad(of.sum(), scores)[0] for of in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-15)
    assert torch.autograd.gradcheck(lambda x: alignment_loss(x.softmax(2), torch.tensor(links)), scores)


def test_attention_that_underflows_has_a_finite_loss_and_gradient() -> None:
    scores = torch.tensor([[[500.0, 0.0]]], requires_grad=True)
    loss = alignment_loss(scores.softmax(2), torch.tensor([[0, 0, 1]])).sum()
    (gradient,) = torch.autograd.grad(loss, scores)
    assert float(loss.detach()) == pytest.approx(-math.log(1e-30)) and gradient.isfinite().all()


def batch_of(corpus: Corpus | Corpora, layout: str, indices: list[int]) -> Batch:
    pairs = np.array(indices, dtype=np.int64)
    if layout == "padded":
        return collate(corpus, pairs, VOCABULARY)
    sizes = (int(lengths.sum()) + 3 for lengths in corpus.lengths(pairs))
    return collate_packed(corpus, PackedPart(pairs, *sizes), VOCABULARY)


def module_of(config: RunConfig) -> TrainModule:
    return TrainModule(build_model(config, VOCABULARY), build_objective(config, VOCABULARY)).double().train()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_objective_has_the_loss_of_its_layer_with_the_weights_of_pairs(tmp_path: Path, layout: str) -> None:
    write_corpus(tmp_path, pairs=5, longest=12)
    corpus = write_weights(tmp_path, 0.5, 2.0, 1.0, 3.25, 0.125)
    module = module_of(validate(SETTINGS))
    batch = batch_of(corpus, layout, [4, 1, 2, 3])
    output = module(batch)
    expected = torch.zeros((), dtype=torch.float64)
    attention = module.model.cross_attentions()[2]
    for pair, weight in ((4, 0.125), (1, 2.0), (2, 1.0), (3, 3.25)):
        one = batch_of(corpus, "padded", [pair])
        assert one.links_L3 is not None and bool(len(one.links_L3)) == bool(pair % 3)
        with watched([attention]) as seen:
            module.model(one)
        expected = expected + weight * transcribed(seen[attention], one.links_L3.tolist()).sum()
    assert float(expected.detach()) > 1.0
    torch.testing.assert_close(output.metrics["guided_alignment"], expected.detach(), rtol=1e-9, atol=0)
    alone = module_of(validate({**SETTINGS, "objective": {"guided_alignment": {"layer": 2, "weight": 0.0}}}))
    torch.testing.assert_close(output.loss - alone(batch).loss, 0.05 * expected, rtol=1e-9, atol=1e-12)
    nothing = PackedPart(np.empty(0, np.int64), 1, 1)
    empty = module(
        collate(corpus, nothing.sentences, VOCABULARY)
        if layout == "padded"
        else collate_packed(corpus, nothing, VOCABULARY)
    )
    assert empty.metrics["guided_alignment"] == 0.0 == empty.loss


def test_links_of_corpora_follow_their_tags_and_segmentations(tmp_path: Path) -> None:
    for name, pairs in (("first", 4), ("second", 3)):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name, pairs=pairs, longest=12)
    corpora = [Corpus(tmp_path / name, "train") for name in ("first", "second")]
    mixed = Corpora([CorpusPart("first", (corpora[0],)), CorpusPart("second", (corpora[1],), 7, 8)])
    links = batch_of(mixed, "padded", [5, 1]).links_L3
    own = [corpus.links_of(np.array([1])) for corpus in corpora]
    assert links is not None and own[0] is not None and own[1] is not None
    expected = {(1, t, s) for _, t, s in own[0].tolist()} | {(0, t + 1, s + 1) for _, t, s in own[1].tolist()}
    assert set(map(tuple, links.tolist())) == expected and len(expected) > 4


def test_damaged_links_are_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path, pairs=5, longest=12)
    path = tmp_path / "train.links.uint16.bin"
    numbers = np.fromfile(path, "<u2")
    numbers[-1] = 40
    numbers.tofile(path)
    with pytest.raises(DataError, match="links of tokens that its pairs lack"):
        Corpus(tmp_path, "train").links_of(np.array([4]))
    np.arange(3, dtype="<i8").tofile(tmp_path / "train.links.offsets.bin")
    with pytest.raises(DataError, match="instead of the 2"):
        Corpus(tmp_path, "train")


SOURCE = "the big dog sleeps\nsame\nthe small cat runs quickly\nsame\na bird\n\nthe \u200b bird sings\n"
TARGET = "der große Hund schläft\ngleich\ndie kleine Katze läuft\ngleich\nein Vogel\nleer\nder Vogel singt\n"
LINKS = "0-0 1-1 2-2 3-3\n0-0\n0-0 1-1 2-2 3-3 4-3\n0-0\n1-1\n\n0-0 2-1 3-2\n"
SOURCE, TARGET, LINKS = f"{SOURCE}a\u00a0dog sings\n", f"{TARGET}ein Hund singt\n", f"{LINKS}0-0 0-1 1-2\n"
SOURCE, TARGET, LINKS = f"{SOURCE}\u200b dog sings\u00a0so\n", f"{TARGET}Hund singt so\n", f"{LINKS}1-0 2-1\n"


def prepare(directory: Path, *options: str, links: str = LINKS) -> int:
    for name, text in (("en", SOURCE), ("de", TARGET), ("links", links)):
        (directory / name).write_text(text, encoding="utf-8")
    sides = ["--train-source", "en", "--train-target", "de", "--valid-source", "en", "--valid-target", "de"]
    words = [str(directory / word) if word in ("en", "de") else word for word in sides]
    return main(["prepare", *words, "--train-alignments", str(directory / "links"), "--out", str(directory / "data"),
                 "--vocab-size", "45", *options])  # fmt: skip


def test_tokens_of_a_bert_have_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preparation, "_existing_vocabulary", lambda options: object.__new__(BertTokenizer))
    assert prepare(tmp_path) == 2
    assert "--train-alignments needs tokens that show where words begin" in capsys.readouterr().err


def test_words_that_the_normalization_changes_have_no_links(tmp_path: Path) -> None:
    """One that vanishes may hide one that is cut."""
    assert prepare(tmp_path, "--normalization", "nfkc") == 0
    tokenizer = DataDirectory.open(tmp_path / "data").tokenizer()
    for text, has_links in (("the \u200b dog re\u00b4d", False), ("the dog sings", True), ("the \ufb01 dog", True)):
        (tokens,) = tokenizer.encode_batch([text], "source")
        assert (tokens_of_words(tokens, text, tokenizer, "source", False) is not None) is has_links, text
    assert token_links(b"3-0 0-0", [[0]], [[0]]) == [] and token_links(b"0-0", [[0]], [[0]]) == [0, 0]


@pytest.mark.parametrize(
    "options",
    [(), ("--segmentations", "3"), ("--symbols", "<2de>", "--tag-source", "<2de>", "--tag-target", "<2de>"),
     ("--vocabulary-type", "unigram")],
)  # fmt: skip
def test_links_of_words_become_links_of_their_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    assert prepare(tmp_path, "--unicode", "drop_zero_width", *options) == 0
    assert "3 of 7 pairs lose their word alignments" in capsys.readouterr().err
    directory = DataDirectory.open(tmp_path / "data")
    tokenizer, tagged = directory.tokenizer(), int("--tag-source" in options)
    corpora = directory.training_corpora()
    assert len(corpora) == (3 if "--segmentations" in options else 1)
    for corpus in corpora:
        # The duplicate and the empty pair are removed. The fifth has lost a word, and in the next one a no-break
        # space divides words for SentencePiece, but not for fast_align; in the last one both happen.
        assert len(corpus) == 7
        for pair, line in enumerate(["0-0 1-1 2-2 3-3", "0-0", "0-0 1-1 2-2 3-3 4-3", "1-1", "", "", ""]):
            links = corpus.links_of(np.array([pair]))
            assert links is not None
            words = []
            for side, tokens in (("source", corpus.source(pair)), ("target", corpus.target(pair))):
                pieces = tokenizer.pieces(tokens.tolist(), side)[tagged:]
                words.append([-1] * tagged + list(np.cumsum([piece.startswith("\u2581") for piece in pieces]) - 1))
            ours = [(words[0][s], words[1][t]) for _, t, s in links.tolist()]
            wanted = {tuple(map(int, link.split("-"))) for link in line.split()}
            assert set(ours) == wanted
            assert len(ours) == sum(words[0].count(i) * words[1].count(j) for i, j in wanted)


@pytest.mark.parametrize(
    ("links", "said"),
    [
        (LINKS.replace("4-3", "5-3"), "line 3 of .*links has the link 5-3, but its pair has 5 words and 4"),
        (LINKS.replace("4-3", "4-4"), "line 3 of .*links has the link 4-4"),
        (LINKS.replace("4-3", "4~3"), "line 3 of .*links has '4~3', which is no link"),
        (LINKS + "0-0\n", "text and alignments have different numbers of lines"),
    ],
)
def test_wrong_alignments_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], links: str, said: str
) -> None:
    assert prepare(tmp_path, links=links) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "data").exists()


def test_data_without_alignments_and_layers_without_attention_are_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path, pairs=5, longest=12)
    for layer, method, said in ((9, "transformer", "decoder layer 9 .* are 1, 2"), (None, "abnet", "are none")):
        config = validate({**SETTINGS, "objective": {"guided_alignment": {"layer": layer}}})
        model = build_model(config if method == "transformer" else settings_of(method), VOCABULARY)
        with pytest.raises(ConfigError, match=said):
            build_objective(config, VOCABULARY).check_model(model)
    assert prepare(tmp_path, "--out", str(tmp_path / "aligned")) == 0
    config = validate(SETTINGS)
    _check_alignments(config, TrainingData([DataOption(tmp_path / "aligned")]))
    sample = prepare_sample(tmp_path, 100, train=40, valid=5, test=5)
    with pytest.raises(ConfigError, match="guided_alignment needs word alignments"):
        _check_alignments(config, TrainingData([DataOption(sample)]))


def test_guided_attention_is_what_translate_aligns_by(tmp_path: Path) -> None:
    """Training with the loss alone moves the attention mass onto the links."""
    write_corpus(tmp_path, pairs=30, longest=10)
    corpus = Corpus(tmp_path, "train")
    module = module_of(validate({**SETTINGS, "objective": {"guided_alignment": {"layer": 2, "weight": 5.0}}}))
    batch = batch_of(corpus, "packed", list(range(30)))
    optimizer = torch.optim.Adam(module.parameters(), lr=3e-3)
    values = []
    for _ in range(40):
        optimizer.zero_grad()
        output = module(batch)
        (output.loss / batch.target_tokens).backward()
        optimizer.step()
        values.append(float(output.metrics["guided_alignment"]))
    assert values[-1] < 0.6 * values[0]
