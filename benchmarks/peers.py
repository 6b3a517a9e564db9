"""CPU time and memory of training by command: ours, fairseq, OpenNMT-py, and a loop over torch.nn.Transformer.

    python benchmarks/peers.py make DIR [FAIRSEQ]
    OMP_NUM_THREADS=1 python benchmarks/run.py peers --text TEXT --environments DIR [--rounds 3] [--updates 60]

The first command makes virtual environments of the peers, with this one's torch and NumPy; FAIRSEQ is what pip
installs it from, such as a copy of its repository. Peers that DIR lacks are left out. TEXT has raw Multi30k (train
and val in .en and .de). All train on the same pieces of a joint vocabulary, on one thread, in fp32: pre-norm
Transformers of the same size, dropout of embeddings and sub-layers alone, label smoothing, Adam, the norm clipped to
1, shared embeddings, updates of some 2,048 target tokens as each counts them. `peers.py loop` makes batches of pairs
of equal length, as a first version would.

Commands take turns. A rate is target tokens a CPU second from the first update to the last: the time of a command
that stops after one update is subtracted, and shown as "start".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]
from records import Results, Table  # noqa: E402

TOKENS, DROPOUT, SMOOTHING, RATE = 2048, 0.1, 0.1, 1e-3
PACKAGES = {
    "fairseq": (
        *("cython", "cffi", "pycparser", "bitarray", "antlr4-python3-runtime==4.8", "omegaconf==2.0.6"),
        *("hydra-core==1.0.7", "scikit-learn", "scipy", "joblib", "threadpoolctl", "soundfile"),
    ),
    "opennmt": (
        *("OpenNMT-py==3.5.1", "configargparse", "pyonmttok", "rapidfuzz", "pyahocorasick", "six", "fasttext-wheel"),
        *("pybind11", "flask", "waitress"),
    ),
}
"""Packages without what they depend on, such as another torch."""
FORMATS = {
    "program": "{}",
    "target tokens a CPU second": "{:,.0f}",
    "loop = 1": "{:.2f}",
    "start, CPU seconds": "{:.1f}",
    "peak MiB": "{:,.0f}",
}
HASHABLE = """
import dataclasses
made = dataclasses.dataclass
def dataclass(cls=None, /, **options):
    def wrap(cls):
        old = cls.__module__.partition(".")[0] in ("fairseq", "hydra")
        return made(cls, **{**options, **({"unsafe_hash": True} if old else {})})
    return wrap if cls is None else wrap(cls)
dataclasses.dataclass = dataclass
"""
"""Python 3.11 refuses defaults of fields that have no hash, which fairseq and its Hydra have."""


def make(directory: Path, fairseq: str = "git+https://github.com/facebookresearch/fairseq") -> None:
    """Make the environments of the peers."""
    for name, packages in PACKAGES.items():
        home = directory / name
        venv.create(home, with_pip=True)
        site = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
        (site / "hashable.py").write_text(HASHABLE)
        (site / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\nimport hashable\n")
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--no-deps"]
        subprocess.run([*pip, "pip<24.1", "setuptools<70", "wheel"], check=True)  # which read old metadata
        for each in (*packages, *([fairseq] if name == "fairseq" else [])):
            subprocess.run([*pip, "--no-build-isolation", each], check=True)
        if name == "opennmt":
            subprocess.run([*pip[:-1], "spacy"], check=True)


def write_pieces(text: Path, out: Path, vocabulary: int) -> None:
    """Prepare the text, and write its training pairs as pieces with spaces between."""
    import sentencepiece

    files = [
        f"--{split}-{side}={text / stem}.{language}"
        for split, stem in (("train", "train"), ("valid", "val"))
        for side, language in (("source", "en"), ("target", "de"))
    ]
    prepare = [sys.executable, "-m", "deepspeed_nmt", "prepare", "--out", str(out / "data"), *files]
    subprocess.run([*prepare, "--vocab-size", f"{vocabulary}"], check=True)
    model = sentencepiece.SentencePieceProcessor(model_file=str(out / "data" / "vocabulary.model"))
    for split, stem in (("train", "train"), ("valid", "val")):
        for language in ("en", "de"):
            lines = (text / f"{stem}.{language}").read_text(encoding="utf-8").splitlines()
            pieces = [" ".join(model.encode(line, out_type=str)) for line in lines]
            (out / f"{split}.{language}").write_text("\n".join(pieces) + "\n", encoding="utf-8")


def loop(out: Path, dim: int, layers: int, vocabulary: int, updates: int) -> None:
    """Train the modules of `step.py`'s reference, and print the target tokens of the updates."""
    import step
    import torch
    from torch.nn.utils.rnn import pad_sequence

    from deepspeed_nmt.core.vocabulary import Vocabulary
    from tests.support import batch_of

    step.DIM, step.FFN, step.HEADS, step.LAYERS, step.VOCABULARY = dim, 4 * dim, heads(dim), layers, vocabulary
    model = step.Reference().train()
    for module in model.modules():  # of sub-layers alone
        if isinstance(module, torch.nn.MultiheadAttention):
            module.dropout = 0.0
        elif isinstance(module, torch.nn.TransformerEncoderLayer | torch.nn.TransformerDecoderLayer):
            module.dropout.p = 0.0
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    own = Vocabulary(vocabulary)
    lines = [(out / f"train.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "de")]
    counts = Counter(piece for side in lines for line in side for piece in line.split())
    ids = {piece: 4 + n for n, (piece, _) in enumerate(counts.most_common(vocabulary - 4))}
    sides = [[torch.tensor([*map(ids.__getitem__, line.split()), own.eos]) for line in side] for side in lines]
    order = sorted(range(len(lines[0])), key=lambda n: (len(sides[1][n]), len(sides[0][n])))
    batches: list[list[int]] = [[]]
    for n in order:
        if batches[-1] and (len(batches[-1]) + 1) * len(sides[1][n]) > TOKENS:
            batches.append([])
        batches[-1].append(n)
    random.Random(1).shuffle(batches)
    tokens = 0
    for number, batch in enumerate(batches[:updates], 1):
        source, target = (pad_sequence([side[n] for n in batch], True, own.pad) for side in sides)
        made = batch_of(source, target.roll(1, 1), target, pad=own.pad, update=number)
        (model(made) / made.target_tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += made.target_tokens
    sys.stdout.write(f"{tokens} target tokens\n")


def heads(dim: int) -> int:
    """Return the number of heads of a width."""
    return max(1, dim // 64)


class Command:
    """A program's training: its command for some updates, and the target tokens that it says it has made."""

    def __init__(self, words: Callable[[int, Path], Sequence[object]], tokens: Callable[[str], float]) -> None:
        self.words = words
        self.tokens = tokens

    def run(self, updates: int) -> tuple[float, float, float]:
        """Return CPU seconds, MiB at the peak, and target tokens."""
        with tempfile.TemporaryDirectory() as directory, (Path(directory) / "log").open("w+") as log:
            words = [str(word) for word in self.words(updates, Path(directory))]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environment)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            log.seek(0)
            text = log.read()
            if process.returncode != 0:
                raise RuntimeError(f"{words[0]} ended with status {process.returncode}: {text[-2000:]}")
            return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, self.tokens(text)


def commands(out: Path, arguments: argparse.Namespace) -> Iterator[tuple[str, Command]]:
    """Yield the programs that are here."""
    dim, layers, wide, count = arguments.dim, arguments.layers, 4 * arguments.dim, heads(arguments.dim)
    ours = f"""model.dim={dim} model.ffn_dim={wide} model.heads={count} model.encoder_layers={layers}
        model.decoder_layers={layers} model.norm=pre model.dropout={DROPOUT} engine.name=plain engine.device=cpu
        optimizer.lr={RATE} optimizer.clip_norm=1 schedule.name=inverse_sqrt schedule.warmup_updates=400
        batch.update_tokens={TOKENS} training.validate_every=100000 collapse.every=0
        validation.metrics=[] validation.max_sentences=1 validation.attention_images=0""".split()
    ours = [sys.executable, "-m", "deepspeed_nmt", "train", "--recipe", "multi30k_cpu", *ours, *arguments.settings]
    yield (
        "ours",
        Command(
            lambda n, run: [*ours, "--data", out / "data", "--run", run / "run", f"training.max_updates={n}"],
            lambda text: float(re.findall(r"([\d,]+) target tokens", text)[-1].replace(",", "")),
        ),
    )
    words = [sys.executable, __file__, "loop", out, dim, layers, arguments.vocab]
    yield "loop", Command(lambda n, run: [*words, n], lambda text: float(text.split()[-3]))
    if (programs := arguments.environments / "fairseq" / "bin").exists():
        command = [programs / "fairseq-preprocess", "--trainpref", out / "train", "--destdir", out / "fairseq"]
        command += ["--source-lang", "en", "--target-lang", "de", "--joined-dictionary", "--cpu"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        fairseq = f"""--cpu --no-save --arch transformer --share-all-embeddings --encoder-normalize-before
            --decoder-normalize-before --disable-validation --encoder-embed-dim {dim} --decoder-embed-dim {dim}
            --encoder-ffn-embed-dim {wide} --decoder-ffn-embed-dim {wide} --encoder-attention-heads {count}
            --decoder-attention-heads {count} --encoder-layers {layers} --decoder-layers {layers} --dropout {DROPOUT}
            --optimizer adam --adam-betas (0.9,0.98) --clip-norm 1.0 --lr {RATE} --lr-scheduler inverse_sqrt
            --warmup-updates 400 --criterion label_smoothed_cross_entropy --label-smoothing {SMOOTHING}
            --max-tokens {TOKENS} --log-interval 1 --log-format json --num-workers 0 --seed 1""".split()
        yield (
            "fairseq",
            Command(
                lambda n, run: [programs / "fairseq-train", out / "fairseq", *fairseq, "--max-update", n],
                lambda text: sum(map(float, re.findall(r'"wpb": "([\d.]+)"', text))),
            ),
        )
    if (onmt := arguments.environments / "opennmt" / "bin" / "onmt_train").exists():
        pieces = Counter((out / "train.en").read_text().split() + (out / "train.de").read_text().split())
        (out / "pieces").write_text("".join(f"{piece}\t{times}\n" for piece, times in pieces.most_common()))
        data = {"one": {"path_src": f"{out}/train.en", "path_tgt": f"{out}/train.de", "transforms": []}}
        (out / "onmt.yaml").write_text(json.dumps({"data": data}))
        opennmt = f"""--src_vocab {out}/pieces --share_vocab --share_embeddings --share_decoder_embeddings
            --position_encoding --encoder_type transformer --decoder_type transformer --layers {layers}
            --hidden_size {dim} --word_vec_size {dim} --transformer_ff {wide} --heads {count} --dropout {DROPOUT}
            --attention_dropout 0 --label_smoothing {SMOOTHING} --optim adam --adam_beta2 0.98 --max_grad_norm 1
            --learning_rate {RATE} --batch_type tokens --batch_size {TOKENS} --accum_count 1 --normalization tokens
            --num_workers 0 --report_every 1 --save_checkpoint_steps 100000 --valid_steps 100000 --seed 1""".split()
        yield (
            "OpenNMT-py",
            Command(
                lambda n, run: [
                    onmt,
                    "-config",
                    out / "onmt.yaml",
                    *opennmt,
                    "--train_steps",
                    n,
                    "--save_model",
                    run / "m",
                ],
                lambda text: sum(map(float, re.findall(r"bsz: *\d+/ *(\d+)/", text))),
            ),
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--text", type=Path, required=True, help="directory of raw Multi30k")
    parser.add_argument("--environments", type=Path, default=Path("none"), help="directory of `peers.py make`")
    parser.add_argument("--dim", type=int, default=256, help="width (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=6, help="layers on each side (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=8000, help="size of the vocabulary (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=60, help="updates of a command (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="commands of each program (default: %(default)s)")
    parser.add_argument("--set", dest="settings", nargs="+", default=[], metavar="KEY=VALUE", help="settings of ours")


def run(arguments: argparse.Namespace) -> Results:
    """Measure the programs in turns."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        write_pieces(arguments.text, out, arguments.vocab)
        found = dict(commands(out, arguments))
        rounds: list[dict[str, Any]] = []
        for number in range(arguments.rounds):
            for name, command in found.items():
                start, _, first = command.run(1)
                seconds, memory, tokens = command.run(arguments.updates)
                rate = (tokens - first) / max(seconds - start, 1e-9)
                rounds.append({"round": number, "program": name, "start": start, "memory": memory, "rate": rate})
        rows = []
        for name in found:
            rates, starts, peaks = (
                [row[key] for row in rounds if row["program"] == name] for key in ("rate", "start", "memory")
            )
            loops = [row["rate"] for row in rounds if row["program"] == "loop"]
            ratios = [rate / other for rate, other in zip(rates, loops, strict=True)]
            values = (name, *map(statistics.median, (rates, ratios, starts, peaks)))
            rows.append(dict(zip(FORMATS, values, strict=True)))
        return Results(tables={"training": Table.of(rows, FORMATS)}, rounds=rounds)


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]), *sys.argv[3:4])
    else:
        loop(Path(sys.argv[2]), *map(int, sys.argv[3:7]))
