"""Speed of beam search, and of Hugging Face's `generate` with Marian of the same size beside it.

All weights are random, so no hypothesis ends before the limit, and both programs make the same number of steps. Real
sentences end at different lengths, which favours a search that drops finished sentences.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from harness import Bench, Values, wall_seconds
from marian import build_marian
from torch import Tensor
from training import TINY

from deepspeed_nmt.build import build_kernels, build_model
from deepspeed_nmt.config import RunConfig, load_config
from deepspeed_nmt.engine.config import DTYPES
from deepspeed_nmt.search import SEARCHES

SENTENCES, LAYERS, SOURCE, STEPS = (1, 64, 256), (6, 15, 27), 26, 32
PROGRAMS = (("deepspeed_nmt", "fp32"), ("deepspeed_nmt", "bf16"), ("HF generate", "fp32"), ("HF generate", "bf16"))
"""Programs and the dtypes of their weights; add a line for each other one."""


def decoding_config(layers: int, steps: int, tiny: bool) -> RunConfig:
    """Return the settings of a BIG model whose translations have ``steps`` tokens."""
    depth = [f"model.encoder_layers={layers}", f"model.decoder_layers={layers}"]
    limits = ["search.beam=4", "search.max_length_ratio=0", f"search.max_length_extra={steps}"]
    return load_config("transformer_big", settings=[*(TINY if tiny else ()), *depth, *limits])


def decoder(program: str, precision: str, config: RunConfig, bench: Bench) -> Callable[[Tensor], object]:
    """Build a model, and return a function that translates a batch of sentences without padding."""
    dtype, steps = DTYPES[precision], config.search.model_dump()["max_length_extra"]
    if program == "deepspeed_nmt":
        model = build_model(config, bench.vocabulary, build_kernels(config)).to(bench.device, dtype).eval()
        search = SEARCHES[config.search.name].build(config.search, model, bench.vocabulary)
        return lambda source_BS: search.search(source_BS, padded=False)
    marian = build_marian(config, bench.vocabulary, bench.device).to(dtype).eval()
    return lambda source_BS: marian.generate(
        input_ids=source_BS,
        attention_mask=torch.ones_like(source_BS),
        num_beams=4,
        max_new_tokens=steps,
        min_new_tokens=steps,
    )


def measure(translate: Callable[[Tensor], object], source_BS: Tensor, steps: int, bench: Bench) -> Values:
    """Translate a batch a few times, and return the columns of the table."""
    with torch.inference_mode():
        wall_seconds(lambda: translate(source_BS), bench.device)  # warms up
        if bench.on_gpu:
            torch.cuda.reset_peak_memory_stats(bench.device)
        rounds = 1 if bench.tiny else 3
        seconds = statistics.median(wall_seconds(lambda: translate(source_BS), bench.device) for _ in range(rounds))
    values = {
        "seconds": seconds,
        "sentences_per_s": len(source_BS) / seconds,
        "tokens_per_s": len(source_BS) * steps / seconds,
        "step_ms": 1e3 * seconds / steps,
    }
    if bench.on_gpu:
        values["peak_gib"] = torch.cuda.max_memory_allocated(bench.device) / 2**30
    return values


def run(bench: Bench) -> None:
    """Measure all sizes."""
    sentences, depths, steps = ((1, 2), (2,), 3) if bench.tiny else (SENTENCES, LAYERS, STEPS)
    vocabulary = bench.vocabulary
    generator = torch.Generator().manual_seed(1)
    source_BS = torch.randint(vocabulary.unk + 1, vocabulary.size, (max(sentences), SOURCE), generator=generator)
    source_BS[:, -1] = vocabulary.eos
    source_BS = source_BS.to(bench.device)
    for layers, (program, precision) in itertools.product(depths, PROGRAMS):
        config = decoding_config(layers, steps, bench.tiny)
        built = lru_cache(partial(decoder, program, precision, config, bench))
        for count in sentences:
            bench.measure(
                lambda built=built, count=count: measure(built(), source_BS[:count], steps, bench),
                layers=layers,
                sentences=count,
                program=program,
                precision=precision,
            )
