"""Options of `prepare`."""

from __future__ import annotations

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
from deepspeed_nmt.data.tokenizer import Tokenizer
from deepspeed_nmt.data.unicode_rules import read_unicode_rules
from deepspeed_nmt.errors import shown
from deepspeed_nmt.registry import Config
from deepspeed_nmt.text import TextForm, check_language

DEFAULT_VOCAB_SIZE = 8000


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
    """Seed of the sample that the vocabulary is trained on."""
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
        if self.tokenizer is None:
            return self
        if not self.tokenizer.startswith(PREFIX):
            raise ValueError(f"--tokenizer must be {PREFIX}BERT or {PREFIX}BERT,BERT, but is {shown(self.tokenizer)}")
        given = {"--vocab-from": self.vocab_from, "--vocab-size": self.vocab_size, "--segmented": self.segmented}
        given["--character-coverage"] = self.character_coverage != 1.0
        given["--normalization"] = self.normalization is not None
        given[f"--text {self.text}"] = self.text not in (None, "raw")
        if others := [option for option, value in given.items() if value]:
            raise ValueError(f"--tokenizer brings its own vocabularies for raw text; leave out {', '.join(others)}")
        return self

    @model_validator(mode="after")
    def _normalization_is_of_a_new_vocabulary(self) -> PrepareOptions:
        if self.normalization is not None and self.segmented:
            raise ValueError("--normalization is for raw text, but segmented text is taken as it is; leave it out")
        if self.normalization is not None and self.vocab_from is not None:
            raise ValueError("--vocab-from brings its own normalization; leave out --normalization")
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
        if self.train_weights and len(self.train_weights) != files:
            raise ValueError(
                "--train-weights must have a file for each file of the training text, but has "
                f"{len(self.train_weights)} for {files}"
            )
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
    def splits(self) -> tuple[str, ...]:
        """Splits with text."""
        return ("train", "valid", "test") if self.test_source else ("train", "valid")

    def paths(self, split: str) -> tuple[Paths, Paths]:
        """Return the source and the target files of a split; of TSV there are none."""
        return getattr(self, f"{split}_source"), getattr(self, f"{split}_target")

    @property
    def inputs(self) -> dict[str, Paths]:
        """All input files by ``<split>.<side>``, ``train.tsv`` and ``train.weights``."""
        named = {f"{split}.{side}": paths for split in ("train", "valid", "test")
                 for side, paths in zip(SIDES, self.paths(split), strict=True)}  # fmt: skip
        named |= {"train.tsv": self.tsv, "train.weights": self.train_weights}
        return {name: paths for name, paths in named.items() if paths}

    @property
    def training_sets(self) -> list[FileSet]:
        """The files of the training text that are aligned with each other, by their names in :attr:`inputs`."""
        names = [name for name in self.inputs if name.startswith("train.")]
        return [dict(zip(names, files, strict=True)) for files in zip(*map(self.inputs.get, names), strict=True)]

    @property
    def layout(self) -> TextLayout:
        """Places of the pairs in the training text."""
        return TextLayout(tsv=bool(self.tsv), tsv_columns=self.tsv_columns, weighted=bool(self.train_weights))

    @property
    def weighted(self) -> bool:
        """True if the training pairs have weights."""
        return bool(self.train_weights) or len(self.tsv_columns or ()) == 3

    def recorded(self, vocabulary: Tokenizer | None) -> dict[str, Any]:
        """Collect the options that decide the result, besides the text; ``vocabulary`` is the given one, if any."""
        options = self.model_dump(mode="json", include={"segmented", "cleaning"})
        if self.tsv_columns is not None:
            options["tsv_columns"] = list(self.tsv_columns)
        text = self.text_form
        if text != TextForm(form="tokenised" if self.segmented else "raw"):  # not recorded by versions without it
            options["text"] = asdict(text)
        if self.filters:
            options["filters"] = {name: each.model_dump(mode="json") for name, each in self.filters.items()}
        if self.unicode:
            options["unicode"] = list(self.unicode)
        if vocabulary is not None:
            return {**options, "tokenizer" if self.tokenizer else "vocab_from": vocabulary.digest}
        size = self.vocab_size or (None if self.segmented else DEFAULT_VOCAB_SIZE)
        if self.normalization not in (None, "nfkc"):  # not recorded by versions that had no other
            options["normalization"] = self.normalization
        return {**options, "vocab_size": size, "character_coverage": self.character_coverage, "seed": self.seed}


def input_option(name: str) -> str:
    """Return the option that names input files.

    Args:
        name: of the files in :attr:`PrepareOptions.inputs`.
    """
    return "--tsv" if name == "train.tsv" else f"--{name.replace('.', '-')}"
