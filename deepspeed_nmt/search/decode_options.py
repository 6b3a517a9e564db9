"""Options of a translation: each once, with its description, its check, and what it excludes.

The flags of commands, the keywords of ``Translator``, the check of a resumed translation, and what CTranslate2 lacks
come from :class:`DecodeOptions`. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.deep_shallow_score import ALPHA, EXPONENT
from deepspeed_nmt.errors import ConfigError, finite_number, option, shown, typed
from deepspeed_nmt.files import parse_json, read_regular
from deepspeed_nmt.registry import Config, problem_of

NativeChoice = Literal["auto", "on", "off"]
"""Use of native code: "auto" if it can be compiled."""
MAX_SOURCE_TOKENS = 1024
"""Tokens of a source line that are translated by default, if the model was not trained on longer ones."""
STREAM = (
    *("max_tokens", "buffer_lines", "nbest", "max_source_tokens", "strict"),
    *("token_scores", "alignment", "alignment_layer", "reliance"),
)
"""Options of the translation of lines by an opened model."""
OPEN = (
    *("checkpoint", "device", "exit", "encoder_layers", "decoder_layers", "detokenise", "precision", "weights"),
    *("suppress", "tag", "tag_target", "native"),
)
"""Options of the opening of runs."""


def _option(metavar: str, description: str, default: Any = None, ge: int | None = None, **marks: Any) -> Any:
    """Return an option.

    Args:
        metavar: name of its value on the command line; empty for a choice or a flag.
        description: with the default in parentheses, if it is not that of the option.
        default: None if it is not given; the default is then the run's or depends on others.
        ge: least value.
        **marks: ``group`` of options; ``setting`` if it overrides the setting of the search of this name;
            ``stays`` if a stopped translation is resumed only with the same value, on which the translation of a line
            depends; ``torch`` if CTranslate2 does not have it; ``exported`` if it is decided when a run is exported.
    """
    return Field(default=default, ge=ge, description=description, json_schema_extra={"metavar": metavar, **marks})


def _setting(metavar: str, description: str, group: str = "search") -> Any:
    return _option(metavar, description, group=group, setting=True, stays=True)


def _rule(metavar: str, description: str) -> Any:
    return _setting(metavar, description, "rules of the translation")


def _numbers(value: Any) -> Any:
    """Parse numbers that are separated by commas."""
    return [finite_number(word) for word in value.split(",")] if isinstance(value, str) else value


Tag = Annotated[str | None, BeforeValidator(lambda value: "" if value == "none" else value)]


class DecodeOptions(Config):
    """All options of a translation.

    ``prefix``, ``constraints``, ``alignment`` and ``reliance`` are files on the command line; in Python the first two
    are texts, and the others are True.
    """

    model_config = ConfigDict(strict=True)

    run: Sequence[Path] | None = _option("DIR", "run directory, made by `train`; several decode as an ensemble")
    export: Path | None = _option(
        "DIR", "in place of a run: an export for CTranslate2, made by `export`, which translates"
    )
    checkpoint: str | Path = _option("C", "best, last, average, or a path", "best", exported=True)
    weights: Annotated[Sequence[float] | None, BeforeValidator(_numbers)] = _option(
        "W,W",
        "weights of the runs of an ensemble, positive numbers, for example 0.7,0.3 (default: equal)",
        stays=True,
        torch=True,
    )
    input: str | None = _option("F", "source text, one sentence a line; - is standard input")
    output: str | None = _option("F", "file for translations; - is standard output")
    nbest: int = _option(
        "N", "translations of each sentence; if above 1, as n-best lists in Moses' format", 1, ge=1, stays=True
    )
    token_scores: bool = _option(
        "",
        "write n-best lists, also of one translation, with the log-probability of each token",
        False,
        stays=True,
        torch=True,
    )
    alignment: str | bool | None = _option(
        "F", "file for links of words in Pharaoh's format, a line for each translation", torch=True
    )
    alignment_layer: int | None = _option(
        "N",
        "decoder layer whose cross-attention aligns, from 1 (default: the best on the run's validation text)",
        stays=True,
        torch=True,
    )
    reliance: str | bool | None = _option(
        "F",
        "file for signs of doubt, a line for each translation: reliance on the source, share of the source, "
        "coverage, repetition, copies, flags, and the reliance of each token",
        torch=True,
    )
    exit: str | None = _option(
        "E",
        "exit to decode from: shallow, deep (depth growing), or N-M (default: the top)",
        stays=True,
        exported=True,
    )
    encoder_layers: int | None = _option(
        "N", "first layers or loops of the encoder to use (default: all)", ge=1, stays=True, exported=True
    )
    decoder_layers: int | None = _option(
        "M", "first layers or loops of the decoder to use (default: all)", ge=1, stays=True, exported=True
    )
    tag: Tag = _option(
        "S",
        "put this symbol of the vocabulary in front of each source line, or `none` (default: that of the "
        "run's data, if any)",
        stays=True,
    )
    tag_target: Tag = _option(
        "S",
        "let each translation begin with this symbol, which is not written, or `none` (default: that of the "
        "run's data, if any)",
        stays=True,
    )
    detokenise: str | None = _option(
        "L",
        "write plain text: undo Moses' tokenizer by the rules of language L (default: that of the run's data)",
        stays=True,
        nargs="?",
    )
    max_tokens: int = _option(
        "N", "batch size: sentences x longest source, and sentences x hypotheses", 4096, ge=1, stays=True
    )
    max_source_tokens: int | None = _option(
        "N",
        "longest source line, in tokens; of longer ones the beginning is translated (default: 1024, or the "
        "longest sentence that the run was trained on)",
        ge=1,
        stays=True,
    )
    strict: bool = _option(
        "",
        "refuse source lines longer than --max-source-tokens, and lines that are not UTF-8, instead: in a file "
        "before anything is translated, in a pipe at that line",
        False,
    )
    buffer_lines: int | None = _option(
        "N", "lines of a pipe that are read, and written, together (default: 4096; of a terminal 1)", ge=1
    )
    device: Literal["auto", "cpu", "cuda"] = _option("D", "cpu or cuda; auto: a GPU if there is one", "auto")
    precision: Literal["auto", "fp32", "bf16", "fp16", "int8"] = _option(
        "P", "fp32, bf16, fp16 (GPUs) or int8 (CPUs); auto: 16 bit on a GPU, fp32 on a CPU", "auto"
    )
    native: NativeChoice = _option(
        "N",
        "decode on a CPU, in fp32 or int8, by code that is compiled at its first use: on or off; auto: if there is a "
        "C++ compiler",
        "auto",
        torch=True,
    )
    runtime: Literal["torch", "ctranslate2"] | None = _option(
        "R",
        "program that translates; ctranslate2: with an export of the run, which the first use makes and "
        "compares with the run (default: torch; with --export ctranslate2)",
        stays=True,
    )
    workers: int = _option("N", "processes on this host's CPU that translate pieces of the file", 1, ge=1)
    search: str | None = _option(
        "S",
        "beam, diverse_beam, constrained_beam, sampling, mbr, speculative, deep_shallow, choosing_exits, or "
        "mask_predict (default: search.name of the run)",
        group="search",
        stays=True,
    )
    beam: int | None = _setting("K", "beam size, at most 1000 (default: search.beam of the run)")
    length_penalty: str | None = _setting(
        "P", "gnmt:A ((5 + length) / 6)^A, power:A length^A, mean or none (default: the run's)"
    )
    groups: int | None = _setting("G", "diverse beam: groups (default: the beam size)")
    diversity: float | None = _setting(
        "D", "diverse beam: cost of a token for each hypothesis of an earlier group with it (default: 0.5)"
    )
    samples: int | None = _setting("N", "sampling, mbr: samples of a sentence, at most 1000 (default: 1, mbr: 32)")
    temperature: float | None = _setting("T", "sampling, mbr: temperature (default: 1)")
    top_k: int | None = _setting("K", "sampling, mbr: from the K best tokens (default: all)")
    top_p: float | None = _setting(
        "P", "sampling, mbr: from the fewest tokens whose probabilities sum to P (default: 1)"
    )
    seed: int | None = _setting("N", "sampling, mbr: of the random choices (default: 1)")
    draft_layers: int | None = _setting(
        "M", "decode greedily, drafted by the first M layers or loops of the decoder (search speculative)"
    )
    draft_tokens: int | None = _setting("K", "speculative: most tokens that are drafted at once (default: 8)")
    draft_confidence: float | None = _setting(
        "P",
        "speculative: accepts a drafted token without verification if the exit gives it a probability of P or "
        "more; no longer greedy (default: 1, none)",
    )
    iterations: int | None = _setting("T", "mask-predict: iterations (default: search.iterations of the run)")
    length_beam: int | None = _setting(
        "L", "mask-predict: candidate lengths (default: search.length_beam of the run)"
    )
    rerank: Literal["deep-shallow"] | None = _option(
        "deep-shallow", "depth growing: rerank the candidates of both exits by both exits", group="search", torch=True
    )
    choose_exits: Path | None = _option(
        "F",
        "file that `report depths` has fitted: how deep the decoder translates each sentence is chosen by its rule",
        group="search",
        torch=True,
    )
    alpha: float | None = _setting(
        "A",
        f"deep-shallow: weight of the exit that proposed a candidate (default: search.alpha of the run, or {ALPHA})",
    )
    exponent: float | None = _setting(
        "E", f"deep-shallow: exponent of the length in the score (default: search.exponent of the run, or {EXPONENT})"
    )
    prefix: Any = _option(
        "F", "text with which each translation begins, line by line", group="rules of the translation", torch=True
    )
    constraints: Any = _option(
        "F",
        "phrases that each translation contains, separated by tabs, line by line (search constrained_beam)",
        group="rules of the translation",
        torch=True,
    )
    min_length: int | None = _rule("N", "shortest translation in tokens, EOS included")
    max_length: int | None = _rule(
        "N",
        "longest translation in tokens, EOS included; the ratio and the tokens on top of it bound it as "
        "well; 0 is no other bound",
    )
    max_length_ratio: float | None = _rule("A", "at most A tokens for each source token")
    max_length_extra: int | None = _rule("B", "at most B tokens on top of the ratio")
    no_repeat_ngram: int | None = _rule("N", "no N tokens occur twice in this order")
    suppress_unknown: bool | None = _rule("", "never predict the unknown token")
    suppress: Sequence[str] | None = _option(
        "TOKEN",
        "never predict this token, as the vocabulary spells it or text that is one token; may be given several times",
        group="rules of the translation",
        torch=True,
    )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> DecodeOptions:
        """Check options by name; those that are None are not given.

        Raises:
            ConfigError: naming all that are wrong, or options that exclude one another.
            TypeError: if there is no such option.
        """
        for name in values:
            if name not in cls.model_fields:
                raise TypeError(f"unexpected keyword argument '{name}'")
        try:
            return cls.model_validate({name: value for name, value in values.items() if value is not None})
        except ValidationError as error:
            problems = {}  # one for each option, also for one that may be of several types
            for problem in error.errors():
                name = option(str(problem["loc"][0])) if problem["loc"] else ""
                problems[name] = problem_of(problem, name)
            raise ConfigError(sorted(problems.values())) from error

    @classmethod
    def of_command(cls, arguments: object) -> DecodeOptions:
        """Check the options among the arguments of a command; see :meth:`of`."""
        return cls.of({name: value for name, value in vars(arguments).items() if name in cls.model_fields})

    @model_validator(mode="after")
    def _check_exclusions(self) -> DecodeOptions:
        exits = self.exits
        if len(exits) > 1 and exits[0] == "exit":
            raise ValueError(f"{option('exit')} and {option(exits[1])} both choose an exit; give one of them")
        names = {name: search for name, search in self._searches.items() if search is not None}
        if len(set(names.values())) > 1:
            (first, one), (second, other) = list(names.items())[:2]
            raise ValueError(f"{option(first)} decodes by the search {one}, {option(second)} by {other}; give one")
        if self.alignment_layer is not None and not self.alignment:
            raise ValueError(f"{option('alignment_layer')} is for {option('alignment')}, which is missing; give both")
        if self.run is not None and self.export is not None:
            raise ValueError(f"{option('run')} and {option('export')} are both given; give one of them")
        if self.export is not None and self.runtime == "torch":
            raise ValueError(
                f"{option('export')} is for CTranslate2, and {option('runtime')} is torch; leave out one"
            )
        if self.workers > 1 and self.device == "cuda":
            raise ValueError(
                f"{option('workers')} starts processes on the CPU, but {option('device')} is cuda; give one of them, "
                "and start a process for each GPU with `torchrun` or `deepspeed`"
            )
        return self

    @property
    def _searches(self) -> dict[str, str | None]:
        """Names of the searches that options choose."""
        return {
            "search": self.search,
            "draft_layers": None if self.draft_layers is None else "speculative",
            "rerank": self.rerank and self.rerank.replace("-", "_"),
            "constraints": "constrained_beam" if isinstance(self.constraints, str) else None,
            "choose_exits": "choosing_exits" if self.choose_exits is not None else None,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the search by name; None where those of the run are to be taken."""
        settings = self.given_values(*marked("setting"))
        if self.choose_exits is not None:
            settings |= read_rule(self.choose_exits)[0]
        return {**settings, "name": next(filter(None, self._searches.values()), None)}

    def longest_line(self, default: int | None = None) -> int:
        """Return the bound of a source line in tokens, given that of the run."""
        return self.max_source_tokens or default or MAX_SOURCE_TOKENS

    @property
    def is_exported(self) -> bool:
        """True if CTranslate2 translates."""
        return self.export is not None or self.runtime == "ctranslate2"

    @property
    def exits(self) -> list[str]:
        """Names of the options that choose an exit, as far as they are given."""
        return self.given(("exit", "encoder_layers", "decoder_layers"))

    def given_values(self, *names: str) -> dict[str, Any]:
        """Return the values of some options by name."""
        return {name: getattr(self, name) for name in names}

    def given(self, names: Iterable[str]) -> list[str]:
        """Return those of some options that are not at their defaults."""
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    def resumed(self) -> dict[str, Any]:
        """Return the options with which a stopped translation is resumed, as they are typed."""
        return {typed(name): value for name, value in self.given_values(*marked("stays")).items()}


def read_rule(file: Path) -> tuple[dict[str, Any], object]:
    """Read settings of the search choosing_exits, and the digest of the weights that they were fitted on.

    Raises:
        ConfigError: if the file is not what `report depths --fit` writes.
    """
    try:
        content = parse_json(read_regular(file))
        return {name: content[name] for name in ("exits", "rule", "threshold")}, content.get("weights")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{option('choose_exits')} is {file}, which is not what `report depths --fit` writes "
            f"({getattr(error, 'strerror', None) or error}); give its file"
        ) from error


def marked(mark: str) -> list[str]:
    """Return the names of the options that have a mark; see :func:`_option`."""
    fields = DecodeOptions.model_fields.items()
    return [
        name
        for name, field in fields
        if isinstance(field.json_schema_extra, dict) and mark in field.json_schema_extra
    ]


def identity_of(search: SearchConfig, device: str, precision: str) -> dict[str, Any]:
    """Return the settings by which lines are translated; a setting that has an option has the option's name."""
    names = {"name": typed("search"), **{name: typed(name) for name in marked("setting")}}
    settings = {names.get(key, f"search.{key}"): value for key, value in search.model_dump(mode="json").items()}
    return {**settings, "--precision": precision, "the device": device}  # auto differs from one GPU to another


def check_type(name: str, value: object, types: tuple[type, ...], requirement: str) -> None:
    """Check that an argument is of one of the types, or raise a ConfigError."""
    if not isinstance(value, types):
        raise ConfigError(f"{option(name)} is {shown(value)}; give {requirement}")


def check_unicode(name: str, text: str) -> None:
    """Check that text has no surrogates, as Python makes of bytes that are not UTF-8, or raise a ConfigError."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{option(name)} has a lone surrogate in {shown(text)}; decode the bytes by their encoding"
        ) from error


def checked_texts(name: str, texts: Iterable[Any], phrases: bool = False) -> Iterator[Any]:
    """Return an iterator over sentences, or the phrases of each, that refuses everything else as it reads them.

    Raises:
        ConfigError: if they are one string, or no iterable.
    """
    requirement = "a list with a list of phrases for each sentence" if phrases else "a list of strings"
    if isinstance(texts, (str, bytes)):
        raise ConfigError(f"{option(name)} is one string, {shown(texts)}; give {requirement}")
    check_type(name, texts, (Iterable,), requirement)

    def text(value: Any) -> str:
        check_type(name, value, (str,), requirement)
        check_unicode(name, value)
        return value  # type: ignore[no-any-return]

    def texts_of(value: Any) -> list[str]:
        check_type(name, value, (list, tuple), requirement)
        return [text(part) for part in value]

    return map(texts_of if phrases else text, texts)
