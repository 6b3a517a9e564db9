"""Words for the tags of the log, as legends and titles of the page have them."""

from __future__ import annotations

import re

METRIC_NAMES = {"bleu": "BLEU", "bleu_tokenised": "tokenised BLEU", "chrf": "chrF", "ter": "TER"}
"""Names of metrics in print."""
_MEASURES = {**METRIC_NAMES, "loss": "validation loss", "nll": "validation NLL", "ppl": "validation perplexity"}
_FIXED = {
    "train/loss": "training loss",
    "train/nll": "training NLL",
    "train/ppl": "training perplexity",
    "train/lr": "learning rate",
    "train/grad_norm": "norm",
    "collapse/source_reliance": "source reliance",
    "collapse/nll": "loss with the true sources",
    "perf/target_tokens_per_s": "target tokens a second",
    "perf/memory": "peak memory",
    "perf/mfu": "MFU",
    "perf/data_wait": "waiting for data",
    "perf/padding": "padding",
}
_CORPUS = re.compile(r"data/(.+)/share|train/(.+)/nll")


def words_of(tag: str) -> str:
    """Return the words for a tag: "validation loss, news" for ``valid/news/loss``; the tag if it has none."""
    if tag.startswith("valid/"):
        return measure_words(tag.removeprefix("valid/"))
    if found := _CORPUS.fullmatch(tag):
        return found[1] or found[2]
    return _FIXED.get(tag, tag)


def measure_words(measure: str) -> str:
    """Return the words for a measure of validation, given as METRIC, or as SET/METRIC of a set with a name."""
    of, _, name = measure.rpartition("/")
    words = _MEASURES.get(name, name)
    if of == "mean":
        return f"{words}, mean of all sets"
    return f"{words}, {of}" if of else words
