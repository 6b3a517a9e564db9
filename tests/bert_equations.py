"""Transcriptions of the models made of two BERTs, from the equations of the papers.

They read the weights of a model's modules, and share no code with it: one sentence at a time, so that nothing is
padded or masked; one position and one head at a time; causal attention by leaving out later positions.

Legend: S source length, T target length, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tests import equations
from tests.equations import attend, linear, network


def norm(part: Any, x: Tensor) -> Tensor:
    return equations.norm(part, x, 1e-12)


def gelu(x: Tensor) -> Tensor:
    return x * (1.0 + torch.erf(x / math.sqrt(2.0))) / 2.0


def s(layer: Any, heads: int, h: Tensor, causal: bool = True) -> Tensor:
    """Apply S of BERT."""
    return norm(layer.self_residual.norm, h + attend(layer.self_attention, heads, h, h, causal))


def c(layer: Any, heads: int, h: Tensor, r: Tensor) -> Tensor:
    """Apply C, cross-attention in the place of BERT's self-attention."""
    return norm(layer.cross_residual.norm, h + attend(layer.cross_attention, heads, h, r))


def f(layer: Any, h: Tensor, name: str = "feed_forward") -> Tensor:
    """Apply F of BERT, or F_c, named ``fusion``."""
    return norm(getattr(layer, f"{name}_residual").norm, h + network(getattr(layer, name), h, gelu))


def embed(part: Any, tokens: list[int]) -> Tensor:
    return norm(
        part.norm, torch.stack([part.weight[t] + part.position_PD[i] + part.type_D for i, t in enumerate(tokens)])
    )


def head(model: Any, h: Tensor) -> Tensor:
    transform = model.decoder.final_norm
    return linear(model.projection, norm(transform.norm, gelu(linear(transform.dense, h))))


def decoder_logits(model: Any, source: list[int], target: list[int]) -> Tensor:
    """Return the logits of a decoder initialised from BERT, given BOS and the target's tokens. Shape: -> (T,V)."""
    config = model.config
    r, heads = embed(model.source_embedding, source), config.target.heads
    for layer in model.encoder.layers:
        r = f(layer, s(layer, config.source.heads, r, causal=False))
    h = embed(model.target_embedding, target)
    for number, layer in enumerate(model.decoder.layers, 1):
        if config.decoder == "parallel":
            g = layer.fusion_scale if config.fusion_scale == "learned" else [config.fusion_scale] * 2
            a = g[0] * (s(layer, heads, h) + c(layer, heads, h, r))
            h = g[1] * (f(layer, a, "fusion") + f(layer, a))
        elif config.decoder == "serial":
            h = f(layer, c(layer, heads, f(layer, s(layer, heads, h)), r), "fusion")
        elif config.decoder == "transformer":
            h = f(layer, c(layer, heads, s(layer, heads, h), r))
        elif number <= config.target.layers:
            h = f(layer, s(layer, heads, h))
        else:
            h = f(layer, c(layer, heads, h, r))
    return head(model, h)


def abnet_encode(model: Any, source: list[int]) -> tuple[Tensor, Tensor]:
    """Return AB-Net's encoded source, and the logits of the target's length."""
    config = model.config
    h = embed(model.source_embedding, source)
    if config.length_from == "token":
        h = torch.stack([model.length_token.weight, *h])
    for layer in model.encoder.layers:
        x = f(layer.layer, s(layer.layer, config.source.heads, h, causal=False))
        h = x + network(layer.adapter, norm(layer.adapter_residual.norm, x), torch.relu)
    return h[1:] if config.length_from == "token" else h, linear(model.length, h[0])


def abnet_logits(model: Any, r: Tensor, target: list[int]) -> Tensor:
    """Return AB-Net's logits at each position of [CLS] y [SEP], given the encoded source. Shape: -> (T,V)."""
    config = model.config
    cross_heads = config.cross_heads or config.target.heads
    h = embed(model.target_embedding, target)
    for layer in model.decoder.layers:
        adapter_norm, cross_norm = layer.adapter_residual.norm, layer.cross_residual.norm
        attended = s(layer.layer, config.target.heads, h, causal=False)
        if config.adapters == "serial":
            h = attended = f(layer.layer, attended)
        if config.adapter_norm == "pre":
            a = attended + attend(layer.cross_attention, cross_heads, norm(cross_norm, h), r)
            adapted = network(layer.adapter, norm(adapter_norm, a), torch.relu)
            h = adapted + (a if config.adapters == "serial" else f(layer.layer, a))
        else:
            a = norm(cross_norm, attended + attend(layer.cross_attention, cross_heads, h, r))
            adapted = network(layer.adapter, a, torch.relu)
            h = norm(adapter_norm, adapted + (a if config.adapters == "serial" else f(layer.layer, a)))
    return head(model, h)


def sentences(tokens_BT: Tensor, pad: int) -> Iterator[list[int]]:
    """Yield the rows of a batch without their padding."""
    for row in tokens_BT.tolist():
        yield [token for token in row if token != pad]


def mask_predict(
    model: Any, source: list[int], iterations: int, lengths: int, penalty: Callable[[int], float]
) -> list[tuple[list[int], float]]:
    """Translate a sentence by mask-predict, section 3 of Ghazvininejad et al. 2019, and score its candidates.

    Returns:
        Tokens and score of a candidate of each length, best first.
    """
    vocabulary = model.vocabulary
    special = [vocabulary.pad, vocabulary.bos, vocabulary.eos, vocabulary.mask]
    r, length_logits = abnet_encode(model, source)
    possible = range(1, model.longest_target)
    candidates = []
    for n in sorted(possible, key=lambda length: -float(length_logits[length]))[:lengths]:
        y, log_p, masked = [vocabulary.mask] * n, [0.0] * n, list(range(n))
        for t in range(1, iterations + 1):
            log_probs = torch.log_softmax(abnet_logits(model, r, [vocabulary.bos, *y, vocabulary.eos]), 1)
            for i in masked:
                of_token = log_probs[1 + i].tolist()
                y[i] = max((v for v in range(len(of_token)) if v not in special), key=lambda v: of_token[v])
                log_p[i] = of_token[y[i]]
            masked = sorted(range(n), key=lambda i: log_p[i])[: math.floor(n * (iterations - t) / iterations)]
            for i in masked:
                y[i] = vocabulary.mask
        candidates.append((y, sum(log_p) / penalty(n)))
    return sorted(candidates, key=lambda candidate: -candidate[1])
