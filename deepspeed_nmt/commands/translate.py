"""Translate a file, one sentence a line, with a trained run.

    deepspeed-nmt translate --run RUN --input test.en --output test.hyp
    deepspeed-nmt translate --run RUN_A --run RUN_B --input test.en --output test.hyp       # an ensemble

Memory stays bounded on files of any length. An empty line gives an empty line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_nmt.errors import ConfigError

if TYPE_CHECKING:
    from deepspeed_nmt.core.model import TranslationModel
    from deepspeed_nmt.runs import Run
    from deepspeed_nmt.search import SearchConfig

HELP = "translate text with a trained run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument(
        "--run", type=Path, required=True, action="append", metavar="DIR",
        help="made by `train`; given several times, the runs decode as an ensemble",
    )  # fmt: skip
    parser.add_argument("--checkpoint", default="best", metavar="C", help="best, last, average, or a path [best]")
    parser.add_argument("--input", required=True, metavar="F", help="source text; - for standard input")
    parser.add_argument("--output", required=True, metavar="F", help="where translations go; - for standard output")
    parser.add_argument("--beam", type=int, metavar="K", help="hypotheses kept [the run's search.beam]")
    parser.add_argument("--length-penalty", metavar="P", help="gnmt:A, power:A, mean or none [the run's]")
    parser.add_argument("--iterations", type=int, metavar="T", help="mask-predict: rounds of guessing [the run's]")
    parser.add_argument("--length-beam", type=int, metavar="L", help="mask-predict: lengths tried [the run's]")
    parser.add_argument("--nbest", type=int, default=1, metavar="N", help="write N translations a line, with scores")
    parser.add_argument(
        "--max-tokens", type=int, default=4096, metavar="N", help="sentences x longest source at once"
    )
    parser.add_argument("--encoder-layers", type=int, metavar="N", help="decode with the first N layers (or loops)")
    parser.add_argument("--decoder-layers", type=int, metavar="M", help="decode with the first M layers (or loops)")
    parser.add_argument("--exit", metavar="E", help="decode from an exit: shallow or deep (depth growing), or n-m")
    parser.add_argument("--rerank", choices=("deep-shallow",), help="depth growing: both nets propose, both judge")
    parser.add_argument("--alpha", type=float, metavar="A", help="weight of the proposing net in --rerank [0.5]")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")


def run(arguments: argparse.Namespace) -> int:
    """Translate."""
    import torch

    from deepspeed_nmt.console import counting
    from deepspeed_nmt.files import atomic_text_writer, check_text
    from deepspeed_nmt.runs import Run
    from deepspeed_nmt.search.ensemble import Ensemble
    from deepspeed_nmt.search.translate import translate_lines

    runs = [Run.open(path) for path in arguments.run]
    opened = runs[0]
    _check(arguments, runs)
    source = None if arguments.input == "-" else Path(arguments.input)
    if source is not None:
        check_text(source)
    target = None if arguments.output == "-" else Path(arguments.output)
    if target is not None and (target.is_dir() or not target.parent.is_dir()):
        what = "is a directory" if target.is_dir() else f"there is no directory {target.parent}"
        raise ConfigError(f"--output must be a file that can be written, but {target}: {what}")
    search = _search(arguments, opened)
    use_cuda = arguments.device != "cpu" and torch.cuda.is_available()
    device = torch.device("cuda" if use_cuda else "cpu")
    models = [_model(run, arguments) for run in runs]
    model = (models[0] if len(models) == 1 else Ensemble(models).eval()).to(device)

    interactive = source is None and sys.stdin.isatty()
    # Only a complete translation takes the output's place: until then it may even be the input.
    writer = nullcontext(sys.stdout) if target is None else atomic_text_writer(target)
    with writer as output, counting("translate", "sentences") as advance:
        translations = translate_lines(
            model,
            opened.tokenizer,
            _lines(source),
            search,
            max_tokens=arguments.max_tokens,
            buffer_lines=1 if interactive else 4096,
            device=device,
            nbest=arguments.nbest,
            advance=advance,
        )
        for number, best in enumerate(translations):
            if arguments.nbest == 1:
                output.write(best[0].text + "\n")
            else:
                output.writelines(f"{number}\t{each.score:.4f}\t{each.text}\n" for each in best)
            if interactive:
                output.flush()
        output.flush()
    return 0


def _check(arguments: argparse.Namespace, runs: list[Run]) -> None:
    """Refuse options that contradict one another or do not fit the runs.

    Raises:
        ConfigError: naming the options.
    """
    if len({run.tokenizer.digest for run in runs}) > 1:
        raise ConfigError(
            "the runs of an ensemble must have one vocabulary, but theirs differ; see prepare --vocab-from"
        )
    guessing = [run.path for run in runs if run.config.search.model_dump()["name"] == "mask_predict"]
    if guessing and len(runs) > 1:
        raise ConfigError(
            f"an ensemble translates from left to right, but {guessing[0]} guesses masked tokens; give it alone"
        )
    layers = arguments.encoder_layers is not None or arguments.decoder_layers is not None
    if layers and arguments.exit is not None:
        raise ConfigError("--exit and --encoder-layers or --decoder-layers say the same; give one of them")
    if arguments.rerank is None:
        if arguments.alpha is not None:
            raise ConfigError("--alpha is the weight of --rerank deep-shallow, which is not asked for; give both")
        return
    if layers or arguments.exit is not None:
        option = "--exit" if arguments.exit is not None else "--encoder-layers or --decoder-layers"
        raise ConfigError(f"--rerank deep-shallow decodes from two exits, {option} from one; give one of them")
    if len(runs) > 1:
        raise ConfigError(
            f"--rerank deep-shallow takes one --run, but {len(runs)} are given; leave out --rerank to decode with an "
            "ensemble, or give one"
        )
    if runs[0].config.model.model_dump()["name"] != "depth_growing":
        raise ConfigError("--rerank deep-shallow needs the two nets of a run with model.name=depth_growing")


def _search(arguments: argparse.Namespace, run: Run) -> SearchConfig:
    """The run's search with what the options change.

    Raises:
        ConfigError: if a value is out of range.
    """
    from deepspeed_nmt.search import SEARCHES, SearchConfig

    given = {
        "name": "deep_shallow" if arguments.rerank else "beam" if _decodes_plainly(arguments, run) else None,
        "beam": arguments.beam,
        "length_penalty": arguments.length_penalty,
        "alpha": arguments.alpha,
        "iterations": arguments.iterations,
        "length_beam": arguments.length_beam,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    settings = {**run.config.search.model_dump(), **changes}
    kind = SEARCHES[settings["name"]].config
    if foreign := [key for key in changes if key not in kind.model_fields]:
        option = f"--{foreign[0].replace('_', '-')}"
        raise ConfigError(f"{option} is no option of search.name={settings['name']}, by which this run is decoded")
    search = _checked(kind, {name: value for name, value in settings.items() if name in kind.model_fields})
    assert isinstance(search, SearchConfig)
    return search


def _decodes_plainly(arguments: argparse.Namespace, run: Run) -> bool:
    """Whether there are no two nets to search with, though the run was validated by deep-shallow search."""
    if run.config.search.model_dump()["name"] != "deep_shallow":
        return False
    exits = (arguments.exit, arguments.encoder_layers, arguments.decoder_layers)
    return len(arguments.run) > 1 or any(each is not None for each in exits)


def _model(run: Run, arguments: argparse.Namespace) -> TranslationModel:
    """A run's model, from the exit asked for. The side that no layers are asked for has all of its own.

    Raises:
        ConfigError: if the run has no such exit.
    """
    from deepspeed_nmt.console import logger
    from deepspeed_nmt.core.model import TOP, exit_name

    model = run.model(arguments.checkpoint)
    stages, name = model.stages, arguments.exit or TOP
    if arguments.encoder_layers is not None or arguments.decoder_layers is not None:
        asked = (arguments.encoder_layers, arguments.decoder_layers)
        name = exit_name(*(whole if count is None else count for count, whole in zip(asked, stages, strict=True)))
    try:
        cut = model.at_exit(name)
    except ConfigError as error:
        raise ConfigError(f"{run.path}: {error}") from error
    if not run.trained_at(name, stages):
        logger.warning("%s was not trained at exit %s; objective.multi_softmax trains exits", run.path, name)
    return cut


def _lines(source: Path | None) -> Iterator[str]:
    from deepspeed_nmt.files import text_lines

    with sys.stdin.buffer if source is None else source.open("rb") as stream:
        yield from text_lines(stream)


def _checked(kind: type, settings: dict[str, object]) -> object:
    from pydantic import ValidationError

    try:
        return kind(**settings)
    except ValidationError as error:
        raise ConfigError(
            [f"{'.'.join(map(str, p['loc']))}: {p['msg']}, but is {p['input']!r}" for p in error.errors()]
        ) from error
