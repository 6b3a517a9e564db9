"""Decoders made of a target-language BERT (papers/parallel-mechanism-decoder), and what they are compared with.

The encoder is a source-language BERT, whose top states are R. Write BERT's two sub-layers, each with its residual
connection and LayerNorm, as

    S(x) = LN(x + SelfAttention(x))      F(x) = LN(x + FFN(x))      C(x) = LN(x + CrossAttention(x, R))

with self-attention made causal. Decoder layer n is then

    parallel      A = S(H) + C(H);   H' = F_c(A) + F(A)               (eq. 7-10; both networks read the sum)
    serial        H' = F_2(C(F_1(S(H))))                              from two adjacent BERT layers
    transformer   H' = F(C(S(H)))                                     cross-attention starts fresh
    coordinator   H' = F(S(H)), and on top of all, layers F_c(C(H)) that start fresh

In ``parallel``, C and F_c (the fusion sub-layer) start as copies of S and F (the encoding sub-layer) of the same BERT
layer, LayerNorms included; in ``serial``, S and F_1 come from layer 2n-1, C and F_2 from layer 2n. On top stands
BERT's language-model head. ``freeze`` keeps parts as they come: the encoding sub-layers (S and F, or S and F_1), both
sides' embeddings with the output matrix tied to them, or the encoder. The papers' rows freeze the embeddings, but for
the coordinator's, which has an output matrix of its own.

Legend: B sentences, T target length, D model width, R rows = B x beam.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import Field, model_validator
from torch import Tensor, nn

from deepspeed_nmt.core.parts import DataVocabulary
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.bert import parts
from deepspeed_nmt.methods.bert.config import SMALL_BERT, BertPair, BertShape
from deepspeed_nmt.methods.bert.weights import Loader
from deepspeed_nmt.methods.transformer import Transformer
from deepspeed_nmt.nn.cache import LayerCache
from deepspeed_nmt.nn.embedding import LearnedEmbedding, PredictionTransform
from deepspeed_nmt.nn.layers import (
    Context,
    CrossAttending,
    DecoderLayer,
    EncoderLayer,
    MakeDecoderLayer,
    cross_attention_sublayer,
    feed_forward_sublayer,
    self_attention_sublayer,
)
from deepspeed_nmt.nn.stack import LayerStack
from deepspeed_nmt.nn.sublayer import Residual
from deepspeed_nmt.registry import SelfTest

Decoder = Literal["parallel", "serial", "transformer", "coordinator"]
Part = Literal["encoding", "embeddings", "encoder"]


class BertDecoderConfig(BertPair):
    """A translation model of two BERTs."""

    name: Literal["bert"] = "bert"
    decoder: Decoder = Field(default="parallel", description="decoder layer that the target's BERT is made into")
    pretrained: bool = Field(default=True, description="start from the BERTs' weights; false: only their shapes")
    freeze: tuple[Part, ...] = Field(default=("embeddings",), description="parts that are not trained")
    tie_output: bool = Field(default=True, description="the output matrix is the target's embedding matrix")
    coordinator_layers: int = Field(
        default=12, ge=1, description="layers on top of the BERT, for decoder=coordinator"
    )

    @model_validator(mode="after")
    def _check(self) -> BertDecoderConfig:
        if self.decoder == "serial" and self.target.layers % 2:
            raise ValueError(
                f"decoder=serial makes a layer of every two BERT layers, but the target has {self.target.layers}; "
                "use a BERT with an even number of layers, or another decoder"
            )
        if self.freeze and not self.pretrained:
            raise ValueError(
                "freeze keeps weights as they come, but with pretrained=false they are random; set freeze=[]"
            )
        return self

    def check_data(self, tokenizer: DataVocabulary) -> None:
        """As for every pair of BERTs; without pretrained weights any data fits."""
        if self.pretrained:
            super().check_data(tokenizer)


SELF_TEST = SelfTest(
    "berts",
    {
        "model": {
            "name": "bert",
            "source": SMALL_BERT,
            "target": SMALL_BERT,
            "attention_dropout": 0.0,
            "freeze": ["encoding", "embeddings"],
        }
    },
)
"""The parallel decoder, whose embeddings and encoding sub-layers are frozen."""


class Encoding(CrossAttending):
    """The parts of a layer that encode the target's prefix, S and F, and those that fuse it with the source."""

    def __init__(self, shape: BertShape, pair: BertPair) -> None:
        super().__init__()
        self.self_attention = parts.attention(shape, pair)
        self.self_residual: Residual = parts.residual(shape, pair)
        self.feed_forward = parts.feed_forward(shape)
        self.feed_forward_residual: Residual = parts.residual(shape, pair)
        self.cross_attention = parts.attention(shape, pair)
        self.cross_residual: Residual = parts.residual(shape, pair)
        self.fusion = parts.feed_forward(shape)
        self.fusion_residual = parts.residual(shape, pair)

    def attend(self, x_BTD: Tensor, cache: LayerCache | None) -> Tensor:
        """S. Shape: (B,T,D) -> (B,T,D), or with a cache (R,1,D) -> (R,1,D)"""
        return self_attention_sublayer(self.self_attention, self.self_residual, x_BTD, cache)

    def encoding(self) -> list[nn.Module]:
        """What ``freeze: encoding`` freezes."""
        return [self.self_attention, self.self_residual, self.feed_forward, self.feed_forward_residual]


class ParallelLayer(Encoding):
    """A = S(H) + C(H); H' = F_c(A) + F(A)."""

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Shape: (B,T,D) -> (B,T,D), or with a cache (R,1,D) -> (R,1,D)"""
        crossed = cross_attention_sublayer(self.cross_attention, self.cross_residual, x_BTD, context, cache)
        sum_BTD = self.attend(x_BTD, cache) + crossed
        return feed_forward_sublayer(self.fusion, self.fusion_residual, sum_BTD) + feed_forward_sublayer(
            self.feed_forward, self.feed_forward_residual, sum_BTD
        )


class SerialLayer(Encoding):
    """H' = F_2(C(F_1(S(H))))."""

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Shape: (B,T,D) -> (B,T,D), or with a cache (R,1,D) -> (R,1,D)"""
        x_BTD = feed_forward_sublayer(self.feed_forward, self.feed_forward_residual, self.attend(x_BTD, cache))
        x_BTD = cross_attention_sublayer(self.cross_attention, self.cross_residual, x_BTD, context, cache)
        return feed_forward_sublayer(self.fusion, self.fusion_residual, x_BTD)


class CoordinatorLayer(CrossAttending):
    """H' = F_c(C(H)): it sees the prefix through the states of the BERT below alone."""

    self_residual: None = None

    def __init__(self, shape: BertShape, pair: BertPair) -> None:
        super().__init__()
        self.cross_attention = parts.attention(shape, pair)
        self.cross_residual: Residual = parts.residual(shape, pair)
        self.feed_forward = parts.feed_forward(shape)
        self.feed_forward_residual: Residual = parts.residual(shape, pair)

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Shape: (B,T,D) -> (B,T,D), or with a cache (R,1,D) -> (R,1,D)"""
        x_BTD = cross_attention_sublayer(self.cross_attention, self.cross_residual, x_BTD, context, cache)
        return feed_forward_sublayer(self.feed_forward, self.feed_forward_residual, x_BTD)


class BertTransformer(Transformer):
    """Encoder and decoder made of two BERTs. Built by :func:`build_bert_decoder`."""

    config: BertDecoderConfig

    def load_pretrained(self) -> bool:
        config = self.config
        if not config.pretrained:
            return False
        assert isinstance(self.source_embedding, LearnedEmbedding)
        assert isinstance(self.target_embedding, LearnedEmbedding)
        assert isinstance(self.decoder.final_norm, PredictionTransform)
        source = Loader(config.source_encoder, "source")
        source.embedding(self.source_embedding)
        for number, layer in enumerate(self.encoder.layers):
            assert isinstance(layer, EncoderLayer)
            source.layer(layer, number)
        target = Loader(config.target_encoder, "target")
        target.embedding(self.target_embedding)
        target.head(self.decoder.final_norm, self.projection)
        for number, layer in enumerate(self.decoder.layers):
            _load_decoder_layer(target, layer, number)
        return True


def _load_decoder_layer(target: Loader, layer: nn.Module, number: int) -> None:
    """The weights of layer ``number``, from 0, of a decoder."""
    if isinstance(layer, CoordinatorLayer):
        return
    assert isinstance(layer, (Encoding, DecoderLayer))
    first, second = (2 * number, 2 * number + 1) if isinstance(layer, SerialLayer) else (number, number)
    target.attention(layer.self_attention, layer.self_residual, first)
    target.feed_forward(layer.feed_forward, layer.feed_forward_residual, first)
    if isinstance(layer, Encoding):
        target.attention(layer.cross_attention, layer.cross_residual, second)
        target.feed_forward(layer.fusion, layer.fusion_residual, second)


def build_bert_decoder(
    config: BertDecoderConfig, vocabulary: Vocabulary, make_layer: MakeDecoderLayer | None = None
) -> BertTransformer:
    """A model whose weights are still to be loaded; ``make_layer`` is not used, the decoder makes its own layers."""
    source_embedding = parts.embedding(config.source, config, vocabulary.source)
    target_embedding = parts.embedding(config.target, config, vocabulary)
    transform, projection = parts.head(config.target, target_embedding, config.tie_output, vocabulary)
    encoder = [parts.bert_layer(config.source, config) for _ in range(config.source.layers)]
    decoder = _decoder_layers(config)
    model = BertTransformer(
        source_embedding,
        target_embedding,
        LayerStack(encoder),
        LayerStack(decoder, final_norm=transform),
        projection,
        vocabulary.pad,
    )
    model.config, model.mask = config, vocabulary.mask
    parts.initialise(model)
    for part in config.freeze:
        for module in _parts(model, part):
            module.requires_grad_(False)
    return model


def _decoder_layers(config: BertDecoderConfig) -> list[nn.Module]:
    shape = config.target

    def plain(crossing: bool) -> DecoderLayer:
        return DecoderLayer(
            self_attention=parts.attention(shape, config),
            self_residual=parts.residual(shape, config),
            cross_attention=parts.attention(shape, config) if crossing else None,
            cross_residual=parts.residual(shape, config) if crossing else None,
            feed_forward=parts.feed_forward(shape),
            feed_forward_residual=parts.residual(shape, config),
        )

    made: dict[Decoder, Callable[[], list[nn.Module]]] = {
        "parallel": lambda: [ParallelLayer(shape, config) for _ in range(shape.layers)],
        "serial": lambda: [SerialLayer(shape, config) for _ in range(shape.layers // 2)],
        "transformer": lambda: [plain(crossing=True) for _ in range(shape.layers)],
        "coordinator": lambda: [
            *(plain(crossing=False) for _ in range(shape.layers)),
            *(CoordinatorLayer(shape, config) for _ in range(config.coordinator_layers)),
        ],
    }
    return made[config.decoder]()


def _parts(model: BertTransformer, part: Part) -> list[nn.Module]:
    """What ``freeze`` names."""
    if part == "encoder":
        return [model.encoder]
    if part == "embeddings":
        return [model.source_embedding, model.target_embedding]
    found: list[nn.Module] = []
    for layer in model.decoder.layers:
        if isinstance(layer, Encoding):
            found += layer.encoding()
        elif isinstance(layer, DecoderLayer):
            found += [layer.self_attention, layer.self_residual, layer.feed_forward, layer.feed_forward_residual]
    return found
