"""Layers compiled by torch.compile: one graph for each, whatever the batch, and the results of uncompiled ones.

Layers are traced, but no code is generated for them.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch._dynamo
from torch import Tensor
from torch._dynamo.utils import counters

from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels.segments import Segments
from deepspeed_nmt.methods.cross_attention_drop import CrossAttentionDropConfig, build_cross_attention_drop
from deepspeed_nmt.methods.transformer import Transformer, TransformerConfig, build_transformer
from deepspeed_nmt.nn import compiled
from deepspeed_nmt.nn.compiled import check_compiler
from deepspeed_nmt.nn.layers import AttentionRecord, DecoderLayer, Draw, LayerParts
from tests.varlen import use_varlen_on_a_cpu

pytestmark = pytest.mark.long

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
V = Vocabulary(30)
CONFIG = TransformerConfig(dim=16, ffn_dim=32, heads=2, encoder_layers=2, decoder_layers=2, dropout=0.0)
SHORT, LONG, TARGET = 40, 48, 44
"""Sizes of rows."""
FIRST = [([9, 8], SHORT), ([8, 8, 8, 8, 4], LONG)]
"""Lengths of sentences, and size of the source's row, of two micro-batches that differ in every size."""
LATER = [([5] * 6, LONG), ([9], SHORT), ([7, 8, 9, 2], LONG), ([6] * 5, SHORT), ([1] * 20, LONG)]


@pytest.fixture(autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the backend of the compiler: "eager" traces functions, "aot_eager" their derivatives, too."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=getattr(request, "param", "eager")))
    torch._dynamo.reset()
    if getattr(request, "param", "eager") == "inductor":
        check_compiler(torch.device("cpu"))
    counters.clear()
    yield
    torch._dynamo.reset()


def models(config: TransformerConfig = CONFIG, rate: float = 0.0) -> tuple[Transformer, Transformer]:
    """Return a model in training, and a copy of it with compiled layers."""
    layer = CrossAttentionDropConfig(drop_ratio=rate, drop_depth=2)

    def make(number: int, parts: LayerParts) -> DecoderLayer:
        return build_cross_attention_drop(layer, number, parts)

    torch.manual_seed(1)
    model = build_transformer(config, V, make).train()
    faster = copy.deepcopy(model)
    faster.compile_layers()
    return model, faster


def states(model: Transformer, lengths: list[int], size: int, update: int = 1, passes: int = 1) -> Tensor:
    """Compute decoder states of packed sentences of random tokens; zeros in the tail. Shape: -> (P,T,D)."""
    generator = torch.Generator().manual_seed(len(lengths))
    source, target = (torch.randint(4, V.size, (1, n), generator=generator) for n in (size, TARGET))
    sources, targets = Segments.of(lengths, size), Segments.of(lengths, TARGET)
    memory = model.encode(source.repeat(passes, 1), segments=sources)
    draw = Draw(1, update, tuple(range(passes)))
    found: Tensor = model.decode(target.repeat(passes, 1), memory, draw, segments=targets)[0]
    return found[:, : sum(lengths)]


def gradients(model: Transformer, out: Tensor) -> list[Tensor]:
    """Return the gradients of a function of the states."""
    found = torch.autograd.grad(out.sin().sum(), list(model.parameters()), allow_unused=True)
    return [torch.zeros(()) if each is None else each for each in found]


def compare(model: Transformer, faster: Transformer, *arguments: object, **options: object) -> None:
    """Compare states and gradients of a model and a compiled one."""
    ours, theirs = (states(each, *arguments, **options) for each in (faster, model))  # type: ignore[arg-type]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    for one, other in zip(gradients(faster, ours), gradients(model, theirs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def graphs() -> int:
    """Return the number of graphs so far."""
    return int(counters["stats"]["unique_graphs"])


def test_a_layer_is_one_graph_for_any_number_of_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    use_varlen_on_a_cpu(monkeypatch)
    model, faster = models()
    for update, (lengths, size) in enumerate(FIRST):
        compare(model, faster, lengths, size, update)
    before = graphs()
    assert before == 4, "two classes of layers, for one size and for any"
    for update, (lengths, size) in enumerate(LATER, 10):
        compare(model, faster, lengths, size, update)
    assert graphs() == before
    assert not counters["graph_break"], dict(counters["graph_break"])


def test_choices_of_an_update_do_not_compile_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for each set of passes that may skip cross-attention: none, the first, the second, both."""
    use_varlen_on_a_cpu(monkeypatch)
    model, faster = models(rate=0.5)
    compare(model, faster, *FIRST[1], passes=2)
    for update in range(10):
        for lengths, size in FIRST:
            states(faster, lengths, size, update, passes=2)
    before = graphs()
    for update in range(10, 30):
        states(faster, *FIRST[0], update, passes=2)
    assert graphs() == before
    assert not counters["graph_break"], dict(counters["graph_break"])


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_attention_by_rows_runs_beside_compiled_code() -> None:
    """Without a kernel for packed sentences, attention is not compiled."""
    model, faster = models()
    faster.recompute(1, 2)
    compare(model, faster, *FIRST[0])
    before = graphs()
    compare(model, faster, [9], SHORT)
    assert graphs() == before


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_recomputation_repeats_the_masks_of_dropout(monkeypatch: pytest.MonkeyPatch) -> None:
    use_varlen_on_a_cpu(monkeypatch)
    _, faster = models(CONFIG.model_copy(update={"dropout": 0.2}))
    found = []
    for every in (0, 1):
        faster.recompute(every, every)
        torch.manual_seed(4)
        found.append(gradients(faster, states(faster, *FIRST[0])))
    assert max(float(each.abs().max()) for each in found[0]) > 0.0
    assert not torch.equal(states(faster, *FIRST[0]), states(faster, *FIRST[0])), "dropout is on"
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_attention_weights_are_handed_over_by_compiled_and_recomputed_layers() -> None:
    model, faster = models()
    faster.recompute(1, 1)
    (lengths, size), results = FIRST[0], []
    segments, source = Segments.of(lengths, size), torch.full((1, size), 5)
    for each in (model, faster):
        record = AttentionRecord(each.attention_layers().values())
        memory = replace(each.encode(source, segments=segments), record=record)
        each.decode(torch.full((1, size), 6), memory, Draw(1, 1), segments=segments)
        weights = list(record.weights.values())
        assert [of.shape for of in weights] == [(2, 9, 9)] * 2
        gradient = torch.autograd.grad(sum(of[:, 1].square().sum() for of in weights), each.encoder.parameters())
        results.append([*weights, *gradient])
    assert graphs() > 0
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_only_training_is_compiled() -> None:
    model, faster = models()
    for name in ("2-2", "1-1"):
        ours, theirs = (states(each.eval().at_exit(name), *FIRST[0]) for each in (faster, model))
        assert torch.equal(ours, theirs)
    assert graphs() == 0
    assert list(faster.state_dict()) == list(model.state_dict())


def test_a_copy_is_compiled_and_has_its_own_weights() -> None:
    model, faster = models()
    copied = copy.deepcopy(faster)
    with torch.no_grad():
        for weight in faster.parameters():
            weight.zero_()
    compare(model, copied, *FIRST[0])
    assert graphs() > 0
    assert all(layer.forward.__self__ is layer for layer in copied.all_layers())  # type: ignore[attr-defined]


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("No working C++ compiler found\nand details")

    monkeypatch.setattr(compiled.torch, "compile", lambda function: fail)
    with pytest.raises(ConfigError, match=r"on cpu \(.*: No working C\+\+ compiler found\); install .*compile=off"):
        check_compiler(torch.device("cpu"))
