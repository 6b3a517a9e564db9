"""Training speed beside Hugging Face's Marian: the same size, the same batches, and as good a loop.

Marian is post-norm and ours pre-norm, with the same matrix products. Its loop is what a careful user would write:
SDPA, fused Adam, autocast or 16-bit weights, gradient accumulation without waiting for the GPU, and clipping.
`speedup` is relative to the fastest Marian. "16-bit weights" also keeps Adam's moments in 16 bit, which our engines
do not: it flatters Marian.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import Bench, Skipped, Values, write_corpus
from training import BIG, PAIRS, Variant, timed, training

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.loader import TrainLoader, Update
from deepspeed_nmt.engine.config import DTYPES

VARIANTS = (BIG,)
"""Our settings to compare; add a line for each other one."""
PEERS = ("autocast", "16-bit weights")


def build_marian(config: RunConfig, vocabulary: Vocabulary, device: torch.device) -> Any:
    """Build Marian in the size of one of our models.

    Raises:
        Skipped: if transformers is not installed.
    """
    try:
        from transformers import MarianConfig, MarianMTModel
    except ImportError as error:
        raise Skipped(f"transformers cannot be imported: {error}") from error
    ours = config.model.model_dump()
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (
            ("layers", ours[f"{side}_layers"]),
            ("ffn_dim", ours["ffn_dim"]),
            ("attention_heads", ours["heads"]),
        )
    }
    torch.manual_seed(1)
    settings = MarianConfig(
        vocab_size=vocabulary.size,
        d_model=ours["dim"],
        dropout=ours["dropout"],
        attention_dropout=0.0,
        activation_dropout=0.0,
        activation_function="relu",
        max_position_embeddings=512,
        scale_embedding=True,
        pad_token_id=vocabulary.pad,
        bos_token_id=vocabulary.bos,
        eos_token_id=vocabulary.eos,
        decoder_start_token_id=vocabulary.bos,
        forced_eos_token_id=None,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        **sides,
    )
    return MarianMTModel(settings).to(device)


def marian_update(config: RunConfig, peer: str, bench: Bench) -> Callable[[Update], None]:
    """Return a function that makes an update of Marian."""
    device, dtype = bench.device, DTYPES[bench.half]
    model = build_marian(config, bench.vocabulary, device).train()
    autocast = peer == "autocast"
    if not autocast:
        model = model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    def make(update: Update) -> None:
        for each in update.micro_batches:
            batch = each.to(device)
            with torch.autocast(device.type, dtype=dtype, enabled=autocast):
                logits = model(
                    input_ids=batch.source_BS,
                    attention_mask=batch.source_BS.ne(batch.pad),
                    decoder_input_ids=batch.target_input_BT,
                    use_cache=False,
                ).logits
                loss = F.cross_entropy(
                    logits.flatten(0, 1),
                    batch.target_output_BT.flatten(),
                    ignore_index=batch.pad,
                    label_smoothing=0.1,
                    reduction="sum",
                )
            (loss / update.target_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return make


def run(bench: Bench) -> None:
    """Measure Marian, then our models."""
    runs = len(PEERS) + len(VARIANTS)
    with tempfile.TemporaryDirectory() as directory:
        corpus = write_corpus(Path(directory), 400 if bench.tiny else PAIRS, bench.vocabulary)
        config = BIG.config(bench.tiny)
        fastest = 0.0
        for number, peer in enumerate(PEERS):

            def theirs(peer: str = peer, budget: float = bench.seconds_left / (runs - number)) -> Values:
                make = marian_update(config, peer, bench)
                loader = TrainLoader(corpus, config.batch, config.training.seed, 0, 1, bench.vocabulary)
                return timed(make, loader, bench, budget).values()

            found = bench.measure(theirs, program="HF Marian", model=BIG.name, settings=peer, precision=bench.half)
            fastest = max(fastest, float(str(found.get("tokens_per_s", 0.0))))
        for number, variant in enumerate(VARIANTS):
            budget = bench.seconds_left / (len(VARIANTS) - number)
            bench.measure(
                lambda variant=variant, budget=budget: ours(variant, corpus, bench, budget, fastest),
                program="deepspeed_nmt",
                model=variant.name,
                settings=" ".join(variant.settings),
                precision=bench.half,
            )


def ours(variant: Variant, corpus: Corpus, bench: Bench, budget_s: float, fastest: float) -> Values:
    """Measure one of our models, and compare it with the fastest Marian, in tokens a second."""
    with training(replace(variant, precision=bench.half).config(bench.tiny), corpus, bench) as run:
        values = timed(run.update, run.loader, bench, budget_s).values()
        return {**values, "speedup": float(str(values["tokens_per_s"])) / fastest if fastest else None}
