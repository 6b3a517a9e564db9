"""AB-Net: frozen BERTs and adapters, masked tokens, and mask-predict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.config import load_config
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TOP, Memory
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods.abnet import LENGTH, AbNet, masked_positions
from deepspeed_nmt.methods.bert.config import BertShape
from deepspeed_nmt.nn.cache import DecoderCache
from deepspeed_nmt.search.mask_predict import MaskPredict, MaskPredictConfig
from tests.support import batch_of
from tests.unit.test_bert import batch, folders, loaded, tokenizer, transformers  # noqa: F401

V = Vocabulary(40, pad=0, bos=2, eos=3, unk=1, mask=4, own_source=Vocabulary(30, pad=0, bos=2, eos=3, unk=1, mask=4))
BOTH = pytest.mark.parametrize("recipe", ["abnet_serial", "abnet_parallel"])


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


def test_masked_tokens_depend_only_on_seed_update_and_sentence() -> None:
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
    rows = slice(37, 99)
    part = replace(data, target_output_BT=data.target_output_BT[rows, :9], sentence_ids_B=data.sentence_ids_B[rows])
    whole_rows = lengths[rows] < 9
    assert torch.equal(masked_positions(part, V)[whole_rows], masked[rows, :9][whole_rows])
    assert not torch.equal(masked_positions(replace(data, update=replace(data.update, number=2)), V), masked)
    assert not torch.equal(masked_positions(replace(data, update=replace(data.update, seed=2)), V), masked)


@BOTH
def test_without_its_adapters_it_equals_the_frozen_berts(recipe: str, folders: tuple[Path, Path], tokenizer) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    model, data = loaded(recipe, folders, tokenizer.vocabulary), batch(tokenizer)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert trained and all("adapter" in name or "cross" in name or name.startswith("length.") for name in trained)
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


@BOTH
def test_the_loss_is_of_the_masked_tokens_and_of_the_length(recipe: str) -> None:
    model, data = small(recipe), pairs(5, 9)
    config = load_config(recipe, settings=["objective.masked_tokens.length_weight=0.3"])
    found = build_objective(config, V)(model.train(), data)
    masked = masked_positions(data, V)
    shown = torch.cat([data.target_input_BT[:, :1], data.target_output_BT.masked_fill(masked, 4)], dim=1)
    memory = model.encode(data.source_BS)
    logits = model.projection(model.decode(shown, memory)[0])[:, 1:]
    expected = F.cross_entropy(logits[masked], data.target_output_BT[masked], reduction="sum", label_smoothing=0.1)
    nll = F.cross_entropy(logits[masked], data.target_output_BT[masked], reduction="sum")
    lengths = data.target_input_BT.ne(0).sum(1) - 1
    length = F.cross_entropy(model.lengths(memory), lengths) * data.target_tokens
    torch.testing.assert_close(found.loss, 2 * expected + 0.3 * length)
    torch.testing.assert_close(found.nll, 2 * nll)
    torch.testing.assert_close(found.metrics[LENGTH], length)
    found.loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name


def test_parallel_adapters_follow_their_formula() -> None:
    model = small("abnet_parallel")
    layer, part = model.decoder.layers[0], model.decoder.layers[0].layer
    h, r = torch.randn(1, 4, 16), torch.randn(1, 3, 16)
    from deepspeed_nmt.nn.layers import Context

    def norm(residual, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        return F.layer_norm(x, (16,), residual.norm.weight, residual.norm.bias, 1e-12)

    with torch.no_grad():
        a = norm(part.self_residual, h + part.self_attention(h, h)) + layer.cross_attention(
            norm(layer.cross_residual, h), r
        )
        expected = norm(part.feed_forward_residual, a + part.feed_forward(a)) + layer.adapter(
            norm(layer.adapter_residual, a)
        )
        torch.testing.assert_close(layer(h, Context(memory_BSD=r)), expected)


class Oracle:
    """Model that predicts token 10 + i at place i, surely if the token before is known, otherwise a wrong token."""

    mask, longest_target = 4, 12

    def __init__(self) -> None:
        self.shown: list[Tensor] = []

    def encode(self, source_BS: Tensor, padded: bool = True) -> Memory:
        return Memory(source_BS.unsqueeze(2).float(), None)

    def lengths(self, memory: Memory) -> Tensor:
        logits = torch.full((memory.states_BSD.shape[0], 20), -9.0)
        logits[:, 6], logits[:, 4], logits[:, 0], logits[:, 15] = 1.0, 0.5, 5.0, 4.0
        return logits

    def guess(self, tokens_RT: Tensor, wanted_RT: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        self.shown.append(tokens_RT.clone())
        assert torch.equal(wanted_RT, tokens_RT.eq(4))
        place = torch.arange(tokens_RT.shape[1]).expand_as(tokens_RT)
        left_seen = F.pad(tokens_RT[:, :-1], (1, 0), value=4).ne(4)
        log_p_RT = torch.where(left_seen, -0.1, -1.0 - 0.01 * place)
        return torch.where(left_seen, 10 + place, 30)[wanted_RT], log_p_RT[wanted_RT]


def test_the_least_probable_tokens_are_predicted_again() -> None:
    oracle = Oracle()
    search = MaskPredict(MaskPredictConfig(iterations=3, length_beam=2), oracle, V)
    assert search.config.width == 2
    ((best, second),) = search.search(torch.tensor([[5, 3]]))
    # Lengths of zero and beyond the model's maximum are not tried.
    assert {len(best.tokens), len(second.tokens)} == {6, 4}
    first, again, third = oracle.shown
    assert first.tolist() == [[2, 4, 4, 4, 4, 4, 4, 3], [2, 4, 4, 4, 4, 3, 0, 0]]
    # The 4 least probable of 6 tokens are masked, then 2; of 4 tokens 2, then 1. The certain token stays.
    assert again.eq(4).sum(1).tolist() == [4, 2] and third.eq(4).sum(1).tolist() == [2, 1]
    assert again.tolist()[0] == [2, 11, 30, 4, 4, 4, 4, 3]
    assert best.score >= second.score and best.score == pytest.approx(best.log_prob / len(best.tokens))
    once = MaskPredict(MaskPredictConfig(iterations=1, length_beam=1), Oracle(), V).search(torch.tensor([[5, 3]]))
    assert once[0][0].tokens == [11, 30, 30, 30, 30, 30]


@BOTH
def test_a_translation_does_not_depend_on_the_batch(recipe: str) -> None:
    model, data = small(recipe), pairs(6, 9)
    search = MaskPredict(MaskPredictConfig(iterations=4, length_beam=3), model, V)
    together = search.search(data.source_BS)
    for row, found in enumerate(together):
        length = int(data.source_BS[row].ne(0).sum())
        (alone,) = search.search(data.source_BS[row : row + 1, :length], padded=False)
        assert [each.tokens for each in alone] == [each.tokens for each in found]
        assert [each.score for each in alone] == pytest.approx([each.score for each in found], abs=1e-4)
        assert not {0, 2, 3, 4} & {token for each in found for token in each.tokens}
        assert len({len(each.tokens) for each in found}) == 3 and all(len(each.tokens) <= 22 for each in found)


def test_beam_search_is_refused() -> None:
    model = small("abnet_serial")
    with pytest.raises(ConfigError, match=r"use search.name=mask_predict"):
        model.begin()
    with pytest.raises(ConfigError, match=r"use search.name=mask_predict"):
        model.step(torch.tensor([2]), model.encode(torch.tensor([[2, 5, 3]])), DecoderCache([0]))
    with pytest.raises(ConfigError, match="has no exits but the top"):
        model.at_exit("1-1")
    assert model.at_exit(TOP) is model and model.stages == (1, 1)
