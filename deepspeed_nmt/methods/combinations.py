"""Combinations of settings that have no meaning, refused when the configuration is read."""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed_nmt.core.model import exit_name
from deepspeed_nmt.methods.abnet import AbNetConfig
from deepspeed_nmt.methods.bert import BertPair
from deepspeed_nmt.methods.cross_attention_drop import CrossAttentionDropConfig
from deepspeed_nmt.methods.depth_growing import DepthGrowingConfig
from deepspeed_nmt.methods.multi_softmax import MultiSoftmaxConfig
from deepspeed_nmt.methods.recurrent import RecurrentConfig
from deepspeed_nmt.methods.transformer import StandardLayerConfig, TransformerShape
from deepspeed_nmt.registry import Config
from deepspeed_nmt.search.deep_shallow import DeepShallowConfig
from deepspeed_nmt.search.mask_predict import MaskPredictConfig


def problems_of(model: Config, layer: Config, objective: Mapping[str, Config], search: Config) -> list[str]:
    """One sentence for each contradiction, naming both settings and a way out."""
    problems = []
    if isinstance(layer, CrossAttentionDropConfig) and isinstance(model, TransformerShape):
        depth, setting = model.decoder_layers, "model.decoder_layers"
        if isinstance(model, DepthGrowingConfig):
            depth, setting = model.top_decoder_layers, "model.top_decoder_layers"
        if layer.drop_depth > depth:
            problems.append(
                f"layer.drop_depth must not exceed {setting}, but is {layer.drop_depth} of {depth}; "
                f"lower layer.drop_depth to {depth} at most"
            )
        if all(layer.rate(number) == 1.0 for number in range(1, depth + 1)):
            problems.append(
                f"layer.drop_ratio, layer.drop_depth and layer.beyond leave none of the {depth} layers of "
                f"{setting} any cross-attention; lower layer.drop_depth or layer.beyond"
            )
    many = objective.get("multi_softmax")
    if isinstance(many, MultiSoftmaxConfig) and isinstance(model, TransformerShape):
        problems += _problems_of_exits(many, model, layer)
    if isinstance(model, DepthGrowingConfig) and "multi_softmax" in objective:
        problems.append(
            "objective.multi_softmax trains many exits, but model.name=depth_growing trains only the one on top; "
            "use objective.label_smoothed, or model.name=transformer"
        )
    if isinstance(search, DeepShallowConfig) and not isinstance(model, DepthGrowingConfig):
        problems.append(
            "search.name=deep_shallow needs the two nets of model.name=depth_growing, but model.name is "
            f"{model.model_dump()['name']}; use search.name=beam"
        )
    if isinstance(model, BertPair):
        problems += _problems_of_berts(model, layer, objective, search)
    else:
        if "masked_tokens" in objective:
            problems.append("objective.masked_tokens trains model.name=abnet alone; use objective.label_smoothed")
        if isinstance(search, MaskPredictConfig):
            problems.append("search.name=mask_predict decodes model.name=abnet alone; use search.name=beam")
    if _active(objective, "ddr") and _active(objective, "r_drop"):
        problems.append(
            "objective.ddr and objective.r_drop both run every pair twice, with one encoding and with two; "
            "set one of them to null"
        )
    return problems


def _problems_of_berts(model: BertPair, layer: Config, objective: Mapping[str, Config], search: Config) -> list[str]:
    name, problems = model.model_dump()["name"], []
    if not isinstance(layer, StandardLayerConfig):
        problems.append(
            f"layer.name={layer.model_dump()['name']} makes layers of a Transformer, but model.name={name} has those "
            "of BERTs; use layer.name=standard"
        )
    if "multi_softmax" in objective:
        problems.append(
            f"objective.multi_softmax trains the exits of a Transformer, but model.name={name} is trained at its "
            "top; use another objective"
        )
    guesses = isinstance(model, AbNetConfig)
    if guesses != ("masked_tokens" in objective):
        use = "masked_tokens" if guesses else "label_smoothed"
        problems.append(
            f"model.name={name} is trained by objective.{use}; set that, and the other likelihood to null"
        )
    if guesses != isinstance(search, MaskPredictConfig):
        problems.append(
            f"model.name={name} is decoded by search.name={'mask_predict' if guesses else 'beam'}; set that"
        )
    if guesses and (terms := [term for term in ("ddr", "r_drop", "ald") if _active(objective, term)]):
        problems.append(
            f"objective.{terms[0]} compares predictions from left to right, but model.name=abnet guesses masked "
            f"tokens; set objective.{terms[0]} to null"
        )
    return problems


def _problems_of_exits(many: MultiSoftmaxConfig, model: TransformerShape, layer: Config) -> list[str]:
    problems = []
    sides = {"encoder_layers": model.encoder_layers, "decoder_layers": model.decoder_layers}
    if isinstance(model, RecurrentConfig):
        sides = {"encoder_loops": model.encoder_loops, "decoder_loops": model.decoder_loops}
    for count, (setting, stages) in zip(many.drawn or (1, 1), sides.items(), strict=True):
        if count > stages:
            problems.append(
                f"objective.multi_softmax.exits must draw at most model.{setting} exits of that side, but draws "
                f"{count} of {stages}; lower it"
            )
    encoder, decoder = sides.values()
    known = {exit_name(n, m) for n in range(1, encoder + 1) for m in range(1, decoder + 1)}
    if unknown := sorted(set(many.weights) - known):
        problems.append(
            f"objective.multi_softmax.weights must name exits n-m up to {exit_name(encoder, decoder)}, but names "
            f"{', '.join(unknown)}"
        )
    if not any(many.trains(n, m, (encoder, decoder)) for n in range(1, encoder + 1) for m in range(1, decoder + 1)):
        problems.append(
            "objective.multi_softmax.weights must give one of the exits that are trained a weight above 0, but all "
            f"of those of exits={many.exits} weigh nothing; raise that of {exit_name(encoder, decoder)}"
        )
    drops = isinstance(layer, CrossAttentionDropConfig) and layer.rate(1) == 1.0
    if drops and "decoder_layers" in sides:
        problems.append(
            "objective.multi_softmax translates from the decoder's first layer on, but layer.drop_ratio=1 with "
            "layer.drop_depth leaves that layer no cross-attention; use a layer.drop_ratio below 1"
        )
    return problems


def _active(objective: Mapping[str, Config], name: str) -> bool:
    return name in objective and objective[name].model_dump()["weight"] > 0.0
