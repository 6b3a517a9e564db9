"""Speed of beam search on a CPU, beside CTranslate2 and Hugging Face's `generate` with the same weights.

    OMP_NUM_THREADS=1 python benchmarks/run.py decode [--layers 6 15 27] [--beams 4 1] [--batches 1 32 256]
    OMP_NUM_THREADS=1 python benchmarks/run.py decode --as decode_trained --trained RUN --text FILE
    OMP_NUM_THREADS=1 python benchmarks/run.py decode --as decode_drafts --trained RUN --text FILE --drafts 1 2 \
        [--layers 6 15 27] [--confidences 0.7 0.9] [--reference FILE]
    OMP_NUM_THREADS=1 python benchmarks/run.py decode --as decode_start --start-up RUN

The model is written for the other programs as `deepspeed-nmt export` writes it. Its weights are random, so that no
hypothesis ends before the limit, and every program makes the same number of steps: 6 encoder layers, D=256, FFN
1,024, 4 heads, V=8,000, sources of 16 tokens, translations of 24. With --trained, it is that of a run, and the
sources are the first lines of a text, in batches as they stand. "ours ... torch" decodes without native code.

The programs take turns. Seconds are processor time of all threads. In parentheses is the median, over the rounds, of
CTranslate2's seconds in the same precision divided by the program's (of CTranslate2's in fp32 for Hugging Face and
bf16). Loading and packing are not measured: every program has translated the text before.

--drafts measures speculative decoding instead, drafted by so many layers, beside greedy decoding by the same native
code and by CTranslate2: the first 64 lines of the text, in batches as they stand. The model is the run's, read out at
--layers of its decoder. With --confidences, drafted tokens also stand from these probabilities on. With --reference,
BLEU is that of the whole text, in batches of 64.

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
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import sacrebleu
import torch
from records import Results, Table
from timing import Work, add_rounds, in_turns, ratio, relative
from torch import Tensor

from deepspeed_nmt.core.model import TOP, TranslationModel, exit_name
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.export.ctranslate2_weights import write_ctranslate2
from deepspeed_nmt.export.huggingface_weights import write_huggingface
from deepspeed_nmt.kernels import onednn_ops
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.native import library as native
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.forced import pad_sources
from deepspeed_nmt.search.models import prepare_to_decode
from deepspeed_nmt.search.speculative import Speculative, SpeculativeConfig

DIM, FFN, HEADS, ENCODER_LAYERS, SOURCE, STEPS, LONGEST = 256, 1024, 4, 6, 16, 24, 256
LINES = 64
V = Vocabulary(8000)
PEERS = {"fp32": "float32", "int8": "int8"}
CASE = "decoder layers, beam, batch"
Translate = Callable[[Tensor, int], int]
"""Translates a batch of sentences, (B,S), with a beam, and returns the number of tokens that it has written."""


class Subject(NamedTuple):
    """A model, made anew for each program, and the limits of the searches of ours and CTranslate2."""

    name: str
    make: Callable[[], TranslationModel]
    vocabulary: Vocabulary
    ours: Mapping[str, object]
    peers: Mapping[str, object]


def random_subject(layers: int) -> Subject:
    """Return a model with random weights, whose hypotheses never end before the limit."""

    def make() -> TranslationModel:
        torch.manual_seed(1)
        sizes = {"dim": DIM, "ffn_dim": FFN, "heads": HEADS, "encoder_layers": ENCODER_LAYERS}
        return build_transformer(TransformerConfig.model_validate({**sizes, "decoder_layers": layers}), V).eval()

    ours = {"max_length_ratio": 0, "max_length_extra": STEPS}
    return Subject(str(layers), make, V, ours, {"min_decoding_length": STEPS - 1, "max_decoding_length": STEPS})


def trained_subject(run: Run, layers: int | None = None) -> Subject:
    """Return the model of a run, at an exit after so many decoder layers, whose hypotheses end where they do."""
    encoder, top = run.loaded("best")[0].stages
    exit = TOP if layers in (None, top) else exit_name(encoder, layers)
    make, peers = lambda: run.loaded("best")[0].at_exit(exit), {"length_penalty": 1.0}
    return Subject(str(layers or top), make, run.tokenizer.vocabulary, {"length_penalty": "mean"}, peers)


def encoded(run: Run, text: Path, lines: int) -> Tensor:
    """Return the first lines of a text, with padding. Shape: -> (B,S)."""
    vocabulary = run.tokenizer.vocabulary
    beginning = text.read_text(encoding="utf-8").splitlines()[:lines]
    rows = [[*row, vocabulary.source.eos] for row in run.tokenizer.encode_batch(beginning, "source")]
    return pad_sources(rows, vocabulary.pad, "cpu")[0]


def ours(subject: Subject, precision: str, natively: bool) -> Translate:
    """Return our search with weights packed in a precision."""
    model = subject.make()
    prepare_to_decode(model, torch.device("cpu"), precision, natively)
    searches: dict[int, BeamSearch] = {}

    def translate(source_BS: Tensor, beam: int) -> int:
        if beam not in searches:
            settings = BeamConfig.model_validate({"beam": beam, **subject.ours})
            searches[beam] = BeamSearch(settings, model, subject.vocabulary)
        padded = bool(source_BS.eq(subject.vocabulary.pad).any())
        return sum(len(hypotheses[0].tokens) for hypotheses in searches[beam].search(source_BS, padded))

    return translate


def ctranslate2(subject: Subject, precision: str, directory: Path) -> Translate:
    """Return CTranslate2's search with the same weights."""
    from ctranslate2 import Translator

    vocabulary = subject.vocabulary
    pieces, sources = ([f"t{n}" for n in range(side.size)] for side in (vocabulary, vocabulary.source))
    where = directory / f"ctranslate2-{subject.name}-{precision}"
    where.mkdir()
    write_ctranslate2(where, subject.make().described(), vocabulary, (sources, pieces), LONGEST, precision)
    program = Translator(
        str(where), compute_type=PEERS[precision], inter_threads=1, intra_threads=torch.get_num_threads()
    )

    def translate(source_BS: Tensor, beam: int) -> int:
        tokens = [[token for token in row if token != vocabulary.pad] for row in source_BS.tolist()]
        rows = [[sources[token] for token in row[:-1]] for row in tokens]  # it adds the EOS itself
        limits = {"max_decoding_length": int(1.5 * max(map(len, tokens))) + 10, **subject.peers}
        found = program.translate_batch(rows, beam_size=beam, max_batch_size=len(rows), **limits)
        return sum(len(result.hypotheses[0]) for result in found)

    return translate


def huggingface(subject: Subject, directory: Path) -> Translate:
    """Return Hugging Face's search with the same random weights."""
    from transformers import AutoModelForSeq2SeqLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # each call would warn of its limit
    logging.disable_progress_bar()
    where = directory / f"huggingface-{subject.name}"
    where.mkdir()
    write_huggingface(where, subject.make().described(), V, LONGEST, {})
    model = AutoModelForSeq2SeqLM.from_pretrained(where).eval()
    limits = {"min_new_tokens": STEPS, "max_new_tokens": STEPS, "do_sample": False}

    def translate(source_BS: Tensor, beam: int) -> int:
        found = model.generate(source_BS, attention_mask=torch.ones_like(source_BS), num_beams=beam, **limits)
        return int(found[:, 1:].ne(V.pad).sum())

    return translate


def drafts(run: Run, arguments: argparse.Namespace, directory: Path) -> Iterator[Results]:
    """Measure speculative decoding beside greedy decoding; rows more with each depth, precision and batch."""
    sources_NS, pad = encoded(run, arguments.text, LINES), run.tokenizer.vocabulary.pad
    lengths_N = sources_NS.ne(pad).sum(dim=1)
    rows: list[dict[str, object]] = []
    rounds: dict[str, object] = {}
    bleus: dict[str, dict[str, float]] = {}
    for layers, precision, size in itertools.product(arguments.layers, PEERS, arguments.batches):
        subject, where = trained_subject(run, layers), directory / f"{layers}-{precision}-{size}"
        where.mkdir()
        starts = range(0, LINES, size)
        batches = [sources_NS[at : at + size, : int(lengths_N[at : at + size].max())] for at in starts]
        searches = drafting(
            subject, precision, [m for m in arguments.drafts if 2 * m < layers], arguments.confidences
        )
        peer = ctranslate2(subject, precision, where)
        case = f"{layers}, {precision}, {size}"
        more, rounds[case] = measure_drafts(searches, peer, batches, pad, arguments.rounds)
        weights = f"{layers}, {precision}"
        if arguments.reference is not None and weights not in bleus:
            bleus[weights] = bleus_of(run, searches, arguments.text, arguments.reference)
        of_program = bleus.get(weights, {})
        rows += [
            {"layers, precision, batch": case, **row, "BLEU": of_program.get(str(row["program"]))} for row in more
        ]
        formats = {"speed-up": "{:.2f}", "accepted": "{:.0%}", "tokens a pass": "{:.2f}", "as greedy": "{:.1%}"}
        formats["BLEU"] = "{:.1f}"
        yield Results(tables={"drafts": Table.of(rows, formats)}, rounds=rounds)


def bleus_of(
    run: Run, searches: Mapping[str, BeamSearch | Speculative], text: Path, reference: Path
) -> dict[str, float]:
    """Return sacreBLEU of a whole text by each search."""
    references = reference.read_text(encoding="utf-8").splitlines()
    sources_NS = encoded(run, text, len(references))
    lengths_N = sources_NS.ne(run.tokenizer.vocabulary.pad).sum(dim=1)
    found = {}
    for name, search in searches.items():
        lines: list[str] = []
        for at in range(0, len(references), LINES):
            source_BS = sources_NS[at : at + LINES, : int(lengths_N[at : at + LINES].max())]
            lines += [run.tokenizer.decode(best[0].tokens) for best in search.search(source_BS, True)]
        found[name] = sacrebleu.corpus_bleu(lines, [references]).score
        if isinstance(search, Speculative):
            search.counts.clear()
    return found


def drafting(
    subject: Subject, precision: str, layers: list[int], confidences: list[float]
) -> dict[str, BeamSearch | Speculative]:
    """Return greedy decoding, and searches that these numbers of layers draft, by native code."""
    model, vocabulary = subject.make(), subject.vocabulary
    prepare_to_decode(model, torch.device("cpu"), precision, True)
    greedy = BeamConfig.model_validate({"beam": 1, **subject.ours})
    searches: dict[str, BeamSearch | Speculative] = {"greedy": BeamSearch(greedy, model, vocabulary)}
    for count, confidence in itertools.product(layers, [1.0, *confidences]):
        own = {"draft_layers": count, "draft_confidence": confidence}
        name = f"drafted by {count}" + (f", {confidence:g} stands" if confidence < 1.0 else "")
        settings = SpeculativeConfig.model_validate({**own, **subject.ours})
        searches[name] = Speculative(settings, model, vocabulary)
    return searches


def measure_drafts(
    searches: Mapping[str, BeamSearch | Speculative], peer: Translate, batches: list[Tensor], pad: int, rounds: int
) -> tuple[list[dict[str, object]], dict[str, list[float]]]:
    """Return a row for each program, and the seconds of each round."""
    found: dict[str, list[list[int]]] = {}
    by_peer: dict[str, int] = {}

    def once(name: str) -> None:
        lists = [searches[name].search(source_BS, bool(source_BS.eq(pad).any())) for source_BS in batches]
        found[name] = [best[0].tokens for best in itertools.chain.from_iterable(lists)]

    def once_by_peer() -> None:
        by_peer["CTranslate2"] = sum(peer(source_BS, 1) for source_BS in batches)

    works: dict[str, Work] = {name: lambda _, name=name: partial(once, name) for name in searches}  # type: ignore[misc]
    taken = in_turns({**works, "CTranslate2": lambda _: once_by_peer}, rounds, clock=time.process_time)
    rows = []
    for name, seconds in taken.items():
        tokens = by_peer[name] if name in by_peer else sum(map(len, found[name]))
        speed = tokens / statistics.median(seconds)
        row: dict[str, object] = {
            "program": name,
            "tokens/s": round(speed),
            "speed-up": ratio(taken["greedy"], seconds),
        }
        if isinstance(search := searches.get(name), Speculative):
            counts, pairs = search.counts, list(zip(found[name], found["greedy"], strict=True))
            row["accepted"] = counts["accepted"] / max(1, counts["drafted"])
            row["tokens a pass"] = counts["tokens"] / counts["passes"]
            row["as greedy"] = sum(one == other for one, other in pairs) / len(pairs)
        rows.append(row)
    return rows, taken


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
    parser.add_argument("--trained", type=Path, metavar="RUN", help="measure the model of a run")
    parser.add_argument("--text", type=Path, metavar="FILE", help="source text for it")
    parser.add_argument(
        "--drafts",
        type=int,
        nargs="+",
        metavar="M",
        help="measure drafts by the first M layers of it, if they are less than half",
    )
    parser.add_argument(
        "--confidences", type=float, nargs="+", default=[], metavar="P", help="probabilities from which drafts stand"
    )
    parser.add_argument("--reference", type=Path, metavar="FILE", help="translations of the text, for BLEU of drafts")
    parser.add_argument("--start-up", type=Path, metavar="RUN", help="measure whole commands for one line")


def run(arguments: argparse.Namespace) -> Iterator[Results]:
    """Measure all programs; a row more with each size."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        if arguments.start_up is not None:
            yield start_up(arguments.start_up, arguments.rounds, directory)
            return
        if arguments.drafts is not None:
            yield from drafts(Run.open(arguments.trained, "--trained"), arguments, directory)
            return
        generator = torch.Generator().manual_seed(1)
        sources = torch.randint(4, V.size, (max(arguments.batches), SOURCE), generator=generator)
        sources[:, -1] = V.eos
        subjects = list(map(random_subject, arguments.layers))
        if arguments.trained is not None:
            opened = Run.open(arguments.trained, "--trained")
            subjects, sources = [trained_subject(opened)], encoded(opened, arguments.text, max(arguments.batches))
        rows: list[dict[str, object]] = []
        rounds: dict[str, object] = {}
        for subject in subjects:
            precisions = [each for each in ("fp32", "bf16") if onednn_ops.obstacle(each) is None]
            programs = {f"ours {precision} torch": ours(subject, precision, False) for precision in precisions}
            if native.obstacle() is None:
                programs |= {f"ours {each}": ours(subject, each, True) for each in PEERS}
            programs |= {f"CTranslate2 {peer}": ctranslate2(subject, peer, directory) for peer in PEERS}
            if arguments.trained is None:
                programs["HF fp32"] = huggingface(subject, directory)
            for beam, batch in itertools.product(arguments.beams, arguments.batches):
                source_BS = sources[:batch, : int(sources[:batch].ne(subject.vocabulary.pad).sum(dim=1).max())]
                values, taken = measure(programs, source_BS, beam, arguments.rounds)
                rows.append({CASE: [subject.name, beam, batch], **values})
                rounds[f"{subject.name}, {beam}, {batch}"] = taken
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
        peer = taken["CTranslate2 int8" if "int8" in name else "CTranslate2 fp32"]
        found[name] = [tokens[name] / statistics.median(seconds), ratio(peer, seconds)]
    return found, taken
