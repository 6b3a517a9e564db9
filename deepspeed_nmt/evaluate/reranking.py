"""Choice of the weights of deep-shallow decoding on a validation set, from n-best lists with scores by both exits.

The candidates do not depend on alpha and the exponent, so each pair only chooses among the same candidates, whose
n-grams are counted once: hundreds of pairs take seconds.

Legend: L source lines, K candidates of a line (padded), F statistics of BLEU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepspeed_nmt.deep_shallow import ALPHA, EXITS, EXPONENT, total_of
from deepspeed_nmt.errors import DataError
from deepspeed_nmt.evaluate.bleu import (
    TokenisedBleu,
    bleu_of_statistics,
    multi_bleu,
    plain_bleu,
    sentence_statistics,
)
from deepspeed_nmt.evaluate.nbest import Candidate, read_nbest
from deepspeed_nmt.evaluate.scoring import ScoreInputs, read_sentences, warn_of_files
from deepspeed_nmt.files import shown_name

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
class Tuning:
    """BLEU of a validation set at every pair of weights.

    Attributes:
        lines: number of source lines.
        candidates: number of candidates of all lines.
        label: name of the metric.
        signature: of the metric.
        grid: BLEU by (alpha, exponent).
    """

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
        for name, pair in (("default", DEFAULT), ("best", self.best)):
            lines.append(
                f"{name:<8} --alpha {pair[0]:g} --exponent {pair[1]:g}  {self.label} = {self.grid[pair]:.2f}"
            )
        lines.append(f"  {self.signature}")
        if grid:
            lines += ["", "exponent" + "".join(f"{f'alpha {alpha:g}':>11}" for alpha in ALPHAS)]
            for exponent in EXPONENTS:
                values = "".join(f"{self.grid[alpha, exponent]:>11.2f}" for alpha in ALPHAS)
                lines.append(f"{exponent:>8g}{values}")
        return "\n".join(lines)

    def as_json(self, grid: bool) -> str:
        """Return the report as a JSON object, with unrounded scores; with ``grid``, of all pairs."""

        def point(pair: tuple[float, float]) -> dict[str, float]:
            return {"alpha": pair[0], "exponent": pair[1], "bleu": self.grid[pair]}

        values: dict[str, object] = {
            "lines": self.lines,
            "candidates": self.candidates,
            "metric": self.label,
            "signature": self.signature,
            "default": point(DEFAULT),
            "best": point(self.best),
        }
        if grid:
            values["grid"] = [point(pair) for pair in self.grid]
        return json.dumps(values)


class RerankLists:
    """N-best lists of both exits, as arrays.

    Args:
        lists: the candidates of each line. That of an empty line, which neither exit has scored, stands alone.

    Raises:
        ValueError: if a candidate lacks the scores by both exits; the message is the number of its line, from 1.
    """

    def __init__(self, lists: Sequence[Sequence[Candidate]]) -> None:
        self.lists = lists
        width = max(map(len, lists))
        self._means_LKN = np.zeros((len(lists), width, len(EXITS)))
        self._proposed_LKN = np.zeros((len(lists), width, len(EXITS)), dtype=np.bool_)
        self._length_LK = np.ones((len(lists), width))
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
        several_L = np.array([len(candidates) > 1 for candidates in self.lists])
        cut_L = (count_LN < count_LN.max()).any(axis=1) & several_L
        return int(cut_L.argmax()) + 1 if cut_L.any() else None

    def choose(self, alpha: float, exponent: float) -> NDArray[np.intp]:
        """Return the place of the best candidate of each line. Shape: (L,).

        Args:
            alpha: weight of the exit that proposed a candidate.
            exponent: exponent of its length with EOS.
        """
        own_LKN, other_LKN = self._means_LKN, self._means_LKN[:, :, ::-1]
        total_LKN = total_of(own_LKN, other_LKN, self._length_LK[:, :, None], alpha, exponent)
        chosen_L: NDArray[np.intp] = np.where(self._proposed_LKN, total_LKN, -np.inf).max(axis=2).argmax(axis=1)
        return chosen_L

    def texts(self, alpha: float, exponent: float) -> list[str]:
        """Return the best candidate of each line as text."""
        chosen = self.choose(alpha, exponent)
        return [each[place].text for each, place in zip(self.lists, chosen.tolist(), strict=True)]


def tune(
    nbest: str,
    references: Sequence[str],
    *,
    convert: Converter = list,
    convert_reference: Converter = list,
    tokenised: bool = False,
    lowercase: bool = False,
) -> Tuning:
    """Compute the BLEU of the translations that each pair of weights chooses.

    Args:
        nbest: file of n-best lists, written by `translate --rerank deep-shallow --nbest`; "-" is standard input.
        references: files of reference translations.
        convert: function that brings translations into the form to score.
        convert_reference: the same for references.
        tokenised: compute BLEU over the tokens of the text instead of sacreBLEU.
        lowercase: ignore case.

    Raises:
        DataError: if a file cannot be read, lacks candidates or scores, or is not aligned with the others.
    """
    if nbest in references:
        raise DataError(
            f"n-best lists and references must be different files, but both are {shown_name(nbest)}; give the "
            "reference translations"
        )
    lists = read_nbest(nbest)
    read = {name: convert_reference(read_sentences(name)) for name in dict.fromkeys(references)}  # pipes, once
    sentences = [read[name] for name in references]
    for name, lines in read.items():
        if len(lines) != len(lists):
            raise DataError(
                f"{shown_name(nbest)} and {shown_name(name)} must be aligned line by line, but have the candidates "
                f"of {len(lists):,} lines and {len(lines):,} lines; give files of the same sentences"
            )
    try:
        reranked = RerankLists(lists)
    except ValueError as error:
        raise DataError(
            f"{shown_name(nbest)} must have the scores by both exits, but lacks them for line {error}; write it with "
            "translate --rerank deep-shallow --nbest"
        ) from error
    if (line := reranked.first_cut) is not None:
        raise DataError(
            f"{shown_name(nbest)} must have all candidates of both exits, but lacks some of line {line:,}; write it "
            "with translate --rerank deep-shallow --nbest TWICE_THE_BEAM"
        )
    metric = multi_bleu(lowercase) if tokenised else plain_bleu(lowercase)
    texts = convert([each.text for candidates in lists for each in candidates])
    warn_of_files(ScoreInputs([(nbest, texts)], read, None), tokenised, lowercase)
    others = [[lines[each.line] for candidates in lists for each in candidates] for lines in sentences]
    counts = sentence_statistics(metric, texts, others)
    first_L = np.cumsum([0, *map(len, lists[:-1])])  # row of the first candidate of each line in `counts`
    grid = {
        (alpha, exponent): bleu_of_statistics(metric, counts[first_L + reranked.choose(alpha, exponent)].sum(axis=0))
        for alpha in ALPHAS
        for exponent in EXPONENTS
    }
    label = TokenisedBleu.label if tokenised else "sacreBLEU"
    return Tuning(len(lists), len(texts), label, str(metric.get_signature()), grid)
