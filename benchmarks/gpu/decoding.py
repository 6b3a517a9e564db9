"""Speed of beam search as in `translate`, and of Hugging Face's `generate` with Marian of the same size beside it.

All weights are random, so hypotheses hardly end before the limit. With sentences of *equal* lengths both programs
make the same number of steps. Those of *mixed* lengths have limits of their own, so that they end one after another,
as real sentences do; `generate` has one limit for all.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from harness import Bench, Values
from marian import build_marian
from timing import seconds_of as wall_seconds
from torch import Tensor
from training import TINY

from deepspeed_nmt.build import build_kernels, build_model
from deepspeed_nmt.config import RunConfig, load_config
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.kernels.precision import DTYPES
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.models import prepare_to_decode

SENTENCES, LAYERS, BEAMS, SOURCE, STEPS = (1, 64, 256), (6, 27, 15), (4, 1), 26, 32
GENERATE = "HF generate"
Translate = Callable[[Tensor, int], object]
"""Translates sources in a number of steps."""


def decoding_config(layers: int, beam: int, steps: int, tiny: bool) -> RunConfig:
    """Return the settings of a BIG model whose translations have ``steps`` tokens for a source of SOURCE."""
    depth = [f"model.encoder_layers={layers}", f"model.decoder_layers={layers}"]
    limits = [f"search.beam={beam}", "search.max_length_ratio=1", f"search.max_length_extra={steps - SOURCE}"]
    return load_config("transformer_big", settings=[*(TINY if tiny else ()), *depth, *limits])


def our_model(layers: int, bench: Bench) -> TranslationModel:
    """Build our model, ready to decode."""
    config = decoding_config(layers, 1, STEPS, bench.tiny)
    model = build_model(config, bench.vocabulary, build_kernels(config)).eval()
    prepare_to_decode(model, bench.device, bench.half)
    return model


def ours(model: TranslationModel, config: RunConfig, bench: Bench) -> Translate:
    """Return our way to translate."""
    assert isinstance(config.search, BeamConfig)
    search = BeamSearch(config.search, model, bench.vocabulary)

    def translate(source_BS: Tensor, steps: int) -> object:
        return search.search(source_BS, padded=bool(source_BS.eq(bench.vocabulary.pad).any()))

    return translate


def their_model(layers: int, bench: Bench) -> Any:
    """Build the other program's model."""
    config = decoding_config(layers, 1, STEPS, bench.tiny)
    return build_marian(config, bench.vocabulary, bench.device).to(DTYPES[bench.half]).eval()


def theirs(marian: Any, beam: int) -> Translate:
    """Return the other program's way to translate."""

    def translate(source_BS: Tensor, steps: int) -> object:
        return marian.generate(
            input_ids=source_BS,
            attention_mask=torch.ones_like(source_BS),
            num_beams=beam,
            max_new_tokens=steps,
            min_new_tokens=steps,
        )

    return translate


def measure(translate: Translate, source_BS: Tensor, steps: int, bench: Bench) -> Iterator[Values]:
    """Translate a batch a few times, and yield the columns of the table."""
    tokens = int(source_BS.ne(bench.vocabulary.pad).sum()) + len(source_BS) * (steps - source_BS.shape[1])

    def seconds_of(rounds: int) -> list[float]:
        with torch.inference_mode():
            return [wall_seconds(lambda: translate(source_BS, steps), bench.device) for _ in range(rounds)]

    seconds_of(1 if bench.tiny else 4)
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    seconds = statistics.median(seconds_of(1 if bench.tiny else 3))
    yield {
        "seconds": seconds,
        "sentences_per_s": len(source_BS) / seconds,
        "tokens_per_s": tokens / seconds,
        "step_ms": 1e3 * seconds / steps,
    }
    if bench.on_gpu:
        yield {"peak_gib": torch.cuda.max_memory_allocated(bench.device) / 2**30}


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
    """Measure all sizes, the most wanted first, in case the time runs out."""
    counts, depths, extra = ((1, 2), (2,), 3) if bench.tiny else (SENTENCES, LAYERS, STEPS - SOURCE)
    beams = (2,) if bench.tiny else BEAMS
    equal = [(count, False) for count in counts]
    for layers in depths:
        model = cache(partial(our_model, layers, bench))  # built by the first row that needs it
        for beam in beams:
            config = decoding_config(layers, beam, SOURCE + extra, bench.tiny)
            made = cache(lambda config=config, model=model: ours(model(), config, bench))
            for count, mixed in [*equal, (max(counts), True)]:
                add_row(made, layers, beam, "deepspeed_nmt", count, mixed, extra, bench)
        model.cache_clear()
        model = cache(partial(their_model, layers, bench))
        for beam in beams:
            made = cache(lambda beam=beam, model=model: theirs(model(), beam))
            for count, mixed in equal:
                add_row(made, layers, beam, GENERATE, count, mixed, extra, bench)


def add_row(
    translate: Callable[[], Translate],
    layers: int,
    beam: int,
    program: str,
    count: int,
    mixed: bool,
    extra: int,
    bench: Bench,
) -> None:
    """Measure one way to translate, with sentences of one kind."""
    source_BS = sources(count, mixed, bench)
    steps = source_BS.shape[1] + extra
    bench.measure(
        lambda: measure(translate(), source_BS, steps, bench),
        layers=layers,
        beam=beam,
        sentences=count,
        lengths="mixed" if mixed else "equal",
        program=program,
        precision=bench.half,
    )
