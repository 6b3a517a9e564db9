"""Filters of sentence pairs: a table of named criteria, by which `prepare` and others remove pairs.

Each filter has a class of settings with defaults, and a function that builds a test of a pair from them. Each pair is
judged for itself, so worker processes can share the pairs; only for ``near_duplicates`` earlier pairs matter, and
:mod:`deepspeed_nmt.data.clean` decides about it in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from deepspeed_nmt.data.filters import agreement, languages, markup, scores
from deepspeed_nmt.data.filters import near_duplicates as repeats
from deepspeed_nmt.data.filters.base import FilterConfig, Key, ScoreTest, Test
from deepspeed_nmt.errors import ConfigError, did_you_mean, shown
from deepspeed_nmt.registry import Entry, Registry, problem_of
from deepspeed_nmt.text import TextForm

FILTERS: Registry[Callable[..., Any]] = Registry(
    "filter",
    [
        Entry("html", markup.HtmlConfig, markup.html),
        Entry("url", markup.UrlConfig, markup.url),
        Entry("long_words", markup.LongWordsConfig, markup.long_words),
        Entry("letters", markup.LettersConfig, markup.letters),
        Entry("copy", agreement.CopyConfig, agreement.copy),
        Entry("digits", agreement.DigitsConfig, agreement.digits),
        Entry("punctuation", agreement.PunctuationConfig, agreement.punctuation),
        Entry("repetition", agreement.RepetitionConfig, agreement.repetition),
        Entry("script", languages.ScriptConfig, languages.script),
        Entry("language", languages.LanguageConfig, languages.language),
        Entry("score", scores.ScoreConfig, scores.score),
        Entry("near_duplicates", repeats.NearDuplicatesConfig, repeats.near_duplicates),
    ],
)
"""All filters, in the order in which they are applied."""
PRESETS: Mapping[str, tuple[str, ...]] = {
    "web": (
        *("html", "url", "long_words", "letters", "copy", "digits", "punctuation", "repetition", "near_duplicates"),
    ),
}
"""Names for several filters, all with their defaults. They need no languages and no further packages."""

__all__ = ["FILTERS", "PRESETS", "FilterConfig", "FilterConfigs", "PairFilters", "read_filters"]

FilterConfigs = Mapping[str, FilterConfig]
"""Settings of the filters that are applied, by name."""


def read_filters(given: str | Mapping[str, Any]) -> dict[str, FilterConfig]:
    """Read which filters are to be applied.

    Args:
        given: names of filters and presets, separated by commas, as on the command line: NAME, NAME=VALUE, or -NAME
            to leave out a filter of a preset; or settings by name, as in ``meta.json``.

    Returns:
        Settings by name, in the order in which filters are applied.

    Raises:
        ConfigError: if a name or a value is wrong.
    """
    configs = _from_words(given.split(",")) if isinstance(given, str) else _from_settings(given)
    return {name: configs[name] for name in FILTERS if name in configs}


def _from_words(words: Iterable[str]) -> dict[str, FilterConfig]:
    configs: dict[str, FilterConfig] = {}
    for word in filter(None, map(str.strip, words)):
        name, equals, value = word.partition("=")
        if name in PRESETS and not equals:
            configs.update({each: _validated(each, {}) for each in PRESETS[name]})
        elif name[:1] == "-" and name[1:] in configs and not equals:
            del configs[name[1:]]
        elif name[:1] == "-":
            raise ConfigError(f"--filters must leave out a filter that it has named before, but has {shown(word)}")
        else:
            configs[name] = _validated(name, _value(name, value) if equals else {})
    return configs


def _from_settings(settings: Mapping[str, Any]) -> dict[str, FilterConfig]:
    return {
        name: each if isinstance(each, FilterConfig) else _validated(name, each) for name, each in settings.items()
    }


def _value(name: str, value: str) -> dict[str, Any]:
    try:
        return _class_of(name).fields_of(value)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"the filter {name} {error}") from error


def _validated(name: str, settings: Any) -> FilterConfig:
    try:
        return _class_of(name).model_validate(settings)
    except ValidationError as error:
        raise ConfigError(problem_of(each, f"the filter {name}") for each in error.errors()) from error


def _class_of(name: str) -> type[FilterConfig]:
    if name in PRESETS:
        raise ConfigError(
            f"{name} is a preset of --filters and has no value; give {name}, and NAME=VALUE for a filter"
        )
    if name not in FILTERS:
        known = [*PRESETS, *FILTERS]
        raise ConfigError(f"--filters must name known filters, but has {shown(name)}{did_you_mean(name, known)}")
    config = FILTERS[name].config
    assert issubclass(config, FilterConfig)
    return config


class PairFilters:
    """Filters that are applied to pairs in turn. It can be pickled.

    Args:
        configs: of the filters, by name; see :func:`read_filters`.
        text: form and languages of the text.
        segmented: True if the text is segmented in the ``@@ `` style; the filters see its words.

    Raises:
        ConfigError: if a filter lacks a language or a package.
    """

    def __init__(self, configs: FilterConfigs, text: TextForm, segmented: bool = False) -> None:
        self.configs = dict(configs)
        self._arguments = (self.configs, text, segmented)
        self._segmented = segmented
        self._tests: dict[str, Test] = {}
        self._score_tests: dict[str, ScoreTest] = {}
        self._keys: dict[str, Key] = {}
        for name, config in configs.items():
            kind: dict[str, Any] = self._keys if config.finds_repeats else self._tests
            (self._score_tests if config.reads_scores else kind)[name] = FILTERS[name].build(config, text)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the settings: another process builds the filters again."""
        return PairFilters, self._arguments

    @property
    def judging(self) -> tuple[str, ...]:
        """Names of the filters that judge each pair for itself, in order."""
        return (*self._tests, *self._score_tests)

    @property
    def reading_scores(self) -> tuple[str, ...]:
        """Names of the filters that judge a pair by its score, in order: after those that read its text."""
        return tuple(self._score_tests)

    @property
    def remembering(self) -> tuple[str, ...]:
        """Names of the filters that remove repetitions of earlier pairs."""
        return tuple(self._keys)

    def fault(self, source: str, target: str, score: float | None = None) -> str:
        """Return the name of the first filter that removes a pair; "" if all of them keep it, but for repetitions.

        Args:
            source: text of the source.
            target: text of the target.
            score: of the pair; may be None if no filter reads scores.
        """
        source, target = self._words(source), self._words(target)
        if fault := next((name for name, removes in self._tests.items() if removes(source, target)), ""):
            return fault
        if not self._score_tests:
            return ""
        assert score is not None, f"the filter {self.reading_scores[0]} needs a score of each pair"
        return next((name for name, removes in self._score_tests.items() if removes(score)), "")

    def keys(self, name: str, pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
        """Yield the text by which the filter ``name`` finds repetitions, of each pair."""
        key = self._keys[name]
        return (key(self._words(source), self._words(target)) for source, target in pairs)

    def _words(self, side: str) -> str:
        return side.replace("@@ ", "") if self._segmented else side
