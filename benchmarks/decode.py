"""Speed of beam search on a CPU, beside CTranslate2 and Hugging Face's `generate` with the same weights.

    OMP_NUM_THREADS=1 python benchmarks/decode.py [--layers 6 15 27] [--beams 4 1] [--batches 1 32 256] [--rounds 5]

The model is written for the other programs as `deepspeed-nmt export` writes it. Its weights are random, so that no
hypothesis ends before the limit, and every program makes the same number of steps: 6 encoder layers, D=256, FFN
1,024, 4 heads, V=8,000, sources of 16 tokens, translations of 24. Real sentences end at different lengths.

The programs take turns in a random order, so that other work on the machine affects all alike. `ratio` is the median,
over the rounds, of CTranslate2's seconds in the same precision divided by the program's (of CTranslate2's in fp32 for
Hugging Face, and for bf16). Loading and packing are not measured: every program has translated the batch before.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.export.ctranslate2_weights import write_ctranslate2
from deepspeed_nmt.export.huggingface_weights import write_huggingface
from deepspeed_nmt.kernels import packed
from deepspeed_nmt.methods.transformer import Transformer, TransformerConfig, build_transformer
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.precision import prepare_to_decode

DIM, FFN, HEADS, ENCODER_LAYERS, VOCABULARY, SOURCE, STEPS, LONGEST = 256, 1024, 4, 6, 8000, 16, 24, 64
PEERS = {"fp32": "float32", "int8": "int8"}
Translate = Callable[[Tensor, int], object]
"""Translates a batch of sentences, (B,S), with a beam."""


def build(layers: int, vocabulary: Vocabulary) -> Transformer:
    """Build a model with random weights and this many decoder layers."""
    torch.manual_seed(1)
    config = TransformerConfig(
        dim=DIM, ffn_dim=FFN, heads=HEADS, encoder_layers=ENCODER_LAYERS, decoder_layers=layers
    )
    return build_transformer(config, vocabulary).eval()


def ours(layers: int, vocabulary: Vocabulary, precision: str) -> Translate:
    """Return our search with weights packed in a precision."""
    model = build(layers, vocabulary)
    prepare_to_decode(model, torch.device("cpu"), precision)

    def translate(source_BS: Tensor, beam: int) -> object:
        settings = BeamConfig(beam=beam, max_length_ratio=0, max_length_extra=STEPS)
        return BeamSearch(settings, model, vocabulary).search(source_BS, padded=False)

    return translate


def ctranslate2(layers: int, vocabulary: Vocabulary, precision: str, directory: Path) -> Translate:
    """Return CTranslate2's search with the same weights."""
    from ctranslate2 import Translator

    pieces = [f"t{number}" for number in range(vocabulary.size)]
    where = directory / f"ctranslate2-{layers}-{precision}"
    where.mkdir()
    write_ctranslate2(where, build(layers, vocabulary).plain(), vocabulary, (pieces, pieces), LONGEST, precision)
    program = Translator(
        str(where), compute_type=PEERS[precision], inter_threads=1, intra_threads=torch.get_num_threads()
    )

    def translate(source_BS: Tensor, beam: int) -> object:
        rows = [[pieces[token] for token in row[:-1]] for row in source_BS.tolist()]  # it adds the EOS itself
        return program.translate_batch(
            rows, beam_size=beam, max_batch_size=len(rows), min_decoding_length=STEPS - 1, max_decoding_length=STEPS
        )

    return translate


def huggingface(layers: int, vocabulary: Vocabulary, directory: Path) -> Translate:
    """Return Hugging Face's search with the same weights."""
    from transformers import AutoModelForSeq2SeqLM

    where = directory / f"huggingface-{layers}"
    where.mkdir()
    write_huggingface(where, build(layers, vocabulary).plain(), vocabulary, LONGEST)
    model = AutoModelForSeq2SeqLM.from_pretrained(where).eval()

    def translate(source_BS: Tensor, beam: int) -> object:
        return model.generate(
            source_BS,
            attention_mask=torch.ones_like(source_BS),
            num_beams=beam,
            min_new_tokens=STEPS,
            max_new_tokens=STEPS,
            do_sample=False,
        )

    return translate


def main() -> None:
    """Measure all programs, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", [6, 15, 27]), ("beams", [4, 1]), ("batches", [1, 32, 256])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each program (default: %(default)s)")
    parser.add_argument("--without", nargs="*", default=[], metavar="P", help="programs to leave out, such as HF")
    parser.add_argument("--json", action="store_true", help="print a JSON object for each measurement")
    arguments = parser.parse_args()
    vocabulary = Vocabulary(VOCABULARY)
    generator = torch.Generator().manual_seed(1)
    if not arguments.json:
        sys.stdout.write(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {arguments.rounds} rounds\n")
        sys.stdout.write(f"{'layers':>6} {'beam':>4} {'batch':>5}  {'program':<18} {'tokens/s':>9} {'ratio':>6}\n")
    with tempfile.TemporaryDirectory() as temporary:
        for layers in arguments.layers:
            programs = {
                f"ours {precision}": ours(layers, vocabulary, precision)
                for precision in packed.PACKED
                if packed.obstacle(precision) is None
            }
            for precision in PEERS:
                programs[f"CTranslate2 {precision}"] = ctranslate2(layers, vocabulary, precision, Path(temporary))
            programs["HF fp32"] = huggingface(layers, vocabulary, Path(temporary))
            programs = {name: each for name, each in programs.items() if not set(name.split()) & {*arguments.without}}
            for beam in arguments.beams:
                for batch in arguments.batches:
                    source_BS = torch.randint(4, VOCABULARY, (batch, SOURCE), generator=generator)
                    source_BS[:, -1] = vocabulary.eos
                    for name, values in measure(programs, source_BS, beam, arguments.rounds).items():
                        row = {"layers": layers, "beam": beam, "batch": batch, "program": name, **values}
                        sys.stdout.write(f"{json.dumps(row)}\n" if arguments.json else line(row))
                        sys.stdout.flush()


def measure(programs: dict[str, Translate], source_BS: Tensor, beam: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the columns of the table of each program."""
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds + 1):
        for name, translate in random.Random(number).sample(list(programs.items()), len(programs)):
            started = time.perf_counter()
            translate(source_BS, beam)
            if number:  # the first one warms up
                taken[name].append(time.perf_counter() - started)
    found = {}
    for name, seconds in taken.items():
        peer = taken["CTranslate2 int8" if name.endswith("int8") else "CTranslate2 fp32"]
        found[name] = {
            "tokens_per_s": len(source_BS) * STEPS / statistics.median(seconds),
            "ratio": statistics.median(theirs / own for theirs, own in zip(peer, seconds, strict=True)),
        }
    return found


def line(row: dict[str, object]) -> str:
    """Return a row of the table."""
    return "{layers:>6} {beam:>4} {batch:>5}  {program:<18} {tokens_per_s:>9,.0f} {ratio:>6.2f}\n".format(**row)


if __name__ == "__main__":
    main()
