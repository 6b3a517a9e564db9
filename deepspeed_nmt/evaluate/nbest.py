"""N-best lists in the format of Moses, and the choice of the weights of deep-shallow decoding from them.

One candidate a line, those of a source line adjacent and best first, in four fields:

    0 ||| Der Hund schläft . ||| deep= -0.412 shallow= -0.463 by_deep= 1 by_shallow= 0 tokens= 5 ||| -0.871

They are the number of the source line from 0, the text, features by name, and the score by which candidates are
ranked. Numbers have nine significant digits, which identify a number of fp32. The feature ``token_log_probs`` has as
many values as the candidate has tokens, and one for EOS.

The candidates of a validation set do not depend on alpha and the exponent, so each pair only chooses among the same
candidates, whose n-grams are counted once: hundreds of pairs take seconds.

Legend: L source lines, K candidates of a line (padded), N exits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product

import numpy as np
from numpy.typing import NDArray

from deepspeed_nmt.console import table
from deepspeed_nmt.deep_shallow_score import ALPHA, EXITS, EXPONENT, total_of
from deepspeed_nmt.errors import DataError, finite_number, shown, whole_number
from deepspeed_nmt.evaluate.metrics import METRICS, TextMetric, in_language
from deepspeed_nmt.files import open_text, shown_name, text_lines

_BAR = " ||| "
_TOKENS = "token_log_probs="
"""Name of the feature of several values, the last one."""
Converter = Callable[[Sequence[str]], list[str]]
"""Function that converts sentences."""
DEFAULT = (ALPHA, EXPONENT)
"""Alpha and exponent of Wu et al. (2019)."""
ALPHAS = tuple(number / 10 for number in range(11))
"""Weights that are tried of the exit that proposed a candidate."""
EXPONENTS = tuple(number / 10 for number in range(-10, 11))
"""Exponents that are tried: 0 ranks by mean log-probability, 1 by log-probability."""
_NEEDED = {*EXITS, *(f"by_{exit}" for exit in EXITS), "tokens"}


@dataclass(frozen=True)
class Candidate:
    """A candidate translation of the source line number ``line``, from 0; the best one has the highest score.

    ``token_log_probs`` are of each token and of EOS; none if they are not known.
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
        """Parse a line of a file, whose text may contain the separator, or raise a ValueError."""
        line, rest = text.split(_BAR, 1)
        translation, features, score = rest.rsplit(_BAR, 2)
        features, _, token_values = features.partition(_TOKENS)
        words = features.split()
        if not all(name.endswith("=") for name in words[::2]):
            raise ValueError("features that are not pairs of name= and value")
        values = map(finite_number, words[1::2])
        pairs = {name.removesuffix("="): value for name, value in zip(words[::2], values, strict=True)}
        if (tokens := pairs.get("tokens", 0.0)) < 0.0 or not tokens.is_integer():
            raise ValueError("tokens that are no count")
        log_probs = tuple(map(finite_number, token_values.split()))
        return cls(whole_number(line), translation, pairs, finite_number(score), log_probs)


def read_nbest(name: str) -> list[list[Candidate]]:
    """Read the candidates of each source line from a file, or from standard input, "-".

    Raises:
        DataError: if the file cannot be read, a line is no candidate, or the numbers of source lines are not 0, 1, 2
            and so on.
    """
    lists: list[list[Candidate]] = []
    with open_text(name) as stream:
        for number, group in groupby(_candidates(text_lines(stream, name), name), key=lambda item: item.line):
            if number != len(lists):
                what = f"candidates of line {number:,} in the place of those of line {len(lists):,}"
                raise DataError(f"{shown_name(name)} has {what}; give the whole output of translate --nbest")
            lists.append(list(group))
    if not lists:
        raise DataError(f"{shown_name(name)} is empty; give an n-best list")
    return lists


def _candidates(lines: Iterator[str], name: str) -> Iterator[Candidate]:
    for number, line in enumerate(lines, 1):
        try:
            yield Candidate.parse(line)
        except ValueError as error:
            raise DataError(
                f"line {number:,} of {shown_name(name)} is {shown(line)}, and not line ||| text ||| features ||| "
                "score; write the list with translate --nbest"
            ) from error


@dataclass(frozen=True)
class Tuning:
    """BLEU of a validation set at every pair of weights (alpha, exponent); numbers of its lines and candidates."""

    lines: int
    candidates: int
    label: str
    signature: str
    grid: Mapping[tuple[float, float], float]

    @property
    def best(self) -> tuple[float, float]:
        """The pair of the highest BLEU; of several, the one that is closest to the default."""
        return max(self.grid, key=lambda pair: (self.grid[pair], -np.abs(np.subtract(pair, DEFAULT)).sum()))

    def as_text(self, grid: bool) -> str:
        """Return a report to read; with ``grid``, BLEU at all pairs."""
        lines = [f"{self.candidates:,} candidates of {self.lines:,} lines"]
        for name, (alpha, exponent) in (("default", DEFAULT), ("best", self.best)):
            bleu = self.grid[alpha, exponent]
            lines.append(f"{name:<8} --alpha {alpha:g} --exponent {exponent:g}  {self.label} = {bleu:.2f}")
        lines.append(f"  {self.signature}")
        if grid:
            head = ["exponent", *(f"alpha {alpha:g}" for alpha in ALPHAS)]
            rows = [[f"{exp:g}", *(f"{self.grid[alpha, exp]:.2f}" for alpha in ALPHAS)] for exp in EXPONENTS]
            lines += ["", table([head, *rows], left=0)]
        return "\n".join(lines)

    def as_json(self, grid: bool) -> str:
        """Return the report as a JSON object, with unrounded scores; with ``grid``, of all pairs."""
        points = {pair: {"alpha": pair[0], "exponent": pair[1], "bleu": bleu} for pair, bleu in self.grid.items()}
        values = {"lines": self.lines, "candidates": self.candidates, "metric": self.label}
        values |= {"signature": self.signature, "default": points[DEFAULT], "best": points[self.best]}
        return json.dumps({**values, "grid": list(points.values())} if grid else values)


class RerankLists:
    """N-best lists of both exits, as arrays. An empty line, which neither exit has scored, has one candidate.

    Raises:
        ValueError: if a candidate lacks the scores by both exits; the message is the number of its line, from 1.
    """

    def __init__(self, lists: Sequence[Sequence[Candidate]]) -> None:
        self.lists = lists
        shape = len(lists), max(map(len, lists))
        self._means_LKN, self._length_LK = np.zeros((*shape, len(EXITS))), np.ones(shape)
        self._proposed_LKN = np.zeros((*shape, len(EXITS)), dtype=np.bool_)
        for line, candidates in enumerate(lists):
            if len(candidates) == 1 and candidates[0].text == "" and EXITS[0] not in candidates[0].features:
                self._proposed_LKN[line, 0] = True
                continue
            for place, candidate in enumerate(candidates):
                features = candidate.features
                if _NEEDED - features.keys():
                    raise ValueError(line + 1)
                self._means_LKN[line, place] = [features[exit] for exit in EXITS]
                self._proposed_LKN[line, place] = [features[f"by_{exit}"] > 0 for exit in EXITS]
                self._length_LK[line, place] = features["tokens"] + 1.0

    @property
    def first_cut(self) -> int | None:
        """Number, from 1, of the first line that lacks candidates; None if no line does.

        The search gives each exit the same number of candidates in all lines, some of which both exits propose. Only
        a line with a single candidate, which both exits propose, may have fewer.
        """
        count_LN = self._proposed_LKN.sum(axis=1)
        single_L = np.array([len(candidates) == 1 for candidates in self.lists])
        by_both_L = self._proposed_LKN[:, 0].all(axis=1)
        cut_L = (count_LN < count_LN.max()).any(axis=1) & ~(single_L & by_both_L)
        return int(cut_L.argmax()) + 1 if cut_L.any() else None

    def choose(self, alpha: float, exponent: float) -> NDArray[np.intp]:
        """Return the place of the best candidate of each line by these weights. Shape: (L,)."""
        own_LKN, other_LKN = self._means_LKN, self._means_LKN[:, :, ::-1]
        total_LKN = total_of(own_LKN, other_LKN, self._length_LK[:, :, None], alpha, exponent)
        chosen_L: NDArray[np.intp] = np.where(self._proposed_LKN, total_LKN, -np.inf).max(axis=2).argmax(axis=1)
        return chosen_L


def tune(
    nbest: str, references: Sequence[str], convert: Converter = list, convert_reference: Converter = list,
    tokenised: bool = False, lowercase: bool = False, language: str | None = None,
) -> Tuning:  # fmt: skip
    """Compute the BLEU of the translations that each pair of weights chooses from ``nbest``, "-" or a file.

    Args:
        nbest: n-best lists, written by `translate --rerank deep-shallow --nbest`.
        convert: function that brings translations into the form to score; references have their own.
        tokenised: True for BLEU over the tokens of the text instead of sacreBLEU.
    """
    from deepspeed_nmt.evaluate import scoring

    if nbest in references:
        raise DataError(f"{shown_name(nbest)} is given as n-best list and as reference; give the references")
    lists = read_nbest(nbest)
    # A pipe can be read once.
    read = {name: convert_reference(scoring.read_sentences(name)) for name in dict.fromkeys(references)}
    for name, lines in read.items():
        if len(lines) != len(lists):
            raise DataError(
                f"{shown_name(nbest)} has the candidates of {len(lists):,} lines, and {shown_name(name)} has "
                f"{len(lines):,} lines; give files of the same sentences"
            )
    remedy = "write it with translate --rerank deep-shallow --nbest TWICE_THE_BEAM"
    try:
        reranked = RerankLists(lists)
    except ValueError as error:
        raise DataError(f"{shown_name(nbest)} lacks the scores by both exits for line {error}; {remedy}") from error
    if (line := reranked.first_cut) is not None:
        raise DataError(f"{shown_name(nbest)} lacks candidates of line {line:,} that an exit proposed; {remedy}")
    name = "bleu_tokenised" if tokenised else "bleu"
    bleu = in_language(METRICS[name], language)
    assert isinstance(bleu, TextMetric)
    metric = bleu.make(lowercase)
    texts = convert([candidate.text for candidates in lists for candidate in candidates])
    scoring.warn_of_files(scoring.ScoreInputs([(nbest, texts)], read, None), tokenised, lowercase)
    others = [[read[name][item.line] for candidates in lists for item in candidates] for name in references]
    counts = scoring.sentence_statistics(metric, texts, others)
    first_L = np.cumsum([0, *map(len, lists[:-1])])  # row of the first candidate of each line in `counts`
    grid = {
        pair: scoring.score_of_statistics(metric, counts[first_L + reranked.choose(*pair)])
        for pair in product(ALPHAS, EXPONENTS)
    }
    return Tuning(len(lists), len(texts), scoring.LABELS[name], str(metric.get_signature()), grid)
