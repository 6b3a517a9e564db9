"""Recomputation changes memory and time, but not the results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.methods.ald import ALD, ALDConfig
from deepspeed_nmt.methods.consistency import Consistency, ConsistencyConfig
from deepspeed_nmt.methods.cross_attention_drop import CrossAttentionDropConfig, build_cross_attention_drop
from deepspeed_nmt.methods.depth_growing import DepthGrowingConfig, build_depth_growing
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.multi_softmax import MultiSoftmax, MultiSoftmaxConfig
from deepspeed_nmt.methods.recurrent import RecurrentConfig, build_recurrent
from deepspeed_nmt.methods.transformer import TransformerConfig, TransformerShape, build_transformer
from deepspeed_nmt.methods.transparent_attention import TransparentAttentionConfig, build_transparent_attention
from deepspeed_nmt.nn.layers import EncoderLayer
from tests.support import batch_of

V = Vocabulary(40)
SHAPE = TransformerConfig(
    dim=16, ffn_dim=24, heads=2, encoder_layers=3, decoder_layers=3, dropout=0.2, attention_dropout=0.1
)


def shaped(kind: type[TransformerShape], **changes: object) -> TransformerShape:
    return kind(**{**SHAPE.model_dump(exclude={"name"}), **changes})


def vanilla() -> tuple[TranslationModel, Objective]:
    return build_transformer(SHAPE, V), Objective(LabelSmoothed(0.1, V.pad))


def deep_decoder() -> tuple[TranslationModel, Objective]:
    drop = CrossAttentionDropConfig(drop_depth=3, drop_ratio=0.6)
    model = build_transformer(SHAPE, V, lambda number, parts: build_cross_attention_drop(drop, number, parts))
    regularizers = [Consistency(ConsistencyConfig(), encode_twice=False), ALD(ALDConfig(), V)]
    return model, Objective(LabelSmoothed(0.1, V.pad), regularizers)


def exits() -> tuple[TranslationModel, Objective]:
    config = shaped(RecurrentConfig, encoder_loops=2, decoder_loops=2, sharing="closed_chain")
    assert isinstance(config, RecurrentConfig)
    return build_recurrent(config, V), Objective(MultiSoftmax(MultiSoftmaxConfig(exits="all"), V.pad))


def growing() -> tuple[TranslationModel, Objective]:
    config = shaped(DepthGrowingConfig, top_encoder_layers=2, top_decoder_layers=2)
    assert isinstance(config, DepthGrowingConfig)
    return build_depth_growing(config, V), Objective(LabelSmoothed(0.1, V.pad))


def growing_through_the_bottom() -> tuple[TranslationModel, Objective]:
    config = shaped(DepthGrowingConfig, top_encoder_layers=2, top_decoder_layers=2, attend="h1_plus_input")
    assert isinstance(config, DepthGrowingConfig)
    return build_depth_growing(config, V), Objective(LabelSmoothed(0.1, V.pad))


def transparent() -> tuple[TranslationModel, Objective]:
    config = shaped(TransparentAttentionConfig)
    assert isinstance(config, TransparentAttentionConfig)
    return build_transparent_attention(config, V), Objective(LabelSmoothed(0.1, V.pad))


def batch(update: int) -> Batch:
    source = torch.tensor([[7, 8, 9, 10, 11, 2], [12, 13, 14, 2, 0, 0]])
    output = torch.tensor([[17, 18, 19, 2], [22, 2, 0, 0]])
    inputs = torch.tensor([[1, 17, 18, 19], [1, 22, 0, 0]])
    return batch_of(source, inputs, output, ids=[30, 4], seed=5, update=update)


def gradients(
    build: Callable[[], tuple[TranslationModel, Objective]], every: tuple[int, int], update: int
) -> tuple[Tensor, dict[str, Tensor | None]]:
    torch.manual_seed(1)
    model, objective = build()
    model.recompute(*every)
    model.train()
    torch.manual_seed(2)
    loss = objective(model, batch(update)).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("build", [vanilla, deep_decoder, exits, growing, growing_through_the_bottom, transparent])
@pytest.mark.parametrize("every", [(1, 1), (2, 0), (0, 2)])
@pytest.mark.parametrize("update", [1, 2, 3])
def test_loss_and_gradients_are_the_same_bits(
    build: Callable[[], tuple[TranslationModel, Objective]], every: tuple[int, int], update: int
) -> None:
    loss, plain = gradients(build, (0, 0), update)
    again, recomputed = gradients(build, every, update)
    assert torch.equal(loss, again)
    for name, gradient in plain.items():
        if gradient is None:
            assert recomputed[name] is None
        else:
            assert recomputed[name] is not None and torch.equal(gradient, recomputed[name]), name


def test_every_kth_layer_runs_twice() -> None:
    def runs(every: int) -> int:
        torch.manual_seed(1)
        model, objective = vanilla()
        model.recompute(every, 0)
        counts = []
        for module in model.modules():
            if isinstance(module, EncoderLayer):
                module.register_forward_pre_hook(lambda *_: counts.append(1))
        objective(model.train(), batch(1)).loss.backward()
        return len(counts)

    assert [runs(0), runs(1), runs(2), runs(3), runs(4)] == [3, 6, 4, 4, 3]


def test_nothing_is_recomputed_without_a_backward_pass() -> None:
    model, objective = vanilla()
    model.recompute(1, 1)
    kept: list[Tensor] = []
    with torch.no_grad(), torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        objective(model.eval(), batch(1))
    assert not kept


def test_recomputation_saves_fewer_tensors() -> None:
    def kept(every: int) -> int:
        torch.manual_seed(1)
        model, objective = vanilla()
        model.recompute(every, every)
        seen: dict[int, int] = {}

        def pack(x: Tensor) -> Tensor:
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            objective(model.train(), batch(1))
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        return sum(size for pointer, size in seen.items() if pointer not in parameters)

    assert kept(1) < 0.5 * kept(2) < 0.5 * kept(0)
