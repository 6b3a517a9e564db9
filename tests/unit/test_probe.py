"""Measurements of untrained models: `plan --probe`."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch import nn

from deepspeed_nmt.build import build_model
from deepspeed_nmt.cli import main
from deepspeed_nmt.config import validate
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.methods import self_tests
from deepspeed_nmt.methods.transformer import SMALL
from deepspeed_nmt.parity import VOCABULARY, settings_of
from deepspeed_nmt.run import probe as probing
from deepspeed_nmt.run.probe import Probe, probe


@pytest.mark.parametrize("name", self_tests())
def test_every_method_can_be_probed(name: str) -> None:
    config = settings_of(name)
    probed = probe(config, replace(VOCABULARY, mask=4))  # as those of BERTs, from which others may predict, too
    assert 0.0 < probed.source < 2.0 and -0.2 < probed.likeness < 1.0
    assert (probed.prefix is None) == (config.search.name == "mask_predict")
    stacks = build_model(config, VOCABULARY).stacks
    for norms, side in zip((probed.encoder, probed.decoder), stacks, strict=True):
        assert len(norms) == sum(len(stack.layers) for stack in side)
    is_trained = name != "added_exits"  # which trains what reads the states of the layers
    assert (max(probed.decoder) > 0.0) == is_trained and "untrained" in str(probed)


def test_a_probe_sees_what_a_model_ignores() -> None:
    config = validate({"model": {"name": "transformer", **SMALL, "decoder_layers": 3}})

    def probed(blind: str) -> Probe:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(probing, "build_model", partial(blinded, blind))
            return probe(config, VOCABULARY)

    def blinded(blind: str, *arguments: Any) -> TranslationModel:
        model = build_model(*arguments)
        for layer in model.decoder.layers:  # type: ignore[union-attr]
            if blind == "source":
                nn.init.zeros_(layer.cross_attention.out_proj.weight)
        if blind == "prefix":
            nn.init.zeros_(model.target_embedding.weight)  # type: ignore[union-attr]
        return model

    sound, no_source, no_prefix = probed(""), probed("source"), probed("prefix")
    assert sound.source > 0.05 and sound.prefix is not None and sound.prefix > 0.5
    assert no_source.source == 0.0 and no_prefix.prefix == 0.0


def test_the_command_probes(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [
        "model.dim=16",
        "model.ffn_dim=16",
        "model.heads=2",
        "model.encoder_layers=2",
        "model.decoder_layers=3",
    ]
    assert main(["plan", "--recipe", "transformer_base", "--vocab-size", "50", "--probe", "--json", *settings]) == 0
    probed = json.loads(capsys.readouterr().out)["probe"]
    assert len(probed["encoder"]) == 2 and len(probed["decoder"]) == 3 and probed["prefix"] > probed["source"] > 0.0
