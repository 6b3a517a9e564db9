"""Speed of beam search on a CPU, beside CTranslate2 and Hugging Face's `generate` with the same weights.

    OMP_NUM_THREADS=1 python benchmarks/run.py decode [--layers 6 15 27] [--beams 4 1] [--batches 1 32 256]
    OMP_NUM_THREADS=1 python benchmarks/run.py decode --as decode_start --start-up RUN

The model is written for the other programs as `deepspeed-nmt export` writes it. Its weights are random, so that no
hypothesis ends before the limit, and every program makes the same number of steps: 6 encoder layers, D=256, FFN
1,024, 4 heads, V=8,000, sources of 16 tokens, translations of 24.

The programs take turns. Seconds are processor time of all threads. In parentheses is the median, over the rounds, of
CTranslate2's seconds in the same precision divided by the program's (of CTranslate2's in fp32 for Hugging Face and
bf16). Loading and packing are not measured: every program has translated the text before.

--start-up measures the whole command for one line instead, from its start to its end, of a trained run: ours, ours by
CTranslate2, and Hugging Face's classes on the exported run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from records import Results, Table
from timing import Work, add_rounds, in_turns, ratio, relative
from torch import Tensor

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.export.ctranslate2_weights import write_ctranslate2
from deepspeed_nmt.export.huggingface_weights import write_huggingface
from deepspeed_nmt.kernels import onednn_ops
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.models import prepare_to_decode

DIM, FFN, HEADS, ENCODER_LAYERS, SOURCE, STEPS, LONGEST = 256, 1024, 4, 6, 16, 24, 64
V = Vocabulary(8000)
PEERS = {"fp32": "float32", "int8": "int8"}
CASE = "decoder layers, beam, batch"
Translate = Callable[[Tensor, int], int]
"""Translates a batch of sentences, (B,S), with a beam, and returns the number of tokens that it has written."""


def random_model(layers: int) -> TranslationModel:
    """Return a model with random weights, whose hypotheses never end before the limit."""
    torch.manual_seed(1)
    shape = {"dim": DIM, "ffn_dim": FFN, "heads": HEADS, "encoder_layers": ENCODER_LAYERS, "decoder_layers": layers}
    return build_transformer(TransformerConfig.model_validate(shape), V).eval()


def ours(layers: int, precision: str) -> Translate:
    """Return our search with weights packed in a precision."""
    model = random_model(layers)
    prepare_to_decode(model, torch.device("cpu"), precision)
    searches: dict[int, BeamSearch] = {}

    def translate(source_BS: Tensor, beam: int) -> int:
        if beam not in searches:
            settings = BeamConfig(beam=beam, max_length_ratio=0, max_length_extra=STEPS)
            searches[beam] = BeamSearch(settings, model, V)
        return sum(len(hypotheses[0].tokens) for hypotheses in searches[beam].search(source_BS, padded=False))

    return translate


def ctranslate2(layers: int, precision: str, directory: Path) -> Translate:
    """Return CTranslate2's search with the same weights."""
    from ctranslate2 import Translator

    pieces = [f"t{number}" for number in range(V.size)]
    where = directory / f"ctranslate2-{layers}-{precision}"
    where.mkdir()
    write_ctranslate2(where, random_model(layers).described(), V, (pieces, pieces), LONGEST, precision)
    program = Translator(
        str(where), compute_type=PEERS[precision], inter_threads=1, intra_threads=torch.get_num_threads()
    )
    limits = {"min_decoding_length": STEPS - 1, "max_decoding_length": STEPS}

    def translate(source_BS: Tensor, beam: int) -> int:
        rows = [[pieces[token] for token in row[:-1]] for row in source_BS.tolist()]  # it adds the EOS itself
        found = program.translate_batch(rows, beam_size=beam, max_batch_size=len(rows), **limits)
        return sum(len(result.hypotheses[0]) for result in found)

    return translate


def huggingface(layers: int, directory: Path) -> Translate:
    """Return Hugging Face's search with the same weights."""
    from transformers import AutoModelForSeq2SeqLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # each call would warn of its limit
    logging.disable_progress_bar()
    where = directory / f"huggingface-{layers}"
    where.mkdir()
    write_huggingface(where, random_model(layers).described(), V, LONGEST)
    model = AutoModelForSeq2SeqLM.from_pretrained(where).eval()
    limits = {"min_new_tokens": STEPS, "max_new_tokens": STEPS, "do_sample": False}

    def translate(source_BS: Tensor, beam: int) -> int:
        found = model.generate(source_BS, attention_mask=torch.ones_like(source_BS), num_beams=beam, **limits)
        return int(found[:, 1:].ne(V.pad).sum())

    return translate


def start_up(run: Path, rounds: int, directory: Path) -> Results:
    """Measure whole commands that translate one line."""
    ours = [sys.executable, "-m", "deepspeed_nmt"]
    export = [*ours, "export", "--run", str(run), "--format", "huggingface", "--out", str(directory / "huggingface")]
    subprocess.run([*export, "--sentences", "2"], check=True, capture_output=True)
    text = directory / "line"
    text.write_text("A man in a blue shirt is standing on a ladder cleaning a window.\n", encoding="utf-8")
    peer = (
        "import sys; from transformers import AutoModelForSeq2SeqLM, AutoTokenizer; "
        "tokenizer, model = (each.from_pretrained(sys.argv[1]) for each in (AutoTokenizer, AutoModelForSeq2SeqLM)); "
        "found = model.generate(**tokenizer(open(sys.argv[2]).readlines(), return_tensors='pt'), num_beams=4); "
        "tokenizer.batch_decode(found, skip_special_tokens=True)"
    )
    translate = [*ours, "translate", "--run", str(run), "--input", str(text), "--beam", "4", "--output"]
    by_ctranslate2 = ["--runtime", "ctranslate2", "--precision"]
    programs = {
        "ours": [*translate, str(directory / "torch")],
        "ours, CTranslate2 fp32": [*translate, str(directory / "fp32"), *by_ctranslate2, "fp32"],
        "ours, CTranslate2 int8": [*translate, str(directory / "int8"), *by_ctranslate2, "int8"],
        "HF": [sys.executable, "-c", peer, str(directory / "huggingface"), str(text)],
    }
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}

    def work(command: list[str]) -> Work:
        return lambda _: partial(subprocess.run, command, check=True, capture_output=True, env=environment)

    # Round 0 exports for CTranslate2 and fills the disk's cache.
    taken = in_turns({name: work(command) for name, command in programs.items()}, rounds)
    return Results(tables={"start": relative(taken)}, rounds=taken)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, default in (("layers", [6, 15, 27]), ("beams", [4, 1]), ("batches", [1, 32, 256])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default, help="(default: %(default)s)")
    add_rounds(parser, 5)
    parser.add_argument("--start-up", type=Path, metavar="RUN", help="measure whole commands for one line")


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Measure all programs; a row more with each size."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        if arguments.start_up is not None:
            yield start_up(arguments.start_up, arguments.rounds, directory)
            return
        generator = torch.Generator().manual_seed(1)
        sources = torch.randint(4, V.size, (max(arguments.batches), SOURCE), generator=generator)
        sources[:, -1] = V.eos
        rows: list[dict[str, object]] = []
        rounds: dict[str, object] = {}
        for layers in arguments.layers:
            precisions = [each for each in onednn_ops.PACKED if onednn_ops.obstacle(each) is None]
            programs = {f"ours {precision}": ours(layers, precision) for precision in precisions}
            programs |= {f"CTranslate2 {peer}": ctranslate2(layers, peer, directory) for peer in PEERS}
            programs["HF fp32"] = huggingface(layers, directory)
            for beam, batch in itertools.product(arguments.beams, arguments.batches):
                values, taken = measure(programs, sources[:batch], beam, arguments.rounds)
                rows.append({CASE: [layers, beam, batch], **values})
                rounds[f"{layers}, {beam}, {batch}"] = taken
                formats = {CASE: "{}, {}, {}", **dict.fromkeys(programs, "{:,.0f} ({:.2f})")}
                yield Results(tables={"speed": Table.of(rows, formats)}, rounds=rounds)


def measure(
    programs: dict[str, Translate], source_BS: Tensor, beam: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return tokens a second and the ratio to CTranslate2 by program, and the seconds of each round."""
    tokens: dict[str, int] = {}

    def once(name: str) -> None:
        tokens[name] = programs[name](source_BS, beam)

    works: dict[str, Work] = {name: lambda _, name=name: partial(once, name) for name in programs}  # type: ignore[misc]
    taken = in_turns(works, rounds, clock=time.process_time)
    found = {}
    for name, seconds in taken.items():
        peer = taken["CTranslate2 int8" if name.endswith("int8") else "CTranslate2 fp32"]
        found[name] = [tokens[name] / statistics.median(seconds), ratio(peer, seconds)]
    return found, taken
