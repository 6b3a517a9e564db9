"""The registry of the names of searches.

To add a search, write its file with a configuration class and a :class:`Search`, and add its line here.
"""

from __future__ import annotations

from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.parts import SearchConfig
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.registry import Entry, Registry
from deepspeed_nmt.search.base import Search
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.constrained import ConstrainedBeam, ConstrainedBeamConfig
from deepspeed_nmt.search.deep_shallow import DeepShallow, DeepShallowConfig
from deepspeed_nmt.search.diverse import DiverseBeam, DiverseBeamConfig
from deepspeed_nmt.search.mask_predict import MaskPredict, MaskPredictConfig
from deepspeed_nmt.search.mbr import MinimumBayesRisk, MinimumBayesRiskConfig
from deepspeed_nmt.search.sampling import Sampling, SamplingConfig

# name, configuration, builder: (config, model, vocabulary) -> search
SEARCHES: Registry[Search] = Registry(
    "search",
    [
        Entry("beam", BeamConfig, BeamSearch),
        Entry("deep_shallow", DeepShallowConfig, DeepShallow),
        Entry("mask_predict", MaskPredictConfig, MaskPredict),
        Entry("diverse_beam", DiverseBeamConfig, DiverseBeam),
        Entry("constrained_beam", ConstrainedBeamConfig, ConstrainedBeam),
        Entry("sampling", SamplingConfig, Sampling),
        Entry("mbr", MinimumBayesRiskConfig, MinimumBayesRisk),
    ],
)


class KeptSearch:
    """The search of a user who translates several texts, with its caches and CUDA graphs.

    It is built anew when its configuration or its model has changed. Only one thread at a time may use it.
    """

    def __init__(self) -> None:
        self._kept: tuple[SearchConfig, DecodableModel, Search] | None = None

    def of(self, config: SearchConfig, model: DecodableModel, vocabulary: Vocabulary) -> Search:
        """Return the search with a model.

        Args:
            config: settings.
            model: the model.
            vocabulary: special tokens of the model.

        Raises:
            ConfigError: if the search cannot decode with the model.
        """
        if self._kept is None or self._kept[0] != config or self._kept[1] is not model:
            self._kept = config, model, SEARCHES[config.name].build(config, model, vocabulary)
        return self._kept[2]
