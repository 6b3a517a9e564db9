"""Filters of text in another script or language than that of its side.

This is the only file that imports py3langid: its model is inside the package (5 MB), and nothing is downloaded.
"""

from __future__ import annotations

import importlib
from functools import lru_cache
from typing import Any

import regex
from pydantic import Field
from typing_extensions import override

from deepspeed_nmt.data.filters.base import FilterConfig, Test, share
from deepspeed_nmt.errors import ConfigError, did_you_mean, shown
from deepspeed_nmt.text import TextForm

_IDENTIFIED = 1000
"""Characters of a line by which its language is identified; more take time, and a line of marks takes hours."""
_LETTER = regex.compile(r"\p{Alphabetic}")
_LANGUAGES = {
    "Arabic": "ar arz ary ckb fa ku ps sd sdh ug ur",
    "Armenian": "hy",
    "Bengali": "as bn",
    "Cyrillic": "ab ba be bg ce chv cv kk ky mk mn os ru rue sah sr tg tt uk",
    "Devanagari": "bh bho hi mai mr ne new sa",
    "Ethiopic": "am ti",
    "Georgian": "ka",
    "Greek": "el grc",
    "Gujarati": "gu",
    "Gurmukhi": "pa",
    "Han+Bopomofo": "wuu yue zh",
    "Han+Hiragana+Katakana": "ja",
    "Hangul+Han": "ko",
    "Hebrew": "he yi",
    "Kannada": "kn",
    "Khmer": "km",
    "Lao": "lo",
    "Latin": "af ast az br bs ca ceb co cs cy da de en eo es et eu fi fil fo fr fy ga gd gl ha haw hmn hr ht hu ia "
    "id ig is it jv kab la lb lg ln lt lv mg mi ms mt nb nds nl nn no nso ny oc pl pt qu rm ro rw sc sk sl sm sn so "
    "sq st su sv sw tet tk tl tn tr ts uz vi vo wa wo xh yo zu",
    "Malayalam": "ml",
    "Myanmar": "my",
    "Oriya": "or",
    "Sinhala": "si",
    "Tamil": "ta",
    "Telugu": "te",
    "Thai": "th",
    "Tibetan": "bo dz",
}
SCRIPTS = {language: scripts for scripts, languages in _LANGUAGES.items() for language in languages.split()}
"""Unicode's names of the scripts of a language, joined by ``+``, by its code."""


class ScriptConfig(FilterConfig):
    """Settings of ``script``.

    OpusFilter's `CharacterScoreFilter` has 1 as default, which removes each line with a name in another script.
    """

    min_share: float = Field(default=0.5, gt=0, le=1)
    """Smallest share of a side's letters that belong to its script."""
    source: str = ""
    """Scripts of the source, by Unicode's names, joined by ``+``; "" for those of its language."""
    target: str = ""
    """Scripts of the target."""

    @classmethod
    @override
    def fields_of(cls, value: str) -> dict[str, Any]:
        parts = value.split("/")
        fields: dict[str, Any] = {} if parts[0][:1].isalpha() else {"min_share": parts.pop(0)}
        if len(parts) not in (0, 2):
            raise ValueError(f"must be SHARE, SOURCE/TARGET or SHARE/SOURCE/TARGET, but is {shown(value)}")
        return fields | dict(zip(("source", "target"), parts, strict=False))

    @override
    def describe(self) -> str:
        return f"less than {self.min_share:g} of a side's letters in its script"


def script(config: ScriptConfig, text: TextForm) -> Test:
    """Build the filter ``script``. Letters that many scripts share, and sides without letters, are no fault.

    Raises:
        ConfigError: if a script or a language is unknown.
    """
    source = _foreign(config.source or _scripts_of(text.source_lang, "source"))
    target = _foreign(config.target or _scripts_of(text.target_lang, "target"))

    def is_foreign(side: str, foreign: regex.Pattern[str], latin: bool) -> bool:
        if latin and side.isascii():
            return False
        found = len(foreign.findall(side))
        return found > 0 and share(found, len(_LETTER.findall(side))) > 1 - config.min_share + 1e-9

    latin = [pattern.search("a") is None for pattern in (source, target)]
    return lambda left, right: is_foreign(left, source, latin[0]) or is_foreign(right, target, latin[1])


def _scripts_of(language: str | None, side: str) -> str:
    if language is None:
        raise ConfigError(
            f"the filter script needs the language of the {side}; give --{side}-lang, or the scripts of both sides: "
            "script=Latin/Cyrillic"
        )
    if language not in SCRIPTS:
        raise ConfigError(
            f"the filter script must know the script of {shown(language)} (--{side}-lang), but does not; give those "
            "of both sides, for example script=Latin/Cyrillic"
        )
    return SCRIPTS[language]


def _foreign(scripts: str) -> regex.Pattern[str]:
    """Return a pattern of letters of other scripts."""
    try:
        own = "".join(rf"\p{{Script={_name(each)}}}" for each in scripts.split("+"))
        return regex.compile(rf"(?V1)[\p{{Alphabetic}}--[{own}\p{{Script=Common}}\p{{Script=Inherited}}]]")
    except regex.error as error:
        raise ConfigError(
            "the filter script must have Unicode's names of scripts, such as Latin or Han+Hiragana+Katakana, but "
            f"has {shown(scripts)}"
        ) from error


def _name(script: str) -> str:
    if not regex.fullmatch("[A-Za-z_]+", script):
        raise regex.error("no name of a script")
    return script


class LanguageConfig(FilterConfig):
    """Settings of ``language``.

    The default is low because short sentences are hard to identify. Of English and German text (newstest2012 and
    2014, Tatoeba, Multi30k) it removes up to 0.9% of the pairs, and it keeps up to 0.6% of sentences in the other
    language.
    """

    min_probability: float = Field(default=0.05, gt=0, lt=1)
    """Smallest probability of a side's language among those that py3langid knows."""

    @override
    def describe(self) -> str:
        return f"a side is of another language (probability below {self.min_probability:g})"


def language(config: LanguageConfig, text: TextForm) -> Test:
    """Build the filter ``language``.

    Raises:
        ConfigError: if a language is not given or unknown, or py3langid is not installed.
    """
    source = _known("source", text.source_lang)
    target = _known("target", text.target_lang)
    identifier = _identifier()

    def is_other(side: str, expected: str) -> bool:
        side = side[:_IDENTIFIED]
        best, probability = identifier.classify(side)
        if best == expected:
            return bool(probability < config.min_probability)
        return bool(dict(identifier.rank(side))[expected] < config.min_probability)

    return lambda left, right: is_other(left, source) or is_other(right, target)


def _known(side: str, code: str | None) -> str:
    if code is None:
        raise ConfigError(f"the filter language needs the language of the {side}; give --{side}-lang")
    if code not in (known := _identifier().labels):
        raise ConfigError(
            f"--{side}-lang must be a language that py3langid identifies, but is {shown(code)}"
            f"{did_you_mean(code, known)}; or leave out the filter language"
        )
    return code


@lru_cache(maxsize=1)
def _identifier() -> Any:
    """Load py3langid's model, which takes a second."""
    try:
        langid = importlib.import_module("py3langid.langid")
    except ImportError as error:
        raise ConfigError(
            "py3langid must be installed for the filter language, but is not; run `pip install py3langid`, or leave "
            "the filter out"
        ) from error
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
