"""The registry of the names of searches.

To add a search, write its file with a configuration class and a :class:`Search`, and add its line here.
"""

from __future__ import annotations

from deepspeed_nmt.registry import Entry, Registry
from deepspeed_nmt.search.base import Search
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch, DiverseBeamConfig
from deepspeed_nmt.search.choosing_exits import ChoosingExits, ChoosingExitsConfig
from deepspeed_nmt.search.constrained import ConstrainedBeam, ConstrainedBeamConfig
from deepspeed_nmt.search.deep_shallow import DeepShallow, DeepShallowConfig
from deepspeed_nmt.search.mask_predict import MaskPredict, MaskPredictConfig
from deepspeed_nmt.search.mbr import MinimumBayesRisk, MinimumBayesRiskConfig
from deepspeed_nmt.search.sampling import Sampling, SamplingConfig
from deepspeed_nmt.search.speculative import Speculative, SpeculativeConfig

# name, configuration, builder: (config, model, vocabulary) -> search
SEARCHES: Registry[Search] = Registry(
    "search",
    [
        Entry("beam", BeamConfig, BeamSearch),
        Entry("deep_shallow", DeepShallowConfig, DeepShallow),
        Entry("mask_predict", MaskPredictConfig, MaskPredict),
        Entry("diverse_beam", DiverseBeamConfig, BeamSearch),
        Entry("constrained_beam", ConstrainedBeamConfig, ConstrainedBeam),
        Entry("sampling", SamplingConfig, Sampling),
        Entry("choosing_exits", ChoosingExitsConfig, ChoosingExits),
        Entry("mbr", MinimumBayesRiskConfig, MinimumBayesRisk),
        Entry("speculative", SpeculativeConfig, Speculative),
    ],
)
