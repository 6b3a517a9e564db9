"""Experiment: do the states of the encoder tell which sentences need the whole decoder?

    python benchmarks/run.py predictor --run RUN --text TEXT [--exits 6 10 14 20]

RUN is a run with exits after these decoder layers; TEXT is a directory with raw Multi30k. A ridge regression, fitted
on the validation text, predicts from mean and maximum of the encoder's states and the length how much chrF++ a
sentence gains by all layers over an exit. Of the test text, the half that is predicted to gain least is translated by
the exit, and the rest by all layers; for comparison, halves at random, which take the same time.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from records import Results, Table
from sacrebleu.metrics import BLEU, CHRF
from torch import Tensor

from deepspeed_nmt import Translator
from deepspeed_nmt.run.directory import Run
from deepspeed_nmt.search.forced import pad_sources

PENALTIES = (30.0, 300.0, 3000.0)
TEXTS = {"fitted on": "val", "tried on": "test_2016_flickr"}
_TOGETHER, _DRAWS = 64, 10


class Side(NamedTuple):
    """References, translations by number of decoder layers, and features of the sentences, (B,F)."""

    references: list[str]
    translations: dict[int, list[str]]
    features_BF: Tensor

    def bleu(self, translations: list[str]) -> float:
        return float(BLEU().corpus_score(translations, [self.references]).score)

    def gains(self, exit: int, depth: int) -> Tensor:
        """Return how much chrF++ each sentence gains by all layers."""
        metric = CHRF(word_order=2)
        deep, shallow = (
            torch.tensor([
                metric.sentence_score(translation, [reference]).score
                for translation, reference in zip(self.translations[n], self.references, strict=True)
            ])
            for n in (depth, exit)
        )  # fmt: skip
        return (deep - shallow).double()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, required=True, help="run with exits")
    parser.add_argument("--text", type=Path, required=True, help="directory with raw Multi30k")
    parser.add_argument("--exits", type=int, nargs="+", default=[6, 10, 14, 20], help="decoder layers of exits")


def features(run: Run, lines: list[str]) -> Tensor:
    """Return mean and maximum of the encoder's states and the length of each line. Shape: -> (B,2D+1)."""
    model, vocabulary, found = run.loaded("best")[0].eval(), run.tokenizer.vocabulary, []
    for first in range(0, len(lines), _TOGETHER):
        encoded = run.tokenizer.encode_batch(lines[first : first + _TOGETHER], "source")
        source_BS = pad_sources([[*row, vocabulary.source.eos] for row in encoded], vocabulary.pad, "cpu")[0]
        is_pad_BS1 = source_BS.eq(vocabulary.pad).unsqueeze(2)
        states_BSD = model.encode(source_BS).states_BSD
        length_B1 = (~is_pad_BS1).sum(dim=1)
        mean_BD = states_BSD.masked_fill(is_pad_BS1, 0.0).sum(dim=1) / length_B1
        most_BD = states_BSD.masked_fill(is_pad_BS1, -torch.inf).amax(dim=1)
        found.append(torch.cat([mean_BD, most_BD, length_B1.float()], dim=1))
    return torch.cat(found).double()


def read_side(run: Run, text: Path, name: str, depths: list[int]) -> Side:
    source, references = ((text / f"{name}.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de"))
    encoder = len(run.loaded("best")[0].stacks[0][0].layers)
    translations = {}
    for depth in depths:
        translator = Translator.open(run.path, exit=f"{encoder}-{depth}")
        translations[depth] = [each.text for each in translator.translate(source)]
    return Side(references, translations, features(run, source))


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> Iterator[Results]:
    opened = Run.open(arguments.run, "--run")
    depth = len(opened.loaded("best")[0].stacks[1][0].layers)
    fitted, tried = (read_side(opened, arguments.text, name, [*arguments.exits, depth]) for name in TEXTS.values())
    mean_F, scale_F = fitted.features_BF.mean(dim=0), fitted.features_BF.std(dim=0).clamp(min=1e-6)
    x_BF, new_BF = ((side.features_BF - mean_F) / scale_F for side in (fitted, tried))
    rows: list[list[float | int]] = []
    for exit in arguments.exits:
        gain_B, gained_B = fitted.gains(exit, depth), tried.gains(exit, depth)
        whole, shallow, half = tried.translations[depth], tried.translations[exit], len(gained_B) // 2

        def mixed(places: list[int], whole: list[str] = whole, shallow: list[str] = shallow) -> float:
            taken = set(places)
            return tried.bleu([(shallow if n in taken else whole)[n] for n in range(len(whole))])

        at_random = fmean(mixed(random.Random(seed).sample(range(len(whole)), half)) for seed in range(_DRAWS))
        for penalty in PENALTIES:
            gram_FF = x_BF.t() @ x_BF + penalty * torch.eye(x_BF.shape[1], dtype=x_BF.dtype)
            predicted_B = new_BF @ torch.linalg.solve(gram_FF, x_BF.t() @ (gain_B - gain_B.mean()))
            correlation = float(torch.corrcoef(torch.stack([predicted_B, gained_B]))[0, 1])
            chosen = mixed(predicted_B.argsort()[:half].tolist())
            rows.append([exit, penalty, correlation, tried.bleu(shallow), chosen, at_random, tried.bleu(whole)])
        columns = {
            "exit": "{}", "penalty": "{:,.0f}", "correlation": "{:.3f}", "BLEU of the exit": "{:.2f}",
            "half by the predictor": "{:.2f}", "half at random": "{:.2f}", "all layers": "{:.2f}",
        }  # fmt: skip
        yield Results(tables={"predictor": Table(columns=columns, rows=rows)})
