"""Training speed beside Hugging Face's Marian, a model of the same size.

Marian is post-norm and ours pre-norm, with the same matrix products. Its loop is what a careful user would write:
SDPA, fused Adam, autocast or 16-bit weights, copies from pinned memory one micro-batch ahead, gradient accumulation
without waiting for the GPU, and clipping. "16-bit weights" also keeps Adam's moments in 16 bit, which our engines do
not: it flatters Marian.

Marian needs padded batches. With little padding its micro-batches are small, so it is trained with several bounds on
it. `speedup` is relative to the fastest Marian. Ours trains as it does by default, packed on a GPU from sm_80 up, and
padded, on the very batches of the fastest Marian.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import Bench, Skipped, Values, write_corpus
from training import BIG, PADDED, PAIRS, Memory, Variant, timed, training

from deepspeed_nmt.config import RunConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.loader import TrainLoader, Update
from deepspeed_nmt.engine.settings import resolve_engine
from deepspeed_nmt.engine.transfer import on_device
from deepspeed_nmt.kernels.precision import DTYPES
from deepspeed_nmt.parallel.world import World

PEERS = ("16-bit weights", "autocast")
PADDINGS = (0.25, 0.5, 0.1)
"""Values of `batch.max_padding` with which Marian is trained, those that are probably the best first."""


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
        for batch in on_device(update.micro_batches, device):
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
    with tempfile.TemporaryDirectory() as directory:
        corpus = write_corpus(Path(directory), 400 if bench.tiny else PAIRS, bench.vocabulary)
        config, memory = BIG.config(bench.tiny), Memory.of(bench.device)
        settings = resolve_engine(config.engine, config.optimizer, World(0, 1, 0, bench.device))
        tokens = memory.fitting_tokens(config, bench.vocabulary, settings)
        fastest, best, left = 0.0, PADDINGS[0], len(PEERS) * len(PADDINGS) + 2
        for peer, padding in itertools.product(PEERS, PADDINGS):

            def theirs(
                peer: str = peer, padding: float = padding, budget: float = bench.seconds_left / left
            ) -> Values:
                make = marian_update(config, peer, bench)
                batch = config.batch.model_copy(
                    update={"layout": "padded", "max_padding": padding, "micro_tokens": tokens}
                )
                loader = TrainLoader.of_corpus(corpus, batch, config.training.seed, 0, 1, bench.vocabulary)
                return {"layout": "padded", **timed(make, loader, bench, budget).values()}

            labels = {"model": BIG.name, "settings": peer, "max_padding": padding, "precision": bench.half}
            found = bench.measure(theirs, program="HF Marian", **labels)
            speed = float(str(found.get("tokens_per_s", 0.0)))
            if speed > fastest:
                fastest, best = speed, padding
            left -= 1
        same = replace(PADDED, settings=(*PADDED.settings, f"batch.max_padding={best}"))
        for variant, shown in ((BIG, "-"), (same, best)):
            budget = bench.seconds_left / left
            bench.measure(
                lambda variant=variant, budget=budget: ours(variant, corpus, bench, memory, budget, fastest),
                program="deepspeed_nmt",
                model=variant.name,
                settings=" ".join(variant.settings[:1]) or "default",
                max_padding=shown,
                precision=bench.half,
            )
            left -= 1


def ours(
    variant: Variant, corpus: Corpus, bench: Bench, memory: Memory, budget_s: float, fastest: float
) -> Iterator[Values]:
    """Measure one of our models, and compare it with the fastest Marian, in tokens a second."""
    with training(replace(variant, precision=bench.half), corpus, bench, memory) as run:
        yield run.backends
        values = timed(run.update, run.loader, bench, budget_s).values()
        yield {**values, "speedup": float(str(values["tokens_per_s"])) / fastest if fastest else None}
