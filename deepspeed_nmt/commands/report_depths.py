"""`report depths`: BLEU and time of a run at every pair of encoder and decoder stages.

    deepspeed-nmt report depths --run RUN --input test.en --reference test.de --out depths.png

The run was trained with objective.multi_softmax; with a recurrent model a stage is a loop. A few sentences are
translated before anything is timed. Names the fastest pair
that loses at most --max-loss BLEU against the full depth. With --oracle it also counts, for each pair, the sentences
that it translates best (by sentence BLEU; of equals the shallowest pair), and the BLEU of choosing so.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_nmt.core.model import TranslationModel
    from deepspeed_nmt.evaluate.depths import Depth
    from deepspeed_nmt.run.directory import Run

_WARM_UP_SENTENCES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the report's options."""
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="made by `train`")
    parser.add_argument("--checkpoint", default="best", metavar="C", help="best, last, average, or a path [best]")
    parser.add_argument("--input", type=Path, required=True, metavar="F", help="source text")
    parser.add_argument("--reference", type=Path, required=True, metavar="F", help="its translation")
    parser.add_argument("--max-loss", type=float, default=0.5, metavar="B", help="BLEU that may be lost [0.5]")
    parser.add_argument("--oracle", action="store_true", help="count which pair translates each sentence best")
    parser.add_argument(
        "--max-tokens", type=int, default=4096, metavar="N", help="sentences x longest source at once"
    )
    parser.add_argument("--out", type=Path, default=Path("depths.png"), metavar="F", help="picture [depths.png]")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Translate the file at every depth and report."""
    import json
    from dataclasses import asdict

    import torch

    from deepspeed_nmt.console import logger, output
    from deepspeed_nmt.errors import ConfigError, DataError
    from deepspeed_nmt.evaluate.bleu import corpus_scores, sentence_bleu, tokenised_bleu
    from deepspeed_nmt.evaluate.depths import cheapest, draw_depths, oracle, pareto_front
    from deepspeed_nmt.evaluate.picture import check_picture
    from deepspeed_nmt.files import check_text, text_lines
    from deepspeed_nmt.run.directory import Run

    for path in (arguments.input, arguments.reference):
        check_text(path)
    if not 0.0 <= arguments.max_loss < float("inf"):
        raise ConfigError(f"--max-loss must be a number of BLEU points from 0 up, but is {arguments.max_loss}")
    check_picture(arguments.out)
    opened = Run.open(arguments.run)
    with arguments.input.open("rb") as stream:
        sources = list(text_lines(stream))
    with arguments.reference.open("rb") as stream:
        references = [opened.tokenizer.reference(line) for line in text_lines(stream)]
    if len(sources) != len(references) or not sources:
        raise DataError(
            f"--input and --reference must have equally many lines, at least one, but have {len(sources)} and "
            f"{len(references)}"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = opened.model(arguments.checkpoint).to(device)
    _check_stages(opened, model.stages)
    depths, translated = _measure(opened, model, sources, references, arguments.max_tokens)
    enough = cheapest(depths, arguments.max_loss)
    result: dict[str, object] = {
        "depths": [asdict(depth) for depth in depths],
        "pareto_front": [depth.name for depth in pareto_front(depths)],
        "cheapest": enough.name,
        "max_loss": arguments.max_loss,
    }
    chosen: dict[str, int] = {}
    if arguments.oracle:
        # Shallow pairs first, so that of equals the shallowest counts.
        order = sorted(range(len(depths)), key=lambda number: depths[number].encoder + depths[number].decoder)
        scores = [
            [sentence_bleu(*pair) for pair in zip(translated[number], references, strict=True)] for number in order
        ]
        picks = [order[number] for number in oracle(scores)]
        best = [translated[number][row] for row, number in enumerate(picks)]
        score = tokenised_bleu if opened.tokenizer.segmented else corpus_scores
        chosen = {depth.name: picks.count(number) for number, depth in enumerate(depths)}
        result["oracle"] = {"sentences": chosen, "bleu": score(best, [references]).bleu}
    draw_depths(depths, arguments.out)
    output(json.dumps(result) if arguments.json else _table(depths, chosen, result))
    logger.info("picture: %s", arguments.out)
    return 0


def _check_stages(run: Run, stages: tuple[int, int]) -> None:
    """Refuse a run that has one depth, and warn of one that was trained at few of its depths.

    Raises:
        ConfigError: naming the runs that have several.
    """
    from deepspeed_nmt.console import logger
    from deepspeed_nmt.core.model import exit_name
    from deepspeed_nmt.errors import ConfigError

    if stages == (1, 1):
        named = run.config.model.named_exits
        what = f"has the exits {' and '.join(named)}; translate with --exit" if named else "has one on each side"
        raise ConfigError(
            "report depths needs a run with several stages (layers, or loops over shared layers), but "
            f"{run.path} {what}"
        )
    names = [exit_name(n, m) for n in range(1, stages[0] + 1) for m in range(1, stages[1] + 1)]
    trained = [name for name in names if run.trained_at(name, stages)]
    if len(trained) < len(names):
        logger.warning(
            "%s was trained at %d of its %d depths only (%s); expect bad translations at the others",
            run.path,
            len(trained),
            len(names),
            ", ".join(trained),
        )


def _measure(
    run: Run, model: TranslationModel, sources: list[str], references: list[str], max_tokens: int
) -> tuple[list[Depth], list[list[str]]]:
    """Each depth, the encoder's outside, and what it translates. Shape: -> depths, depths x sentences"""
    import time

    from deepspeed_nmt.console import logger
    from deepspeed_nmt.core.model import exit_name
    from deepspeed_nmt.evaluate.bleu import corpus_scores, tokenised_bleu
    from deepspeed_nmt.evaluate.depths import Depth
    from deepspeed_nmt.search import SearchConfig
    from deepspeed_nmt.search.translate import translate_lines

    search, device = run.config.search, next(model.parameters()).device
    assert isinstance(search, SearchConfig)

    def translate(net: TranslationModel, lines: list[str]) -> list[str]:
        return [
            best[0].text for best in translate_lines(net, run.tokenizer, lines, search, max_tokens, device=device)
        ]

    translate(model, sources[:_WARM_UP_SENTENCES])  # what the first batch pays for is no depth's own cost
    score = tokenised_bleu if run.tokenizer.segmented else corpus_scores
    depths: list[Depth] = []
    translated: list[list[str]] = []
    for n in range(1, model.stages[0] + 1):
        for m in range(1, model.stages[1] + 1):
            started = time.monotonic()
            hypotheses = translate(model.at_exit(exit_name(n, m)), sources)
            seconds = time.monotonic() - started
            depths.append(Depth(n, m, score(hypotheses, [references]).bleu, seconds))
            translated.append(hypotheses)
            logger.info("%s: BLEU %.2f, %.1f s", depths[-1].name, depths[-1].bleu, seconds)
    return depths, translated


def _table(depths: list[Depth], chosen: dict[str, int], result: dict[str, object]) -> str:
    lines = [f"{'n-m':>7}{'BLEU':>9}{'seconds':>10}{'  best for' if chosen else ''}".rstrip()]
    for depth in depths:
        best = f"{chosen[depth.name]:>10,}" if chosen else ""
        lines.append(f"{depth.name:>7}{depth.bleu:>9.2f}{depth.seconds:>10.1f}{best}")
    front = result["pareto_front"]
    assert isinstance(front, list)
    lines += ["", f"Pareto front: {', '.join(front)}"]
    lines.append(f"fastest within {result['max_loss']} BLEU of the full depth: {result['cheapest']}")
    if chosen:
        picked = result["oracle"]
        assert isinstance(picked, dict)
        lines.append(f"BLEU of choosing the best pair for each sentence: {picked['bleu']:.2f}")
    return "\n".join(lines)
