"""One of two tensor-parallel ranks; reports their parameters, dropout masks and losses as JSON."""

from __future__ import annotations

import copy
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_nmt.core.objective import Objective, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.loader import TrainLoader, collate
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine import build_engine
from deepspeed_nmt.engine.settings import EngineConfig, resolve_engine
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels import cross_entropy, torch_ops
from deepspeed_nmt.kernels.cross_entropy import projected_cross_entropy
from deepspeed_nmt.kernels.segments import Mask
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.nn.attention import MultiHeadAttention
from deepspeed_nmt.nn.cache import KeysValues
from deepspeed_nmt.nn.embedding import Projection
from deepspeed_nmt.parallel.tensor import SLICE, parallelize, scatter
from deepspeed_nmt.parallel.world import World, join_world, leave_world
from deepspeed_nmt.train.optimizers.adam import AdamConfig
from tests.equations import projected_cross_entropy_ref

V = Vocabulary(61)


def everyones(x: Tensor) -> list[Tensor]:
    """Gather a tensor that has the same shape on all ranks."""
    found = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(found, x.contiguous())
    return found


def equal(x: Tensor) -> bool:
    first, second = everyones(x.detach())
    return torch.equal(first, second)


def training(directory: Path, world: World) -> dict[str, Any]:
    torch.manual_seed(3)
    config = TransformerConfig(
        dim=32, ffn_dim=96, heads=4, encoder_layers=2, decoder_layers=2, dropout=0.2, attention_dropout=0.2,
        activation_dropout=0.2,
    )  # fmt: skip
    model = build_transformer(config, V)
    model.recompute(0, 1)
    whole = {name: p.numel() for name, p in model.named_parameters()}
    parallelize(model, world)
    module = TrainModule(model, Objective(LabelSmoothed(0.1, V.pad)))
    corpus = Corpus(directory, "train")
    dummy = collate(corpus, torch.empty(0, dtype=torch.int64).numpy(), V)
    settings = resolve_engine(EngineConfig(name="plain", device="cpu"), AdamConfig(clip_norm=0.5), world)
    engine = build_engine(settings, module, world, dummy)
    # Equality of dropout masks across ranks, inside a sliced sub-layer and between sub-layers.
    drawn: dict[str, list[bool]] = {"inside": [], "between": []}
    mask_of = torch_ops._mask

    def watched(x: Tensor, p: float) -> Tensor:
        mask = mask_of(x, p)
        if x.dim() == 3:
            drawn["between" if x.shape[-1] == config.dim else "inside"].append(equal(mask))
        return mask

    loader = TrainLoader.of_corpus(
        corpus, BatchConfig(update_tokens=300, micro_tokens=200), 5, world.data_rank, world.data_ranks, V
    )
    torch_ops._mask = watched
    results = []
    for update in loader.updates(Cursor(), 1):
        result = engine.update(update.micro_batches, update.target_tokens, 1e-3)
        results.append(float(result.sums["loss"]))
        torch_ops._mask = mask_of
        if update.number == 6:
            break
    parameters = dict(model.named_parameters())
    return {
        "drawn": drawn,
        "loss_equal": equal(torch.tensor(results)),
        "common_equal": all(equal(p) for p in parameters.values() if not hasattr(p, SLICE)),
        "common": [name for name, p in parameters.items() if not hasattr(p, SLICE)],
        "held": {name: p.numel() / whole[name] for name, p in parameters.items() if hasattr(p, SLICE)},
        "names_kept": sorted(parameters) == sorted(whole),
    }


def sliced_cross_entropy(world: World) -> dict[str, Any]:
    """Return errors of loss and gradients of the sliced projection against the unsliced reference, in float64."""
    found = {}
    for states_count, taught in ((1, None), (2, None), (2, "kl")):
        torch.manual_seed(5)
        weight = torch.randn(V.size, 8, dtype=torch.float64)
        states = [torch.randn(40, 8, dtype=torch.float64, requires_grad=True) for _ in range(states_count)]
        targets = torch.randint(0, V.size, (40,))
        rows = torch.rand(40, dtype=torch.float64)
        arguments: dict[str, Any] = {
            "targets_N": targets,
            "smoothing": 0.1,
            "ignore_index": 0,
            "divergence_weight": 0.7,
            "row_weights_N": rows,
            "taught": taught,
        }
        learning = states[:1] if taught else states
        reference_weight = weight.clone().requires_grad_()
        expected = projected_cross_entropy_ref(states, reference_weight, **arguments)
        expected_gradients = torch.autograd.grad(expected[0], [reference_weight, *learning])
        projection = Projection(nn.Parameter(weight.clone()))
        parallelize(projection, world)
        cross_entropy._CHUNK_BYTES["cpu"] = 7 * 31 * 8
        ours = projection(states, partial(projected_cross_entropy, **arguments))
        d_weight, *d_states = torch.autograd.grad(ours[0], [projection.weight, *learning])
        part = getattr(projection.weight, SLICE)
        differences = [float((a - b).abs().max()) for a, b in zip(ours, expected, strict=True)]
        differences.append(float((d_weight - part.of(expected_gradients[0])).abs().max()))
        differences += [float((a - b).abs().max()) for a, b in zip(d_states, expected_gradients[1:], strict=True)]
        found[taught or str(states_count)] = differences
    return found


class OwnAttention(MultiHeadAttention):
    """Attention with queries and values of its own, and no weights."""

    def attend(self, query_BTD: Tensor, memory: KeysValues, mask: Mask, causal: bool) -> Tensor:
        return super().attend(1.5 * query_BTD, KeysValues(memory.keys, memory.values.sin()), mask, causal)


class GatedAttention(OwnAttention):
    """Attention with a weight of its own, of which ranks would have only parts of the gradient."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.gate = nn.Parameter(torch.ones(1))


def own_attention(world: World) -> dict[str, Any]:
    """Return errors of outputs and gradients of a sliced attention of one's own, and how another one is refused."""
    torch.manual_seed(7)
    whole = OwnAttention(32, 4).double()
    sliced = copy.deepcopy(whole)
    parallelize(sliced, world)
    query, memory = torch.randn(2, 2, 5, 32, dtype=torch.float64)
    leaves = [(query.clone().requires_grad_(), memory.clone().requires_grad_()) for _ in range(2)]
    differences = []
    results = []
    for layer, (x, m) in zip((whole, sliced), leaves, strict=True):
        results.append(layer(x, x, None, True).total() + layer(x, m).total() + layer(x, layer.project(m)).total())
        results[-1].square().sum().backward()
    differences.append(float((results[0] - results[1]).abs().max()))
    differences += [float((a.grad - b.grad).abs().max()) for a, b in zip(*leaves, strict=True)]
    for (name, ours), theirs in zip(sliced.named_parameters(), whole.parameters(), strict=True):
        assert name == "out_proj.bias" or hasattr(ours, SLICE), name
        differences.append(float((ours.grad - scatter(theirs.grad, ours)).abs().max()))
    try:
        parallelize(nn.Sequential(GatedAttention(32, 4)), world)
    except ConfigError as refusal:
        return {"differences": differences, "refusal": str(refusal)}
    return {"differences": differences, "refusal": ""}


def attention_weights(world: World) -> list[float]:
    """Return errors of a sliced attention's weights, as the mean over all heads, and of gradients from them."""
    torch.manual_seed(8)
    whole = MultiHeadAttention(32, 4).double()
    sliced = copy.deepcopy(whole)
    parallelize(sliced, world)
    query, memory, factor = torch.randn(3, 2, 5, 32, dtype=torch.float64)
    leaves = [(query.clone().requires_grad_(), memory.clone().requires_grad_()) for _ in range(2)]
    weights = [layer.weights(x, m) for layer, (x, m) in zip((whole, sliced), leaves, strict=True)]
    for of in weights:
        (of * factor[..., :5]).sum().backward()
    differences = [float((weights[0] - weights[1]).abs().max())]
    differences += [float((a.grad - b.grad).abs().max()) for a, b in zip(*leaves, strict=True)]
    for name in ("q_proj", "k_proj"):
        ours, theirs = (getattr(layer, name).weight for layer in (sliced, whole))
        assert theirs.grad.abs().max() > 1e-3
        differences.append(float((ours.grad - scatter(theirs.grad, ours)).abs().max()))
    return differences


def main() -> None:
    world = join_world("cpu", timeout_s=300, tensor_ranks=2)
    report = {"training": training(Path(sys.argv[1]), world), "cross_entropy": sliced_cross_entropy(world)}
    report["own_attention"] = own_attention(world)
    report["attention_weights"] = attention_weights(world)
    if world.is_main:
        Path(sys.argv[2]).write_text(json.dumps(report))
    leave_world()


if __name__ == "__main__":
    main()
