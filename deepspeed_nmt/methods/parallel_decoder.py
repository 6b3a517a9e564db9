"""Decoders initialised from a target-language BERT: the parallel-mechanism decoder and its baselines.

"Parallel Mechanism Decoders in Pretrained Language Model-based Neural Machine Translation", an anonymous submission
to ACL Rolling Review of February 2024, equations 7 to 10.

The encoder is a source-language BERT with the top states R. The sub-layers of the decoder are those of BERT (Devlin,
Chang, Lee, Toutanova: "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", 2019), each
with its own residual connection and LayerNorm, but with causal self-attention:

    S(x) = LN(x + SelfAttention(x)),   C(x) = LN(x + CrossAttention(x, R)),   F(x) = LN(x + FFN(x)).

A decoder layer computes, from the state H,

    parallel      A = g_1 (S(H) + C(H)),  H' = g_2 (F_c(A) + F(A))      (eq. 7-10, where g_1 = g_2 = 1)
    serial        H' = F_2(C(F_1(S(H))))
    transformer   H' = F(C(S(H)))
    coordinator   H' = F(S(H));  above all of these, ``coordinator_layers`` layers H' = F_c(C(H))

and is initialised as follows:

- ``parallel``: S and F, the encoding sub-layer, from BERT layer n; C and F_c, the fusion sub-layer, as copies of
  them, LayerNorms included.
- ``serial``: S and F_1 from BERT layer 2n - 1, C and F_2 from BERT layer 2n.
- ``transformer``: S and F from BERT layer n; C is random.
- ``coordinator``: S and F from BERT layer n; the layers above are random. The external coordinator is the paper's
  baseline after Duan and Zhao (2023).

``fusion_scale`` sets g_1 and g_2: 1, the paper's equations; another number; or ``learned``, two numbers for each
layer that start at 0.5. Since F_c starts as F, H' starts as 2 g_2 F(A), which has the scale of BERT's states if g_2 =
0.5.

BERT's language-model head follows the top layer. ``freeze`` excludes parts from training: the encoding sub-layers (S
and F, or S and F_1), the embeddings of both sides with the output matrix tied to them, or the encoder.

Deviation: the paper's text has each feed-forward network read one attention, equations 8 to 10 have both read the
sum. The equations are implemented.

Legend: B sentences, T target length, D model width, R rows = B x beam.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from deepspeed_nmt.core.parts import MAX_LAYERS, DataVocabulary
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods import bert
from deepspeed_nmt.methods.bert import SMALL_BERTS, BertPair, Loader
from deepspeed_nmt.methods.transformer import Transformer
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.cache import LayerCache
from deepspeed_nmt.nn.embedding import LearnedEmbedding, PredictionTransform
from deepspeed_nmt.nn.layers import Context, DecoderBlock, DecoderLayer, EncoderLayer, LayerParts, Residual
from deepspeed_nmt.nn.stack import LayerStack
from deepspeed_nmt.registry import Entry, SelfTest

Decoder = Literal["parallel", "serial", "transformer", "coordinator"]
Part = Literal["encoding", "embeddings", "encoder"]
_FIRST_LEARNED_SCALE = 0.5


class BertDecoderConfig(BertPair):
    """Settings of a model initialised from two BERTs."""

    name: Literal["bert"] = "bert"
    decoder: Decoder = Field(default="parallel", description="decoder layer that the target's BERT is made into")
    fusion_scale: Annotated[float, Field(gt=0.0, le=1.0)] | Literal["learned"] = Field(
        default=1.0,
        description="factor of the sums of decoder=parallel, above 0 and at most 1; learned: two for each layer",
    )
    pretrained: bool = Field(default=True, description="start from the BERTs' weights, not only their shapes")
    freeze: tuple[Part, ...] = Field(default=("embeddings",), description="parts excluded from training")
    tie_output: bool = Field(default=True, description="tie the output matrix to the target's embeddings")
    coordinator_layers: int = Field(
        default=12, ge=1, le=MAX_LAYERS, description="layers with cross-attention on top, for decoder=coordinator"
    )

    packed: ClassVar[bool] = True

    @model_validator(mode="after")
    def _check(self) -> BertDecoderConfig:
        if self.decoder == "serial" and self.target.layers % 2:
            raise ValueError(
                f"decoder=serial makes each layer from two BERT layers, but the target has {self.target.layers}; "
                "use a BERT with an even number of layers, or another decoder"
            )
        if self.decoder != "parallel" and self.fusion_scale != 1.0:
            raise ValueError(
                f"fusion_scale is {self.fusion_scale}, but decoder={self.decoder} has no sums to scale; omit it, or "
                "use decoder=parallel"
            )
        if self.freeze and not self.pretrained:
            raise ValueError(
                f"freeze is {list(self.freeze)}, but with pretrained=false all weights are random; set freeze=[]"
            )
        return self

    def check_data(self, tokenizer: DataVocabulary) -> None:
        """Refuse data that does not fit pretrained weights; random weights fit any data."""
        if self.pretrained:
            super().check_data(tokenizer)


class Encoding(DecoderBlock):
    """Parts of a decoder layer with an encoding sub-layer (S and F) and a fusion sub-layer (C and F_c)."""

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        self.self_attention = parts.attention()
        self.self_residual: Residual = parts.residual()
        self.feed_forward = parts.feed_forward()
        self.feed_forward_residual: Residual = parts.residual()
        self.cross_attention: MultiHeadAttention = parts.attention()
        self.cross_residual: Residual = parts.residual()
        self.fusion = parts.feed_forward()
        self.fusion_residual = parts.residual()

    def attend(self, x_BTD: Tensor, context: Context, cache: LayerCache | None) -> Tensor:
        """Apply S. Shape: (B,T,D) -> (B,T,D), or with a cache (R,1,D) -> (R,1,D)."""
        mask, attention = context.target_mask, self.self_attention
        attended: Tensor = self.self_residual(x_BTD, lambda h: attention(h, h, mask, True, cache))
        return attended


class ParallelLayer(Encoding):
    """Decoder layer A = g_1 (S(H) + C(H)), H' = g_2 (F_c(A) + F(A)).

    Attributes:
        fusion_scale: learned g_1 and g_2, (2,); None if they are fixed.
    """

    def __init__(self, parts: LayerParts, scale: float | Literal["learned"]) -> None:
        super().__init__(parts)
        self.fusion_scale = nn.Parameter(torch.full((2,), _FIRST_LEARNED_SCALE)) if scale == "learned" else None
        self._fixed_scale = 1.0 if isinstance(scale, str) else scale

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Apply the layer. Shape: (B,T,D) -> (B,T,D), or with a cache (R,1,D) -> (R,1,D)."""
        crossed_BTD = self.cross(x_BTD, context, cache)
        sum_BTD = self._scaled(self.attend(x_BTD, context, cache) + crossed_BTD, 0)
        fused_BTD = self.fusion_residual(sum_BTD, self.fusion)
        return self._scaled(fused_BTD + self.feed_forward_residual(sum_BTD, self.feed_forward), 1)

    def _scaled(self, sum_BTD: Tensor, number: int) -> Tensor:
        """Multiply sum ``number``, 0 or 1, by its factor. Shape: (B,T,D) -> (B,T,D)."""
        if self.fusion_scale is not None:
            return sum_BTD * self.fusion_scale[number].to(sum_BTD.dtype)
        return sum_BTD if self._fixed_scale == 1.0 else sum_BTD * self._fixed_scale


class SerialLayer(Encoding):
    """Decoder layer H' = F_2(C(F_1(S(H)))), where ``fusion`` is F_2."""

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Apply the layer. Shape: (B,T,D) -> (B,T,D), or with a cache (R,1,D) -> (R,1,D)."""
        x_BTD = self.attend(x_BTD, context, cache)
        x_BTD = self.feed_forward_residual(x_BTD, self.feed_forward)
        x_BTD = self.cross(x_BTD, context, cache)
        x_BTD = self.fusion_residual(x_BTD, self.fusion)
        return x_BTD


class CoordinatorLayer(DecoderBlock):
    """Decoder layer H' = F_c(C(H)), without self-attention."""

    self_residual: None = None

    def __init__(self, parts: LayerParts) -> None:
        super().__init__()
        self.cross_attention: MultiHeadAttention = parts.attention()
        self.cross_residual: Residual = parts.residual()
        self.feed_forward = parts.feed_forward()
        self.feed_forward_residual: Residual = parts.residual()

    def forward(self, x_BTD: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        """Apply the layer. Shape: (B,T,D) -> (B,T,D), or with a cache (R,1,D) -> (R,1,D)."""
        x_BTD = self.cross(x_BTD, context, cache)
        x_BTD = self.feed_forward_residual(x_BTD, self.feed_forward)
        return x_BTD


class BertTransformer(Transformer):
    """Transformer whose encoder and decoder have the layers of two BERTs. Built by :func:`build_bert_decoder`."""

    config: BertDecoderConfig
    source_embedding: LearnedEmbedding
    target_embedding: LearnedEmbedding

    @override
    def load_pretrained(self) -> bool:
        config = self.config
        if not config.pretrained:
            return False
        assert isinstance(self.decoder.final_norm, PredictionTransform)
        layers = [layer for layer in self.encoder.layers if isinstance(layer, EncoderLayer)]
        Loader(config.source_encoder, "source").encoder(self.source_embedding, layers)
        target = Loader(config.target_encoder, "target")
        target.embedding(self.target_embedding)
        target.head(self.decoder.final_norm, self.projection)
        for number, layer in enumerate(self.decoder.layers):
            first, second = (2 * number, 2 * number + 1) if isinstance(layer, SerialLayer) else (number, number)
            if isinstance(layer, (Encoding, DecoderLayer)):
                target.attention(layer.self_attention, layer.self_residual, first)
                target.feed_forward(layer.feed_forward, layer.feed_forward_residual, first)
            if isinstance(layer, Encoding):
                target.attention(layer.cross_attention, layer.cross_residual, second)
                target.feed_forward(layer.fusion, layer.fusion_residual, second)
        return True


def build_bert_decoder(config: BertDecoderConfig, vocabulary: Vocabulary) -> BertTransformer:
    """Build a randomly initialised model, into which the BERTs are to be loaded."""
    source_embedding = bert.embedding(config.source, config, vocabulary.source)
    target_embedding = bert.embedding(config.target, config, vocabulary)
    transform, projection = bert.head(config.target, target_embedding, config.tie_output, vocabulary)
    source_parts = bert.layer_parts(config.source, config)
    encoder = LayerStack([EncoderLayer(source_parts) for _ in range(config.source.layers)])
    decoder = LayerStack(_decoder_layers(config), final_norm=transform)
    model = BertTransformer(source_embedding, target_embedding, encoder, decoder, projection, vocabulary.pad)
    model.config = config
    bert.initialise(model)
    for part in config.freeze:
        for module in _parts(model, part):
            module.requires_grad_(False)
    return model


def _decoder_layers(config: BertDecoderConfig) -> list[nn.Module]:
    parts, layers = bert.layer_parts(config.target, config), range(config.target.layers)
    if config.decoder == "parallel":
        return [ParallelLayer(parts, config.fusion_scale) for _ in layers]
    if config.decoder == "serial":
        return [SerialLayer(parts) for _ in layers[::2]]
    if config.decoder == "transformer":
        return [DecoderLayer.of(parts) for _ in layers]
    own = [DecoderLayer.of(parts, crosses=False) for _ in layers]
    return [*own, *(CoordinatorLayer(parts) for _ in range(config.coordinator_layers))]


def _parts(model: BertTransformer, part: Part) -> list[nn.Module]:
    """Return the modules of a part that ``freeze`` can contain."""
    if part == "encoder":
        return [model.encoder]
    if part == "embeddings":
        return [model.source_embedding, model.target_embedding]
    encoding = (layer for layer in model.decoder.layers if isinstance(layer, (Encoding, DecoderLayer)))
    return [
        module
        for layer in encoding
        for module in (layer.self_attention, layer.self_residual, layer.feed_forward, layer.feed_forward_residual)
    ]


ENTRY = Entry(
    "bert",
    BertDecoderConfig,
    lambda config, vocabulary, make_layer: build_bert_decoder(config, vocabulary),
    SelfTest(
        "berts",
        {"model": {"name": "bert", **SMALL_BERTS, "fusion_scale": "learned", "freeze": ["encoding", "embeddings"]}},
    ),
)
