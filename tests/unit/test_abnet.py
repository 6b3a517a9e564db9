"""AB-Net: frozen BERTs and adapters, masked tokens, and mask-predict."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.config import load_config
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import CheckpointError
from deepspeed_nmt.methods.abnet import AbNet
from deepspeed_nmt.methods.bert import BertShape
from deepspeed_nmt.methods.masked_tokens import (
    LENGTH,
    MaskedTokens,
    MaskedTokensConfig,
    masked_positions,
    source_span,
)
from deepspeed_nmt.search.base import LengthPenalty
from deepspeed_nmt.search.mask_predict import MaskPredict, MaskPredictConfig
from tests.bert_equations import abnet_encode, abnet_logits, mask_predict, sentences
from tests.support import batch_of
from tests.unit.test_bert import batch, folders, loaded, tokenizer, transformers  # noqa: F401

V = Vocabulary(40, pad=0, bos=2, eos=3, unk=1, mask=4, own_source=Vocabulary(30, pad=0, bos=2, eos=3, unk=1, mask=4))
BOTH = pytest.mark.parametrize("recipe", ["abnet_serial", "abnet_parallel"])
ALL = pytest.mark.parametrize(
    "recipe", ["abnet_serial", "abnet_parallel", "abnet_original_serial", "abnet_original_parallel"]
)


def pairs(rows: int, longest: int, seed: int = 1, update: int = 1) -> Batch:
    """Return random pairs, of which the first is the longest."""
    generator = torch.Generator().manual_seed(5)
    lengths = [longest, *(int(n) for n in torch.randint(1, longest + 1, (rows - 1,), generator=generator))]
    words = [torch.randint(5, 30, (n,), generator=generator) for n in lengths]
    end, begin = torch.tensor([3]), torch.tensor([2])
    sides = [[torch.cat([begin, w, end]) for w in words], [torch.cat([begin, w]) for w in words]]
    sides.append([torch.cat([w, end]) for w in words])
    source, target_input, output = (torch.nn.utils.rnn.pad_sequence(side, True, 0) for side in sides)
    return batch_of(source, target_input, output, seed=seed, update=update)


def test_the_number_of_masked_tokens_is_uniform() -> None:
    data = pairs(400, 12)
    masked = masked_positions(data, V)
    words = data.target_output_BT.ne(0) & data.target_output_BT.ne(3)
    assert not (masked & ~words).any(), "neither EOS nor padding is masked"
    counts, lengths = masked.sum(1), words.sum(1)
    assert bool((counts >= 1).all()) and bool((counts <= lengths).all())
    # m is uniform in 1..N: half of the tokens on average, sometimes one or all of them.
    assert abs(float((counts / (lengths + 1)).mean()) - 0.5) < 0.03
    long = lengths >= 8
    assert bool((counts[long] == 1).any()) and bool((counts[long] == lengths[long]).any())


NOISE = MaskedTokensConfig(replacement="bert", source_rate=0.3)


def test_noise_replaces_masked_tokens_as_bert_does() -> None:
    data = pairs(3000, 12)
    shown = MaskedTokens(NOISE, V).corrupted(data, training=True)
    sides = [
        (data.target_output_BT, shown.target_input_BT[:, 1:], masked_positions(data, V), V),
        (data.source_BS, shown.source_BS, source_span(data, V.source, 0.3), V.source),
    ]
    for before, after, masked, vocabulary in sides:
        assert torch.equal(before[~masked], after[~masked])
        count, ordinary = int(masked.sum()), vocabulary.size - 5
        hidden, same = (after[masked] == 4), (after[masked] == before[masked])
        other = after[masked & (after != 4) & (after != before)]
        assert float(hidden.sum()) / count == pytest.approx(0.8, abs=0.02)
        assert float(same.sum()) / count == pytest.approx(0.1 + 0.1 / ordinary, abs=0.015)
        assert sorted(set(other.tolist())) == list(range(5, vocabulary.size)), "any token but the special ones"
        assert other.bincount(minlength=vocabulary.size)[5:].float().std() < 0.5 * len(other) / ordinary
    assert torch.equal(shown.target_input_BT[:, 0], data.target_input_BT[:, 0])
    assert torch.equal(shown.target_output_BT, data.target_output_BT), "the loss sees the whole target"


def test_the_masked_span_of_a_source_is_contiguous() -> None:
    data = pairs(3000, 12)
    words = data.source_BS.ge(5)
    span = source_span(data, V.source, 0.3)
    assert not (span & ~words).any()
    lengths = words.sum(1)
    assert span.sum(1).tolist() == [max(1, round(0.3 * n)) for n in lengths.tolist()]
    starts = span.int().argmax(1) - 1
    assert all(row[start + 1 : start + 1 + row.sum()].all() for row, start in zip(span, starts, strict=True))
    # Of sources of 12 tokens a span of 4 starts at 0 to 8: 0.2 + 0.6 / 9 at either end, 0.6 / 9 elsewhere.
    frequency = starts[lengths == 12].bincount(minlength=9) / float((lengths == 12).sum())
    assert frequency[[0, 8]].tolist() == pytest.approx([0.2 + 0.6 / 9] * 2, abs=0.07)
    assert frequency[1:8].tolist() == pytest.approx([0.6 / 9] * 7, abs=0.06)


def test_noise_depends_only_on_seed_update_and_sentence() -> None:
    data, objective = pairs(200, 12), MaskedTokens(NOISE, V)
    whole = objective.corrupted(data, training=True)
    rows = slice(37, 99)
    part = replace(
        data,
        source_BS=data.source_BS[rows],
        target_input_BT=data.target_input_BT[rows],
        target_output_BT=data.target_output_BT[rows],
        sentence_ids_B=data.sentence_ids_B[rows],
    )
    alone = objective.corrupted(part, training=True)
    assert torch.equal(alone.source_BS, whole.source_BS[rows])
    assert torch.equal(alone.target_input_BT, whole.target_input_BT[rows])
    for update in (replace(data.update, number=2), replace(data.update, seed=2)):
        other = objective.corrupted(replace(data, update=update), training=True)
        assert not torch.equal(other.source_BS, whole.source_BS)
    quiet = objective.corrupted(data, training=False)
    masked = masked_positions(data, V)
    assert quiet.source_BS is data.source_BS, "validation reads the whole source"
    assert torch.equal(quiet.target_input_BT[:, 1:], data.target_output_BT.masked_fill(masked, 4))


@BOTH
def test_without_its_adapters_it_equals_the_frozen_berts(recipe: str, folders: tuple[Path, Path], tokenizer) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    model, data = loaded(recipe, folders, tokenizer.vocabulary), batch(tokenizer)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all("adapter" in name or "cross" in name or name.startswith("length") for name in trained)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if (
                name.endswith(("adapter.down_proj.weight", "adapter.down_proj.bias"))
                or ".cross_attention.out_proj." in name
            ):
                parameter.zero_()
        encoder = transformers.BertModel.from_pretrained(folders[0], add_pooling_layer=False).eval()
        mask = data.source_BS.ne(0)
        memory = model.encode(data.source_BS)
        expected = encoder(data.source_BS, attention_mask=mask.long()).last_hidden_state
        torch.testing.assert_close(memory.states_BSD[mask], expected[mask], rtol=0, atol=1e-5)
        tokens = torch.cat([data.target_input_BT[:, :1], data.target_output_BT], dim=1)
        seen = tokens.ne(0)
        decoder = transformers.BertForMaskedLM.from_pretrained(folders[1]).eval()
        logits = model.projection(model.decode(tokens, memory)[0])
        torch.testing.assert_close(
            logits[seen], decoder(tokens, attention_mask=seen.long()).logits[seen], rtol=0, atol=1e-4
        )


def small(recipe: str, *settings: str) -> AbNet:
    """Return a small random model in eval mode."""
    config = load_config(
        recipe, settings=["model.adapter_dim=24", "model.dropout=0", "model.attention_dropout=0", *settings]
    )
    shape = BertShape(dim=16, layers=2, heads=2, ffn_dim=32, positions=24)
    config = config.model_copy(update={"model": config.model.model_copy(update={"source": shape, "target": shape})})
    model = build_model(config, V)
    assert isinstance(model, AbNet)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.eval()


@pytest.mark.parametrize("average", ["sentences", "tokens"])
@BOTH
def test_the_loss_is_of_the_masked_tokens_and_of_the_length(recipe: str, average: str) -> None:
    model, data = small(recipe), pairs(5, 9)
    weight = ["objective.masked_tokens.length_weight=0.3", f"objective.masked_tokens.length_average={average}"]
    config = load_config(recipe, settings=weight)
    found = build_objective(config, V)(model.train(), data)
    masked = masked_positions(data, V)
    shown = torch.cat([data.target_input_BT[:, :1], data.target_output_BT.masked_fill(masked, 4)], dim=1)
    memory = model.encode(data.source_BS)
    logits = model.projection(model.decode(shown, memory)[0])[:, 1:]
    expected = F.cross_entropy(logits[masked], data.target_output_BT[masked], reduction="sum", label_smoothing=0.1)
    nll = F.cross_entropy(logits[masked], data.target_output_BT[masked], reduction="sum")
    lengths = data.target_input_BT.ne(0).sum(1) - 1
    length = F.cross_entropy(model.lengths(memory), lengths, reduction="sum")
    length = length * (data.target_tokens / data.rows if average == "sentences" else 1.0)
    torch.testing.assert_close(found.loss, 2 * expected + 0.3 * length)
    torch.testing.assert_close(found.nll, 2 * nll)
    torch.testing.assert_close(found.metrics[LENGTH], length)
    found.loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


@ALL
def test_the_whole_model_follows_its_equations(recipe: str) -> None:
    """In float64: logits, lengths and gradients of a padded batch, against single sentences."""
    model, data = small(recipe).double(), pairs(4, 6)
    tokens = torch.cat([data.target_input_BT[:, :1], data.target_output_BT], dim=1)
    memory = model.encode(data.source_BS)
    found = [model.projection(model.decode(tokens, memory)[0])[tokens.ne(0)], model.lengths(memory)]
    encoded, lengths = zip(*(abnet_encode(model, row) for row in sentences(data.source_BS, 0)), strict=True)
    rows = zip(encoded, sentences(tokens, 0), strict=True)
    expected = [torch.cat([abnet_logits(model, *row) for row in rows]), torch.stack(lengths)]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    gradients = []
    for ours in (found, expected):
        torch.manual_seed(2)
        total = sum((each * torch.randn_like(each)).sum() for each in ours)
        gradients.append(torch.autograd.grad(total, list(trained.values())))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
        assert theirs.std() > 0.5
    for name, ours, theirs in zip(trained, *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9, msg=name)


@pytest.mark.parametrize(
    ("recipe", "penalty"),
    [
        ("abnet_serial", "mean"),
        ("abnet_parallel", "none"),
        ("abnet_original_serial", "gnmt:1.1"),
        ("abnet_original_parallel", "power:0.5"),
    ],
)
def test_mask_predict_follows_its_paper(recipe: str, penalty: str) -> None:
    """Candidates of a padded batch, against a plain port that translates one sentence after another."""
    model, data = small(recipe).double(), pairs(4, 6)
    with torch.no_grad():
        model.source_embedding.weight.mul_(10.0)  # so that the sentences differ in their lengths
        if model.length.bias is not None:
            model.length.bias[[0, 23]] = 50.0  # no translation has none, or more tokens than the model reads
        config = MaskPredictConfig(iterations=4, length_beam=3, length_penalty=penalty)
        found = MaskPredict(config, model, V).search(data.source_BS)
        for row, source in zip(found, sentences(data.source_BS, 0), strict=True):
            expected = mask_predict(model, source, 4, 3, LengthPenalty.parse(penalty))
            assert [each.tokens for each in row] == [tokens for tokens, _ in expected]
            assert [each.score for each in row] == pytest.approx([score for _, score in expected], abs=1e-5)
            assert [each.log_prob for each in row] == pytest.approx(
                [score * LengthPenalty.parse(penalty)(len(tokens)) for tokens, score in expected], abs=1e-4
            )
    assert not {0, 2, 3, 4} & {token for row in found for each in row for token in each.tokens}
    assert len({frozenset(len(each.tokens) for each in row) for row in found}) > 1


def test_default_tensors_of_a_program_change_nothing() -> None:
    search = MaskPredict(MaskPredictConfig(iterations=2), small("abnet_serial"), V)
    expected = search.search(pairs(2, 5).source_BS)
    torch.set_default_dtype(torch.float64)
    try:
        assert search.search(pairs(2, 5).source_BS) == expected
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("part", ["target_embedding", "length"])
def test_mask_predict_refuses_a_damaged_model_and_one_in_training(part: str) -> None:
    model, source_BS = small("abnet_serial"), pairs(2, 5).source_BS
    search = MaskPredict(MaskPredictConfig(iterations=2), model, V)
    model.train()
    with pytest.raises(AssertionError, match=r"model\.eval"):
        search.search(source_BS)
    model.eval()
    with torch.no_grad():
        for parameter in model.get_submodule(part).parameters():
            parameter.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="predicts NaN"):
        search.search(source_BS)
