"""Combinations of settings that have no meaning, refused when the configuration is read."""

from __future__ import annotations

from collections.abc import Mapping

from deepspeed_nmt.methods.cross_attention_drop import CrossAttentionDropConfig
from deepspeed_nmt.methods.depth_growing import DepthGrowingConfig
from deepspeed_nmt.methods.transformer import TransformerShape
from deepspeed_nmt.registry import Config


def problems_of(model: Config, layer: Config, objective: Mapping[str, Config]) -> list[str]:
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
    if isinstance(model, DepthGrowingConfig) and "multi_softmax" in objective:
        problems.append(
            "objective.multi_softmax trains many exits, but model.name=depth_growing trains only the one on top; "
            "use objective.label_smoothed, or model.name=transformer"
        )
    if _active(objective, "ddr") and _active(objective, "r_drop"):
        problems.append(
            "objective.ddr and objective.r_drop both run every pair twice, with one encoding and with two; "
            "set one of them to null"
        )
    return problems


def _active(objective: Mapping[str, Config], name: str) -> bool:
    return name in objective and objective[name].model_dump()["weight"] > 0.0
