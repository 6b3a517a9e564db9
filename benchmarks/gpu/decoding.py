"""Speed of beam search as in `translate`, and of Hugging Face's `generate` with Marian of the same size beside it.

All weights are random, so hypotheses hardly end before the limit. With sentences of *equal* lengths both programs
make the same number of steps. Those of *mixed* lengths have limits of their own, so that they end one after another,
as real sentences do; `generate` has one limit for all.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import lru_cache, partial
from typing import get_args

import torch
from harness import Bench, Skipped, Values, wall_seconds
from marian import build_marian
from torch import Tensor
from training import TINY

from deepspeed_nmt.build import build_kernels, build_model
from deepspeed_nmt.config import RunConfig, load_config
from deepspeed_nmt.engine.config import DTYPES
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch, Steps
from deepspeed_nmt.search.precision import prepare_to_decode

SENTENCES, LAYERS, BEAMS, SOURCE, STEPS = (1, 32, 256), (6, 27), (1, 4), 26, 32
GENERATE = "HF generate"
WAYS = ("graphs", "static", "growing", GENERATE)
"""Ways to take the steps, each a :data:`~deepspeed_nmt.search.beam.Steps` or the other program; `translate` on a GPU
takes graphs."""


def decoding_config(layers: int, beam: int, steps: int, tiny: bool) -> RunConfig:
    """Return the settings of a BIG model whose translations have ``steps`` tokens for a source of SOURCE."""
    depth = [f"model.encoder_layers={layers}", f"model.decoder_layers={layers}"]
    limits = [f"search.beam={beam}", "search.max_length_ratio=1", f"search.max_length_extra={steps - SOURCE}"]
    return load_config("transformer_big", settings=[*(TINY if tiny else ()), *depth, *limits])


def decoder(way: str, precision: str, config: RunConfig, bench: Bench) -> Callable[[Tensor, int], object]:
    """Build a model, and return a function of sources, and of the steps that it makes."""
    beam = config.search.width
    if way == GENERATE:
        marian = build_marian(config, bench.vocabulary, bench.device).to(DTYPES[precision]).eval()
        return lambda source_BS, steps: marian.generate(
            input_ids=source_BS,
            attention_mask=torch.ones_like(source_BS),
            num_beams=beam,
            max_new_tokens=steps,
            min_new_tokens=steps,
        )
    if way == "graphs" and not bench.on_gpu:
        raise Skipped("CUDA graphs need a GPU")
    assert way in get_args(Steps) and isinstance(config.search, BeamConfig)
    model = build_model(config, bench.vocabulary, build_kernels(config)).eval()
    prepare_to_decode(model, bench.device, precision)
    search = BeamSearch(config.search, model, bench.vocabulary, way)  # type: ignore[arg-type]
    return lambda source_BS, steps: search.search(source_BS, padded=bool(source_BS.eq(bench.vocabulary.pad).any()))


def measure(translate: Callable[[Tensor, int], object], source_BS: Tensor, steps: int, bench: Bench) -> Values:
    """Translate a batch a few times, and return the columns of the table."""
    tokens = int(source_BS.ne(bench.vocabulary.pad).sum()) + len(source_BS) * (steps - source_BS.shape[1])
    with torch.inference_mode():
        for _ in range(1 if bench.tiny else 4):  # graphs are recorded when their sizes have occurred a few times
            wall_seconds(lambda: translate(source_BS, steps), bench.device)
        if bench.on_gpu:
            torch.cuda.reset_peak_memory_stats(bench.device)
        rounds = 1 if bench.tiny else 3
        seconds = statistics.median(
            wall_seconds(lambda: translate(source_BS, steps), bench.device) for _ in range(rounds)
        )
    values = {
        "seconds": seconds,
        "sentences_per_s": len(source_BS) / seconds,
        "tokens_per_s": tokens / seconds,
        "step_ms": 1e3 * seconds / steps,
    }
    if bench.on_gpu:
        values["peak_gib"] = torch.cuda.max_memory_allocated(bench.device) / 2**30
    return values


def sources(count: int, mixed: bool, bench: Bench) -> Tensor:
    """Return random sentences of SOURCE tokens, or of a half to one and a half times as many. Shape: -> (B,S)."""
    vocabulary, generator = bench.vocabulary, torch.Generator().manual_seed(1)
    lengths_B = torch.full((count,), SOURCE)
    if mixed:
        lengths_B = torch.linspace(1.5 * SOURCE, 0.5 * SOURCE, count).long()
    longest = int(lengths_B.max())
    source_BS = torch.randint(vocabulary.unk + 1, vocabulary.size, (count, longest), generator=generator)
    place_S, last_B1 = torch.arange(longest), lengths_B.unsqueeze(1) - 1
    source_BS[place_S == last_B1] = vocabulary.eos
    source_BS[place_S > last_B1] = vocabulary.pad
    return source_BS.to(bench.device)


def run(bench: Bench) -> None:
    """Measure all sizes."""
    counts, depths, extra = ((1, 2), (2,), 3) if bench.tiny else (SENTENCES, LAYERS, STEPS - SOURCE)
    beams = (2,) if bench.tiny else BEAMS
    for layers, beam, way in itertools.product(depths, beams, WAYS):
        config = decoding_config(layers, beam, SOURCE + extra, bench.tiny)
        built = lru_cache(partial(decoder, way, bench.half, config, bench))
        cases = [(count, False) for count in counts]
        if way != GENERATE:
            cases.append((max(counts), True))
        for count, mixed in cases:
            source_BS = sources(count, mixed, bench)
            steps = source_BS.shape[1] + extra
            bench.measure(
                lambda built=built, source_BS=source_BS, steps=steps: measure(built(), source_BS, steps, bench),
                layers=layers,
                beam=beam,
                sentences=count,
                lengths="mixed" if mixed else "equal",
                program=way if way == GENERATE else "deepspeed_nmt",
                steps="-" if way == GENERATE else way,
                precision=bench.half,
            )
