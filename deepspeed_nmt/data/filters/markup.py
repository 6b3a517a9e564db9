"""Filters of text that is no prose: markup, addresses, endless words, tables."""

from __future__ import annotations

import re
from html.entities import html5

import regex
from pydantic import Field
from typing_extensions import override

from deepspeed_nmt.data.filters.base import UNSPACED, FilterConfig, Test, share
from deepspeed_nmt.text import TextForm

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
_WORDS = regex.compile(rf"(?V1)[\S--[{UNSPACED}]]+")
_LETTERS = regex.compile(r"[\p{L}\p{M}]+")


class HtmlConfig(FilterConfig):
    """Settings of ``html``, by default as strict as OpusFilter's `HtmlTagFilter`, which removes any tag."""

    max_share: float = Field(default=0.0, ge=0, lt=1)
    """Largest share of a side's characters in tags and character references of HTML."""

    @override
    def describe(self) -> str:
        return "tags of HTML" if self.max_share == 0 else f"over {self.max_share:g} of a side is HTML"


def html(config: HtmlConfig, text: TextForm) -> Test:
    """Build the filter ``html``. In tokenised text, escaped characters are those of Moses' tokenizer, and no HTML."""
    escaped = text.form not in ("moses", "tokenised")

    def marked_up(side: str) -> int:
        found = sum(len(tag.group()) for tag in _TAG.finditer(side)) if "<" in side else 0
        if escaped and "&" in side:
            entities = (entity.group() for entity in _ENTITY.finditer(side))
            found += sum(len(each) for each in entities if each[1] == "#" or each[1:] in html5)
        return found

    return lambda source, target: any(
        share(marked_up(side), len(side)) > config.max_share for side in (source, target)
    )


class UrlConfig(FilterConfig):
    """Settings of ``url``. The default keeps sentences that cite an address, and removes bare addresses."""

    max_share: float = Field(default=0.5, ge=0, lt=1)
    """Largest share of a side's characters in addresses of the web or of mail."""

    @override
    def describe(self) -> str:
        return f"over {self.max_share:g} of a side is addresses (URLs, mail)"


def url(config: UrlConfig, text: TextForm) -> Test:
    """Build the filter ``url``."""

    def addresses(side: str) -> int:
        if not ("://" in side or "@" in side or "www." in side):
            return 0
        return sum(len(address.group()) for address in _ADDRESS.finditer(side))

    return lambda source, target: any(
        share(addresses(side), len(side)) > config.max_share for side in (source, target)
    )


class LongWordsConfig(FilterConfig):
    """Settings of ``long_words``, with the default of OpusFilter's `LongWordFilter`."""

    length: int = Field(default=40, ge=2)
    """Characters of a word that is too long. Scripts without spaces between words have no words here."""

    @override
    def describe(self) -> str:
        return f"a word of {self.length} characters or more"


def long_words(config: LongWordsConfig, text: TextForm) -> Test:
    """Build the filter ``long_words``."""

    def too_long(side: str) -> bool:
        if all(len(word) < config.length for word in side.split()):  # fast, and true of nearly all lines
            return False
        return any(len(word) >= config.length for word in _WORDS.findall(side))

    return lambda source, target: too_long(source) or too_long(target)


class LettersConfig(FilterConfig):
    """Settings of ``letters``, with the default of Bicleaner's rule that most characters are letters."""

    min_share: float = Field(default=0.5, gt=0, le=1)
    """Smallest share of letters among a side's characters other than white space."""

    @override
    def describe(self) -> str:
        return f"less than {self.min_share:g} of a side is letters"


def letters(config: LettersConfig, text: TextForm) -> Test:
    """Build the filter ``letters``. Vowel signs and other marks are parts of letters."""

    def too_few(side: str) -> bool:
        characters = sum(map(len, side.split()))
        return share(sum(map(len, _LETTERS.findall(side))), characters) < config.min_share

    return lambda source, target: too_few(source) or too_few(target)
