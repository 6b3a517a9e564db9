"""Import a model of fairseq as a run, and fairseq's binarised text as a data directory.

    deepspeed-nmt import-fairseq --from checkpoint_best.pt --data-bin DATA-BIN --run RUN
    deepspeed-nmt import-fairseq --data-bin DATA-BIN --out DATA

DATA-BIN is what fairseq-preprocess made; a model needs its dictionaries only. With the run, `translate`, `export` and
`train --init-from` work as with any other. Its text is segmented as that of the model was, or raw text with
--sentencepiece. Both commands give the same vocabulary; they can be given as one. A checkpoint is read without
running code that it may contain.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from deepspeed_nmt.commands.flags import add_flags
from deepspeed_nmt.commands.prepare import read_options, report
from deepspeed_nmt.console import output
from deepspeed_nmt.data.clean import CleaningConfig
from deepspeed_nmt.data.data_directory import Meta
from deepspeed_nmt.data.fairseq import FairseqTokenizer
from deepspeed_nmt.data.options import PrepareOptions
from deepspeed_nmt.data.preparation import prepare
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.text import Form, TextForm, check_language

if TYPE_CHECKING:
    from deepspeed_nmt.run.importing_fairseq import Languages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--from", dest="origin", type=Path, metavar="F", help="checkpoint that fairseq-train wrote; needs --run"
    )
    parser.add_argument(
        "--data-bin", type=Path, required=True, metavar="DIR",
        help="directory with the dictionaries (dict.LANG.txt), and with the binarised text for --out",
    )  # fmt: skip
    parser.add_argument("--run", type=Path, metavar="DIR", help="run directory to make of the checkpoint")
    parser.add_argument("--out", type=Path, metavar="DIR", help="data directory to make of the binarised text")
    for side in ("source", "target"):
        parser.add_argument(
            f"--{side}-lang", metavar="L",
            help=f"language of the {side}, as in dict.L.txt (default: that of the checkpoint, or of the text)",
        )  # fmt: skip
    parser.add_argument(
        "--sentencepiece", nargs="+", type=Path, default=[], metavar="F",
        help="SentencePiece model that segmented the text, or two for source and target; then text is raw",
    )  # fmt: skip
    parser.add_argument(
        "--text", choices=("raw", "moses", "tokenised"),
        help="form of the text whose segments these are, as for `prepare` (default: tokenised; raw with "
        "--sentencepiece)",
    )  # fmt: skip
    group = parser.add_argument_group("with --out, as of `prepare`")
    add_flags(group, PrepareOptions, ("workers", "overwrite", "filters", "unicode"))
    add_flags(group, CleaningConfig)


def run(arguments: argparse.Namespace) -> int:
    """Import the model, the text or both, and print what they are."""
    from deepspeed_nmt.run.importing_fairseq import find_languages, import_model, open_dictionaries, read_checkpoint

    if (arguments.origin is None) != (arguments.run is None):
        raise ConfigError("one of --from and --run is missing; give both, or neither")
    if arguments.run is None and arguments.out is None:
        raise ConfigError("neither --run nor --out is given; give --from and --run, or --out, or all of them")
    checkpoint = None if arguments.origin is None else read_checkpoint(arguments.origin)
    languages = find_languages(arguments.data_bin, arguments.source_lang, arguments.target_lang, checkpoint)
    tokenizer = open_dictionaries(arguments.data_bin, languages, arguments.sentencepiece)
    text = _text_form(arguments, languages)
    if checkpoint is not None:
        config = import_model(arguments.origin, checkpoint, tokenizer, arguments.run, text)
        model = config.model.model_dump()
        keys = ("encoder_layers", "decoder_layers", "dim", "ffn_dim", "heads", "norm", "share_embeddings")
        output(f"{arguments.run}: {', '.join(f'{key}={model[key]}' for key in keys)}")
    if arguments.out is not None:
        output(_import_text(arguments, languages, tokenizer, text))
    return 0


def _text_form(arguments: argparse.Namespace, languages: Languages) -> TextForm:
    """Return the form of the text. Names of languages that are no language codes are not recorded."""
    codes: list[str | None] = [None, None]
    for number, language in enumerate(languages):
        with suppress(ValueError):
            codes[number] = check_language(language)
    form: Form = arguments.text or ("raw" if arguments.sentencepiece else "tokenised")
    if form == "moses" and codes[1] is None:
        raise ConfigError(
            f"{languages.target} is no language code, which --text moses needs for the target; leave it out"
        )
    return TextForm(form, codes[0], codes[1])


def _import_text(
    arguments: argparse.Namespace, languages: Languages, tokenizer: FairseqTokenizer, text: TextForm
) -> str:
    from deepspeed_nmt.run.importing_fairseq import write_text

    out: Path = arguments.out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.text-", dir=out.parent) as name:
        written = write_text(arguments.data_bin, languages, tokenizer, Path(name))
        vocabulary = Path(name) / "vocabulary"
        vocabulary.mkdir()
        tokenizer.save(vocabulary)
        settings = {
            **vars(arguments),
            **written,
            "vocab_from": vocabulary,
            "segmented": tokenizer.segmented,
            "text": text.form,
            "source_lang": text.source_lang,
            "target_lang": text.target_lang,
            "sentencepiece": (),
        }
        options = read_options(settings)
        made = prepare(options)
        assert isinstance(made, Meta)  # no option submits jobs
        return report(made, options.out)
