"""Alignments: links of cross-attention, of tokens and of words, and the choice of the layer that aligns best."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from deepspeed_nmt.build import build_model
from deepspeed_nmt.data.sentencepiece import SentencePieceTokenizer
from deepspeed_nmt.data.vocabulary_training import train_subwords, train_words
from deepspeed_nmt.parity import VOCABULARY, methods, settings_of
from deepspeed_nmt.search.alignment import AttentionWatch, source_words, target_words
from deepspeed_nmt.search.forced import token_log_probs
from deepspeed_nmt.search.reliance import COVERED
from tests.models import Letters

SOURCE = torch.tensor([[7, 8, 9, 10, 11, 2], [12, 13, 2, 0, 0, 0]])
ASKED = [[(4, 5, 6), (14, 15)], [(9, 20, 21, 22)]]


@pytest.mark.parametrize("method", [name for name in methods() if settings_of(name).model.left_to_right])
def test_links_are_the_largest_weights_of_each_layer(method: str) -> None:
    torch.manual_seed(2)
    model = build_model(settings_of(method), VOCABULARY).eval()
    attentions = model.cross_attentions()
    assert list(attentions) == list(model.cross_attending())
    watch = AttentionWatch([[(each, 1.0)] for each in attentions.values()], SOURCE, VOCABULARY)
    with torch.inference_mode(), watch.watching():
        scores = token_log_probs(model, VOCABULARY, SOURCE, True, ASKED, watch.decoded)
    assert scores == token_log_probs(model, VOCABULARY, SOURCE, True, ASKED), "watching changes nothing"
    for number, (row, tokens) in enumerate([(0, (4, 5, 6)), (0, (14, 15)), (1, (9, 20, 21, 22))]):
        source = [token for token in SOURCE[row].tolist() if token != VOCABULARY.pad]
        for place, attention in enumerate(attentions.values()):
            seen: list[torch.Tensor] = []

            def see(module: torch.nn.Module, args: tuple[Any, ...], seen: list[torch.Tensor] = seen) -> None:
                query_1TD, memory = args[:2]
                heads = module.head_dim
                projected = not isinstance(memory, torch.Tensor)  # of a layer that is applied several times
                k = memory.keys[0].transpose(0, 1).flatten(1) if projected else module.k_proj(memory)[0]
                q = module.q_proj(query_1TD)[0]
                parts = zip(q.split(heads, dim=1), k.split(heads, dim=1), strict=True)
                seen.append(sum((a @ b.T / math.sqrt(heads)).softmax(dim=1) for a, b in parts))

            hook = attention.register_forward_pre_hook(see)
            with torch.inference_mode():
                model.decode(torch.tensor([[VOCABULARY.bos, *tokens]]), model.encode(torch.tensor([source])))
            hook.remove()
            words_TS = seen[-1][:, : len(source) - 1]
            assert watch.links(place, number, len(tokens)) == words_TS[: len(tokens)].argmax(dim=1).tolist()
            heads = attention.q_proj.weight.shape[0] // attention.head_dim
            covered = words_TS.sum(dim=0) / heads >= COVERED
            assert watch.coverage(place, number) == pytest.approx(covered.float().mean().item())


class Bounded(Letters):
    """A tokenizer that gets no more of a word than may have to be translated."""

    def encode(self, text: str, /) -> list[int]:
        assert len(text) <= 1 << 16
        return [9] * 5


def test_words_of_tokens() -> None:
    text = ["der kleine Hund schläft im Garten", "die Katze schläft nicht", "ein Haus im großen Garten"] * 5
    bpe = train_subwords(text, 60)
    for line in text[:3]:
        tokens = bpe.encode(line)
        assert len(tokens) > len(line.split())
        pieces = bpe.pieces(tokens)
        begins = [number for number, piece in enumerate(pieces) if piece.startswith("▁")]
        expected = [sum(begin <= place for begin in begins) - 1 for place in range(len(tokens))]
        assert source_words(line, tokens, bpe) == expected == target_words(tokens, bpe)
        assert source_words(line, tokens[:4], bpe) == expected[:4]
        assert [bpe.number(piece) for piece in pieces] == tokens
    segmented = train_words(["10\u00a0% ist gut"])
    line = "10\u00a0% ist gut"  # three tokens of four words
    assert source_words(line, segmented.encode(line), segmented) == [0, 2, 3]
    longest = "x" * (1 << 17)
    assert len(source_words(longest, [9] * 5, Bounded())) == 5
    space = bpe.number("▁")
    assert space is not None
    hund = bpe.encode("Hund")
    assert target_words([*bpe.encode("die"), space, *hund, space], bpe)[-len(hund) - 2 :] == [
        1,
        *[1] * len(hund),
        None,
    ]
    assert isinstance(bpe, SentencePieceTokenizer) and bpe.number("Kürbis") is None
    with_bytes = train_subwords(text, 300, byte_fallback=True)
    tokens = with_bytes.encode("die Ω im €Haus Ω")
    words = target_words(tokens, with_bytes)
    of_bytes = [(piece, word) for piece, word in zip(with_bytes.pieces(tokens), words, strict=True) if "<0x" in piece]
    assert of_bytes == [
        *(("<0xCE>", 1), ("<0xA9>", 1), ("<0xE2>", 3), ("<0x82>", 3), ("<0xAC>", 3), ("<0xCE>", 4), ("<0xA9>", 4)),
    ]

    class Apostrophes(Letters):
        """A tokenizer that joins words around an apostrophe, as those of BERTs do."""

        def decode(self, tokens: Sequence[int]) -> str:
            return " ".join(
                "'" if token == 3 else super(Apostrophes, self).decode([token]) for token in tokens
            ).replace(" ' ", "'")

    assert target_words([4, 5, 3, 6, 7], Apostrophes()) == [0, 1, 1, 1, 2]
