"""Compare BLEU and time of a run at every pair of encoder and decoder stages.

    deepspeed-nmt report depths --run RUN --input test.en --reference test.de --out depths.png

The run must be trained with objective.multi_softmax. A stage is a layer, or a loop of a recurrent model. The report
names the fastest pair whose BLEU is at most --max-loss below that of the full depth. With --oracle it also counts the
sentences that each pair translates best, by sentence BLEU (ties go to the shallowest pair), and the BLEU of the best
pair for each sentence.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deepspeed_nmt.core.model import TranslationModel
    from deepspeed_nmt.evaluate.depths import Depth
    from deepspeed_nmt.run.directory import Run

_ENOUGH_SENTENCES = 200
"""Number of sentences below which the report warns that it is not reliable."""
_WARM_UP_SENTENCES = 8
"""Number of sentences translated before the first depth is timed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the report's options."""
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", help="run directory, made by `train`")
    parser.add_argument(
        "--checkpoint", default="best", metavar="C", help="best, last, average, or a path (default: %(default)s)"
    )
    parser.add_argument("--input", type=Path, required=True, metavar="F", help="source text, one sentence a line")
    parser.add_argument("--reference", type=Path, required=True, metavar="F", help="reference translation of --input")
    parser.add_argument(
        "--max-loss",
        type=float,
        default=0.5,
        metavar="B",
        help="largest loss of BLEU accepted (default: %(default)s)",
    )
    parser.add_argument("--oracle", action="store_true", help="count the sentences that each pair translates best")
    parser.add_argument(
        "--max-tokens", type=int, default=4096, metavar="N",
        help="batch size: sentences x longest source (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, default=Path("depths.png"), metavar="F",
        help="picture to write, .png, .svg or .pdf (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Translate the file at every depth, draw the picture, and print the table.

    Raises:
        ConfigError: if an option is out of range, or the run has one depth.
        DataError: if the files are empty or not aligned.
    """
    import json
    from dataclasses import asdict

    import torch

    from deepspeed_nmt.console import logger, output
    from deepspeed_nmt.errors import ConfigError, DataError
    from deepspeed_nmt.evaluate.bleu import corpus_scores, sentence_bleu, tokenised_bleu
    from deepspeed_nmt.evaluate.depths import cheapest, depth_table, draw_depths, oracle, pareto_front
    from deepspeed_nmt.evaluate.picture import check_picture
    from deepspeed_nmt.files import open_text, text_lines
    from deepspeed_nmt.run.directory import Run

    if not 0.0 <= arguments.max_loss < float("inf"):
        raise ConfigError(f"--max-loss must be at least 0 and finite, but is {arguments.max_loss}")
    check_picture(arguments.out)
    opened = Run.open(arguments.run)
    with open_text(arguments.input) as stream:
        sources = list(text_lines(stream, arguments.input))
    with open_text(arguments.reference) as stream:
        references = [opened.tokenizer.reference(line) for line in text_lines(stream, arguments.reference)]
    if len(sources) != len(references) or not sources:
        raise DataError(
            f"--input and --reference must have equally many lines, at least one, but have {len(sources)} and "
            f"{len(references)}; give files of the same sentences"
        )
    if len(sources) < _ENOUGH_SENTENCES:
        few = "%d sentences are too few to compare depths: BLEU and times vary by chance; give %d or more"
        logger.warning(few, len(sources), _ENOUGH_SENTENCES)
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
        # Shallow pairs come first, so that they win ties.
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
    output(json.dumps(result) if arguments.json else depth_table(depths, chosen, result))
    logger.info("picture: %s", arguments.out)
    return 0


def _check_stages(run: Run, stages: tuple[int, int]) -> None:
    """Check that a run has several depths, and warn if it was not trained at all of them.

    Raises:
        ConfigError: if it has one depth only.
    """
    from deepspeed_nmt.console import logger
    from deepspeed_nmt.core.model import exit_name
    from deepspeed_nmt.errors import ConfigError

    if stages == (1, 1):
        named = run.config.model.named_exits
        what = (
            f"has the exits {' and '.join(named)}; translate with --exit" if named else "has one stage on each side"
        )
        raise ConfigError(
            "report depths needs a run with several stages (layers, or loops over shared layers), but "
            f"{run.path} {what}"
        )
    names = [exit_name(n, m) for n in range(1, stages[0] + 1) for m in range(1, stages[1] + 1)]
    trained = [name for name in names if run.trained_at(name, stages)]
    if len(trained) < len(names):
        logger.warning(
            "%s was trained at only %d of its %d depths (%s); expect bad translations at the others",
            run.path,
            len(trained),
            len(names),
            ", ".join(trained),
        )


def _measure(
    run: Run, model: TranslationModel, sources: list[str], references: list[str], max_tokens: int
) -> tuple[list[Depth], list[list[str]]]:
    """Translate ``sources`` at every depth, and return the depths and their translations.

    Decoder stages vary fastest.

    Shape: -> depths, depths x sentences
    """
    import time

    from deepspeed_nmt.console import logger
    from deepspeed_nmt.core.model import exit_name
    from deepspeed_nmt.evaluate.bleu import corpus_scores, tokenised_bleu
    from deepspeed_nmt.evaluate.depths import Depth
    from deepspeed_nmt.search import SearchConfig
    from deepspeed_nmt.search.translate import translate_lines

    search, device = run.config.search, next(model.parameters()).device
    assert isinstance(search, SearchConfig)

    def translate(net: TranslationModel, lines: list[str], warn: bool = False) -> list[str]:
        found = translate_lines(
            net,
            run.tokenizer,
            lines,
            search,
            max_tokens,
            device=device,
            max_source_tokens=run.max_source_tokens,
            warn=warn,
        )
        return [best[0].text for best in found]

    translate(model, sources[:_WARM_UP_SENTENCES])  # start-up costs of the first batch must not count for a depth
    score = tokenised_bleu if run.tokenizer.segmented else corpus_scores
    depths: list[Depth] = []
    translated: list[list[str]] = []
    for n in range(1, model.stages[0] + 1):
        for m in range(1, model.stages[1] + 1):
            started = time.monotonic()
            hypotheses = translate(model.at_exit(exit_name(n, m)), sources, warn=n == m == 1)
            seconds = time.monotonic() - started
            depths.append(Depth(n, m, score(hypotheses, [references]).bleu, seconds))
            translated.append(hypotheses)
            logger.info("%s: BLEU %.2f, %.1f s", depths[-1].name, depths[-1].bleu, seconds)
    return depths, translated
