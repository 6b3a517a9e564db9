"""Score translations against one or more references.

    deepspeed-nmt score --hypothesis out.de --reference test.de --source test.en
    deepspeed-nmt score --hypothesis out.bpe.de --reference test.bpe.de --segmented --lowercase
    deepspeed-nmt score --tune-rerank valid.nbest --reference valid.de

Plain text is scored with sacreBLEU and chrF; publish a score together with the signature printed below it. Text that
Moses' tokenizer made is detokenised first if --like names its run or data. Files are UTF-8, one sentence a line,
aligned; `-` is standard input. Of several hypotheses, each is compared with the first by
paired bootstrap resampling.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deepspeed_nmt.console import output
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.evaluate import scoring
from deepspeed_nmt.evaluate.nbest import Converter, tune
from deepspeed_nmt.files import shown_name
from deepspeed_nmt.text import Kind, TextForm, check_language, join_segments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--hypothesis", nargs="+", metavar="F", help="translations to score")
    subject.add_argument(
        "--tune-rerank", metavar="F",
        help="n-best lists of a validation set, written by `translate --rerank deep-shallow --nbest 2K` with K the "
        "beam size: find the --alpha and --exponent of the highest BLEU",
    )  # fmt: skip
    parser.add_argument("--grid", action="store_true", help="with --tune-rerank: show BLEU at every pair")
    parser.add_argument("--reference", nargs="+", required=True, metavar="F", help="reference translations")
    parser.add_argument(
        "--source", metavar="F", help="source text: checks that it is aligned, and counts copies of it"
    )
    parser.add_argument(
        "--metrics", nargs="+", metavar="M",
        help="scores to print: bleu, chrf, ter, with --tokenised bleu_tokenised, and programs of yours as "
        "[NAME=]command:PATH, which need --source (default: bleu and chrf, with --tokenised bleu_tokenised)",
    )  # fmt: skip
    parser.add_argument(
        "--tokenised", action="store_true",
        help="the text is tokenised: compute multi-bleu, as older papers do (not comparable with sacreBLEU)",
    )  # fmt: skip
    parser.add_argument(
        "--segmented", action="store_true", help="join subword-nmt's `@@ ` segments first; implies --tokenised"
    )
    parser.add_argument(
        "--language", metavar="L",
        help="target language, for example zh: sets BLEU's tokenizer (default: that of --like, else 13a)",
    )  # fmt: skip
    parser.add_argument("--lowercase", action="store_true", help="ignore case")
    parser.add_argument(
        "--like", type=Path, metavar="DIR",
        help="the files have the form of this run's or data directory's text: Moses' tokens are made plain; with "
        "--tokenised they are kept, and raw text is tokenised by Moses' rules; references get the lower case and the "
        "spaces of a BERT's tokenizer, which makes scores comparable only with one another",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a JSON object for each hypothesis, one a line")


def run(arguments: argparse.Namespace) -> int:
    """Read the files, score them, and print the scores."""
    tokenised, lowercase = arguments.tokenised or arguments.segmented, arguments.lowercase
    if arguments.tune_rerank is not None:
        output(_tune(arguments, tokenised))
        return 0
    if arguments.grid:
        raise ConfigError("--grid shows BLEU at the pairs of --tune-rerank, which is missing; give both")
    chosen, by_name = None, arguments.metrics is not None
    if by_name:
        for_programs = arguments.source is not None and len(set(arguments.reference)) == 1
        kind: Kind = "tokenised" if tokenised else "plain"
        chosen = scoring.choose_metrics(arguments.metrics, kind, lowercase, for_programs)
    inputs = _read(arguments, tokenised)
    scoring.warn_of_files(inputs, tokenised, lowercase)
    for report in scoring.score_files(inputs, tokenised, lowercase, chosen):
        output((scoring.as_json if arguments.json else scoring.as_text)(report, inputs, by_name))
    return 0


def _tune(arguments: argparse.Namespace, tokenised: bool) -> str:
    if arguments.metrics is not None:
        raise ConfigError("--tune-rerank searches the highest BLEU; leave out --metrics")
    if arguments.source is not None:
        raise ConfigError("--tune-rerank compares n-best lists with --reference alone; leave out --source")
    convert, convert_reference, _, language = _converters(arguments, tokenised)
    lists, references, lowercase = arguments.tune_rerank, arguments.reference, arguments.lowercase
    tuning = tune(lists, references, convert, convert_reference, tokenised, lowercase, language)
    return tuning.as_json(arguments.grid) if arguments.json else tuning.as_text(arguments.grid)


def _read(arguments: argparse.Namespace, tokenised: bool) -> scoring.ScoreInputs:
    """Read all files of the command line, each once."""
    names = [*dict.fromkeys(arguments.hypothesis), *dict.fromkeys(arguments.reference)]
    names += [arguments.source] if arguments.source else []
    if names.count("-") > 1:
        raise DataError("standard input (`-`) is given more than once; give paths")
    # One list for each name, shared by its roles: standard input can be read only once.
    lines = {name: scoring.read_sentences(name) for name in dict.fromkeys(names)}
    if len({len(sentences) for sentences in lines.values()}) > 1:
        counts = "\n".join(f"  {len(sentences):>9,}  {shown_name(name)}" for name, sentences in lines.items())
        raise DataError(
            f"the files have different numbers of lines:\n{counts}\n"
            "give files of the same sentences; a short hypothesis may be an unfinished translation"
        )
    convert, convert_reference, convert_source, language = _converters(arguments, tokenised)
    return scoring.ScoreInputs(
        hypotheses=[(name, convert(lines[name])) for name in arguments.hypothesis],
        references={name: convert_reference(lines[name]) for name in arguments.reference},
        source=convert_source(lines[arguments.source]) if arguments.source else None,
        language=language,
    )


def _converters(arguments: argparse.Namespace, tokenised: bool) -> tuple[Converter, Converter, Converter, str | None]:
    """Return functions that give translations, references and sources the form to score, and the target language."""

    def join(lines: Sequence[str]) -> list[str]:
        return [join_segments(line) for line in lines] if arguments.segmented else list(lines)

    language: str | None = arguments.language
    try:
        language = language and check_language(language)
    except ValueError as error:
        raise ConfigError(f"--language {error}") from error
    if arguments.like is None:
        return join, join, join, language
    from deepspeed_nmt.commands.prepare import verify_vocabulary
    from deepspeed_nmt.data.data_directory import META_FILE, DataDirectory, open_tokenizer

    verify_vocabulary(arguments.like)
    tokenizer = open_tokenizer(arguments.like)
    if (arguments.like / META_FILE).exists():
        form = DataDirectory.open(arguments.like).text_form
    else:
        from deepspeed_nmt.run.directory import DataRecord  # takes seconds

        form = DataRecord.read(arguments.like).common_text
    form = replace(form, target_lang=form.target_lang or language)
    kind: Kind = "tokenised" if tokenised else "plain"
    if problem := form.problem(kind):
        remedy = "give --tokenised" if kind == "plain" else "leave out --tokenised"
        raise DataError(f"--like {arguments.like} cannot give {kind} text, because {problem}; {remedy}")

    def converter(own: TextForm, spelt: Converter = list) -> Converter:
        def convert(lines: Sequence[str]) -> list[str]:
            return own.convert(kind, spelt(join(lines)))

        return convert

    references = converter(form, lambda lines: [tokenizer.reference(line) for line in lines])
    sources = converter(replace(form, target_lang=form.source_lang or form.target_lang))
    return converter(form), references, sources, language or form.target_lang
