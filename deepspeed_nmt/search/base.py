"""The interface of all searches.

Legend: B sentences, S source length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from deepspeed_nmt.registry import Config


class SearchConfig(Config):
    """Base of the settings of every search.

    Attributes:
        name: Name of the search in the registry.
        width_setting: Name of the setting that bounds the number of a sentence's hypotheses.
    """

    name: str
    width_setting: ClassVar[str] = "beam"

    @property
    def width(self) -> int:
        """Upper bound of the number of a sentence's hypotheses."""
        return int(getattr(self, self.width_setting))


@dataclass(frozen=True)
class Hypothesis:
    """A finished translation.

    Attributes:
        tokens: Tokens without BOS and EOS.
        score: Number by which a search ranks hypotheses; the higher the better.
        log_prob: Log-probability (nats) of the tokens and the EOS after them.
    """

    tokens: list[int]
    score: float
    log_prob: float


class Search(Protocol):
    """A search for translations with one model, which must be in eval mode."""

    def search(self, source_BS: Tensor, padded: bool = True) -> list[list[Hypothesis]]:
        """Translate a batch of sentences.

        Args:
            source_BS: Source tokens on the model's device, each row ending in EOS, padded on the right.
            padded: False promises that no position is padding.

        Returns:
            For each sentence at least one hypothesis, best first.
        """
        ...
