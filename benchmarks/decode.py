"""Speed of beam search on a CPU, beside CTranslate2 and Hugging Face's `generate` with the same weights.

    OMP_NUM_THREADS=1 python benchmarks/decode.py [--layers 6 15 27] [--beams 4 1] [--batches 1 32 256] [--rounds 5]
    OMP_NUM_THREADS=1 python benchmarks/decode.py --opennmt DIR ...
    OMP_NUM_THREADS=1 python benchmarks/decode.py --start-up RUN [--rounds 5]

The model is written for the other programs as `deepspeed-nmt export` writes it. Its weights are random, so that no
hypothesis ends before the limit, and every program makes the same number of steps: 6 encoder layers, D=256, FFN
1,024, 4 heads, V=8,000, sources of 16 tokens, translations of 24. Real sentences end at different lengths.

The programs take turns in a random order, so that other work on the machine affects all alike. `ratio` is the median,
over the rounds, of CTranslate2's seconds in the same precision divided by the program's (of CTranslate2's in fp32 for
Hugging Face, OpenNMT-py and bf16). Loading and packing are not measured: every program has translated the batch
before.

OpenNMT-py 3.5.1 requires an older torch, but its search runs on this one. It is taken from a directory of its own,
with random weights of the same sizes, and without what it imports for other work:

    pip install --no-deps --target DIR OpenNMT-py==3.5.1 pyonmttok configargparse rapidfuzz

--start-up measures the whole command for one line instead, from its start to its end, of a trained run: ours, ours by
CTranslate2, and Hugging Face's classes on the exported run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

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


def opennmt(layers: int, vocabulary: Vocabulary, directory: Path) -> Translate:
    """Return OpenNMT-py's search with random weights of the same sizes."""
    sys.path.append(str(directory))
    for unused in ("ahocorasick", "fasttext", "flask", "spacy", "waitress"):
        sys.modules.setdefault(unused, MagicMock())
    import pyonmttok
    from onmt.constants import DefaultTokens
    from onmt.decoders.transformer import TransformerDecoder
    from onmt.encoders.transformer import TransformerEncoder
    from onmt.models.model import NMTModel
    from onmt.modules import Embeddings
    from onmt.translate import GNMTGlobalScorer, Translator

    torch.manual_seed(1)
    special = [DefaultTokens.PAD, DefaultTokens.BOS, DefaultTokens.EOS, DefaultTokens.UNK]
    pieces = pyonmttok.build_vocab_from_tokens([*special, *(f"t{number}" for number in range(4, vocabulary.size))])
    sizes = {"d_model": DIM, "heads": HEADS, "d_ff": FFN, "dropout": 0.0, "attention_dropout": 0.0}
    sizes |= {"max_relative_positions": 0, "relative_positions_buckets": 0, "add_qkvbias": True}
    alignment = {"full_context_alignment": False, "alignment_layer": -1, "alignment_heads": 0}
    embeddings = [Embeddings(DIM, vocabulary.size, word_padding_idx=0, position_encoding=True) for _ in range(2)]
    model = NMTModel(
        TransformerEncoder(ENCODER_LAYERS, embeddings=embeddings[0], **sizes),
        TransformerDecoder(
            layers, copy_attn=False, self_attn_type="scaled-dot", embeddings=embeddings[1], aan_useffn=False,
            **sizes, **alignment,
        ),
    ).eval()  # fmt: skip
    model.generator = torch.nn.Linear(DIM, vocabulary.size)
    for parameter in model.parameters():  # some have no values yet
        torch.nn.init.normal_(parameter, std=0.05)
    vocabularies = {"src": pieces, "tgt": pieces, "decoder_start_token": DefaultTokens.BOS}
    penalty = GNMTGlobalScorer(0.6, 0.0, "wu", "none")

    def translate(source_BS: Tensor, beam: int) -> object:
        program = Translator(
            model, vocabularies, min_length=STEPS - 1, max_length=STEPS - 1, max_length_ratio=0, beam_size=beam,
            global_scorer=penalty, report_score=False,
        )  # fmt: skip
        rows = len(source_BS)
        lists = {name: list(range(rows)) for name in ("cid", "cid_line_number", "ind_in_bucket")}
        batch = {"src": source_BS.unsqueeze(2), "srclen": torch.full((rows,), SOURCE), **lists}
        with torch.inference_mode():
            return program.translate_batch(batch, attn_debug=False)

    return translate


def start_up(run: Path, rounds: int, directory: Path) -> dict[str, dict[str, float]]:
    """Return the seconds of whole commands that translate one line, by program."""
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
    taken: dict[str, list[float]] = {name: [] for name in programs}
    for number in range(rounds + 1):  # the first one exports for CTranslate2 and fills the disk's cache
        for name, command in random.Random(number).sample(list(programs.items()), len(programs)):
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
            if number:
                taken[name].append(time.perf_counter() - started)
    return {
        name: {
            "seconds": statistics.median(seconds),
            "ratio": statistics.median(own / first for own, first in zip(seconds, taken["ours"], strict=True)),
        }
        for name, seconds in taken.items()
    }


def main() -> None:
    """Measure all programs, and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", [6, 15, 27]), ("beams", [4, 1]), ("batches", [1, 32, 256])):
        parser.add_argument(f"--{name}", type=int, nargs="+", default=default, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each program (default: %(default)s)")
    parser.add_argument("--without", nargs="*", default=[], metavar="P", help="programs to leave out, such as HF")
    parser.add_argument("--opennmt", type=Path, metavar="DIR", help="directory in which OpenNMT-py is installed")
    parser.add_argument(
        "--start-up", type=Path, metavar="RUN", help="measure whole commands for one line, by this run"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each measurement")
    arguments = parser.parse_args()
    if arguments.start_up is not None:
        with tempfile.TemporaryDirectory() as temporary:
            for name, row in start_up(arguments.start_up, arguments.rounds, Path(temporary)).items():
                words = f"{name:<24} {row['seconds']:>6.2f} s {row['ratio']:>6.2f}\n"
                sys.stdout.write(f"{json.dumps({'program': name, **row})}\n" if arguments.json else words)
        return
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
            if arguments.opennmt is not None:
                programs["OpenNMT-py fp32"] = opennmt(layers, vocabulary, arguments.opennmt)
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
