"""Filters of sentence pairs: a table of named criteria, by which `prepare` and others remove pairs.

A filter is a class of settings with defaults, which builds a test. Each pair is judged for itself, so processes can
share the pairs; only for ``near_duplicates`` earlier pairs matter.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import unicodedata
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html.entities import html5
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import regex
from pydantic import Field, ValidationError, model_validator
from typing_extensions import override

from deepspeed_nmt.data.tokenizer import SPACE
from deepspeed_nmt.errors import ConfigError, did_you_mean, import_optional, shown
from deepspeed_nmt.files import sha256_of
from deepspeed_nmt.registry import Config, problem_of
from deepspeed_nmt.text import TextForm, join_segments, shared_words

EXAMPLES = 3  # of removed pairs for each reason, and of lines that encoding changes
_SHOWN = 200  # characters of an example

Hashes = npt.NDArray[np.uint64]


@dataclass
class Removals:
    """Removed pairs by reason, counted, with the first of each as examples: (source, target), shortened."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def add(self, reason: str, source: str | bytes, target: str | bytes) -> None:
        """Count a removed pair. Bytes are text that may not be UTF-8."""
        self.counts[reason] += 1
        if len(examples := self.examples.setdefault(reason, [])) < EXAMPLES:
            examples.append((_excerpt(source), _excerpt(target)))

    def merge(self, later: Removals) -> None:
        """Add the removals of a later batch."""
        self.counts.update(later.counts)
        for reason, more in later.examples.items():
            self.examples[reason] = (self.examples.get(reason, []) + more)[:EXAMPLES]


def _excerpt(line: str | bytes) -> str:
    text = line[: 4 * _SHOWN].decode("utf-8", errors="backslashreplace") if isinstance(line, bytes) else line
    more = "..." if len(line) > 4 * _SHOWN or len(text) > _SHOWN else ""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:_SHOWN]) + more


def hashes_of(texts: Iterable[str], count: int) -> Hashes:
    """Hash ``count`` texts to 64 bits each: among 20 million, any two collide with a probability of 1 in 100,000."""
    encoded = (text.encode("utf-8", errors="surrogatepass") for text in texts)
    hashes = (int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") for text in encoded)
    return np.fromiter(hashes, np.uint64, count)


_UNSPACED = r"\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}"
"""Scripts that put no spaces between words, as the content of a set of `regex`."""


class Filter(Config):
    """Base of all filters: the settings of one. Its first field is what ``NAME=VALUE`` sets."""

    remembers: ClassVar[bool] = False
    """True if a pair is removed because an earlier one has the same key."""
    reads_scores: ClassVar[bool] = False
    """True if a pair is judged by the score that is given with it, not by its text."""
    description: ClassVar[str]
    """The pairs that are removed, for the report, with fields in braces."""

    @classmethod
    def fields_of(cls, value: str) -> dict[str, Any]:
        """Return the settings that a value on the command line stands for, or raise a ValueError."""
        return {next(iter(cls.model_fields)): value}

    def describe(self) -> str:
        """Describe the pairs that are removed, for the report."""
        return self.description.format(**dict(self))

    @abstractmethod
    def build(self, text: TextForm) -> Callable[..., Any]:
        """Build the test of a pair: a function of source and target that returns True for a pair to remove.

        A filter that ``remembers`` returns the key of a pair instead, and one that ``reads_scores`` takes the score.

        Raises:
            ConfigError: if the form of the text lacks a language, or a package is missing.
        """


class SideFilter(Filter):
    """Base of filters that judge each side for itself, whatever its language."""

    @override
    def build(self, text: TextForm) -> Callable[..., Any]:
        return lambda source, target: self.is_faulty(source) or self.is_faulty(target)

    @abstractmethod
    def is_faulty(self, side: str) -> bool:
        """Return True if a side is at fault."""


_ELEMENTS = """
a abbr acronym address applet area article aside audio b base basefont bdi bdo big blockquote body br
button canvas caption center cite code col colgroup data datalist dd del details dfn dialog dir div dl dt em embed
fieldset figcaption figure font footer form frame frameset h1 h2 h3 h4 h5 h6 head header hr html i iframe img input
ins kbd label legend li link main map mark menu meta meter nav nobr noframes noscript object ol optgroup option output
p param picture pre progress q rp rt ruby s samp script section select small source span strike strong style sub
summary sup svg table tbody td template textarea tfoot th thead time title tr track tt u ul var video wbr
"""
# Names of elements keep "a < b" and placeholders such as <name> out. No tag contains another "<", so searching takes
# linear time.
_TAG = re.compile(rf"</?(?:{'|'.join(_ELEMENTS.split())})(?:[\s/][^<>]*)?>|<!--|<!doctype[^<>]*>", re.IGNORECASE)
_ENTITY = re.compile(r"&(?:#[0-9]{1,7}|#[xX][0-9a-fA-F]{1,6}|[a-zA-Z][a-zA-Z0-9]{1,31});")
_ADDRESS = re.compile(r"(?:\b(?:https?|ftp)://|\bwww\.)[!-~]+|[\w.+-]{1,64}@[\w-]{1,64}(?:\.[\w-]{1,64})+")


class HtmlFilter(Filter):
    """Tags and character references of HTML, by default as strict as OpusFilter's `HtmlTagFilter`: any tag."""

    max_share: float = Field(default=0.0, ge=0, lt=1)

    @override
    def describe(self) -> str:
        return "tags of HTML" if self.max_share == 0 else f"over {self.max_share:g} of a side is HTML"

    @override
    def build(self, text: TextForm) -> Callable[[str, str], bool]:
        escaped = text.form not in ("moses", "tokenised")  # otherwise escapes are those of Moses' tokenizer

        def is_faulty(side: str) -> bool:
            marked_up = sum(len(tag.group()) for tag in _TAG.finditer(side)) if "<" in side else 0
            if escaped and "&" in side:
                entities = (entity.group() for entity in _ENTITY.finditer(side))
                marked_up += sum(len(text) for text in entities if text[1] == "#" or text[1:] in html5)
            return _share(marked_up, len(side)) > self.max_share

        return lambda source, target: is_faulty(source) or is_faulty(target)


class UrlFilter(SideFilter):
    """Addresses. The default keeps sentences that cite an address, and removes bare addresses."""

    description: ClassVar[str] = "over {max_share:g} of a side is addresses (URLs, mail)"
    max_share: float = Field(default=0.5, ge=0, lt=1)

    @override
    def is_faulty(self, side: str) -> bool:
        if not ("://" in side or "@" in side or "www." in side):
            return False
        addresses = sum(len(address.group()) for address in _ADDRESS.finditer(side))
        return _share(addresses, len(side)) > self.max_share


class LongWordsFilter(SideFilter):
    """Endless words, with the default of OpusFilter's `LongWordFilter`.

    Scripts without spaces between words have no words here.
    """

    description: ClassVar[str] = "a word of {length} characters or more"
    length: int = Field(default=40, ge=2)
    _WORDS: ClassVar[Any] = regex.compile(rf"(?V1)[\S--[{_UNSPACED}]]+")

    @override
    def is_faulty(self, side: str) -> bool:
        if all(len(word) < self.length for word in side.split()):  # fast, and true of nearly all lines
            return False
        return any(len(word) >= self.length for word in self._WORDS.findall(side))


class LettersFilter(SideFilter):
    """Tables and the like, with the default of Bicleaner's rule that most characters are letters.

    Vowel signs and other marks count as letters; white space does not count.
    """

    description: ClassVar[str] = "less than {min_share:g} of a side is letters"
    min_share: float = Field(default=0.5, gt=0, le=1)
    _LETTERS: ClassVar[Any] = regex.compile(r"[\p{L}\p{M}]+")

    @override
    def is_faulty(self, side: str) -> bool:
        return _share(sum(map(len, self._LETTERS.findall(side))), sum(map(len, side.split()))) < self.min_share


class CopyFilter(Filter):
    """Copies, with the bound of Ott et al. (2018), "Analyzing Uncertainty in NMT".

    The overlap is the share of common words among the different words of both sides.
    """

    description: ClassVar[str] = "a copy: {overlap:g} of the words or more are on both sides"
    overlap: float = Field(default=0.5, gt=0, le=1)

    @override
    def build(self, text: TextForm) -> Callable[[str, str], bool]:
        return lambda source, target: shared_words(source, target) >= self.overlap


class DigitsFilter(Filter):
    """Different numbers, with the measure of Vázquez et al. (2019) and OpusFilter's default.

    The similarity is twice the common digits other than 0, by their number in all. Here the digits may have any
    order, and "8" may be translated as "eight": a side without digits is compared with the other side's numbers of
    three digits and more. Digits may be of any script.
    """

    description: ClassVar[str] = "digits differ (similarity below {min_similarity:g})"
    min_similarity: float = Field(default=0.5, gt=0, le=1)
    _NUMBER: ClassVar[re.Pattern[str]] = re.compile(r"\d+")

    @override
    def build(self, text: TextForm) -> Callable[[str, str], bool]:
        def counted(numbers: list[str]) -> Counter[int]:
            digits = Counter(map(unicodedata.digit, "".join(numbers)))
            del digits[0]
            return digits

        def differ(source: str, target: str) -> bool:
            sides = [self._NUMBER.findall(source), self._NUMBER.findall(target)]
            if not all(sides):
                sides = [[number for number in side if len(number) > 2] for side in sides]
            ours, theirs = map(counted, sides)
            total = ours.total() + theirs.total()
            return total > 0 and 2 * (ours & theirs).total() < self.min_similarity * total

        return differ


_END_OF_SENTENCE = tuple(".!?…\u061f\u06d4\u0964\u0965\u1362")  # also Arabic, Urdu, Devanagari, Ethiopic
_CLOSING = "\"'”’“‘»«›‹)]}」』）"
_FULL_WIDTH_END = re.compile("[\u3002\uff01\uff1f\uff61]+")


class PunctuationFilter(Filter):
    """Different numbers of sentences: of words that end as sentences do.

    The default is the difference that OpusFilter's `TerminalPunctuationFilter` (Vázquez et al. 2019) allows for a
    sentence with one full stop.
    """

    description: ClassVar[str] = "ends of sentences differ by more than {max_difference}"
    max_difference: int = Field(default=3, ge=0)

    @override
    def build(self, text: TextForm) -> Callable[[str, str], bool]:
        def ends(side: str) -> int:
            words = sum(word.rstrip(_CLOSING).endswith(_END_OF_SENTENCE) for word in side.split())
            return words if side.isascii() else words + len(_FULL_WIDTH_END.findall(side))

        return lambda source, target: abs(ends(source) - ends(target)) > self.max_difference


class RepetitionFilter(SideFilter):
    """Repeated n-grams of up to 50 words, whatever their case and punctuation.

    OpusFilter's `RepetitionFilter` has the same default, for strings of characters.
    """

    description: ClassVar[str] = "the same words {times} times in a row"
    times: int = Field(default=3, ge=2)
    _WORDS: ClassVar[Any] = regex.compile(rf"(?V1)[{_UNSPACED}]|[\w--[{_UNSPACED}]]+")
    _LONGEST: ClassVar[int] = 50  # words of an n-gram, which bound the time
    _SHORTEST: ClassVar[int] = 3  # characters of what is repeated: "no, no, no" is language. OpusFilter's value

    @override
    def is_faulty(self, side: str) -> bool:
        words = self._WORDS.findall(side.lower())
        if not words or max(Counter(words).values()) < self.times:
            return False
        for period in range(1, min(self._LONGEST, len(words) // self.times) + 1):
            equal = 0
            for place in range(period, len(words)):
                equal = equal + 1 if words[place] == words[place - period] else 0
                if equal < period * (self.times - 1):
                    continue
                if sum(map(len, words[place - period + 1 : place + 1])) >= self._SHORTEST:
                    return True
        return False


_LANGUAGES = """
Arabic: ar arz ary ckb fa ku ps sd sdh ug ur. Armenian: hy. Bengali: as bn. Devanagari: bh bho hi mai mr ne new sa.
Cyrillic: ab ba be bg ce chv cv kk ky mk mn os ru rue sah sr tg tt uk. Ethiopic: am ti. Georgian: ka. Greek: el grc.
Gujarati: gu. Gurmukhi: pa. Han+Bopomofo: wuu yue zh. Han+Hiragana+Katakana: ja. Hangul+Han: ko. Hebrew: he yi.
Kannada: kn. Khmer: km. Lao: lo. Malayalam: ml. Myanmar: my. Oriya: or. Sinhala: si. Tamil: ta. Telugu: te. Thai: th.
Tibetan: bo dz. Latin: af ast az br bs ca ceb co cs cy da de en eo es et eu fi fil fo fr fy ga gd gl ha haw hmn hr ht
hu ia id ig is it jv kab la lb lg ln lt lv mg mi ms mt nb nds nl nn no nso ny oc pl pt qu rm ro rw sc sk sl sm sn so
sq st su sv sw tet tk tl tn tr ts uz vi vo wa wo xh yo zu.
"""
SCRIPTS = {
    language: scripts.strip()
    for scripts, languages in (entry.split(":") for entry in _LANGUAGES.split(".") if ":" in entry)
    for language in languages.split()
}
"""Unicode's names of the scripts of a language, joined by ``+``, by its code."""
_LETTER = regex.compile(r"\p{Alphabetic}")


class ScriptFilter(Filter):
    """Text in another script than that of its language.

    Letters that many scripts share, and sides without letters, are no fault. OpusFilter's `CharacterScoreFilter` has
    1 as default, which removes each line with a name in another script.
    """

    description: ClassVar[str] = "less than {min_share:g} of a side's letters in its script"
    min_share: float = Field(default=0.5, gt=0, le=1)
    source: str = ""
    """Scripts of the source, by Unicode's names, joined by ``+``; "" for those of its language."""
    target: str = ""

    @classmethod
    @override
    def fields_of(cls, value: str) -> dict[str, Any]:
        parts = value.split("/")
        fields: dict[str, Any] = {} if parts[0][:1].isalpha() else {"min_share": parts.pop(0)}
        if len(parts) not in (0, 2):
            raise ValueError(f"{shown(value)} is none of SHARE, SOURCE/TARGET and SHARE/SOURCE/TARGET")
        return fields | dict(zip(("source", "target"), parts, strict=False))

    @override
    def build(self, text: TextForm) -> Callable[[str, str], bool]:
        source = _foreign(self.source or _scripts_of(text.source_lang, "source"))
        target = _foreign(self.target or _scripts_of(text.target_lang, "target"))

        def is_foreign(side: str, foreign: regex.Pattern[str], latin: bool) -> bool:
            if latin and side.isascii():
                return False
            letters = len(foreign.findall(side))
            return letters > 0 and _share(letters, len(_LETTER.findall(side))) > 1 - self.min_share + 1e-9

        latin = [pattern.search("a") is None for pattern in (source, target)]
        return lambda left, right: is_foreign(left, source, latin[0]) or is_foreign(right, target, latin[1])


def _scripts_of(language: str | None, side: str) -> str:
    if language not in SCRIPTS:
        unknown = "no language" if language is None else f"no script of the language {shown(language)}"
        raise ConfigError(
            f"{unknown} of the {side} for the filter script; give --{side}-lang, or the scripts of both sides, for "
            "example script=Latin/Cyrillic"
        )
    return SCRIPTS[language]


def _foreign(scripts: str) -> regex.Pattern[str]:
    """Return a pattern of letters of other scripts."""
    try:
        if not regex.fullmatch(r"[A-Za-z_+]+", scripts):
            raise regex.error("no name of a script")
        own = "".join(rf"\p{{Script={name}}}" for name in scripts.split("+"))
        return regex.compile(rf"(?V1)[\p{{Alphabetic}}--[{own}\p{{Script=Common}}\p{{Script=Inherited}}]]")
    except regex.error as error:
        raise ConfigError(
            f"{shown(scripts)} of the filter script is none of Unicode's names of scripts, such as Latin or "
            "Han+Hiragana+Katakana"
        ) from error


class LanguageFilter(Filter):
    """Text in another language, by py3langid, whose model is inside the package (5 MB).

    The default is low because short sentences are hard to identify. Of English and German text (newstest2012 and
    2014, Tatoeba, Multi30k) it removes up to 0.9% of the pairs, and it keeps up to 0.6% of sentences in the other
    language.
    """

    description: ClassVar[str] = "a side is of another language (probability below {min_probability:g})"
    min_probability: float = Field(default=0.05, gt=0, lt=1)
    _IDENTIFIED: ClassVar[int] = 1000  # characters of a line; more take time, and a line of marks takes hours

    @override
    def build(self, text: TextForm) -> Callable[[str, str], bool]:
        codes = {"source": text.source_lang or "", "target": text.target_lang or ""}
        for side, code in codes.items():
            if not code:
                raise ConfigError(f"no language of the {side} for the filter language; give --{side}-lang")
        identifier = _identifier()
        for side, code in codes.items():
            if code not in identifier.labels:
                raise ConfigError(
                    f"--{side}-lang is {shown(code)}, which py3langid does not identify"
                    f"{did_you_mean(code, identifier.labels)}; or leave out the filter language"
                )

        def is_other(side: str, expected: str) -> bool:
            side = side[: self._IDENTIFIED]
            best, probability = identifier.classify(side)
            if best != expected:
                probability = dict(identifier.rank(side))[expected]
            return bool(probability < self.min_probability)

        return lambda source, target: is_other(source, codes["source"]) or is_other(target, codes["target"])


@cache
def _identifier() -> Any:
    """Load py3langid's model, which takes a second."""
    langid = import_optional("py3langid.langid", "the filter language", "pip install py3langid")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


class ScoreFilter(Filter):
    """A score that came with the pair, such as the mean log-probability of a target token by `score-pairs` (nats).

    It has no default: likelihoods depend on the model, the text and the vocabulary.
    """

    description: ClassVar[str] = "a score below {min_score:g}"
    reads_scores: ClassVar[bool] = True
    min_score: float = Field(allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_bound(cls, settings: Any) -> Any:
        if settings == {}:
            raise ValueError("no smallest score of a pair to keep; give it, for example score=-3")
        return settings

    @override
    def build(self, text: TextForm) -> Callable[[float], bool]:
        return lambda score: score < self.min_score


class OpusFilter(Filter):
    """Filters of OpusFilter (Aulamo et al. 2020), whose package judges the pairs, each for itself.

    ``filters`` is the list that its configuration files have for the step `filter`, and ``files`` has hashes of the
    models that the list names.
    """

    filters: tuple[dict[str, Any], ...]
    files: dict[str, str] = Field(default_factory=dict)
    _TOGETHER: ClassVar[tuple[str, ...]] = ("WordAlignFilter", "SentenceEmbeddingFilter")
    """Those that judge the pairs of a batch together."""

    @classmethod
    @override
    def fields_of(cls, value: str) -> dict[str, Any]:
        import yaml

        try:
            content = yaml.safe_load(Path(value).read_bytes())
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"{value} cannot be read ({' '.join(str(error).split())}); check the file") from error
        filters = content.get("filters") if isinstance(content, dict) else content
        texts = {text for text in _texts(filters) if os.path.isfile(text)}  # noqa: PTH113  (of a long text, Path fails)
        return {"filters": filters, "files": {text: sha256_of(Path(text)) for text in sorted(texts)}}

    @model_validator(mode="before")
    @classmethod
    def _has_filters(cls, settings: Any) -> Any:
        entries = settings.get("filters") if isinstance(settings, dict) else None
        if not isinstance(entries, list | tuple) or not entries or not all(map(_is_entry, entries)):
            raise ValueError(
                "no list of OpusFilter's filters with their parameters, such as [{LengthFilter: {max_length: 80}}]; "
                "give the file that has it, as opusfilter=FILE"
            )
        if together := [name for name in map(_name, entries) if name in cls._TOGETHER]:
            raise ValueError(
                f"{together[0]} judges pairs together, and each pair has to be judged for itself; leave it out, and "
                "give its scores as --train-scores"
            )
        try:
            return {**settings, "filters": json.loads(json.dumps(entries, allow_nan=False))}
        except (TypeError, ValueError) as error:  # meta.json records them
            raise ValueError(f"a parameter has a value that JSON has not ({error}); correct it") from error

    @override
    def describe(self) -> str:
        return f"OpusFilter's {', '.join(map(_name, self.filters))}"

    @override
    def build(self, text: TextForm) -> Callable[[str, str], bool]:
        filters = _opus_filters(json.dumps(self.filters))
        return lambda source, target: (
            not all(entry.accept(next(entry.score([(source, target)]))) for entry in filters)
        )


def _texts(value: Any) -> Iterator[str]:
    """Yield all texts in nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _texts(part)


def _is_entry(entry: Any) -> bool:
    return isinstance(entry, dict) and len(entry.keys() - {"module"}) == 1 and isinstance(entry[_name(entry)], dict)


def _name(entry: Mapping[str, Any]) -> str:
    return next(name for name in entry if name != "module")


@cache
def _opus_filters(filters: str) -> tuple[Any, ...]:
    """Build OpusFilter's filters from their list as JSON. Some load models."""
    pipeline = import_optional("opusfilter.pipeline", "the filter opusfilter", "pip install opusfilter")
    try:
        built = tuple(pipeline.FilterPipeline.from_config(json.loads(filters)).filters)
        for entry in built:
            next(entry.score([("a", "a")]))  # some import their package, which may be missing, only then
    except Exception as error:  # the filters' errors have no common class
        raise ConfigError(
            f"OpusFilter refuses the filters of opusfilter ({type(error).__name__}: {error}); correct the file, or "
            "install what it needs"
        ) from error
    return built


class NearDuplicatesFilter(Filter):
    """Pairs that differ from an earlier one in case, digits, punctuation and white space only.

    Both sides are compared, or one: then only the first translation of a sentence is kept. OpusFilter's
    `remove_duplicates` has the same choices. MinHash would remove sentences that differ in a name or a negation, too.
    """

    remembers: ClassVar[bool] = True
    of: Literal["pair", "source", "target"] = "pair"
    _NO_LETTERS: ClassVar[Any] = regex.compile(r"[^\p{L}\p{M}]+")

    @override
    def describe(self) -> str:
        what = {"pair": "both sides as in", "source": "the source of", "target": "the target of"}[self.of]
        return f"{what} an earlier pair, but for case, digits, marks"

    @override
    def build(self, text: TextForm) -> Callable[[str, str], str]:
        def letters(side: str) -> str:  # a side without letters is compared as it is
            return self._NO_LETTERS.sub("", side).casefold() or side

        return {
            "source": lambda source, target: letters(source),
            "target": lambda source, target: letters(target),
            "pair": lambda source, target: f"{letters(source)}\n{letters(target)}",
        }[self.of]


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


FILTERS: Mapping[str, type[Filter]] = {
    "html": HtmlFilter,
    "url": UrlFilter,
    "long_words": LongWordsFilter,
    "letters": LettersFilter,
    "copy": CopyFilter,
    "digits": DigitsFilter,
    "punctuation": PunctuationFilter,
    "repetition": RepetitionFilter,
    "script": ScriptFilter,
    "language": LanguageFilter,
    "score": ScoreFilter,
    "opusfilter": OpusFilter,
    "near_duplicates": NearDuplicatesFilter,
}
"""All filters, in the order in which they are applied."""
PRESETS: Mapping[str, tuple[str, ...]] = {
    "web": tuple(name for name in FILTERS if name not in ("script", "language", "score", "opusfilter")),
}
"""Names for several filters, all with their defaults. They need no languages and no further packages."""


def read_filters(value: str | Mapping[str, Any]) -> dict[str, Filter]:
    """Read which filters are to be applied, in the order in which they are applied.

    Args:
        value: names of filters and presets, separated by commas, as on the command line: NAME, NAME=VALUE, or -NAME
            to leave out a filter of a preset; or settings by name, as in ``meta.json``.

    Raises:
        ConfigError: if a name or a value is wrong.
    """
    filters: dict[str, Filter] = {}
    if isinstance(value, Mapping):
        filters = {name: _filter_of(name, entry) for name, entry in value.items()}
        value = ""
    for word in filter(None, map(str.strip, value.split(","))):
        name, equals, setting = word.partition("=")
        if name in PRESETS and not equals:
            filters |= {member: _filter_of(member, {}) for member in PRESETS[name]}
        elif name[:1] == "-":
            if name[1:] not in filters or equals:
                raise ConfigError(f"--filters leaves out a filter that it has not named before: {shown(word)}")
            del filters[name[1:]]
        else:
            filters[name] = _filter_of(name, setting if equals else {})
    return {name: filters[name] for name in FILTERS if name in filters}


def _filter_of(name: str, settings: Any) -> Filter:
    if name in PRESETS:
        raise ConfigError(
            f"{name} of --filters is a preset without a value; give {name}, and NAME=VALUE for a filter"
        )
    if name not in FILTERS:
        raise ConfigError(f"{shown(name)} of --filters is no filter{did_you_mean(name, [*PRESETS, *FILTERS])}")
    try:
        fields = FILTERS[name].fields_of(settings) if isinstance(settings, str) else settings
        return FILTERS[name].model_validate(fields)
    except ValidationError as error:
        raise ConfigError(problem_of(problem, f"the filter {name}") for problem in error.errors()) from error
    except ValueError as error:
        raise ConfigError(f"the filter {name}: {error}") from error


class PairFilters:
    """Filters that are applied to pairs in turn, by name, in order; see :func:`read_filters`.

    Of text that is ``segmented`` in the ``@@ `` style they see the words. If a filter lacks a language or a package,
    that is a ConfigError.
    """

    def __init__(self, filters: Mapping[str, Filter], text: TextForm, segmented: bool = False) -> None:
        self.filters = dict(filters)
        self._segmented = segmented
        self._tests = {name: entry.build(text) for name, entry in filters.items()}
        self._judging = {name: entry.reads_scores for name, entry in filters.items() if not entry.remembers}

    def fault(self, source: str, target: str, score: float | None = None) -> str:
        """Return the name of the first filter that removes a pair; "" if all of them keep it, but for repetitions.

        If a filter reads scores, but there is none, that is a ConfigError.
        """
        source, target = self._words(source), self._words(target)
        for name, reads_scores in self._judging.items():
            if reads_scores and score is None:
                raise ConfigError(f"no scores of the pairs for the filter {name}; give scores")
            if self._tests[name](score) if reads_scores else self._tests[name](source, target):
                return name
        return ""

    def hashes(self, name: str, pairs: Sequence[tuple[str, str]]) -> Hashes:
        """Hash the text by which the filter ``name`` recognises repetitions. Shape: -> (pairs,)."""
        key = self._tests[name]
        return hashes_of((key(self._words(source), self._words(target)) for source, target in pairs), len(pairs))

    def _words(self, side: str) -> str:
        if self._segmented and side.startswith(SPACE):  # pieces of SentencePiece, of an imported corpus
            return side.replace(" ", "").replace(SPACE, " ").strip()
        return join_segments(side) if self._segmented else side
