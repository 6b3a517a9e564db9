"""Options of `prepare`: the only place that declares them; the command's flags are made from these fields."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, SerializeAsAny, model_validator

from deepspeed_nmt.core.vocabulary import MAX_VOCABULARY, SIDES
from deepspeed_nmt.data.bert_tokenizer import PREFIX
from deepspeed_nmt.data.clean import UNICODE_RULES, CleaningConfig, read_unicode_rules
from deepspeed_nmt.data.filters import FILTERS, Filter, PairFilters, read_filters
from deepspeed_nmt.data.inputs import STANDARD_INPUT, FileSet, Inputs
from deepspeed_nmt.data.tokenizer import ALPHA, SPACE, SampledSegmentations, Tokenizer
from deepspeed_nmt.data.vocabulary_training import DEFAULT_NORMALIZATION, Normalization, VocabularyType
from deepspeed_nmt.errors import counted, shown, typed
from deepspeed_nmt.registry import Config
from deepspeed_nmt.text import NO_TAGS, Tags, TextForm, check_language

DEFAULT_VOCAB_SIZE = 8000

_SPECIAL = re.compile(r"<pad>|<s>|</s>|<unk>|<0x[0-9A-F]{2}>")
"""Texts of special tokens, and of the tokens of bytes."""
_URL = re.compile(r"[A-Za-z][\w+.-]+:/")
"""Begin of a URL as a path, which has no two slashes in succession."""


def check_symbol(text: str) -> str:
    """Return a user-supplied symbol, or raise a ValueError if it cannot be a token."""
    if not text or text.split() != [text]:
        raise ValueError(f"{shown(text)} has white space, which a symbol cannot have")
    if _SPECIAL.fullmatch(text) or SPACE in text:
        raise ValueError(f"{shown(text)} is the text of a special token; rename the symbol")
    if text == "none":
        raise ValueError("none stands for no tag; rename the symbol")
    return text


Symbol = Annotated[str, AfterValidator(check_symbol)]
Language = Annotated[str, AfterValidator(check_language)]


def command_option(text: str, default: Any = None, metavar: str = "", group: str = "", **more: Any) -> Any:
    """Declare a field as an option of the command."""
    names = {"aliases": more.pop("aliases", ()), "action": more.pop("action", "store")}
    return Field(default, description=text, json_schema_extra={"metavar": metavar, "group": group, **names}, **more)


_VOCABULARY, _TAGS, CLUSTER = "vocabulary", "tags and segmentations", "SLURM"
_LANGUAGE = "language code of the {}, for example de; Moses' rules need it"


FREE = ("workers", "array", "partition", "executor")
"""Options of the executor that change nothing of what tasks write."""


class ExecutorOptions(Config):
    """Options of a work in tasks: who runs them."""

    out: Path
    workers: int = command_option(
        "number of processes of this host; the result is the same for any (default: all cores)", 1,
        aliases=("--threads",), ge=1, le=1024,
    )  # fmt: skip
    executor: Literal["local", "slurm"] = command_option(
        "processes of this host, or jobs of SLURM, which --status shows; the result is the same",
        "local",
        group=CLUSTER,
    )
    tasks: int | None = command_option("number of tasks of a stage", None, "T", group=CLUSTER, ge=1, le=100_000)
    array: int | None = command_option(
        "tasks that run at once (default: all)", None, "A", group=CLUSTER, ge=1, le=100_000
    )
    partition: str | None = command_option("partition of SLURM (default: its own)", metavar="P", group=CLUSTER)

    @model_validator(mode="after")
    def _check_executor(self) -> ExecutorOptions:
        for name in ("tasks", "array", "partition"):
            if self.executor == "local" and getattr(self, name) is not None:
                raise ValueError(f"{typed(name)} is for --executor slurm; add it, or leave {typed(name)} out")
        if self.executor == "slurm" and self.tasks is None:
            raise ValueError("--executor slurm needs a number of tasks; give --tasks, for example 64")
        return self


class PrepareOptions(ExecutorOptions):
    """Options of `prepare`.

    Several files of one kind are read one after another, each aligned with its other side.
    """

    train_source: Inputs = command_option("source text of the training set, one sentence a line", ())
    train_target: Inputs = command_option("target text of the training set, one sentence a line", ())
    valid_source: Inputs = command_option("source text of the validation set, one sentence a line", ..., min_length=1)
    valid_target: Inputs = command_option("target text of the validation set, one sentence a line", ..., min_length=1)
    test_source: Inputs = command_option("source text of the test set, one sentence a line", ())
    test_target: Inputs = command_option("target text of the test set, one sentence a line", ())
    tsv: Inputs = command_option(
        "training text with both sides on a line, separated by a tab; -: standard input", (), action="extend"
    )
    tsv_columns: tuple[Annotated[int, Field(ge=1, le=1000)], ...] | None = command_option(
        "columns of --tsv with source, target, and weights; others are ignored (default: 1,2, and no others)",
        metavar="S,T[,W]",
    )
    train_weights: Inputs = command_option(
        "weights of the training pairs, one positive number a line: factors of their loss", ()
    )
    train_scores: Inputs = command_option("scores of the training pairs, one number a line, for the filter score", ())
    train_alignments: Inputs = command_option(
        "word alignments of the training pairs, links such as 0-0 1-2 on a line, for objective.guided_alignment", ()
    )
    out: Path = command_option("data directory to make", ..., "DIR")
    segmented: bool = command_option("the text is already segmented with '@@ ' marks", False)
    text: Literal["raw", "moses", "tokenised"] | None = command_option(
        "form of the text: raw, tokenised by Moses' rules, or by others; decides how translations are scored "
        "(default: raw; with --segmented: tokenised)"
    )
    source_lang: Language | None = command_option(_LANGUAGE.format("source"), metavar="L")
    target_lang: Language | None = command_option(_LANGUAGE.format("target"), metavar="L")
    vocab_size: int | None = command_option(
        "size of the vocabulary (default: 8000; with --segmented: all)", group=_VOCABULARY, gt=4, le=MAX_VOCABULARY
    )
    vocabulary_type: VocabularyType | None = command_option(
        "type of a new vocabulary of raw text: merges, or a language model of pieces (default: bpe)",
        group=_VOCABULARY,
    )
    separate_vocabularies: bool = command_option(
        "make a vocabulary for each side, each of --vocab-size tokens, instead of one for both", False,
        group=_VOCABULARY,
    )  # fmt: skip
    symbols: tuple[Symbol, ...] = command_option(
        "texts that are single tokens of the vocabulary, such as tags of languages; normalization keeps them", (),
        group=_VOCABULARY,
    )  # fmt: skip
    character_coverage: float = command_option(
        "share of the text's characters that the vocabulary covers; 0.9995 for Chinese or Japanese", 1.0,
        group=_VOCABULARY, gt=0.9, le=1.0,
    )  # fmt: skip
    byte_fallback: bool = command_option(
        "write a character that is not in the vocabulary as its bytes, for which it has 256 tokens", False,
        group=_VOCABULARY,
    )  # fmt: skip
    normalization: Normalization | None = command_option(
        "Unicode normalization of raw text: nfkc rewrites compatibility variants (½ km² as 1⁄2 km2, full-width "
        "letters), nfc only unifies spellings of the same characters, none keeps them (default: nfc)",
        group=_VOCABULARY,
    )
    vocab_from: Path | None = command_option(
        "use the vocabulary of this data or run directory", metavar="DIR", group=_VOCABULARY
    )
    sentencepiece: tuple[Path, ...] = command_option(
        "use a SentencePiece model for both sides, or two for source and target", (), group=_VOCABULARY
    )
    tokenizer: str | None = command_option(
        "use the tokenizer of a BERT for both sides, or of two for source and target; B is a folder, or a name on "
        "the Hugging Face hub",
        metavar="hf:B[,B]",
        group=_VOCABULARY,
    )
    tag_source: str | None = command_option(
        "put this symbol in front of every source, those of validation too", group=_TAGS
    )
    tag_target: str | None = command_option(
        "put this symbol in front of every target, those of validation too", group=_TAGS
    )
    segmentations: int = command_option(
        "sampled segmentations of each training sentence, one for an epoch; 1: one that is not sampled", 1, "K",
        group=_TAGS, ge=1, le=1000,
    )  # fmt: skip
    segmentation_alpha: float | None = command_option(
        "sampling: probability that a merge of BPE is skipped (default: 0.1), or exponent of a unigram model's "
        "probabilities (default: 0.2)", metavar="A", group=_TAGS, gt=0.0, le=1.0,
    )  # fmt: skip
    cleaning: CleaningConfig = CleaningConfig()
    filters: dict[str, SerializeAsAny[Filter]] = command_option(
        "remove more training pairs: web, which stands for many filters, or names of filters "
        f"({', '.join(FILTERS)}), with a value to set their bound; -NAME leaves out a filter of web",
        {},
        "NAME[=VALUE],...",
    )
    unicode: tuple[str, ...] = command_option(
        f"repair characters of the training text before it is cleaned: {', '.join(UNICODE_RULES)}", (), "RULE,..."
    )
    seed: int = command_option(
        "seed of the sample that the vocabulary is learnt from, and of segmentations", 1, ge=0, lt=1 << 63
    )
    overwrite: bool = command_option("replace a data directory made from other text or options", False)

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if isinstance(columns := values.get("tsv_columns"), str):
            values = {**values, "tsv_columns": columns.split(",")}
        read: dict[str, Callable[[Any], Any]] = {"filters": read_filters, "unicode": read_unicode_rules}
        return {name: read[name](value) if name in read else value for name, value in values.items()}

    @model_validator(mode="after")
    def _fit_together(self) -> PrepareOptions:
        self.pair_filters()
        for problem in (*self._excluded(), *self._wrong_vocabulary(), *self._wrong_files()):
            raise ValueError(problem)
        return self

    def _excluded(self) -> Iterator[str]:
        """Yield messages about options that exclude others."""
        given = {name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default}
        new = ("vocabulary_type", "separate_vocabularies", "byte_fallback")
        raw = ("vocab_size", "segmented", "character_coverage", "normalization", *new)
        text = () if self.text == "raw" else ("text",)
        both = "brings its own vocabularies for raw text"
        for name, fact, excluded in (
            ("tokenizer", both, ("sentencepiece", "vocab_from", *raw, "symbols", *text)),
            ("sentencepiece", both, ("vocab_from", *raw)),
            ("vocab_from", "brings its own vocabulary", (*new, "character_coverage", "normalization", "symbols")),
            (
                "segmented",
                "is for text that has its tokens already",
                ("normalization", "vocabulary_type", "character_coverage", "byte_fallback", "segmentations"),
            ),
            ("tsv", "has both sides of the training text", ("train_source", "train_target")),
        ):
            others = [other for other in excluded if other in given]
            if name in given and others:
                yield f"{typed(name)} {fact}; leave out {', '.join(map(typed, others))}"

    def _wrong_vocabulary(self) -> Iterator[str]:
        """Yield messages about vocabulary, tags and languages."""
        if self.tokenizer is not None and not self.tokenizer.startswith(PREFIX):
            yield f"--tokenizer is {shown(self.tokenizer)}, not {PREFIX}BERT or {PREFIX}BERT,BERT"
        if (models := len(self.sentencepiece)) > 2:
            yield f"--sentencepiece: {models} models; give one for both sides, or two for source and target"
        if self.segmentation_alpha is not None and self.segmentations == 1:
            yield "--segmentation-alpha without sampled segmentations; give --segmentations 2 or more"
        if again := sorted({symbol for symbol in self.symbols if self.symbols.count(symbol) > 1}):
            yield f"--symbols has {', '.join(again)} more than once"
        if self.vocab_from is None and self.tokenizer is None:
            for side in SIDES:
                if (tag := self.tags.of(side)) is not None and tag not in self.symbols:
                    yield f"--tag-{side} {shown(tag)} is none of --symbols ({', '.join(self.symbols)}); add it"
        if self.text == "moses" and self.target_lang is None:
            yield "--text moses needs the language by whose rules translations are detokenised; give --target-lang"

    def _wrong_files(self) -> Iterator[str]:
        """Yield messages about the text, its weights and its scores."""
        if not (self.tsv or self.train_source or self.train_target):
            yield "no training text; give --train-source and --train-target, or --tsv"
        if columns := self.tsv_columns:
            if not self.tsv:
                yield "--tsv-columns is for --tsv; leave it out, or give the text as --tsv"
            if len(columns) not in (2, 3) or len(set(columns)) < len(columns):
                yield (
                    f"--tsv-columns is {','.join(map(str, columns))}; give two or three different columns, of "
                    "source, target and weights, for example 1,2"
                )
            if self.train_weights and len(columns) == 3:
                yield "--train-weights and a third column of --tsv-columns are both weights; leave one out"
        files = len(self.tsv or self.train_source)
        for name, paths in (
            ("weights", self.train_weights), ("scores", self.train_scores), ("alignments", self.train_alignments)
        ):  # fmt: skip
            if (count := len(paths)) not in (0, files):
                yield f"--train-{name} has {counted(count, 'files')} for {files} of the training text"
        scored = [name for name, entry in self.filters.items() if entry.reads_scores]
        if scored and not self.train_scores:
            yield f"no scores of the training pairs for the filter {scored[0]}; give --train-scores"
        if self.train_scores and not scored:
            yield "--train-scores is for the filter score; give --filters score=MINIMUM, or leave it out"
        repeats = [name for name, entry in self.filters.items() if entry.remembers]
        if self.cleaning.keep_duplicates and repeats:
            yield f"--keep-duplicates keeps pairs that the filter {repeats[0]} removes; leave out one of them"
        for name, paths in self.inputs.items():
            count = paths.count(STANDARD_INPUT)
            if count and name != "train.tsv":
                yield f"{input_option(name)} is -, but standard input has both sides; give --tsv -"
            if count > 1:
                yield "--tsv has - more than once, but standard input can be read only once; leave out one"
        for name in ("out", "vocab_from", "sentencepiece"):
            paths = getattr(self, name) if name == "sentencepiece" else (getattr(self, name),)
            if any(_URL.match(str(path)) for path in paths):
                yield f"{typed(name)} is a URL, by which only text is read; give a path"
        for split in ("train", "valid", "test"):
            source, target = map(len, self.paths(split))
            if source != target:
                yield f"{split} has {counted(source, 'source files')}, but {counted(target, 'target files')}"

    @property
    def text_form(self) -> TextForm:
        """Form of the text."""
        form = self.text or ("tokenised" if self.segmented else "raw")
        return TextForm(form=form, source_lang=self.source_lang, target_lang=self.target_lang)

    def pair_filters(self) -> PairFilters:
        """Build the filters."""
        return PairFilters(self.filters, self.text_form, self.segmented)

    @property
    def tags(self) -> Tags:
        """Symbols in front of all sentences."""
        return Tags(self.tag_source, self.tag_target)

    def sampling(self, vocabulary_type: str) -> SampledSegmentations | None:
        """Return the segmentations to sample with a vocabulary of a type; None for one that is not sampled."""
        if self.segmentations == 1:
            return None
        alpha = self.segmentation_alpha or ALPHA.get(vocabulary_type, ALPHA["bpe"])
        return SampledSegmentations(self.segmentations, alpha, self.seed)

    def paths(self, split: str) -> tuple[Inputs, Inputs]:
        """Return the source and the target files of a split; of TSV there are none."""
        return getattr(self, f"{split}_source"), getattr(self, f"{split}_target")

    @property
    def inputs(self) -> dict[str, Inputs]:
        """All input files by ``<split>.<side>``, ``train.tsv``, and those of each pair, such as ``train.weights``."""
        named = {f"{split}.{side}": paths for split in ("train", "valid", "test")
                 for side, paths in zip(SIDES, self.paths(split), strict=True)}  # fmt: skip
        named |= {"train.tsv": self.tsv, "train.weights": self.train_weights, "train.scores": self.train_scores}
        named |= {"train.alignments": self.train_alignments}
        return {name: paths for name, paths in named.items() if paths}

    @property
    def training_sets(self) -> list[FileSet]:
        """The files of the training text that are aligned with each other, by their names in :attr:`inputs`."""
        names = [name for name in self.inputs if name.startswith("train.")]
        return [dict(zip(names, files, strict=True)) for files in zip(*map(self.inputs.get, names), strict=True)]

    def recorded(self, vocabulary: Tokenizer | None, sampling: SampledSegmentations | None = None) -> dict[str, Any]:
        """Collect the options that decide the result, besides the text, most of them only if not defaults."""
        options = self.model_dump(mode="json", include={"segmented", "cleaning"})
        text = self.text_form
        changed: dict[str, Any] = {
            "tsv_columns": list(self.tsv_columns or ()),
            "text": asdict(text) if text != TextForm(form="tokenised" if self.segmented else "raw") else None,
            "filters": {name: entry.model_dump(mode="json") for name, entry in self.filters.items()},
            "unicode": list(self.unicode),
            "tags": asdict(self.tags) if self.tags != NO_TAGS else None,
            "segmentations": None if sampling is None else asdict(sampling),
            "symbols": list(self.symbols),
        }
        if vocabulary is not None:
            name = "tokenizer" if self.tokenizer else "sentencepiece" if self.sentencepiece else "vocab_from"
            return {**options, **{key: value for key, value in changed.items() if value}, name: vocabulary.digest}
        changed |= {
            "normalization": None if self.segmented else self.normalization or DEFAULT_NORMALIZATION,
            "vocabulary_type": self.vocabulary_type if self.vocabulary_type != "bpe" else None,
            "separate_vocabularies": self.separate_vocabularies,
            "byte_fallback": self.byte_fallback,
        }
        options |= {key: value for key, value in changed.items() if value}
        size = self.vocab_size or (None if self.segmented else DEFAULT_VOCAB_SIZE)
        return {**options, "vocab_size": size, "character_coverage": self.character_coverage, "seed": self.seed}


def input_option(name: str) -> str:
    """Return the option that names input files, by their name in :attr:`PrepareOptions.inputs`."""
    return "--tsv" if name == "train.tsv" else f"--{name.replace('.', '-')}"
