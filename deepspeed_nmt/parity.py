"""Small models of every method, trained a few updates under any engine: what `selftest` and the tests compare.

All engines do the same arithmetic, so that losses, gradient norms and weights of any two differ by rounding alone.
The models have GELU: where a ReLU is at its kink, rounding would decide whether a whole unit gets a gradient.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepspeed_nmt import randomness
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective, Regularizer, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpus, CorpusWriter
from deepspeed_nmt.data.loader import Cursor, TrainLoader, collate
from deepspeed_nmt.engine import build_engine
from deepspeed_nmt.engine.base import Engine, EngineConfig, ParameterState
from deepspeed_nmt.engine.ds_config import load_ds_config
from deepspeed_nmt.methods.abnet import AbNetConfig, MaskedTokens, MaskedTokensConfig, build_abnet
from deepspeed_nmt.methods.ald import ALD, ALDConfig
from deepspeed_nmt.methods.bert import BertShape
from deepspeed_nmt.methods.consistency import Consistency, ConsistencyConfig
from deepspeed_nmt.methods.cross_attention_drop import CrossAttentionDropConfig, build_cross_attention_drop
from deepspeed_nmt.methods.depth_growing import DepthGrowingConfig, build_depth_growing
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.multi_softmax import MultiSoftmax, MultiSoftmaxConfig
from deepspeed_nmt.methods.parallel_decoder import BertDecoderConfig, build_bert_decoder
from deepspeed_nmt.methods.recurrent import RecurrentConfig, build_recurrent
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.nn.layers import DecoderLayer, LayerParts
from deepspeed_nmt.parallel.collectives import sum_over_data_ranks
from deepspeed_nmt.parallel.tensor import parallelize
from deepspeed_nmt.parallel.world import World

VOCABULARY = Vocabulary(61)
"""An odd size: two ranks that share a model hold unequal slices."""
BATCH = BatchConfig(update_tokens=700, micro_tokens=260)
_SUMS = ("loss", "nll")


def vanilla(dropout: float) -> tuple[TranslationModel, Objective]:
    """A Transformer."""
    config = TransformerConfig(
        dim=32, ffn_dim=64, heads=4, encoder_layers=2, decoder_layers=2, dropout=dropout, activation="gelu"
    )
    return build_transformer(config, VOCABULARY), Objective(LabelSmoothed(0.1, VOCABULARY.pad))


def deep_decoder(dropout: float) -> tuple[TranslationModel, Objective]:
    """All of that paper at once: layers that drop their cross-attention sometimes, always and never, DDR in every
    and ALD in every other update.
    """
    config = TransformerConfig(
        dim=32, ffn_dim=64, heads=4, encoder_layers=1, decoder_layers=4, dropout=dropout, activation="gelu"
    )

    def make_layer(number: int, parts: LayerParts) -> DecoderLayer:
        rate = {1: 1.0, 2: 0.9, 3: 0.5, 4: 0.0}[number]
        drop = CrossAttentionDropConfig(drop_depth=4, drop_ratio=rate)
        return build_cross_attention_drop(drop, number, parts)

    terms: list[Regularizer] = [
        Consistency(ConsistencyConfig(weight=0.7), encode_twice=False),
        ALD(ALDConfig(weight=0.5, every=2), VOCABULARY),
    ]
    model = build_transformer(config, VOCABULARY, make_layer)
    return model, Objective(LabelSmoothed(0.1, VOCABULARY.pad), terms)


def exits(dropout: float) -> tuple[TranslationModel, Objective]:
    """The closed chain, with N x M softmaxing over its loops."""
    config = RecurrentConfig(
        dim=32, ffn_dim=64, heads=4, encoder_layers=2, decoder_layers=2, dropout=dropout, activation="gelu",
        sharing="closed_chain", encoder_loops=3, decoder_loops=2,
    )  # fmt: skip
    objective = Objective(MultiSoftmax(MultiSoftmaxConfig(exits="2x2"), VOCABULARY.pad))
    return build_recurrent(config, VOCABULARY), objective


def growing(dropout: float) -> tuple[TranslationModel, Objective]:
    """A top on a frozen bottom."""
    config = DepthGrowingConfig(
        dim=32, ffn_dim=64, heads=4, encoder_layers=1, decoder_layers=1, dropout=dropout, activation="gelu",
        norm="post", top_encoder_layers=1, top_decoder_layers=1,
    )  # fmt: skip
    return build_depth_growing(config, VOCABULARY), Objective(LabelSmoothed(0.1, VOCABULARY.pad))


_BERT = BertShape(dim=32, layers=2, heads=4, ffn_dim=64, positions=64)


def berts(dropout: float) -> tuple[TranslationModel, Objective]:
    """The parallel decoder, whose embeddings and encoding sub-layers are frozen."""
    config = BertDecoderConfig(
        source=_BERT, target=_BERT, dropout=dropout, attention_dropout=0.0, freeze=("encoding", "embeddings")
    )
    return build_bert_decoder(config, VOCABULARY), Objective(LabelSmoothed(0.1, VOCABULARY.pad))


def abnet(dropout: float) -> tuple[TranslationModel, Objective]:
    """Frozen layers with adapters beside them, masked tokens, and the length."""
    config = AbNetConfig(
        source=_BERT, target=_BERT, dropout=dropout, attention_dropout=0.0, adapters="parallel", adapter_dim=48
    )
    return build_abnet(config, VOCABULARY), Objective(MaskedTokens(MaskedTokensConfig(), VOCABULARY))


class Saved:
    """An engine's state, held in memory; see :class:`deepspeed_nmt.engine.base.SavedState`.

    Attributes:
        weights: whole, by name.
    """

    def __init__(self, states: Iterable[ParameterState]) -> None:
        self._states = {state.name: state for state in states}
        self.weights = {name: state.weight for name, state in self._states.items()}

    def weight(self, name: str) -> Tensor:
        """The weight of a parameter."""
        return self.weights[name]

    def moment(self, name: str, which: str) -> Tensor:
        """One of Adam's moments of a parameter."""
        return self._states[name].moments[which]


METHODS: dict[str, Callable[[float], tuple[TranslationModel, Objective]]] = {
    "vanilla": vanilla,
    "deep_decoder": deep_decoder,
    "exits": exits,
    "growing": growing,
    "berts": berts,
    "abnet": abnet,
}


def write_corpus(directory: Path, pairs: int = 300, longest: int = 30) -> None:
    """A corpus of random tokens, source and target of like length, the same everywhere."""

    def tokens(count: int, *parts: int) -> list[int]:
        low = VOCABULARY.unk + 1
        return [low + int(each) % (VOCABULARY.size - low) for each in randomness.keys(count, *parts)]

    lengths = 1 + (randomness.keys(pairs, 1) % np.uint64(longest - 4)).astype(int)
    sources = [tokens(length, 2, pair) for pair, length in enumerate(lengths)]
    targets = [tokens(length + pair % 3, 3, pair) for pair, length in enumerate(lengths)]
    with CorpusWriter(directory, "train", VOCABULARY.size) as writer:
        writer.append(sources, targets)


def loader_of(directory: Path, world: World) -> TrainLoader:
    """This rank's share of the updates of the corpus in ``directory``."""
    return TrainLoader(Corpus(directory, "train"), BATCH, 5, world.data_rank, world.data_ranks, VOCABULARY)


def build(
    method: str,
    engine: str,
    world: World,
    directory: Path,
    dropout: float = 0.0,
    weights: dict[str, Tensor] | None = None,
) -> Engine:
    """An engine over a model that is the same in every layout.

    Args:
        method: a key of METHODS.
        engine: NAME[:PRECISION][+recompute], the name being plain, zero0 ... zero3, or offload (ZeRO-3 with
            weights and optimizer in the host's memory).
        world: whose ``tensor_ranks`` share a model.
        directory: of the corpus; each rank writes its DeepSpeed configuration there.
        weights: to start from, instead of fresh ones.
    """
    torch.manual_seed(7)
    module = TrainModule(*METHODS[method](dropout))
    kind, _, recompute = engine.partition("+")
    name, _, precision = kind.partition(":")
    if recompute:
        module.model.recompute(1, 1)
    if weights is not None:
        module.model.load_state_dict(weights, strict=False)
    parallelize(module.model, world)
    # With an epsilon far below rounding errors, Adam turns the sign of a gradient that is zero but for rounding into
    # a whole step of the learning rate, and which CPU it runs on would decide some weights. 1e-6 is above them.
    trainable = [p for p in module.to(world.device).parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=0.0, betas=(0.9, 0.98), eps=1e-6)
    settings: dict[str, Any] = {"name": "plain", "precision": precision or "fp32", "device": world.device.type}
    if name != "plain":
        file = directory / f"rank{world.rank}.json"
        content: dict[str, Any] = {"zero_optimization": {"stage": 0 if name == "offload" else int(name[-1])}}
        if name == "offload":
            content = load_ds_config("zero3_offload")
        # Otherwise ZeRO-3 would leave so small parameters whole.
        content["zero_optimization"]["stage3_param_persistence_threshold"] = 0
        if precision == "fp16":
            content["fp16"] = {"enabled": "auto", "initial_scale_power": 8}
        file.write_text(json.dumps(content))
        settings |= {"name": "deepspeed", "ds_config": str(file)}
    dummy = collate(Corpus(directory, "train"), torch.empty(0, dtype=torch.int64).numpy(), VOCABULARY)
    return build_engine(EngineConfig(**settings), module, optimizer, clip_norm=0.5, world=world, dummy=dummy)


def train(engine: Engine, loader: TrainLoader, world: World, first: int, last: int, cursor: Cursor) -> dict[str, Any]:
    """Make updates ``first`` to ``last`` from a position in the data.

    Returns: for each update its loss, terms, gradient norm, micro-batches a rank, and whether it was skipped; and as
    "cursor" where the data goes on.
    """
    losses, norms, counts, skipped, terms = [], [], [], [], []
    for update in loader.updates(cursor, first):
        result = engine.update(update.micro_batches, update.target_tokens, 3e-3 * min(1.0, update.number / 5))
        total = sum_over_data_ranks({name: float(value) for name, value in result.sums.items()}, world)
        terms.append({name: value / update.target_tokens for name, value in total.items() if name not in _SUMS})
        losses.append(total["loss"] / update.target_tokens)
        norms.append(result.grad_norm)
        counts.append(len(update.micro_batches))
        skipped.append(result.skipped)
        cursor = update.after
        if update.number == last:
            break
    return {"loss": losses, "norm": norms, "counts": counts, "skipped": skipped, "terms": terms, "cursor": cursor}
