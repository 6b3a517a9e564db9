"""AB-Net: two frozen BERTs with trained adapters, which translate non-autoregressively.

Guo, Zhang, Xu, Wei, Chen, Chen: "Incorporating BERT into Parallel Sequence Decoding with Adapters", 2020. Serial and
parallel adapters are compared in table 2 of the paper that :mod:`deepspeed_nmt.methods.parallel_decoder` implements.

S and F are the self-attention and feed-forward sub-layers of a frozen BERT layer, as in that module, but with
bidirectional self-attention. LN is a LayerNorm and R the encoder's states. A layer computes

    encoder            X = F(S(H))                           H' = X + W_2 relu(W_1 LN(X))
    serial decoder     X = F(S(H))
                       A = X + CrossAttention(LN(X), R)      H' = A + W_2 relu(W_1 LN(A))
    parallel decoder   A = S(H) + CrossAttention(LN(H), R)   H' = F(A) + W_2 relu(W_1 LN(A))

Each LN has weights of its own. Only cross-attention, adapters (W_1, W_2, LN) and the prediction of the target's
length are trained. A linear layer predicts the length from the encoder's state at [CLS].

**Masked-token objective** (eq. 5 of the paper on parallel decoders; Ghazvininejad, Levy, Liu, Zettlemoyer:
"Mask-Predict: Parallel Decoding of Conditional Masked Language Models", 2019). The decoder reads [CLS] y [SEP], in
which m of the n tokens of y are masked, with m uniform in 1..n. The loss is the cross-entropy of the masked tokens,
given the others and the source. On average (n + 1) / 2 of n + 1 tokens are masked, so the sum is multiplied by 2 to
be comparable per token. The choice of tokens is a function of (seed, update, sentence).

Differences from the authors' experiments on IWSLT14, whose settings are not reproduced here:

- All adapters are pre-norm; theirs are post-norm in the decoder.
- Cross-attention has as many heads as the BERT; theirs has 4. Adapters are 2,048 wide by default; theirs are 512.
- The length is read at [CLS]; they put a learned length token before the source.
- Every masked token becomes [MASK]; they replace 80% by [MASK] and 10% by random tokens, and also mask 10% of the
  source in spans.

Legend: B sentences, S source length, T target length, D model width, L lengths, R rows = B x candidate lengths, N
positions to predict, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TOP, Memory, TranslationModel
from deepspeed_nmt.core.objective import LossOutput
from deepspeed_nmt.core.parts import MAX_INNER_WIDTH, LikelihoodConfig, Parts
from deepspeed_nmt.core.passes import Passes
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels.cross_entropy import projected_cross_entropy
from deepspeed_nmt.methods.bert import parts
from deepspeed_nmt.methods.bert.config import SMALL_BERT, BertPair
from deepspeed_nmt.methods.bert.weights import Loader
from deepspeed_nmt.nn.cache import DecoderCache, LayerCache
from deepspeed_nmt.nn.embedding import LearnedEmbedding, PredictionTransform
from deepspeed_nmt.nn.feedforward import FeedForward
from deepspeed_nmt.nn.layers import (
    Context,
    CrossAttending,
    Draw,
    EncoderLayer,
    MakeDecoderLayer,
    cross_attention_sublayer,
    feed_forward_sublayer,
)
from deepspeed_nmt.nn.stack import LayerStack
from deepspeed_nmt.nn.sublayer import Residual
from deepspeed_nmt.randomness import Purpose, uniforms
from deepspeed_nmt.registry import SelfTest

LENGTH = "length"
"""Name of the length's logits in the output of a pass, and of the metric of their loss."""
_LOGITS_AT_ONCE = 1 << 24
"""Bound on the elements of a matrix of logits in decoding."""
_NOT_LEFT_TO_RIGHT = "model.name=abnet does not translate from left to right; use search.name=mask_predict"


class AbNetConfig(BertPair):
    """Settings of AB-Net."""

    name: Literal["abnet"] = "abnet"
    adapters: Literal["serial", "parallel"] = Field(
        default="serial", description="place of the decoder's adapters: behind the frozen sub-layers, or beside them"
    )
    adapter_dim: int = Field(default=2048, ge=1, le=MAX_INNER_WIDTH, description="inner width of the adapters")

    left_to_right: ClassVar[bool] = False

    def contradictions(self, run: Parts) -> Iterator[str]:
        """Refuse objectives and searches that predict from left to right."""
        yield from super().contradictions(run)
        if not any(isinstance(part, MaskedTokensConfig) for part in run.objective.values()):
            yield (
                "model.name=abnet is trained by objective.masked_tokens; set that, and the other likelihood to null"
            )
        for name in run.active_regularizers():
            yield (
                f"objective.{name} compares predictions from left to right, but model.name=abnet guesses masked "
                f"tokens; set objective.{name} to null"
            )
        if run.search.left_to_right:
            yield "model.name=abnet is decoded by search.name=mask_predict; set that"


class MaskedTokensConfig(LikelihoodConfig):
    """Settings of the masked-token objective."""

    smoothing: float = Field(
        default=0.1, ge=0.0, lt=1.0, description="probability spread evenly over the vocabulary (epsilon)"
    )
    length_weight: float = Field(default=0.1, ge=0.0, description="weight of the loss of the predicted length")

    def contradictions(self, run: Parts) -> Iterator[str]:
        """Refuse models that predict from left to right."""
        if run.model.left_to_right:
            yield (
                "objective.masked_tokens trains models that guess masked tokens, but "
                f"model.name={run.model.name} predicts from left to right; use objective.label_smoothed"
            )


SELF_TEST = SelfTest(
    "abnet",
    {
        "model": {
            "name": "abnet",
            "source": SMALL_BERT,
            "target": SMALL_BERT,
            "attention_dropout": 0.0,
            "adapters": "parallel",
            "adapter_dim": 48,
        },
        "objective": {"masked_tokens": {}},
        "search": {"name": "mask_predict"},
    },
)
"""Parallel adapters, masked tokens, and the length."""


class AdaptedEncoderLayer(nn.Module):
    """Frozen BERT layer, followed by an adapter."""

    def __init__(self, config: AbNetConfig) -> None:
        super().__init__()
        shape = config.source
        self.layer = parts.bert_layer(shape, config)
        self.adapter = FeedForward(shape.dim, config.adapter_dim)
        self.adapter_residual = parts.residual(shape, config, "pre")

    def forward(self, x_BSD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Apply the frozen layer and the adapter. An encoder caches nothing. Shape: (B,S,D) -> (B,S,D)."""
        return feed_forward_sublayer(self.adapter, self.adapter_residual, self.layer(x_BSD, context))


class AdaptedDecoderLayer(CrossAttending):
    """Frozen BERT layer with cross-attention and an adapter, after it (serial) or beside it (parallel)."""

    def __init__(self, config: AbNetConfig) -> None:
        super().__init__()
        shape = config.target
        self.layer = parts.bert_layer(shape, config)
        self.cross_attention = parts.attention(shape, config)
        self.cross_residual: Residual = parts.residual(shape, config, "pre")
        self.adapter = FeedForward(shape.dim, config.adapter_dim)
        self.adapter_residual = parts.residual(shape, config, "pre")
        self.parallel = config.adapters == "parallel"

    @property
    def self_residual(self) -> Residual:  # type: ignore[override]
        """Residual connection of the frozen self-attention."""
        return self.layer.self_residual

    @property
    def feed_forward_residual(self) -> Residual:  # type: ignore[override]
        """Residual connection of the frozen feed-forward network."""
        return self.layer.feed_forward_residual

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Apply the layer to whole sentences, without a cache. Shape: (B,T,D) -> (B,T,D)."""
        bidirectional = Context(mask=context.target_mask)
        if not self.parallel:
            x_BTD = cross_attention_sublayer(
                self.cross_attention, self.cross_residual, self.layer(x_BTD, bidirectional), context
            )
            return feed_forward_sublayer(self.adapter, self.adapter_residual, x_BTD)
        attention, around = self.layer.self_attention, self.layer.self_residual
        attended: Tensor = attention(x_BTD, x_BTD, bidirectional.mask, then=around.epilogue(x_BTD))
        sum_BTD = cross_attention_sublayer(
            self.cross_attention, self.cross_residual, x_BTD, context, onto_BTD=attended
        )
        frozen = feed_forward_sublayer(self.layer.feed_forward, self.layer.feed_forward_residual, sum_BTD)
        return feed_forward_sublayer(self.adapter, self.adapter_residual, sum_BTD, onto=frozen)


class AbNet(TranslationModel):
    """Model that predicts masked tokens. Built by :func:`build_abnet`.

    Attributes:
        mask: token that replaces tokens to be predicted.
    """

    def __init__(self, config: AbNetConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        self.source_embedding = parts.embedding(config.source, config, vocabulary.source)
        self.target_embedding = parts.embedding(config.target, config, vocabulary)
        transform, self.projection = parts.head(config.target, self.target_embedding, True, vocabulary)
        self.encoder = LayerStack([AdaptedEncoderLayer(config) for _ in range(config.source.layers)])
        decoder = [AdaptedDecoderLayer(config) for _ in range(config.target.layers)]
        self.decoder = LayerStack(decoder, final_norm=transform)
        self.length = nn.Linear(config.source.dim, config.target.positions)
        self.vocabulary = vocabulary
        self.vocab_size, self.pad = vocabulary.size, vocabulary.pad
        # A vocabulary without a mask token occurs in `plan` only; `train` requires those of the BERTs.
        self.mask: int = vocabulary.unk if vocabulary.mask is None else vocabulary.mask
        self.longest_source, self.longest_target = config.source.positions, config.target.positions - 1
        parts.initialise(self)
        frozen = [self.source_embedding, self.target_embedding, transform, self.projection]
        for module in [*frozen, *(layer.layer for layer in [*self._encoder_layers(), *self._decoder_layers()])]:
            module.requires_grad_(False)

    @property
    @override
    def stages(self) -> tuple[int, int]:
        return 1, 1

    @property
    @override
    def stacks(self) -> tuple[list[LayerStack], list[LayerStack]]:
        return [self.encoder], [self.decoder]

    @override
    def encode(self, source_BS: Tensor, padded: bool = True, exits: Sequence[int] | None = None) -> Memory:
        mask = self.source_mask(source_BS, padded)
        (states_BSD,) = self.encoder(self.source_embedding(source_BS), Context(mask=mask))
        return Memory(states_BSD, mask)

    def decode(
        self,
        target_input_BT: Tensor,
        memory: Memory,
        draw: Draw | None = None,
        exits: Sequence[int] | None = None,
    ) -> list[Tensor]:
        """Compute the states of [CLS] y [SEP] with masked tokens, bidirectionally. Shape: (B,T) -> (B,T,D)."""
        seen_BT = target_input_BT.ne(self.pad)
        seen_BT[:, 0] = True
        context = Context(memory.mask, memory.states_BSD, draw, target_mask=seen_BT[:, None, None, :])
        states: list[Tensor] = self.decoder(self.target_embedding(target_input_BT), context)
        return states

    def lengths(self, memory: Memory) -> Tensor:
        """Compute the logits of the number of target tokens, without [CLS] and [SEP]. Shape: -> (B,L)."""
        logits_BL: Tensor = self.length(memory.states_BSD[:, 0])
        return logits_BL

    def guess(self, tokens_RT: Tensor, wanted_RT: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Predict the most probable token at each wanted position. Special tokens are never predicted.

        Shape: (R,T), bool (R,T) -> (N,), (N,)

        Args:
            tokens_RT: [CLS] y [SEP], some of whose tokens are masked.
            wanted_RT: True for positions to predict.
            memory: encoded sources.

        Returns:
            The tokens and their log-probabilities (nats), in row-major order of the wanted positions.
        """
        states_ND = self.decode(tokens_RT, memory)[0][wanted_RT]
        never = [self.pad, self.vocabulary.bos, self.vocabulary.eos, self.mask]
        best = []
        for part_ND in torch.split(states_ND, max(1, _LOGITS_AT_ONCE // self.vocab_size)):
            logits_NV: Tensor = self.projection(part_ND)
            log_p_NV = torch.log_softmax(logits_NV.float(), dim=1)
            log_p_NV[:, never] = -torch.inf
            best.append(log_p_NV.max(dim=1))
        return torch.cat([each.indices for each in best]), torch.cat([each.values for each in best])

    @override
    def single_pass(self, batch: Batch) -> dict[str, Tensor]:
        memory = self.encode(batch.source_BS, padded=batch.source_padded)
        shown_BT = batch.target_output_BT.masked_fill(masked_positions(batch, self.vocabulary), self.mask)
        tokens_BT = torch.cat([batch.target_input_BT[:, :1], shown_BT], dim=1)
        return {TOP: self.decode(tokens_BT, memory)[0][:, 1:], LENGTH: self.lengths(memory)}

    @override
    def forward(self, batch: Batch) -> Tensor:
        return self.single_pass(batch)[TOP]

    @override
    def begin(self) -> DecoderCache:
        raise ConfigError(_NOT_LEFT_TO_RIGHT)

    @override
    def step(self, tokens_R: Tensor, memory: Memory, cache: DecoderCache) -> Tensor:
        raise ConfigError(_NOT_LEFT_TO_RIGHT)

    @override
    def at_exit(self, name: str) -> AbNet:
        if name != TOP:
            raise ConfigError(f"model.name=abnet has no exits but the top, but the exit is '{name}'; omit it")
        return self

    @override
    def load_pretrained(self) -> bool:
        assert isinstance(self.decoder.final_norm, PredictionTransform)
        source = Loader(self.config.source_encoder, "source")
        _load(source, self.source_embedding, [layer.layer for layer in self._encoder_layers()])
        target = Loader(self.config.target_encoder, "target")
        if not target.has_head:
            raise ConfigError(
                "model.target_encoder must have been saved with its language-model head, because model.name=abnet "
                f"does not train one, but {self.config.target_encoder} was saved without; name another BERT"
            )
        _load(target, self.target_embedding, [layer.layer for layer in self._decoder_layers()])
        target.head(self.decoder.final_norm, self.projection)
        return True

    def _encoder_layers(self) -> list[AdaptedEncoderLayer]:
        return [layer for layer in self.encoder.layers if isinstance(layer, AdaptedEncoderLayer)]

    def _decoder_layers(self) -> list[AdaptedDecoderLayer]:
        return [layer for layer in self.decoder.layers if isinstance(layer, AdaptedDecoderLayer)]


def _load(loader: Loader, embedded: LearnedEmbedding, layers: Sequence[EncoderLayer]) -> None:
    loader.embedding(embedded)
    for number, layer in enumerate(layers):
        loader.layer(layer, number)


def build_abnet(config: AbNetConfig, vocabulary: Vocabulary, make_layer: MakeDecoderLayer | None = None) -> AbNet:
    """Build an AB-Net whose BERTs are to be loaded.

    Args:
        config: settings.
        vocabulary: vocabulary of the target, and of the source.
        make_layer: not used; the model makes its own layers.
    """
    return AbNet(config, vocabulary)


def masked_positions(batch: Batch, vocabulary: Vocabulary) -> Tensor:
    """Choose the tokens of ``batch.target_output_BT`` to mask, never EOS or padding. Shape: -> bool (B,T)."""
    output_BT, ids_B = batch.target_output_BT, batch.sentence_ids_B
    seed, update = batch.update.seed, batch.update.number
    words_BT = output_BT.ne(vocabulary.pad) & output_BT.ne(vocabulary.eos)
    count_B1 = words_BT.sum(dim=1, keepdim=True)
    chance_B1 = uniforms(ids_B, 1, seed, Purpose.MASK_COUNT, update)
    draws_BT = uniforms(ids_B, output_BT.shape[1], seed, Purpose.MASKED_TARGETS, update)
    # Rank of each token in its sentence's random order; EOS and padding come last.
    place_BT = draws_BT.masked_fill(~words_BT, 2.0).argsort(dim=1).argsort(dim=1)
    return words_BT & (place_BT < (chance_B1 * count_B1).floor() + 1)


class MaskedTokens:
    """Cross-entropy of masked tokens, and of the target's length. Built by :func:`build_masked_tokens`."""

    def __init__(self, config: MaskedTokensConfig, vocabulary: Vocabulary) -> None:
        self.smoothing, self.length_weight = config.smoothing, config.length_weight
        self.vocabulary = vocabulary

    def request_passes(self, passes: Passes) -> None:
        """Request no exit but the top."""

    def __call__(
        self, model: TranslationModel, passes: Sequence[Mapping[str, Tensor]], batch: Batch, divergence: float
    ) -> LossOutput:
        """Compute the loss of one pass; see :class:`Likelihood`. The metric "length" is the length's loss."""
        (found,) = passes
        output_BT, pad = batch.target_output_BT, self.vocabulary.pad
        targets_BT = output_BT.masked_fill(~masked_positions(batch, self.vocabulary), pad)
        consume = partial(
            projected_cross_entropy,
            targets_N=targets_BT.flatten(),
            smoothing=self.smoothing,
            ignore_index=pad,
        )
        loss, nll_N, _ = model.projection([found[TOP].flatten(0, 1)], consume)
        length = self._length(found[LENGTH], batch)
        return LossOutput(2.0 * loss + self.length_weight * length, 2.0 * nll_N.sum(), {LENGTH: length.detach()})

    def _length(self, logits_BL: Tensor, batch: Batch) -> Tensor:
        """Sum the length's NLL, scaled so that the engine's division by tokens makes it a mean over sentences."""
        real_BT = batch.target_mask
        length_B = (real_BT.sum(dim=1) - 1).clamp(min=0)
        losses_B = F.cross_entropy(logits_BL.float(), length_B, reduction="none")
        tokens = batch.update.tokens or batch.target_tokens
        sentences = batch.update.sentences or batch.rows
        return torch.where(real_BT.any(dim=1), losses_B, 0.0).sum() * (tokens / max(1, sentences))


def build_masked_tokens(config: MaskedTokensConfig, vocabulary: Vocabulary) -> MaskedTokens:
    """Build the masked-token objective."""
    return MaskedTokens(config, vocabulary)
