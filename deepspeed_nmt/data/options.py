"""Options of `prepare`."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from deepspeed_nmt.core.vocabulary import MAX_VOCABULARY, SIDES
from deepspeed_nmt.data.bert_tokenizer import PREFIX
from deepspeed_nmt.data.clean import CleaningConfig
from deepspeed_nmt.data.filters import FilterConfig, PairFilters, read_filters
from deepspeed_nmt.data.inputs import STANDARD_INPUT, Paths
from deepspeed_nmt.data.normalization import Normalization
from deepspeed_nmt.data.reading import FileSet, TextLayout
from deepspeed_nmt.data.segmentation import ALPHA, SampledSegmentations
from deepspeed_nmt.data.tokenizer import SPACE, Tokenizer
from deepspeed_nmt.data.unicode_rules import read_unicode_rules
from deepspeed_nmt.data.vocabulary_training import VocabularyType
from deepspeed_nmt.errors import shown
from deepspeed_nmt.registry import Config
from deepspeed_nmt.text import NO_TAGS, Tags, TextForm, check_language

DEFAULT_VOCAB_SIZE = 8000


_SPECIAL = re.compile(r"<pad>|<s>|</s>|<unk>|<0x[0-9A-F]{2}>")
"""Texts of special tokens, and of the tokens of bytes."""


def check_symbol(text: str) -> str:
    """Return a user-supplied symbol.

    Raises:
        ValueError: if it cannot be a token.
    """
    if not text or text.split() != [text]:
        raise ValueError(f"must be texts without white space, but have {shown(text)}")
    if _SPECIAL.fullmatch(text) or SPACE in text:
        raise ValueError(f"must not be texts of special tokens, but have {shown(text)}; rename it")
    if text == "none":
        raise ValueError("must not be none, which stands for no tag; rename it")
    return text


Symbol = Annotated[str, AfterValidator(check_symbol)]


def _one_or_two(models: Paths) -> Paths:
    if len(models) > 2:
        raise ValueError(f"must be one model for both sides, or two for source and target, but are {len(models)}")
    return models


class PrepareOptions(Config):
    """Options of `prepare`.

    Several files of one kind are read one after another, each aligned with its other side.
    """

    train_source: Paths = ()
    train_target: Paths = ()
    tsv: Paths = ()
    """Training text with both sides in a file, used instead of ``train_source`` and ``train_target``."""
    tsv_columns: tuple[Annotated[int, Field(ge=1, le=1000)], ...] | None = None
    """Numbers of the columns with source, target, and optionally weights; None means 1 and 2, and no others."""
    train_weights: Paths = ()
    """Weights of the training pairs, one a line."""
    train_scores: Paths = ()
    """Scores of the training pairs, one a line, for the filter ``score``."""
    valid_source: Paths = Field(min_length=1)
    valid_target: Paths = Field(min_length=1)
    test_source: Paths = ()
    test_target: Paths = ()
    out: Path
    vocab_size: int | None = Field(default=None, gt=4, le=MAX_VOCABULARY)
    """Number of tokens; None means 8000, or all tokens of segmented text."""
    vocab_from: Path | None = None
    """Directory whose vocabulary is used instead of a new one."""
    tokenizer: str | None = None
    """hf:BERT or hf:BERT,BERT: vocabularies of BERTs, used instead of a new one."""
    sentencepiece: Annotated[Paths, AfterValidator(_one_or_two)] = ()
    """User-supplied SentencePiece models, of both sides or of source and target, used instead of a new vocabulary."""
    vocabulary_type: VocabularyType | None = None
    """Type of a new vocabulary of raw text; None means bpe."""
    separate_vocabularies: bool = False
    """True to make a vocabulary for each side instead of one for both."""
    byte_fallback: bool = False
    """True to write characters that are not in a new vocabulary as their bytes."""
    symbols: tuple[Symbol, ...] = ()
    """Texts that are single tokens of a new vocabulary, or are added to the user's models."""
    tag_source: str | None = None
    """Symbol in front of every source of the directory."""
    tag_target: str | None = None
    """Symbol in front of every target of the directory."""
    segmentations: int = Field(default=1, ge=1, le=1000)
    """Segmentations of each training sentence; above 1 they are sampled."""
    segmentation_alpha: float | None = Field(default=None, gt=0.0, le=1.0)
    """Parameter of :class:`SampledSegmentations`. None means that of the vocabulary's type in ALPHA."""
    segmented: bool = False
    """True if the text is already segmented in the ``@@ `` style, so that its tokens are kept."""
    text: Literal["raw", "moses", "tokenised"] | None = None
    """Form of the text, or of the words of segmented text; None means raw, or tokenised if it is segmented."""
    source_lang: Annotated[str, AfterValidator(check_language)] | None = None
    """Language code of the source."""
    target_lang: Annotated[str, AfterValidator(check_language)] | None = None
    """Language code of the target, required by Moses' detokenizer."""
    character_coverage: float = Field(default=1.0, gt=0.9, le=1.0)
    """Share of the text's characters that the vocabulary must hold; 0.9995 for scripts of thousands of characters."""
    normalization: Normalization | None = None
    """Unicode's form of the text of a new vocabulary; None means nfkc."""
    cleaning: CleaningConfig = CleaningConfig()
    filters: dict[str, FilterConfig] = Field(default_factory=dict)
    """Settings of further filters of training pairs, by name; may be given as on the command line."""
    unicode: tuple[str, ...] = ()
    """Rules that repair characters of training text before it is cleaned; may be given as on the command line."""
    seed: int = Field(default=1, ge=0, lt=1 << 63)
    """Seed of the sample that the vocabulary is trained on, and of sampled segmentations."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Number of processes that clean and encode; the result does not depend on it."""
    overwrite: bool = False

    @model_validator(mode="before")
    @classmethod
    def _read_names(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        read = {"filters": read_filters, "unicode": read_unicode_rules}
        return {name: read[name](value) if name in read else value for name, value in given.items()}

    @model_validator(mode="after")
    def _filters_fit(self) -> PrepareOptions:
        self.pair_filters()
        if self.cleaning.keep_duplicates and (
            repeats := [n for n, each in self.filters.items() if each.finds_repeats]
        ):
            raise ValueError(
                f"--keep-duplicates keeps pairs that the filter {repeats[0]} removes; leave out one of them"
            )
        return self

    @model_validator(mode="after")
    def _one_vocabulary(self) -> PrepareOptions:
        if self.tokenizer is not None and not self.tokenizer.startswith(PREFIX):
            raise ValueError(f"--tokenizer must be {PREFIX}BERT or {PREFIX}BERT,BERT, but is {shown(self.tokenizer)}")
        sources = {
            "--tokenizer": self.tokenizer,
            "--sentencepiece": self.sentencepiece,
            "--vocab-from": self.vocab_from,
        }
        given = [option for option, value in sources.items() if value]
        if not given:
            return self
        made = {
            "--vocabulary-type": self.vocabulary_type is not None,
            "--separate-vocabularies": self.separate_vocabularies,
            "--byte-fallback": self.byte_fallback,
        }
        others: dict[str, object] = {option: option != given[0] for option in given}
        if given[0] != "--vocab-from":
            others |= {
                "--vocab-size": self.vocab_size,
                "--segmented": self.segmented,
                "--character-coverage": self.character_coverage != 1.0,
                "--normalization": self.normalization is not None,
            }
        if given[0] == "--tokenizer":
            others[f"--text {self.text}"] = self.text not in (None, "raw")
        if given[0] != "--sentencepiece":
            made["--symbols"] = bool(self.symbols)
        if wrong := [option for option, value in {**others, **made}.items() if value]:
            what = "its own vocabulary" if given[0] == "--vocab-from" else "its own vocabularies for raw text"
            raise ValueError(f"{given[0]} brings {what}; leave out {', '.join(wrong)}")
        return self

    @model_validator(mode="after")
    def _raw_text_is_segmented(self) -> PrepareOptions:
        if self.normalization is not None and self.segmented:
            raise ValueError("--normalization is for raw text, but segmented text is taken as it is; leave it out")
        if self.normalization is not None and self.vocab_from is not None:
            raise ValueError("--vocab-from brings its own normalization; leave out --normalization")
        ways = {
            "--vocabulary-type": self.vocabulary_type is not None,
            "--byte-fallback": self.byte_fallback,
            "--segmentations": self.segmentations > 1,
        }
        if self.segmented and (wrong := [option for option, value in ways.items() if value]):
            raise ValueError(f"--segmented text has its tokens already; leave out {', '.join(wrong)}")
        return self

    @model_validator(mode="after")
    def _alpha_is_of_several_segmentations(self) -> PrepareOptions:
        if self.segmentation_alpha is not None and self.segmentations == 1:
            raise ValueError(
                "--segmentation-alpha is for sampled segmentations, but there is one that is not sampled; give "
                "--segmentations 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _symbols_are_new_tokens(self) -> PrepareOptions:
        if again := sorted({each for each in self.symbols if self.symbols.count(each) > 1}):
            raise ValueError(f"--symbols must be different, but {', '.join(again)} is given more than once")
        if self.vocab_from is None and self.tokenizer is None:
            for option, tag in (("--tag-source", self.tag_source), ("--tag-target", self.tag_target)):
                if tag is not None and tag not in self.symbols:
                    known = f"which are {', '.join(self.symbols)}" if self.symbols else "which are none"
                    raise ValueError(
                        f"{option} must be one of --symbols, {known}, but is {shown(tag)}; add it to --symbols"
                    )
        return self

    @model_validator(mode="after")
    def _moses_has_languages(self) -> PrepareOptions:
        if self.text == "moses" and self.target_lang is None:
            raise ValueError(
                "--text moses needs the language of the target, by whose rules translations are detokenised; give "
                "--target-lang, for example --target-lang de"
            )
        return self

    @model_validator(mode="after")
    def _training_text_is_given_once(self) -> PrepareOptions:
        if not self.tsv and not (self.train_source or self.train_target):
            raise ValueError("the training text must be given; give --train-source and --train-target, or --tsv")
        if self.tsv and (self.train_source or self.train_target):
            raise ValueError("--tsv has both sides of the training text; leave out --train-source and --train-target")
        if self.tsv_columns is not None:
            if not self.tsv:
                raise ValueError("--tsv-columns is for --tsv; leave it out, or give the text as --tsv")
            if len(self.tsv_columns) not in (2, 3) or len(set(self.tsv_columns)) < len(self.tsv_columns):
                raise ValueError(
                    "--tsv-columns must be two or three different columns, of source, target and weights, "
                    f"for example 1,2, but is {','.join(map(str, self.tsv_columns))}"
                )
            if self.train_weights and len(self.tsv_columns) == 3:
                raise ValueError(
                    "--train-weights and a third column of --tsv-columns are both weights; leave one out"
                )
        files = len(self.tsv or self.train_source)
        for option, given in (("--train-weights", self.train_weights), ("--train-scores", self.train_scores)):
            if given and len(given) != files:
                raise ValueError(
                    f"{option} must have a file for each file of the training text, but has {len(given)} for {files}"
                )
        return self

    @model_validator(mode="after")
    def _scores_are_read(self) -> PrepareOptions:
        readers = [name for name, each in self.filters.items() if each.reads_scores]
        if readers and not self.train_scores:
            raise ValueError(f"the filter {readers[0]} needs the scores of the training pairs; give --train-scores")
        if self.train_scores and not readers:
            raise ValueError("--train-scores is for the filter score; give --filters score=MINIMUM, or leave it out")
        return self

    @model_validator(mode="after")
    def _standard_input_has_both_sides(self) -> PrepareOptions:
        for option, paths in self.inputs.items():
            count = paths.count(STANDARD_INPUT)
            if count and option != "train.tsv":
                raise ValueError(
                    f"{input_option(option)} must be files, but has -; standard input has both sides: give --tsv -"
                )
            if count > 1:
                raise ValueError("--tsv must have standard input once, because it is read once; leave out one -")
        return self

    @model_validator(mode="after")
    def _sides_match(self) -> PrepareOptions:
        for split in ("train", "valid", "test"):
            source, target = self.paths(split)
            if len(source) != len(target):
                raise ValueError(
                    f"{split} must have as many source as target files, but has {len(source)} and {len(target)}"
                )
        return self

    @property
    def text_form(self) -> TextForm:
        """Form of the text."""
        form = self.text or ("tokenised" if self.segmented else "raw")
        return TextForm(form=form, source_lang=self.source_lang, target_lang=self.target_lang)

    def pair_filters(self) -> PairFilters:
        """Build the filters.

        Raises:
            ConfigError: if a filter lacks a language or a package.
        """
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

    @property
    def splits(self) -> tuple[str, ...]:
        """Splits with text."""
        return ("train", "valid", "test") if self.test_source else ("train", "valid")

    def paths(self, split: str) -> tuple[Paths, Paths]:
        """Return the source and the target files of a split; of TSV there are none."""
        return getattr(self, f"{split}_source"), getattr(self, f"{split}_target")

    @property
    def inputs(self) -> dict[str, Paths]:
        """All input files by ``<split>.<side>``, ``train.tsv``, ``train.weights`` and ``train.scores``."""
        named = {f"{split}.{side}": paths for split in ("train", "valid", "test")
                 for side, paths in zip(SIDES, self.paths(split), strict=True)}  # fmt: skip
        named |= {"train.tsv": self.tsv, "train.weights": self.train_weights, "train.scores": self.train_scores}
        return {name: paths for name, paths in named.items() if paths}

    @property
    def training_sets(self) -> list[FileSet]:
        """The files of the training text that are aligned with each other, by their names in :attr:`inputs`."""
        names = [name for name in self.inputs if name.startswith("train.")]
        return [dict(zip(names, files, strict=True)) for files in zip(*map(self.inputs.get, names), strict=True)]

    @property
    def layout(self) -> TextLayout:
        """Places of the pairs in the training text."""
        return TextLayout(bool(self.tsv), self.tsv_columns, bool(self.train_weights), bool(self.train_scores))

    @property
    def weighted(self) -> bool:
        """True if the training pairs have weights."""
        return bool(self.train_weights) or len(self.tsv_columns or ()) == 3

    def recorded(self, vocabulary: Tokenizer | None, sampling: SampledSegmentations | None = None) -> dict[str, Any]:
        """Collect the options that decide the result, besides the text.

        Those that older versions lack are recorded only if they are not at their defaults.

        Args:
            vocabulary: the given one, if any.
            sampling: segmentations to draw, if any.
        """
        options = self.model_dump(mode="json", include={"segmented", "cleaning"})
        if self.tsv_columns is not None:
            options["tsv_columns"] = list(self.tsv_columns)
        text = self.text_form
        if text != TextForm(form="tokenised" if self.segmented else "raw"):
            options["text"] = asdict(text)
        if self.filters:
            options["filters"] = {name: each.model_dump(mode="json") for name, each in self.filters.items()}
        if self.unicode:
            options["unicode"] = list(self.unicode)
        if self.tags != NO_TAGS:
            options["tags"] = asdict(self.tags)
        if sampling is not None:
            options["segmentations"] = asdict(sampling)
        if self.symbols:
            options["symbols"] = list(self.symbols)
        if vocabulary is not None:
            given = "tokenizer" if self.tokenizer else "sentencepiece" if self.sentencepiece else "vocab_from"
            return {**options, given: vocabulary.digest}
        size = self.vocab_size or (None if self.segmented else DEFAULT_VOCAB_SIZE)
        changed = {
            "normalization": self.normalization not in (None, "nfkc"),
            "vocabulary_type": self.vocabulary_type not in (None, "bpe"),
            "separate_vocabularies": self.separate_vocabularies,
            "byte_fallback": self.byte_fallback,
        }
        options |= {name: getattr(self, name) for name, differs in changed.items() if differs}
        return {**options, "vocab_size": size, "character_coverage": self.character_coverage, "seed": self.seed}


def input_option(name: str) -> str:
    """Return the option that names input files.

    Args:
        name: of the files in :attr:`PrepareOptions.inputs`.
    """
    return "--tsv" if name == "train.tsv" else f"--{name.replace('.', '-')}"
