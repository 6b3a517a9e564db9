"""Word alignments of the training text, as fast_align and awesome-align write them, and the links of tokens in them.

A line has the links of a pair, ``0-0 1-2 2-1``: word i of the source and word j of the target. Words are separated by
white space, as in the text that was given, and counted from 0. All tokens of one word are linked to all of the other.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from deepspeed_nmt.core.vocabulary import Side
from deepspeed_nmt.data.tokenizer import SPACE, Tokenizer
from deepspeed_nmt.errors import DataError, counted, shown

_LINK = re.compile(rb"([0-9]{1,7})-([0-9]{1,7})")


def check_links(lines: Sequence[bytes], pairs: Sequence[tuple[bytes, bytes]], name: str, first: int) -> None:
    """Raise a DataError if a line has something else than links of words that its pair has.

    ``first`` is the number of the first line in the file ``name``, from 1.
    """
    for number, (line, pair) in enumerate(zip(lines, pairs, strict=True), first):
        words = [len(text.decode(errors="replace").split()) for text in pair]
        for text in line.split():
            link = _LINK.fullmatch(text)
            if link is None:
                raise DataError(
                    f"line {number:,} of {name} has {shown(text.decode(errors='replace'))}, which is no link of "
                    "two words such as 0-1; give the output of fast_align or awesome-align"
                )
            if any(int(word) >= count for word, count in zip(link.groups(), words, strict=True)):
                raise DataError(
                    f"line {number:,} of {name} has the link {link[0].decode()}, but its pair has "
                    f"{counted(words[0], 'words')} and {words[1]}; align the text that is given to `prepare`"
                )


def token_links(line: bytes, source: Sequence[Sequence[int]], target: Sequence[Sequence[int]]) -> list[int]:
    """Return source and target position of each link of tokens, in turn, given the positions of the words' tokens.

    None are left of a line that links a word which the pair lacks: its words were divided at other white space.
    """
    words = {(int(link[1]), int(link[2])) for link in _LINK.finditer(line)}
    if any(i >= len(source) or j >= len(target) for i, j in words):
        return []
    return [n for i, j in sorted(words) for at in source[i] for to in target[j] for n in (at, to)]


def tokens_of_words(
    tokens: Sequence[int], text: str, tokenizer: Tokenizer, side: Side, tagged: bool
) -> list[list[int]] | None:
    """Return the positions of each word's tokens in a sentence, whose first token is a tag if it is ``tagged``.

    None if the tokens begin other words than the text has: if the vocabulary's normalization cuts words, for example.
    """
    words: list[list[int]] = []
    for position, piece in enumerate(tokenizer.pieces(tokens[tagged:], side), int(tagged)):
        if tokenizer.segmented or not words or piece.startswith(SPACE):
            words.append([])
        words[-1].append(position)
    given = text.split()
    if len(words) != len(given):
        return None
    if tokenizer.decode(tokens[tagged:], side) != text:
        # Where the normalization has changed the text, a word that vanished may hide one that was cut.
        of_words = ([tokens[position] for position in word] for word in words)
        pairs = zip(of_words, tokenizer.encode_batch(given, side), strict=True)
        if any(tokenizer.decode(own, side) != tokenizer.decode(alone, side) for own, alone in pairs):
            return None
    return words
