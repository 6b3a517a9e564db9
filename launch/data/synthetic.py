"""Checks and scores of launch/backtranslate.sh.

    python launch/data/synthetic.py check --data DATA --run RUN --corpus DIR[=WEIGHT][@TAG] [--score-run RUN]
        [--distill] [--tag S] [--filters F]
    python launch/data/synthetic.py text --output F TEXT...
    python launch/data/synthetic.py score --run RUN --source F --target F --parts DIR [--workers N]

`check` finds mistakes before hours of translation. It prints, one a line, digests of the model, of the model that
scores and of the data directory, the tag if the models could translate to it, and then the options by which `prepare`
makes a directory like DATA. `text` joins texts, which may be compressed. `score` is for all ranks that a launcher or
--workers starts: each writes the scores of its share of the text to files in DIR.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.data.filters import PairFilters, read_filters
from deepspeed_nmt.data.inputs import copy_text
from deepspeed_nmt.data.training import DataOption
from deepspeed_nmt.errors import ConfigError, DataError, UserError, options_as_typed
from deepspeed_nmt.files import atomic_write_bytes
from deepspeed_nmt.parallel.launched import place
from deepspeed_nmt.text import TextForm

if TYPE_CHECKING:
    from deepspeed_nmt.run.directory import Run

PART_LINES = 50_000
"""Pairs whose scores are in a file. What is scored is kept by such files."""
MAX_TOKENS = 4096
"""Batch size: pairs x longest side."""


def check(arguments: argparse.Namespace) -> None:
    """Check what is given, and print digests and options of `prepare`.

    Raises:
        UserError: if a run or the data directory cannot be used, or they do not fit each other.
    """
    data = DataDirectory.open(arguments.data)
    form = data.text_form
    if data.meta.segmented:
        raise DataError(
            f"--data {data.path} is of segmented text, and translations are not segmented; prepare it from raw text"
        )
    DataOption.parse(arguments.corpus)
    PairFilters(read_filters(arguments.filters), form)
    if arguments.tag:
        data.tokenizer().symbol("source", arguments.tag)
    reverse = form if arguments.distill else TextForm(form.form, form.target_lang, form.source_lang)
    runs = [_opened(path, reverse, "--run", data) for path in arguments.run]
    digest = ",".join(_digest(run, arguments.checkpoint) for run in runs)
    scorer = _digest(_opened(arguments.score_run, form, "--score-run", data)) if arguments.score_run else "none"
    suppressed = arguments.tag if all(arguments.tag in run.tokenizer.symbols for run in runs) else ""
    words = ["--vocab-from", str(data.path)]
    for side in ("source", "target"):
        words += [f"--valid-{side}", str(data.path / f"valid.{side}")]
        if language := getattr(form, f"{side}_lang"):
            words += [f"--{side}-lang", language]
        if tag := getattr(data.meta.tags, side):
            words += [f"--tag-{side}", tag]
    if form.form in ("raw", "moses", "tokenised"):
        words += ["--text", form.form]
    sys.stdout.write("".join(f"{word}\n" for word in (digest, scorer, data.fingerprint, suppressed, *words)))


def _opened(path: Path, form: TextForm, name: str, data: DataDirectory) -> Run:
    """Open a run, which must be for text of a form."""
    from deepspeed_nmt.run.directory import Run  # imports torch, which texts do without

    run = Run.open(path, name)
    if run.text_form.contradicts(form):
        raise ConfigError(
            f"{name} {path} was trained on {run.text_form}, but --data {data.path} needs {form}; give another run, "
            "or prepare the data from such text"
        )
    return run


def _digest(run: Run, checkpoint: str = "best") -> str:
    """Return the digest of a model and its vocabulary."""
    return f"{run.checkpoint(checkpoint).weights_digest}{run.tokenizer.digest}"


def join(arguments: argparse.Namespace) -> None:
    """Join texts, and end their last line.

    Raises:
        DataError: if one cannot be read.
    """
    copy_text(arguments.texts, arguments.output)
    with arguments.output.open("rb+") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")


def score(arguments: argparse.Namespace) -> int:
    """Score this rank's share of the pairs, and return the exit status."""
    if arguments.workers > 1:
        from deepspeed_nmt.parallel.shared_work import run_workers

        arguments.device = "cpu"
        return run_workers(score, argparse.Namespace(**{**vars(arguments), "workers": 1}), arguments.workers)
    here = place()
    from deepspeed_nmt.api import Translator
    from deepspeed_nmt.parallel.hardware import uses_cuda
    from deepspeed_nmt.parallel.world import take_gpu

    if here.ranks > 1 and uses_cuda(arguments.device, "--device"):
        take_gpu(here.local_rank)
    translator = None
    for number, (sources, targets) in enumerate(_parts(arguments.source, arguments.target)):
        part = arguments.parts / f"{number:08d}"
        if number % here.ranks != here.rank or part.exists():
            continue
        translator = translator or Translator.open([arguments.run], device=arguments.device)
        scored = translator.score(sources, targets, max_tokens=MAX_TOKENS)
        atomic_write_bytes(part, "".join(f"{each.mean_log_prob:.9g}\n" for each in scored).encode())
    return 0


def _parts(source: Path, target: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Yield the lines of two aligned files, :data:`PART_LINES` at a time."""
    size = int(os.environ.get("PART_LINES", PART_LINES))
    with source.open("rb") as sources, target.open("rb") as targets:
        while lines := [_text(line) for line in islice(sources, size)]:
            yield lines, [_text(line) for line in islice(targets, size)]


def _text(line: bytes) -> str:
    return line.rstrip(b"\r\n").decode("utf-8", errors="replace")


def main() -> int:
    """Run a command, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # of the deepspeed launcher
    commands = parser.add_subparsers(dest="command", required=True)
    checks = commands.add_parser("check")
    checks.add_argument("--data", type=Path, required=True)
    checks.add_argument("--run", type=Path, action="append", required=True)
    checks.add_argument("--checkpoint", default="best")
    checks.add_argument("--score-run", type=Path)
    checks.add_argument("--distill", action="store_true")
    checks.add_argument("--tag")
    checks.add_argument("--filters", default="")
    checks.add_argument("--corpus", required=True)
    texts = commands.add_parser("text")
    texts.add_argument("--output", type=Path, required=True)
    texts.add_argument("texts", type=Path, nargs="+")
    scores = commands.add_parser("score")
    for name in ("run", "source", "target", "parts"):
        scores.add_argument(f"--{name}", type=Path, required=True)
    scores.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    scores.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    try:
        with options_as_typed():
            if arguments.command == "score":
                return score(arguments)
            (join if arguments.command == "text" else check)(arguments)
    except UserError as error:
        for problem in getattr(error, "problems", [str(error)]):
            sys.stderr.write(f"error: {problem}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
