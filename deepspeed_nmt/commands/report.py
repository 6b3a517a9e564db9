"""Make a page of a run, or compare runs: curves, settings and results, points of a sweep, depths of a model."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_nmt.commands.flags import add_flags
from deepspeed_nmt.console import json_line, logger, output, table
from deepspeed_nmt.errors import ConfigError, check_installed
from deepspeed_nmt.files import atomic_write_bytes
from deepspeed_nmt.search.decode_options import DecodeOptions

if TYPE_CHECKING:
    from deepspeed_nmt.reports.text_scores import ParallelText

_FEW_SENTENCES = 200
"""Number of sentences below which a comparison of depths is not reliable."""
_TRANSLATING = "depths runs sweep"
"""Kinds that translate a test set."""
_OPTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("run", "run", {"type": Path, "metavar": "RUN", "help": "run directory"}),
    ("runs", "runs", {"nargs": "+", "type": Path, "metavar": "RUN", "help": "run directories"}),
    ("sweep", "sweep", {"metavar": "SWEEP", "help": "name of the sweep"}),
    ("--run", "depths", {"dest": "runs", "type": Path, "action": "extend", "nargs": "+", "required": True,
     "metavar": "DIR", "help": "run directories, made by `train`"}),
    ("--runs", "sweep", {"type": Path, "required": True, "metavar": "DIR",
     "help": "directory of the run directories"}),
    ("--data", _TRANSLATING, {"type": Path, "metavar": "DIR", "help": "data directory with a test set to translate"}),
    ("--input", _TRANSLATING, {"type": Path, "metavar": "F", "help": "source text to translate"}),
    ("--reference", _TRANSLATING, {"type": Path, "metavar": "F", "help": "reference translation of --input"}),
    ("--recipe", "run", {"metavar": "NAME",
     "help": "recipe to compare the settings with (default: that of the last start, or none: the defaults)"}),
    ("--metric", "sweep", {"metavar": "M",
     "help": "measure of validation that is the score: a metric or loss, of a named set as SET/METRIC, of the mean "
     "as mean/METRIC (default: the first metric that any run has logged)"}),
    ("--max-loss", "depths", {"type": float, "default": 0.5, "metavar": "B",
     "help": "largest loss of BLEU that is accepted (default: %(default)s)"}),
    ("--oracle", "depths", {"action": "store_true", "help": "count the sentences that each pair translates best"}),
    ("--signs", "depths", {"action": "store_true",
     "help": "also measure by how much each depth relies on the source, and how many of the tokens that its decoder "
     "layers draft the whole decoder accepts"}),
    ("--fit", "depths", {"type": Path, "metavar": "F",
     "help": "write the fastest rule within --max-loss by which a run's exits choose, for `translate "
     "--choose-exits`; give validation text"}),
    ("--repeat", "depths", {"type": int, "default": 1, "metavar": "N",
     "help": "number of measurements; times are their medians (default: %(default)s)"}),
)  # fmt: skip
"""Options with the kinds that have them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of each kind."""
    kinds = parser.add_subparsers(dest="kind", metavar="KIND", required=True)
    for name, (help, report) in _KINDS.items():
        kind = kinds.add_parser(
            name, help=help, description=inspect.getdoc(report), formatter_class=argparse.RawDescriptionHelpFormatter
        )
        for option, of, keywords in _OPTIONS:
            if name in of.split():
                kind.add_argument(option, **keywords)
        if name in _TRANSLATING.split():
            decoding = {"checkpoint": "best", "max_tokens": 4096}
            add_flags(kind, DecodeOptions, tuple(decoding), defaults=decoding)
        file, what = ("page.html", "page") if name == "run" else (f"{name}.png", "picture, .png, .svg or .pdf,")
        kind.add_argument(
            "--out", type=Path, default=Path(file), metavar="F", help=f"{what} to write (default: %(default)s)"
        )
        if name != "run":
            form = kind.add_mutually_exclusive_group()
            form.add_argument("--json", action="store_true", help="print JSON objects, one a line")
            if name == "runs":
                form.add_argument("--markdown", action="store_true", help="print the table in Markdown")


def run(arguments: argparse.Namespace) -> int:
    """Make the report, and return the exit status."""
    return _KINDS[arguments.kind][1](arguments)


def _read_text(arguments: argparse.Namespace, runs: Iterable[Path]) -> ParallelText | None:
    """Check --out and the options of decoding, and read the text to translate; None if no option names one."""
    from deepspeed_nmt.data.data_directory import DataDirectory
    from deepspeed_nmt.reports.pictures import check_out
    from deepspeed_nmt.reports.text_scores import ParallelText

    files = (arguments.input, arguments.reference)
    check_out(arguments.out, [*runs, arguments.data, *files])
    DecodeOptions.of({"max_tokens": arguments.max_tokens})
    if (None in files and files != (None, None)) or (arguments.data is not None and files != (None, None)):
        raise ConfigError(
            "the test set is named by --data, or by --input and --reference together; give one of the two"
        )
    if arguments.data is not None:
        return ParallelText.of(DataDirectory.open(arguments.data))
    return None if arguments.input is None else ParallelText.read(*files)


def _print(arguments: argparse.Namespace, rows: Iterable[Mapping[str, Any]], text: Callable[[], str]) -> int:
    """Print a JSON object for each row, or the text; return the exit status."""
    output("\n".join(map(json_line, rows)) if arguments.json else text())
    logger.info("picture: %s", arguments.out)
    return 0


def _depths(arguments: argparse.Namespace) -> int:
    """Compare BLEU and time at every pair of encoder and decoder stages.

        deepspeed-nmt report depths --run RUN --input test.en --reference test.de --oracle --repeat 3
        deepspeed-nmt report depths --run runs/nxm runs/vanilla/* --data DATA --oracle --repeat 3

    A stage is a layer, or a loop of a recurrent model. A run alone translates at all its depths. Beside other
    runs, one that was trained with objective.multi_softmax does so, and all others together are one system, with
    the full depth of each. The report names the fastest pair whose BLEU is at most --max-loss below that of the
    full depth, or if no model has it, below the best BLEU. With --oracle it also counts the sentences that each
    pair translates best, by sentence BLEU (ties go to the pair of the least measured time), and has the BLEU of
    the best pair for each sentence. BLEU is that by which the runs are validated, if they share one; its signature
    is logged. With --fit it tries rules by which a sentence is translated no deeper than it needs, and writes the
    fastest one within --max-loss.
    """
    from deepspeed_nmt.reports.depths import draw_depths, measure, systems_of
    from deepspeed_nmt.reports.pictures import check_out
    from deepspeed_nmt.reports.text_scores import common_scorer
    from deepspeed_nmt.run.directory import Run

    if not 0.0 <= arguments.max_loss < float("inf"):
        raise ConfigError(f"--max-loss is {arguments.max_loss}; give a finite number of at least 0")
    if arguments.repeat < 1:
        raise ConfigError(f"--repeat is {arguments.repeat}; give a number of at least 1")
    text = _read_text(arguments, arguments.runs)
    if arguments.fit is not None:
        inputs = [*arguments.runs, arguments.data, arguments.input, arguments.reference]
        check_out(arguments.fit, inputs, [arguments.fit.suffix.lower()], "--fit")
    if text is None:
        raise ConfigError("no text to translate; give --data, or --input and --reference")
    runs = [Run.open(path).at(arguments.checkpoint) for path in dict.fromkeys(arguments.runs)]
    systems = systems_of(runs)
    if arguments.fit is not None and len(systems) > 1:
        raise ConfigError(f"--fit is for one run, and {len(runs)} are given; leave it out")
    scorer = common_scorer(runs, text)
    logger.info("BLEU is %s (%s)", scorer.metrics[0].name, scorer.metrics[0].signature())
    if len(text.sources) < _FEW_SENTENCES:
        few = "%d sentences are too few to compare depths: BLEU and times vary by chance; give %d or more"
        logger.warning(few, len(text.sources), _FEW_SENTENCES)
    if arguments.oracle and arguments.repeat == 1:
        logger.warning(
            "--oracle breaks ties by decoding time, but these times and the Pareto front rest on one measurement of "
            "each pair; --repeat 3 steadies them"
        )
    options = {"checkpoint": arguments.checkpoint, "max_tokens": arguments.max_tokens, "repeat": arguments.repeat}
    extras = {"with_oracle": arguments.oracle, "with_rules": arguments.fit is not None, "with_signs": arguments.signs}
    measured = [measure(system, text, scorer, **options, **extras) for system in systems]
    loss = arguments.max_loss
    if arguments.fit is not None:
        measured[0].rule(loss).write(arguments.fit, runs[0].checkpoint(arguments.checkpoint).weights_digest)
    draw_depths(measured, arguments.out)
    reports = [system.report(loss) for system in measured]
    return _print(arguments, reports, lambda: "\n\n".join(system.text(loss) for system in measured))


def _run(arguments: argparse.Namespace) -> int:
    """Make a page of one run: one HTML file that needs no network and no other file.

        deepspeed-nmt report run runs/deep --out deep.html

    It has the state of the run, its curves with skipped updates, spikes, rollbacks and restarts where they were,
    cross-attention by decoder layer, sample translations over time beside their references, the worst sentences,
    and its settings, data and environment. What a run does not record is left out, so the page of a run that is
    still trained, or that failed, can be made at any time. Figures are drawn by plotly, which the page contains.
    """
    from deepspeed_nmt.reports.pictures import check_out

    check_out(arguments.out, [arguments.run], (".html", ".htm"))
    check_installed("plotly", "report run", "pip install plotly")
    from deepspeed_nmt.reports.page import RunPage

    page = RunPage(arguments.run, arguments.recipe)
    content = page.render()
    atomic_write_bytes(arguments.out, content)
    state, sentence = page.status()
    output(f"{page.name}: {state}, {sentence}")
    logger.info("page: %s (%.1f MB)", arguments.out, len(content) / 1e6)
    return 0


def _runs(arguments: argparse.Namespace) -> int:
    """Compare runs: the settings in which they differ, and what came of it.

        deepspeed-nmt report runs runs/plain runs/with_cad --out runs.png
        deepspeed-nmt report runs runs/plain runs/with_cad --data DATA --checkpoint average

    The table has a column for each run, with the settings that differ, then length, cost and results. What a run
    does not record is shown as `-`. With --data, or --input and --reference, each run translates the test set by
    its own search, and its scores are recorded in the run, so that it is translated once; scores recorded before
    are shown, too. The picture shows if decoders use their source: source reliance, perplexity and BLEU over
    target tokens, and for each run the share of cross-attention in the update of each decoder layer over updates.
    Source reliance is the rise of the loss, in nats per target token, when the sources are shuffled among the
    sentences.
    """
    from deepspeed_nmt.evaluate.metrics import validation_tag
    from deepspeed_nmt.reports import run_log
    from deepspeed_nmt.reports.outcome import Outcome, comparison_table, differing, legend
    from deepspeed_nmt.reports.pictures import draw_curves
    from deepspeed_nmt.reports.text_scores import all_scores
    from deepspeed_nmt.run.plans import Plans

    text = _read_text(arguments, arguments.runs)
    paths = list(dict.fromkeys(arguments.runs))
    runs = dict(zip(run_log.run_names(paths), map(Outcome.read, paths), strict=True))
    settings = differing([outcome.config.flat() for outcome in runs.values()])
    logs = {name: outcome.log for name, outcome in runs.items() if outcome.log.tokens is not None}
    measures = run_log.validation_measures(logs.values())
    scores = all_scores(paths, arguments.checkpoint, text, arguments.max_tokens)
    plans = Plans()
    rows = {name: outcome.row(settings, measures, plans, scores[outcome.path]) for name, outcome in runs.items()}
    metric = run_log.validation_metric(logs.values()).name
    panels = {
        run_log.SOURCE_RELIANCE: "source reliance (nats per token)",
        run_log.TRAIN_PERPLEXITY: "training perplexity",
        run_log.VALID_PERPLEXITY: "validation perplexity",
        validation_tag(metric): f"validation {metric}",
    }
    draw_curves({legend(name, rows[name]["settings"]): log for name, log in logs.items()}, panels, arguments.out)
    named = ({"run": name, **row} for name, row in rows.items())
    return _print(arguments, named, lambda: table(comparison_table(rows, measures), markdown=arguments.markdown))


def _sweep(arguments: argparse.Namespace) -> int:
    """Compare the runs of a sweep: final training perplexity, score, source reliance and hours of each point.

        deepspeed-nmt report sweep deep_decoder_fig1 --runs runs/fig1 --data DATA

    The runs are the directories in --runs; launch/sweep.sbatch trains point I of a sweep in the directory I. A
    run belongs to a point if it has the settings that the sweep varies, whatever its name. With --data, or
    --input and --reference, each run translates the test set by its own search, and its scores are recorded in
    the run, so that it is translated once; otherwise the score is the best of validation, by --metric or the
    first metric that any run has logged. Runs without it and unfinished runs are named, and points without a run
    are counted.
    """
    from deepspeed_nmt.reports import sweep as sweeps
    from deepspeed_nmt.reports.text_scores import score_runs
    from deepspeed_nmt.run.directory import CONFIG_FILE

    sweep = sweeps.Sweep(arguments.sweep)
    inputs = [path.parent for path in arguments.runs.glob(f"*/{CONFIG_FILE}")]
    text = _read_text(arguments, inputs)
    if text is not None and arguments.metric is not None:
        raise ConfigError("--metric names a measure of validation, and a test set is given; leave out one of them")
    runs = sweeps.choose_runs(sweep, arguments.runs)
    trained = [outcome for outcome in runs if outcome is not None]
    scores: sweeps.Scores
    if text is None:
        metric, scores = sweeps.validation_scores(trained, arguments.metric)
        metrics = [metric]
    else:
        paths = [outcome.path for outcome in trained]
        metrics, recorded = score_runs(paths, arguments.checkpoint, text, arguments.max_tokens)
        scores = {path: {score.metric: score.value for score in of_run} for path, of_run in recorded.items()}
    sweeps.warn_of_differences(sweep, runs)
    rows = sweeps.sweep_rows(sweep, runs, metrics, scores)
    titles = {metric: f"{'validation' if text is None else 'test'} {metric}" for metric in metrics}
    sweeps.draw_sweep(sweep, rows, titles[metrics[0]], arguments.out)
    return _print(arguments, rows, lambda: table(sweeps.sweep_table(sweep, rows, titles)))


_KINDS: dict[str, tuple[str, Callable[[argparse.Namespace], int]]] = {
    "depths": ("BLEU and time at every depth of one or more runs", _depths),
    "run": ("page of one run: curves, layers, translations, events, settings", _run),
    "runs": ("settings in which runs differ, and what came of it", _runs),
    "sweep": ("results of a sweep's runs against the setting swept", _sweep),
}
"""Kinds of reports: a line of help, and the function that makes the report."""
