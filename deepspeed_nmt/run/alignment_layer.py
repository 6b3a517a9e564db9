"""The decoder layer whose cross-attention aligns best, chosen on the validation text of a run.

There are no reference alignments. A good alignment links a target token with the source token that it translates, so
the target token can be predicted from that source token alone. For each layer the links of the validation text are
divided into two halves by sentence. From each half p(target token | linked source token) is estimated, and the other
half is scored: the layer with the lowest cross-entropy is chosen. A layer that attends to the end of the sentence, to
punctuation or to the token before the translated one predicts hardly better than the frequencies of
the target tokens.

The choice is recorded in the run, with the weights and the exit that it holds for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from pydantic import ValidationError

from deepspeed_nmt.console import logger
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.errors import ConfigError, DataError, option
from deepspeed_nmt.files import atomic_write_text, read_regular
from deepspeed_nmt.registry import Config
from deepspeed_nmt.run.directory import ALIGNMENT_FILE, DataRecord, Run
from deepspeed_nmt.search.alignment import AttentionWatch
from deepspeed_nmt.search.forced import pad_sources, token_log_probs
from deepspeed_nmt.search.lines import length_buckets

MAX_PAIRS = 1000
"""Sentence pairs of the validation text that decide."""
_MAX_TOKENS = 4096
_LONGEST = 250
_PRIOR = 1.0
"""Weight of the frequencies of target tokens in their distribution after a source token, in tokens."""

Linked = tuple[int, int]
"""A source token and the target token that is linked with it."""


class AlignmentLayer(Config):
    """The decoder layer that aligns best.

    Attributes:
        weights: digest of the checkpoint's weights.
        exit: exit of the model.
        layer: number of the layer, from 1.
        cross_entropy: nats per target token on held-out links, by layer.
    """

    weights: str
    exit: str
    layer: int
    cross_entropy: dict[int, float]


class _AlignmentFile(Config):
    """The content of ALIGNMENT_FILE: choices in the order in which they were made."""

    format: Literal[1] = 1
    layers: tuple[AlignmentLayer, ...] = ()


def alignment_layer(run: Run, which: str, exit: str, model: TranslationModel) -> int:
    """Return the number of the decoder layer that aligns best.

    Args:
        run: the run.
        which: checkpoint of the model (best, last, average, or a path).
        exit: exit of the model.
        model: the model at this exit, in eval mode.

    Raises:
        ConfigError: if the model has no cross-attention, or the validation text cannot be read.
    """
    attentions = model.cross_attentions()
    if not attentions:
        raise ConfigError(f"{option('alignment')} needs a model with cross-attention, but {run.path} has none")
    if len(attentions) == 1:
        return next(iter(attentions))
    weights = run.checkpoints.open(which, verify=False).weights_digest
    recorded = _read(run.path)
    for each in recorded:
        if (each.weights, each.exit) == (weights, exit) and each.layer in attentions:
            return each.layer
    try:
        data = DataDirectory.open(Path(DataRecord.read(run.path).path))
        corpus = data.corpus("valid")
    except DataError as error:
        raise ConfigError(
            f"{option('alignment')} chooses the decoder layer on the validation text of the run, which cannot be "
            f"read ({error}); give {option('alignment_layer')}"
        ) from error
    pairs = [(corpus.source(i).tolist(), corpus.target(i).tolist()) for i in range(min(MAX_PAIRS, len(corpus)))]
    pairs = [pair for pair in pairs if max(map(len, pair)) <= _LONGEST and min(map(len, pair)) > 0]
    links = _links(model, run, pairs)
    scores = {layer: held_out_cross_entropy(each) for layer, each in zip(attentions, links, strict=True)}
    best = min(scores, key=lambda layer: scores[layer])
    logger.info(
        "%s: decoder layer %d of %d aligns best (cross-entropy %.3f of held-out links; the worst has %.3f)",
        run.path,
        best,
        len(scores),
        scores[best],
        max(scores.values()),
    )
    choice = AlignmentLayer(weights=weights, exit=exit, layer=best, cross_entropy=scores)
    try:
        content = _AlignmentFile(layers=(*recorded, choice)).model_dump_json(indent=1)
        atomic_write_text(run.path / ALIGNMENT_FILE, content)
    except OSError as error:
        logger.warning("%s could not be written (%s)", run.path / ALIGNMENT_FILE, error.strerror or error)
    return best


def _read(run: Path) -> tuple[AlignmentLayer, ...]:
    """Return the recorded choices; none if their file cannot be read, with a warning."""
    file = run / ALIGNMENT_FILE
    if not file.is_file():
        return ()
    try:
        return _AlignmentFile.model_validate_json(read_regular(file)).layers
    except (OSError, ValidationError):
        logger.warning("%s cannot be read; the layer is chosen again", file)
        return ()


def _links(
    model: TranslationModel, run: Run, pairs: Sequence[tuple[list[int], list[int]]]
) -> list[list[list[Linked]]]:
    """Return for each layer with cross-attention the linked tokens of each sentence pair."""
    vocabulary = run.tokenizer.vocabulary
    device = next(model.parameters()).device
    layers = list(model.cross_attentions().values())
    found: list[list[list[Linked]]] = [[[] for _ in pairs] for _ in layers]
    lengths = [max(map(len, pair)) + 1 for pair in pairs]
    for bucket in length_buckets(lengths, _MAX_TOKENS):
        rows = [[*pairs[number][0], vocabulary.source.eos] for number in bucket]
        source_BS, padded = pad_sources(rows, vocabulary.pad, device)
        with torch.inference_mode():
            watch = AttentionWatch([[(layer, 1.0)] for layer in layers], source_BS, vocabulary)
            with watch.watching():
                asked = [[pairs[number][1]] for number in bucket]
                token_log_probs([model], vocabulary, source_BS, padded, asked, None, watch.decoded)
        for place, number in enumerate(bucket):
            source, target = rows[place], pairs[number][1]
            for layer in range(len(layers)):
                positions = watch.links(layer, place, len(target))
                found[layer][number] = [
                    (source[position], token) for position, token in zip(positions, target, strict=True)
                ]
    return found


def held_out_cross_entropy(sentences: Sequence[Sequence[Linked]]) -> float:
    """Return the cross-entropy (nats per token) of target tokens given their linked source tokens.

    The distributions are estimated on every other sentence and measured on the rest, and the reverse. They are
    smoothed by the frequencies of target tokens.

    Args:
        sentences: linked tokens of each sentence.
    """
    total, tokens = 0.0, 0
    for half in range(2):
        pairs = Counter(pair for each in sentences[half::2] for pair in each)
        sources, targets = Counter[int](), Counter[int]()
        for (source, target), count in pairs.items():
            sources[source] += count
            targets[target] += count
        all_targets = targets.total() + len(targets) + 1  # one for each, and one for those that are unseen
        for each in sentences[1 - half :: 2]:
            for source, target in each:
                prior = (targets[target] + 1) / all_targets
                p = (pairs[source, target] + _PRIOR * prior) / (sources[source] + _PRIOR)
                total -= math.log(p)
            tokens += len(each)
    return total / max(1, tokens)
