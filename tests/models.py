"""Small models and their inputs, which tests of several modules share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from tests.support import batch_of

PAD, BOS, EOS = 0, 1, 2


class Letters:
    """Tokenizer with the letters from a to z as tokens from 4 up; all else is unknown."""

    vocabulary = Vocabulary(30)
    digest = "letters"

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text], "source")[0]

    def encode_batch(self, texts: Sequence[str], side: str) -> list[list[int]]:
        return [[4 + ord(each) - ord("a") if "a" <= each <= "z" else 3 for each in text.strip()] for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token - 4) if token > 3 else "?" for token in tokens)

    def reference(self, text: str) -> str:
        return text


def two_pairs(update: int = 1) -> Batch:
    """Return a batch of two sentence pairs of unequal lengths, of a vocabulary of at least 23 tokens."""
    source = torch.tensor([[7, 8, 9, 10, 11, 2], [12, 13, 14, 2, 0, 0]])
    output = torch.tensor([[17, 18, 19, 2], [22, 2, 0, 0]])
    inputs = torch.tensor([[1, 17, 18, 19], [1, 22, 0, 0]])
    return batch_of(source, inputs, output, ids=[30, 4], seed=5, update=update)


def sharpened(model: TranslationModel, factor: float = 4.0, end: float = 0.0) -> TranslationModel:
    """Return a random model whose predictions are far from uniform, and whose sentences end early and late."""
    with torch.no_grad():
        model.projection.weight.mul_(factor)
    bias_V = torch.zeros(model.vocab_size)
    bias_V[EOS] = end
    model.projection.bias = torch.nn.Parameter(bias_V)
    return model.eval()


def sharp_transformer(seed: int = 1, vocab_size: int = 24, factor: float = 4.0, **settings: Any) -> TranslationModel:
    """Return a small random Transformer whose predictions are far from uniform."""
    torch.manual_seed(seed)
    shape = {"dim": 32, "ffn_dim": 48, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, **settings}
    config = TransformerConfig.model_validate({**shape, "share_embeddings": "none", "dropout": 0.3})
    return sharpened(build_transformer(config, Vocabulary(vocab_size)), factor)


def random_sources(lengths: Sequence[int], vocab_size: int = 24, seed: int = 1, least: int = 4) -> list[list[int]]:
    """Return random sentences of given lengths with EOS, of tokens from ``least`` up."""
    generator = torch.Generator().manual_seed(seed)
    return [[*torch.randint(least, vocab_size, (n - 1,), generator=generator).tolist(), EOS] for n in lengths]


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Collate sentences, padded on the right. Shape: -> (B,S)"""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows])


@torch.no_grad()
def add_noise(model: nn.Module) -> None:
    """Add random numbers to all parameters, so large that each matters to the outputs."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        scale = 0.3 if parameter.ndim < 2 else 1.5 * parameter.shape[-1] ** -0.5
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def assert_as_transcribed(
    model: TranslationModel, batch: Batch, states: Sequence[Tensor], *, all_matter: bool = True
) -> None:
    """Assert that states and gradients in float64 are those of a plain transcription.

    Args:
        states: of each sentence, transcribed. Shape: (T,D) each
        all_matter: True if no parameter has a gradient of zero.
    """
    parameters, real, states_ND = dict(model.named_parameters()), batch.target_output_BT.ne(PAD), torch.cat(states)
    torch.testing.assert_close(model(batch)[real], states_ND, rtol=1e-11, atol=1e-11)
    logits, targets = states_ND @ model.projection.weight.T, batch.target_output_BT[real]
    loss = F.cross_entropy(logits, targets, label_smoothing=0.1, reduction="sum")
    output = Objective(LabelSmoothed(0.1, PAD))(model, batch)
    torch.testing.assert_close(output.loss.double(), loss, rtol=1e-6, atol=0)
    ours, plain = (torch.autograd.grad(each, list(parameters.values())) for each in (output.loss, loss))
    for name, one, other in zip(parameters, ours, plain, strict=True):
        assert not all_matter or other.abs().max() > 0.0, name
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")
