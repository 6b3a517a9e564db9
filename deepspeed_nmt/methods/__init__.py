"""The methods, one file per paper, and the tables a run's configuration names them by.

To add a paper: write its file with a Config class and a build function, and add its line here.
"""

from __future__ import annotations

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.methods.label_smoothed import LabelSmoothedConfig, build_label_smoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.registry import Entry, Registry

# name, configuration, builder: (config, vocab_size, pad) -> model
MODELS: Registry[TranslationModel] = Registry(
    "model",
    [
        Entry("transformer", TransformerConfig, build_transformer),
    ],
)

# name, configuration, builder: (config, pad) -> objective
OBJECTIVES: Registry[Objective] = Registry(
    "objective",
    [
        Entry("label_smoothed", LabelSmoothedConfig, build_label_smoothed),
    ],
)
