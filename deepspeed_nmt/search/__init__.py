"""Decoding: searches for the best translation, and the table a run's configuration names them by."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from deepspeed_nmt.registry import Entry, Registry
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch, Hypothesis
from deepspeed_nmt.search.deep_shallow import DeepShallow, DeepShallowConfig
from deepspeed_nmt.search.mask_predict import MaskPredict, MaskPredictConfig

SearchConfig = BeamConfig | DeepShallowConfig | MaskPredictConfig
"""Settings of any search."""


class Search(Protocol):
    """Finds translations of a batch of sentences."""

    def search(self, source_BS: Tensor, padded: bool = True) -> list[list[Hypothesis]]:
        """Hypotheses of each sentence, best first. Shape: (B,S)"""
        ...


# name, configuration, builder: (model, bos, eos, pad, config) -> search
SEARCHES: Registry[Search] = Registry(
    "search",
    [
        Entry("beam", BeamConfig, BeamSearch),
        Entry("deep_shallow", DeepShallowConfig, DeepShallow),
        Entry("mask_predict", MaskPredictConfig, MaskPredict),
    ],
)
