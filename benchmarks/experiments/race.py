"""Experiment: a race of deep and of other systems on real text, with equal numbers of updates.

    python benchmarks/run.py race --data DATA --out OUT [--jobs ARM:SEED ...] [--updates N] [--set K=V ...]

DATA is a directory made by `deepspeed-nmt prepare`, with a test set: raw Multi30k, English to German, and a
vocabulary of 4,000. All arms have D=128, and the same data, seed, updates and schedule; their parameters differ, and
are a column. Families that this program lacks are left out. A run that was stopped is resumed. Then the last
checkpoints are averaged, and the test set is translated and scored; the others are compared with the first arm.
`deepspeed-nmt report collapse OUT/*-seed1` draws the curves.
"""

from __future__ import annotations

import argparse

from arms import Arm, Experiment, add_options
from records import Results

from deepspeed_nmt.methods import LAYERS, MODELS

COMMON = [
    *("model.dim=128", "engine.name=plain", "engine.device=cpu", "training.keep_last=4", "training.log_every=50"),
    *("optimizer.lr=2e-3", "optimizer.clip_norm=1", "schedule.name=cosine", "schedule.warmup_updates=400"),
    *("batch.update_tokens=2048", "batch.micro_tokens=2048", "model.dropout=0.2", "training.validate_every=500"),
    *("validation.max_sentences=200", "search.beam=4", "collapse.every=250"),
]
TRANSFORMER = ["model.ffn_dim=512", "model.heads=4"]


def transformer(encoder: int, decoder: int, *more: str) -> Arm:
    """Return an arm with the layers of a Transformer."""
    return Arm([*TRANSFORMER, f"model.encoder_layers={encoder}", f"model.decoder_layers={decoder}", *more])


CAD = ["layer.name=cross_attention_drop", "layer.drop_depth=12", "layer.drop_ratio=1.0"]
ARMS = {
    "plain6-6": transformer(6, 6),
    "pre6-18": transformer(6, 18),
    "post6-18": transformer(6, 18, "model.norm=post"),
    "mixed6-18": transformer(6, 18, "model.decoder_norm=post"),
    "dlcl18-6": transformer(18, 6, "model.name=dlcl"),
    "coordination6": transformer(6, 6, "model.name=coordination"),
    "merged_attention18": transformer(
        18, 18, "model.norm=post", "model.init=depth_scaled", "layer.name=merged_attention"
    ),
    "relative6-6": transformer(6, 6, "model.name=relative_positions"),
    "gnmt": Arm(["model.name=gnmt", "model.encoder_layers=4", "model.decoder_layers=4"], recipe="gnmt_wmt14_ende"),
    "convs2s": Arm(
        ["model.name=convs2s", *(f"model.{side}_convolutions=[[6,128,3]]" for side in ("encoder", "decoder"))],
        recipe="convs2s_wmt14_ende",
    ),
    "recurrent6-6": transformer(6, 6, "model.name=recurrent", "model.encoder_loops=3", "model.decoder_loops=2"),
    "deep_decoder6-18": transformer(6, 18, *CAD, "objective.ddr.weight=1", "objective.ald.weight=1"),
}


def existing() -> dict[str, Arm]:
    """Return the arms whose methods this program has."""

    def exists(arm: Arm) -> bool:
        named = dict(setting.split("=", 1) for setting in arm.settings)
        model, layer = named.get("model.name", MODELS.default), named.get("layer.name", LAYERS.default)
        return model in MODELS and layer in LAYERS

    return {name: arm for name, arm in ARMS.items() if exists(arm)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, existing(), [f"{name}:1" for name in existing()])


def run(arguments: argparse.Namespace) -> Results:
    """Run the arms."""
    return Experiment(existing(), arguments, COMMON).run(arguments.jobs)
