"""Speed of beam search on a CPU, beside CTranslate2 and Hugging Face's `generate` with the same weights.

    OMP_NUM_THREADS=1 python benchmarks/run.py decode [--layers 6 15 27] [--beams 4 1] [--batches 1 32 256]
    ... decode --run RUN --input FILE [--lines 300] [--beams ...] [--batches ...]
    ... decode --opennmt DIR ...
    ... decode --start-up RUN [--rounds 5]

The model is written for the other programs as `deepspeed-nmt export` writes it. Without --run its weights are
random, so that no hypothesis ends before the limit, and every program makes the same number of steps: 6 encoder
layers, D=256, FFN 1,024, 4 heads, V=8,000, sources of 16 tokens, translations of 24. With --run it is a trained one,
and translates the first lines of a text, in batches of like length: sentences end at different lengths, and the
hypotheses of a sentence begin alike.

The programs take turns in a random order, so that other work on the machine affects all alike. Seconds are processor
time of all threads. `ratio` is the median, over the rounds, of CTranslate2's seconds in the same precision divided by
the program's (of CTranslate2's in fp32 for Hugging Face, OpenNMT-py and bf16). Loading and packing are not measured:
every program has translated the text before.

OpenNMT-py 3.5.1 requires an older torch, but its search runs on this one. It is taken from a directory of its own,
with random weights of the same sizes, and without what it imports for other work:

    pip install --no-deps --target DIR OpenNMT-py==3.5.1 pyonmttok configargparse rapidfuzz

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import torch
from records import Results, Table
from timing import Work, add_rounds, in_turns, ratio, relative
from torch import Tensor

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.export.ctranslate2_weights import Precision, write_ctranslate2
from deepspeed_nmt.export.huggingface_weights import write_huggingface
from deepspeed_nmt.kernels import onednn_ops
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.models import prepare_to_decode

DIM, FFN, HEADS, ENCODER_LAYERS, VOCABULARY, SOURCE, STEPS, LONGEST = 256, 1024, 4, 6, 8000, 16, 24, 64
PEERS: dict[Precision, str] = {"fp32": "float32", "int8": "int8"}
CASE = "decoder layers, beam, batch"
Translate = Callable[[Tensor, int], int]
"""Translates a batch of sentences, (B,S), with a beam, and returns the number of tokens that it has written."""


@dataclass(frozen=True)
class Subject:
    """A model that all programs translate with.

    Attributes:
        name: for directories.
        layers: number of decoder layers.
        vocabulary: special tokens.
        build: builds the model in eval mode.
        least: least tokens of a translation, EOS included.
        most: most tokens of a translation, EOS included.
    """

    name: str
    layers: int
    vocabulary: Vocabulary
    build: Callable[[], TranslationModel]
    least: int
    most: int

    @property
    def longest(self) -> int:
        """Positions of the longest sentence."""
        return max(self.most, LONGEST)


def random_subject(layers: int) -> Subject:
    """Return a model with random weights, whose hypotheses never end before the limit."""
    vocabulary = Vocabulary(VOCABULARY)

    def build() -> TranslationModel:
        torch.manual_seed(1)
        config = TransformerConfig(
            dim=DIM, ffn_dim=FFN, heads=HEADS, encoder_layers=ENCODER_LAYERS, decoder_layers=layers
        )
        return build_transformer(config, vocabulary).eval()

    return Subject(f"random-{layers}", layers, vocabulary, build, STEPS, STEPS)


def trained_subject(run: Run) -> Subject:
    """Return the best checkpoint of a run."""
    layers = len(run.model("best").described().decoder.layers)
    return Subject(run.path.name, layers, run.tokenizer.vocabulary, lambda: run.model("best").eval(), 0, LONGEST)


def ours(subject: Subject, precision: str) -> Translate:
    """Return our search with weights packed in a precision."""
    model = subject.build()
    prepare_to_decode(model, torch.device("cpu"), precision)
    searches: dict[int, BeamSearch] = {}

    def translate(source_BS: Tensor, beam: int) -> int:
        if beam not in searches:
            settings = BeamConfig(beam=beam, max_length_ratio=0, max_length_extra=subject.most)
            searches[beam] = BeamSearch(settings, model, subject.vocabulary)
        found = searches[beam].search(source_BS, padded=bool(source_BS.eq(subject.vocabulary.pad).any()))
        return sum(len(hypotheses[0].tokens) for hypotheses in found)

    return translate


def ctranslate2(subject: Subject, precision: Precision, directory: Path) -> Translate:
    """Return CTranslate2's search with the same weights."""
    from ctranslate2 import Translator

    vocabulary = subject.vocabulary
    pieces = [f"t{number}" for number in range(vocabulary.size)]
    where = directory / f"ctranslate2-{subject.name}-{precision}"
    where.mkdir()
    write_ctranslate2(where, subject.build().described(), vocabulary, (pieces, pieces), subject.longest, precision)
    program = Translator(
        str(where), compute_type=PEERS[precision], inter_threads=1, intra_threads=torch.get_num_threads()
    )

    def translate(source_BS: Tensor, beam: int) -> int:
        # It adds the EOS itself.
        rows = [[pieces[token] for token in row if token != vocabulary.pad][:-1] for row in source_BS.tolist()]
        found = program.translate_batch(
            rows,
            beam_size=beam,
            max_batch_size=len(rows),
            min_decoding_length=max(subject.least - 1, 0),
            max_decoding_length=subject.most,
        )
        return sum(len(result.hypotheses[0]) for result in found)

    return translate


def huggingface(subject: Subject, directory: Path) -> Translate:
    """Return Hugging Face's search with the same weights."""
    from transformers import AutoModelForSeq2SeqLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # each call would warn of its limit
    logging.disable_progress_bar()
    where = directory / f"huggingface-{subject.name}"
    where.mkdir()
    write_huggingface(where, subject.build().described(), subject.vocabulary, subject.longest)
    model = AutoModelForSeq2SeqLM.from_pretrained(where).eval()

    def translate(source_BS: Tensor, beam: int) -> int:
        found = model.generate(
            source_BS,
            attention_mask=source_BS.ne(subject.vocabulary.pad).long(),
            num_beams=beam,
            min_new_tokens=subject.least,
            max_new_tokens=subject.most,
            do_sample=False,
        )
        return int(found[:, 1:].ne(subject.vocabulary.pad).sum())

    return translate


def opennmt(subject: Subject, directory: Path) -> Translate:
    """Return OpenNMT-py's search with random weights of the sizes of :func:`random_subject`."""
    layers, vocabulary = subject.layers, subject.vocabulary
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

    def translate(source_BS: Tensor, beam: int) -> int:
        program = Translator(
            model, vocabularies, min_length=STEPS - 1, max_length=STEPS - 1, max_length_ratio=0, beam_size=beam,
            global_scorer=penalty, report_score=False,
        )  # fmt: skip
        rows = len(source_BS)
        lists = {name: list(range(rows)) for name in ("cid", "cid_line_number", "ind_in_bucket")}
        batch = {"src": source_BS.unsqueeze(2), "srclen": torch.full((rows,), SOURCE), **lists}
        with torch.inference_mode():
            program.translate_batch(batch, attn_debug=False)
        return rows * STEPS

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
    parser.add_argument("--without", nargs="*", default=[], metavar="P", help="programs to leave out, such as HF")
    parser.add_argument("--opennmt", type=Path, metavar="DIR", help="directory in which OpenNMT-py is installed")
    parser.add_argument("--run", type=Path, help="measure the best checkpoint of this run on real text")
    parser.add_argument("--input", type=Path, metavar="FILE", help="the text, one sentence a line")
    parser.add_argument("--lines", type=int, default=300, help="number of its first lines (default: %(default)s)")
    parser.add_argument(
        "--start-up", type=Path, metavar="RUN", help="measure whole commands for one line, by this run"
    )


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Measure all programs; a row more with each size."""
    if (arguments.run is None) != (arguments.input is None):
        sys.exit("--run and --input go together")
    if arguments.run is not None and arguments.opennmt is not None:
        sys.exit("--opennmt has random weights; leave out --run")
    if arguments.start_up is not None:
        with tempfile.TemporaryDirectory() as temporary:
            yield start_up(arguments.start_up, arguments.rounds, Path(temporary))
        return
    if arguments.run is None:
        subjects = [random_subject(layers) for layers in arguments.layers]
        generator = torch.Generator().manual_seed(1)
        sources = torch.randint(4, VOCABULARY, (max(arguments.batches), SOURCE), generator=generator)
        sources[:, -1] = subjects[0].vocabulary.eos
        text = {batch: [sources[:batch]] for batch in arguments.batches}
    else:
        trained = Run.open(arguments.run)
        subjects = [trained_subject(trained)]
        lines = arguments.input.read_text(encoding="utf-8").splitlines()[: arguments.lines]
        text = {batch: batches_of(trained, lines, batch) for batch in arguments.batches}
    rows: list[dict[str, object]] = []
    rounds: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for subject in subjects:
            programs = programs_of(subject, Path(temporary), arguments.opennmt)
            programs = {name: each for name, each in programs.items() if not set(name.split()) & {*arguments.without}}
            for beam, batch in itertools.product(arguments.beams, arguments.batches):
                case = [subject.layers, beam, batch]
                values, taken = measure(programs, text[batch], beam, arguments.rounds)
                rows.append({CASE: case, **values})
                rounds[", ".join(map(str, case))] = taken
                formats = dict.fromkeys(programs, "{:,.0f} ({:.2f})")
                yield Results(tables={"speed": Table.of(rows, {CASE: "{}, {}, {}", **formats})}, rounds=rounds)


def programs_of(subject: Subject, directory: Path, opennmt_py: Path | None) -> dict[str, Translate]:
    """Return the programs that translate with a model, by name."""
    programs = {
        f"ours {precision}": ours(subject, precision)
        for precision in onednn_ops.PACKED
        if onednn_ops.obstacle(precision) is None
    }
    for peer in PEERS:
        programs[f"CTranslate2 {peer}"] = ctranslate2(subject, peer, directory)
    programs["HF fp32"] = huggingface(subject, directory)
    if opennmt_py is not None:
        programs["OpenNMT-py fp32"] = opennmt(subject, opennmt_py)
    return programs


def batches_of(run: Run, lines: Sequence[str], size: int) -> list[Tensor]:
    """Return the sentences of a text in batches of like length, each (B,S)."""
    eos = run.tokenizer.vocabulary.eos
    rows = sorted((tokens[: LONGEST - 1] for tokens in run.tokenizer.encode_batch(lines, "source")), key=len)
    tensors = [torch.tensor([*row, eos]) for row in rows]
    pad = run.tokenizer.vocabulary.pad
    return [
        torch.nn.utils.rnn.pad_sequence(tensors[start : start + size], batch_first=True, padding_value=pad)
        for start in range(0, len(tensors), size)
    ]


def measure(
    programs: dict[str, Translate], batches: Sequence[Tensor], beam: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return tokens a second and the ratio to CTranslate2 by program, and the seconds of each round.

    Each program translates all batches in each round.
    """
    tokens: dict[str, int] = {}

    def once(name: str) -> None:
        tokens[name] = sum(programs[name](source_BS, beam) for source_BS in batches)

    works: dict[str, Work] = {name: lambda _, name=name: partial(once, name) for name in programs}  # type: ignore[misc]
    taken = in_turns(works, rounds, clock=time.process_time)
    found = {}
    for name, seconds in taken.items():
        peer = taken["CTranslate2 int8" if name.endswith("int8") else "CTranslate2 fp32"]
        found[name] = [tokens[name] / statistics.median(seconds), ratio(peer, seconds)]
    return found, taken
