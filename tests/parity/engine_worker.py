"""One rank of a world that trains a small model under several engines, one after the other.

Arguments: corpus directory, output file, methods (a key of METHODS), then engines as NAME[:PRECISION][+recompute]
(plain, zero0 ... zero3). deep_decoder is all of that paper at once: layers that drop their cross-attention sometimes,
always and never, DDR in every and ALD in every other update. exits is the closed chain with N x M softmaxing over its
loops, growing a model on top of a frozen one.
The output is JSON: for each engine the losses, gradient norms and all weights after some updates, and the same for a
run that was probed, stopped half-way, probed again and restored. $TENSOR_RANKS ranks share a model.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.loader import Cursor, TrainLoader, collate
from deepspeed_nmt.data.plan import BatchConfig
from deepspeed_nmt.data.tokenizer import PAD
from deepspeed_nmt.engine import Engine, EngineConfig, build_engine
from deepspeed_nmt.engine.base import ParameterState
from deepspeed_nmt.methods.ald import ALD, ALDConfig
from deepspeed_nmt.methods.consistency import Consistency, ConsistencyConfig
from deepspeed_nmt.methods.cross_attention_drop import CrossAttentionDropConfig, build_cross_attention_drop
from deepspeed_nmt.methods.depth_growing import DepthGrowingConfig, build_depth_growing
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.multi_softmax import MultiSoftmax, MultiSoftmaxConfig
from deepspeed_nmt.methods.recurrent import RecurrentConfig, build_recurrent
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.nn.layers import DecoderLayer, LayerParts
from deepspeed_nmt.parallel.collectives import sum_over_ranks
from deepspeed_nmt.parallel.tensor import parallelize
from deepspeed_nmt.parallel.world import World, join_world, leave_world

UPDATES = 20
BASIC = ("loss", "nll")
VOCABULARY = Vocabulary(61)  # odd: two ranks that share a model hold unequal slices
BATCH = BatchConfig(update_tokens=700, micro_tokens=260)


class Saved:
    """A state held in memory."""

    def __init__(self, states: Sequence[ParameterState]) -> None:
        self.states = {state.name: state for state in states}

    def weight(self, name: str) -> Tensor:
        return self.states[name].weight

    def moment(self, name: str, which: str) -> Tensor:
        return self.states[name].moments[which]


def lr(update: int) -> float:
    return 3e-3 * min(1.0, update / 5)


def vanilla(dropout: float) -> tuple[TranslationModel, Objective]:
    config = TransformerConfig(dim=32, ffn_dim=64, heads=4, encoder_layers=2, decoder_layers=2, dropout=dropout)
    return build_transformer(config, VOCABULARY), Objective(LabelSmoothed(0.1, PAD))


def deep_decoder(dropout: float) -> tuple[TranslationModel, Objective]:
    config = TransformerConfig(dim=32, ffn_dim=64, heads=4, encoder_layers=1, decoder_layers=4, dropout=dropout)

    def make_layer(number: int, parts: LayerParts) -> DecoderLayer:
        rate = {1: 1.0, 2: 0.9, 3: 0.5, 4: 0.0}[number]
        drop = CrossAttentionDropConfig(drop_depth=4, drop_ratio=rate)
        return build_cross_attention_drop(drop, number, parts)

    terms = [
        Consistency(ConsistencyConfig(weight=0.7), encode_twice=False),
        ALD(ALDConfig(weight=0.5, every=2), VOCABULARY),
    ]
    return build_transformer(config, VOCABULARY, make_layer), Objective(LabelSmoothed(0.1, PAD), terms)


def exits(dropout: float) -> tuple[TranslationModel, Objective]:
    config = RecurrentConfig(
        dim=32, ffn_dim=64, heads=4, encoder_layers=2, decoder_layers=2, dropout=dropout, sharing="closed_chain",
        encoder_loops=3, decoder_loops=2,
    )  # fmt: skip
    return build_recurrent(config, VOCABULARY), Objective(MultiSoftmax(MultiSoftmaxConfig(exits="2x2"), PAD))


def growing(dropout: float) -> tuple[TranslationModel, Objective]:
    config = DepthGrowingConfig(
        dim=32, ffn_dim=64, heads=4, encoder_layers=1, decoder_layers=1, dropout=dropout, norm="post",
        top_encoder_layers=1, top_decoder_layers=1,
    )  # fmt: skip
    return build_depth_growing(config, VOCABULARY), Objective(LabelSmoothed(0.1, PAD))


METHODS = {"vanilla": vanilla, "deep_decoder": deep_decoder, "exits": exits, "growing": growing}


def build(
    method: str,
    engine: str,
    world: World,
    directory: Path,
    dropout: float = 0.0,
    weights: dict[str, Tensor] | None = None,
) -> Engine:
    """An engine over a model that is the same in every layout; ``directory`` holds the corpus."""
    torch.manual_seed(7)
    module = TrainModule(*METHODS[method](dropout))
    engine, _, recompute = engine.partition("+")
    if recompute:
        module.model.recompute(1, 1)
    if weights is not None:
        module.model.load_state_dict(weights, strict=False)
    parallelize(module.model, world)
    # With an epsilon far below rounding errors, Adam turns the sign of a gradient that is zero but for rounding into
    # a whole step of the learning rate, and which CPU it runs on would decide some weights. 1e-6 is above them.
    trainable = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trainable, lr=0.0, betas=(0.9, 0.98), eps=1e-6)
    name, _, precision = engine.partition(":")
    if name == "plain":
        settings = EngineConfig(name="plain", precision=precision or "fp32", device="cpu")
    else:
        ds = directory / f"{name}.json"
        content: dict[str, Any] = {
            "zero_optimization": {"stage": int(name[-1]), "stage3_param_persistence_threshold": 0}
        }
        if precision == "fp16":
            content["fp16"] = {"enabled": "auto", "initial_scale_power": 8}
        if world.is_main:
            ds.write_text(json.dumps(content))
        torch.distributed.barrier()
        settings = EngineConfig(name="deepspeed", ds_config=str(ds), precision=precision or "fp32", device="cpu")
    dummy = collate(Corpus(directory, "train"), torch.empty(0, dtype=torch.int64).numpy(), VOCABULARY)
    return build_engine(settings, module, optimizer, clip_norm=0.5, world=world, dummy=dummy)


def loader_of(directory: Path, world: World) -> TrainLoader:
    """This rank's share of the updates."""
    return TrainLoader(Corpus(directory, "train"), BATCH, 5, world.data_rank, world.data_ranks, VOCABULARY)


def train(engine: Engine, loader: TrainLoader, world: World, first: int, last: int, cursor: Cursor) -> dict[str, Any]:
    losses, norms, counts, skipped, terms = [], [], [], [], []
    for update in loader.updates(cursor, first):
        result = engine.update(update.micro_batches, update.target_tokens, lr(update.number))
        sums = {name: float(value) / world.tensor_ranks for name, value in result.sums.items()}
        total = sum_over_ranks(sums, world)
        terms.append({name: value / update.target_tokens for name, value in total.items() if name not in BASIC})
        losses.append(total["loss"] / update.target_tokens)
        norms.append(result.grad_norm)
        counts.append(len(update.micro_batches))
        skipped.append(result.skipped)
        cursor = update.after
        if update.number == last:
            break
    return {"loss": losses, "norm": norms, "counts": counts, "skipped": skipped, "terms": terms, "cursor": cursor}


def main() -> None:
    world = join_world("cpu", timeout_s=60, tensor_ranks=int(os.environ.get("TENSOR_RANKS", "1")))
    directory, out, method = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    loader = loader_of(directory, world)
    report: dict[str, Any] = {}
    for engine_name in sys.argv[4:]:
        engine = build(method, engine_name, world, directory)
        report[engine_name] = train(engine, loader, world, 1, UPDATES, Cursor())
        del report[engine_name]["cursor"]
        report[engine_name]["weights"] = {s.name: s.weight.flatten().tolist() for s in engine.parameters()}
        engine.close()
        # Stop half-way, hand the state to a new engine, go on; dropout on, since its masks must come back too.
        half = UPDATES // 2
        ends = []
        for resume in (False, True):
            engine = build(method, engine_name, world, directory, dropout=0.1)
            if resume:
                engine.probe(loader.largest())
            done = train(engine, loader, world, 1, half, Cursor())
            if resume:
                states, scalars = list(engine.state()), engine.scalars()
                engine.close()
                weights = {s.name: s.weight for s in states}
                engine = build(method, engine_name, world, directory, dropout=0.1, weights=weights)
                engine.probe(loader.largest())
                engine.restore(Saved(states), scalars)
            rest = train(engine, loader, world, half + 1, UPDATES, done["cursor"])
            ends.append((rest["loss"], [s.weight.flatten().tolist() for s in engine.parameters()], engine.scalars()))
            engine.close()
        report[engine_name]["resumed_bitwise"] = ends[0] == ends[1]
        report[engine_name]["resumed_loss"] = [ends[0][0], ends[1][0]]
    if world.is_main:
        out.write_text(json.dumps(report))
    leave_world()


if __name__ == "__main__":
    main()
