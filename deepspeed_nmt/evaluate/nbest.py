"""N-best lists in the format of Moses.

One candidate a line, those of a source line adjacent and best first, in four fields:

    0 ||| Der Hund schläft . ||| deep= -0.412 shallow= -0.463 by_deep= 1 by_shallow= 0 tokens= 5 ||| -0.871

They are the number of the source line from 0, the text, features by name, and the score by which candidates are
ranked. Numbers have nine significant digits, which identify a number of fp32. The feature ``token_log_probs`` has as
many values as the candidate has tokens, and one for EOS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby

from deepspeed_nmt.errors import DataError, shown
from deepspeed_nmt.files import open_text, shown_name, text_lines

_BAR = " ||| "
_TOKENS = "token_log_probs="
"""Name of the feature of several values, the last one."""


@dataclass(frozen=True)
class Candidate:
    """A candidate translation of a line.

    Attributes:
        line: number of the source line, from 0.
        text: the translation.
        features: numbers by name.
        score: number by which candidates are ranked; the higher the better.
        token_log_probs: log-probability of each token and of EOS; none if they are not known.
    """

    line: int
    text: str
    features: Mapping[str, float]
    score: float
    token_log_probs: tuple[float, ...] = ()

    def __str__(self) -> str:
        """Return the candidate as a line of a file, without line feed."""
        features = [f"{name}= {value:.9g}" for name, value in self.features.items()]
        if self.token_log_probs:
            features.append(" ".join([_TOKENS, *(f"{value:.9g}" for value in self.token_log_probs)]))
        return _BAR.join((str(self.line), self.text, " ".join(features), f"{self.score:.9g}"))

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Parse a line of a file, whose text may contain the separator.

        Raises:
            ValueError: if it is no candidate.
        """
        line, rest = text.split(_BAR, 1)
        translation, features, score = rest.rsplit(_BAR, 2)
        features, _, token_values = features.partition(_TOKENS)
        words = features.split()
        names, values = words[::2], words[1::2]
        if not all(name.endswith("=") for name in names):
            raise ValueError("features must be pairs of name= and value")
        pairs = {name.removesuffix("="): float(value) for name, value in zip(names, values, strict=True)}
        return cls(int(line), translation, pairs, float(score), tuple(map(float, token_values.split())))


def read_nbest(name: str) -> list[list[Candidate]]:
    """Read the candidates of each source line.

    Args:
        name: of a file, or "-" for standard input.

    Raises:
        DataError: if the file cannot be read, a line is no candidate, or the numbers of source lines are not 0, 1, 2
            and so on.
    """
    found: list[list[Candidate]] = []
    with open_text(name) as stream:
        for number, group in groupby(_candidates(text_lines(stream, name), name), key=lambda each: each.line):
            if number != len(found):
                raise DataError(
                    f"{shown_name(name)} must hold the candidates of lines 0, 1, 2 and so on, but those of line "
                    f"{len(found):,} are followed by {number:,}; give the whole output of translate --nbest"
                )
            found.append(list(group))
    if not found:
        raise DataError(f"{shown_name(name)} must hold an n-best list, but is empty; check the path")
    return found


def _candidates(lines: Iterator[str], name: str) -> Iterator[Candidate]:
    for number, line in enumerate(lines, 1):
        try:
            yield Candidate.parse(line)
        except ValueError as error:
            raise DataError(
                f"{shown_name(name)} must be an n-best list (line ||| text ||| features ||| score), but its line "
                f"{number:,} is {shown(line)}; write it with translate --nbest"
            ) from error
