"""Options of a translation: each once, with its description, its check, and what it excludes.

The flags of commands, the keywords of ``Translator``, the check of a resumed translation, what CTranslate2 lacks, and
the tables of docs/commands.md come from :class:`DecodeOptions`. Nothing here imports torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, Field, ValidationError, model_validator

from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.deep_shallow_score import ALPHA, EXPONENT
from deepspeed_nmt.errors import ConfigError, finite_number, option, shown
from deepspeed_nmt.registry import Config, problem_of

Function = TypeVar("Function", bound=Callable[..., Any])
MAX_SOURCE_TOKENS = 1024
"""Tokens of a source line that are translated by default, if the model was not trained on longer ones."""
STREAM = (
    *("max_tokens", "buffer_lines", "nbest", "max_source_tokens", "strict"),
    *("token_scores", "alignment", "alignment_layer"),
)
"""Options of the translation of lines by an opened model."""
OPEN = (
    *("checkpoint", "device", "exit", "encoder_layers", "decoder_layers", "detokenise", "precision", "weights"),
    *("suppress", "tag", "tag_target"),
)
"""Options of the opening of runs."""
SEARCH, RULES = "search", "rules of the translation"
"""Groups of options: settings of the search, and rules of the next token."""


@dataclass(frozen=True)
class Flag:
    """Properties of an option besides its type, default and description.

    Attributes:
        metavar: name of its value on the command line; empty for a choice or a flag.
        setting: setting of the search that it overrides.
        resumed: False if the translation of a line does not depend on it, or if what it names is compared instead:
            a stopped translation is then resumed with any value.
        torch: True if only torch has it, and CTranslate2 does not.
        exported: True if it is decided when a run is exported.
        parse: function of the word on the command line; None for the type of the option.
        page: page that says more.
    """

    metavar: str = ""
    group: str = ""
    setting: str = ""
    resumed: bool = True
    torch: bool = False
    exported: bool = False
    parse: Callable[[str], Any] | None = None
    page: str = ""


def numbers(text: str) -> list[float]:
    """Parse numbers that are separated by commas."""
    return [finite_number(word) for word in text.split(",")]


def symbol(text: str) -> str:
    """Parse a tag: `none` is none."""
    return "" if text == "none" else text


def _setting(name: str, metavar: str = "", group: str = SEARCH, page: str = "") -> Flag:
    return Flag(metavar, group, setting=name, page=page)


class DecodeOptions(Config):
    """All options of a translation.

    None stands for an option that is not given, whose default is then the run's or depends on others. ``prefix``,
    ``constraints`` and ``alignment`` are files on the command line; in Python two are texts, and the last is True.
    """

    model_config = ConfigDict(strict=True)

    run: Annotated[Sequence[Path] | None, Flag("DIR", resumed=False)] = Field(
        default=None, description="run directory, made by `train`; several decode as an ensemble"
    )
    export: Annotated[Path | None, Flag("DIR", resumed=False, page="export.md#translate-with-ctranslate2")] = Field(
        default=None, description="in place of a run: an export for CTranslate2, made by `export`, which translates"
    )
    checkpoint: Annotated[str | Path, Flag("C", resumed=False, exported=True)] = Field(
        default="best", description="best, last, average, or a path"
    )
    weights: Annotated[Sequence[float] | None, Flag("W,W", torch=True, parse=numbers)] = Field(
        default=None,
        description="weights of the runs of an ensemble, positive numbers, for example 0.7,0.3 (default: equal)",
    )
    input: Annotated[str | None, Flag("F", resumed=False)] = Field(
        default=None, description="source text, one sentence a line; - is standard input"
    )
    output: Annotated[str | None, Flag("F", resumed=False)] = Field(
        default=None, description="file for translations; - is standard output"
    )
    nbest: Annotated[int, Flag("N", page="commands.md#n-best-lists")] = Field(
        default=1, ge=1, description="translations of each sentence; if above 1, as n-best lists in Moses' format"
    )
    token_scores: Annotated[bool, Flag(torch=True)] = Field(
        default=False,
        description="write n-best lists, also of one translation, with the log-probability of each token",
    )
    alignment: Annotated[
        str | bool | None, Flag("F", resumed=False, torch=True, page="translation.md#alignments")
    ] = Field(default=None, description="file for links of words in Pharaoh's format, a line for each translation")
    alignment_layer: Annotated[int | None, Flag("N", torch=True)] = Field(
        default=None,
        description="decoder layer whose cross-attention aligns, from 1 (default: the best on the run's validation "
        "text)",
    )
    exit: Annotated[str | None, Flag("E", exported=True, page="papers/depth-growing.md")] = Field(
        default=None, description="exit to decode from: shallow, deep (depth growing), or N-M (default: the top)"
    )
    encoder_layers: Annotated[int | None, Flag("N", exported=True, page="papers/multi-layer-softmaxing.md")] = Field(
        default=None, description="first layers or loops of the encoder to use (default: all)"
    )
    decoder_layers: Annotated[int | None, Flag("M", exported=True, page="papers/multi-layer-softmaxing.md")] = Field(
        default=None, description="first layers or loops of the decoder to use (default: all)"
    )
    tag: Annotated[str | None, Flag("S", parse=symbol, page="multilingual.md#symbols-and-tags")] = Field(
        default=None,
        description="put this symbol of the vocabulary in front of each source line, or `none` (default: that of the "
        "run's data, if any)",
    )
    tag_target: Annotated[str | None, Flag("S", parse=symbol, page="multilingual.md#symbols-and-tags")] = Field(
        default=None,
        description="let each translation begin with this symbol, which is not written, or `none` (default: that of "
        "the run's data, if any)",
    )
    detokenise: Annotated[str | None, Flag("L")] = Field(
        default=None,
        description="write plain text: undo Moses' tokenizer by the rules of language L (default: that of the run's "
        "data)",
    )
    max_tokens: Annotated[int, Flag("N")] = Field(
        default=4096, ge=1, description="batch size: sentences x longest source, and sentences x hypotheses"
    )
    max_source_tokens: Annotated[int | None, Flag("N")] = Field(
        default=None,
        ge=1,
        description="longest source line, in tokens; of longer ones the beginning is translated (default: 1024, or "
        "the longest sentence that the run was trained on)",
    )
    strict: Annotated[bool, Flag(resumed=False, page="translation.md#text-that-is-not-utf-8")] = Field(
        default=False,
        description="refuse source lines longer than --max-source-tokens, and those that are not UTF-8, instead: in "
        "a file before anything is translated, in a pipe at that line",
    )
    buffer_lines: Annotated[int | None, Flag("N", resumed=False)] = Field(
        default=None,
        ge=1,
        description="lines of a pipe that are read, and written, together (default: 4096; of a terminal 1)",
    )
    device: Annotated[Literal["auto", "cpu", "cuda"], Flag("D", resumed=False)] = Field(
        default="auto", description="cpu or cuda; auto: a GPU if there is one"
    )
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16", "int8"], Flag("P", resumed=False)] = Field(
        default="auto", description="fp32, bf16, fp16 (GPUs) or int8 (CPUs); auto: 16 bit on a GPU, fp32 on a CPU"
    )
    runtime: Annotated[
        Literal["torch", "ctranslate2"] | None, Flag("R", page="export.md#translate-with-ctranslate2")
    ] = Field(
        default=None,
        description="program that translates; ctranslate2: with an export of the run, which the first use makes and "
        "compares with the run (default: torch; with --export ctranslate2)",
    )
    workers: Annotated[int, Flag("N", resumed=False, page="commands.md#pieces")] = Field(
        default=1, ge=1, description="processes on this host's CPU that translate pieces of the file"
    )

    search: Annotated[str | None, Flag("S", SEARCH, setting="name", page="translation.md")] = Field(
        default=None,
        description="beam, diverse_beam, constrained_beam, sampling, mbr, deep_shallow, or mask_predict (default: "
        "search.name of the run)",
    )
    beam: Annotated[int | None, _setting("beam", "K")] = Field(
        default=None, description="beam size, at most 1000 (default: search.beam of the run)"
    )
    length_penalty: Annotated[str | None, _setting("length_penalty", "P")] = Field(
        default=None, description="gnmt:A ((5 + length) / 6)^A, power:A length^A, mean or none (default: the run's)"
    )
    groups: Annotated[int | None, _setting("groups", "G", page="translation.md#diverse-beam-search")] = Field(
        default=None, description="diverse beam: groups (default: the beam size)"
    )
    diversity: Annotated[float | None, _setting("diversity", "D", page="translation.md#diverse-beam-search")] = Field(
        default=None,
        description="diverse beam: cost of a token for each hypothesis of an earlier group with it (default: 0.5)",
    )
    samples: Annotated[int | None, _setting("samples", "N", page="translation.md#sampling")] = Field(
        default=None, description="sampling, mbr: samples of a sentence, at most 1000 (default: 1, mbr: 32)"
    )
    temperature: Annotated[float | None, _setting("temperature", "T")] = Field(
        default=None, description="sampling, mbr: temperature (default: 1)"
    )
    top_k: Annotated[int | None, _setting("top_k", "K")] = Field(
        default=None, description="sampling, mbr: from the K best tokens (default: all)"
    )
    top_p: Annotated[float | None, _setting("top_p", "P")] = Field(
        default=None, description="sampling, mbr: from the fewest tokens whose probabilities sum to P (default: 1)"
    )
    seed: Annotated[int | None, _setting("seed", "N")] = Field(
        default=None, description="sampling, mbr: of the random choices (default: 1)"
    )
    utility: Annotated[str | None, _setting("utility", "U", page="translation.md#minimum-bayes-risk")] = Field(
        default=None, description="mbr: chrf or bleu (default: chrf)"
    )
    iterations: Annotated[int | None, _setting("iterations", "T", page="papers/parallel-decoder.md")] = Field(
        default=None, description="mask-predict: iterations (default: search.iterations of the run)"
    )
    length_beam: Annotated[int | None, _setting("length_beam", "L", page="papers/parallel-decoder.md")] = Field(
        default=None, description="mask-predict: candidate lengths (default: search.length_beam of the run)"
    )
    rerank: Annotated[
        Literal["deep-shallow"] | None,
        Flag("deep-shallow", SEARCH, resumed=False, torch=True, page="papers/depth-growing.md"),
    ] = Field(default=None, description="depth growing: rerank the candidates of both exits by both exits")
    alpha: Annotated[float | None, _setting("alpha", "A")] = Field(
        default=None,
        description="deep-shallow: weight of the exit that proposed a candidate (default: search.alpha of the run, "
        f"or {ALPHA})",
    )
    exponent: Annotated[float | None, _setting("exponent", "E")] = Field(
        default=None,
        description="deep-shallow: exponent of the length in the score (default: search.exponent of the run, or "
        f"{EXPONENT})",
    )

    prefix: Annotated[Any, Flag("F", RULES, resumed=False, torch=True, page="translation.md#rules")] = Field(
        default=None, description="text with which each translation begins, line by line"
    )
    constraints: Annotated[
        Any, Flag("F", RULES, resumed=False, torch=True, page="translation.md#lexical-constraints")
    ] = Field(
        default=None,
        description="phrases that each translation contains, separated by tabs, line by line (search "
        "constrained_beam)",
    )
    min_length: Annotated[int | None, _setting("min_length", "N", RULES)] = Field(
        default=None, description="shortest translation in tokens, EOS included"
    )
    max_length: Annotated[int | None, _setting("max_length", "N", RULES)] = Field(
        default=None,
        description="longest translation in tokens, EOS included; the ratio and the tokens on top of it bound it as "
        "well; 0 is no other bound",
    )
    max_length_ratio: Annotated[float | None, _setting("max_length_ratio", "A", RULES)] = Field(
        default=None, description="at most A tokens for each source token"
    )
    max_length_extra: Annotated[int | None, _setting("max_length_extra", "B", RULES)] = Field(
        default=None, description="at most B tokens on top of the ratio"
    )
    no_repeat_ngram: Annotated[int | None, _setting("no_repeat_ngram", "N", RULES)] = Field(
        default=None, description="no N tokens occur twice in this order"
    )
    suppress_unknown: Annotated[bool | None, _setting("suppress_unknown", "", RULES)] = Field(
        default=None, description="never predict the unknown token"
    )
    suppress: Annotated[Sequence[str] | None, Flag("TOKEN", RULES, resumed=False, torch=True)] = Field(
        default=None,
        description="never predict this token, as the vocabulary spells it or text that is one token; may be given "
        "several times",
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

    @model_validator(mode="after")
    def _check_exclusions(self) -> DecodeOptions:
        """Refuse options that exclude one another."""
        layers = [name for name in ("encoder_layers", "decoder_layers") if getattr(self, name) is not None]
        exits = [name for name in ("exit", *layers) if getattr(self, name) is not None]
        if layers and self.exit is not None:
            raise ValueError(f"{option('exit')} and {option(layers[0])} both choose an exit; give one of them")
        if self.rerank is not None and exits:
            raise ValueError(
                f"{option('rerank')} decodes from two exits, {option(exits[0])} from one; give one of them"
            )
        if self.rerank is not None and len(self.run or ()) > 1:
            raise ValueError(f"{option('rerank')} takes one run, and {len(self.run or ())} are given; leave it out")
        names = {name: search for name, search in self._searches.items() if search is not None}
        if len(set(names.values())) > 1:
            (first, one), (second, other) = list(names.items())[:2]
            raise ValueError(f"{option(first)} decodes by the search {one}, {option(second)} by {other}; give one")
        if self.alignment_layer is not None and not self.alignment:
            raise ValueError(f"{option('alignment_layer')} is for {option('alignment')}, which is missing; give both")
        if self.alignment and self.detokenise is not None:
            raise ValueError(
                f"{option('alignment')} links the words that the model writes, which {option('detokenise')} changes; "
                "leave out one of them"
            )
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
            "rerank": self.rerank and self.rerank.replace("-", "_"),
            "constraints": "constrained_beam" if isinstance(self.constraints, str) else None,
        }

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the search by name; None where those of the run are to be taken."""
        settings = {flag.setting: getattr(self, name) for name, flag in flags().items() if flag.setting}
        return {**settings, "name": next(filter(None, self._searches.values()), None)}

    def longest_line(self, default: int | None = None) -> int:
        """Return the bound of a source line in tokens, given that of the run."""
        return self.max_source_tokens or default or MAX_SOURCE_TOKENS

    @property
    def is_exported(self) -> bool:
        """True if CTranslate2 translates."""
        return self.export is not None or self.runtime == "ctranslate2"

    @property
    def writes_lists(self) -> bool:
        """True if n-best lists are written."""
        return self.nbest > 1 or self.token_scores

    @property
    def exits(self) -> list[str]:
        """Names of the options that choose an exit, as far as they are given."""
        return list(self.given(("exit", "encoder_layers", "decoder_layers")))

    def given_values(self, *names: str) -> dict[str, Any]:
        """Return the values of some options by name."""
        return {name: getattr(self, name) for name in names}

    def given(self, names: Iterable[str]) -> Iterator[str]:
        """Yield those of some options that are not at their defaults."""
        return (name for name in names if getattr(self, name) != type(self).model_fields[name].default)

    def resumed(self) -> dict[str, Any]:
        """Return the options with which a stopped translation is resumed, as they are typed."""
        return {typed(name): getattr(self, name) for name, flag in flags().items() if flag.resumed}


def flags() -> dict[str, Flag]:
    """Return the properties of all options by name."""
    return {
        name: next((part for part in field.metadata if isinstance(part, Flag)), Flag())
        for name, field in DecodeOptions.model_fields.items()
    }


def identity_of(search: SearchConfig, device: str, precision: str) -> dict[str, Any]:
    """Return the settings by which lines are translated; a setting that has an option has the option's name."""
    names = {flag.setting: typed(name) for name, flag in flags().items() if flag.setting}
    settings = {names.get(key, f"search.{key}"): value for key, value in search.model_dump(mode="json").items()}
    return {**settings, "--precision": precision, "the device": device}  # auto differs from one GPU to another


def typed(name: str) -> str:
    """Return an option as it is typed on the command line."""
    return f"--{name.replace('_', '-')}"


def option_rows(group: str) -> list[str]:
    """Return the rows of a group's options in the table of docs/commands.md."""
    rows = []
    for name, flag in flags().items():
        field = DecodeOptions.model_fields[name]
        if flag.group != group or field.description is None:
            continue
        text = field.description.replace("(default: ", "(")
        if "(default" not in field.description and field.default not in (None, False, True):
            text += f" ({field.default:,})" if isinstance(field.default, int) else f" ({field.default})"
        page = flag.page.removeprefix("commands.md")
        more = f" ([more]({page}))" if page else ""
        rows.append(f"| `{f'{typed(name)} {flag.metavar}'.strip()}` | {text}{more} |")
    return rows


def choices(name: str) -> tuple[str, ...]:
    """Return the values of an option that has a few; none for others."""
    return tuple(value for kind in kinds(name) for value in getattr(kind, "__args__", ()) if isinstance(value, str))


def kinds(name: str) -> tuple[Any, ...]:
    """Return the types of an option's values without None."""
    annotation = DecodeOptions.model_fields[name].annotation
    parts = getattr(annotation, "__args__", ())
    if type(None) in parts:
        return tuple(part for part in parts if part is not type(None))
    return (annotation,)


def keywords(*names: str) -> Callable[[Function], Function]:
    """Return a decorator of a function whose ``**options`` are these options: `help` shows them."""

    def with_signature(function: Function) -> Function:
        signature = inspect.signature(function)
        parameters, kind = signature.parameters.values(), inspect.Parameter
        own = [parameter for parameter in parameters if parameter.kind is not kind.VAR_KEYWORD]
        rest = [parameter for parameter in parameters if parameter.kind is kind.VAR_KEYWORD]
        fields = {name: DecodeOptions.model_fields[name] for name in names}
        more = [
            kind(name, kind.KEYWORD_ONLY, default=field.default, annotation=field.annotation)
            for name, field in fields.items()
        ]
        keep = rest if function.__name__ == "open" else []
        function.__signature__ = signature.replace(parameters=[*own, *more, *keep])  # type: ignore[attr-defined]
        lines = "\n".join(f"            {name}: {field.description}." for name, field in fields.items())
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions:\n{lines}"
        return function

    return with_signature


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


def checked_texts(sentences: Iterable[str], name: str = "sentences") -> Iterator[str]:
    """Return an iterator over sentences that refuses everything else; it reads on demand.

    Raises:
        ConfigError: if they are one string, or no iterable. The iterator raises it for what is no string.
    """
    if isinstance(sentences, (str, bytes)):
        raise ConfigError(f"`{name}` is one string; put it into a list: [sentence]")
    check_type(name, sentences, (Iterable,), "a list of sentences")

    def text(sentence: str) -> str:
        check_type(name, sentence, (str,), "a list of strings")
        check_unicode(name, sentence)
        return sentence

    return map(text, sentences)


def checked_phrases(constraints: Iterable[Sequence[str]]) -> Iterator[Sequence[str]]:
    """Return an iterator over the phrases of each sentence that refuses phrases that are no text.

    Raises:
        ConfigError: if they are one string, or no iterable. The iterator raises it for what is no list of text.
    """
    requirement = "a list with a list of phrases for each sentence"
    if isinstance(constraints, (str, bytes)):
        raise ConfigError(f"{option('constraints')} is {shown(constraints)}; give {requirement}")
    check_type("constraints", constraints, (Iterable,), requirement)

    def texts(phrases: Sequence[str]) -> Sequence[str]:
        if isinstance(phrases, str):
            raise ConfigError(f"{option('constraints')} has {shown(phrases)}; give {requirement}")
        check_type("constraints", phrases, (Sequence,), requirement)
        for phrase in phrases:
            check_type("constraints", phrase, (str,), requirement)
            check_unicode("constraints", phrase)
        return phrases

    return map(texts, constraints)
