"""Beam search in steps of constant sizes finds what beam search finds, with its steps recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed_nmt.build import build_model
from deepspeed_nmt.core.model import DecodableModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import CheckpointError
from deepspeed_nmt.nn.linear import UsesPackedWeights, pack_weights
from deepspeed_nmt.nn.static_cache import Bucket, Store
from deepspeed_nmt.search import SEARCHES, Hypothesis, beam, replay
from deepspeed_nmt.search.base import Request
from deepspeed_nmt.search.beam import BeamConfig, BeamSearch
from deepspeed_nmt.search.ensemble import Ensemble
from deepspeed_nmt.search.precision import join_weights, packed_weights
from deepspeed_nmt.search.replay import WARM_UP, Replays
from deepspeed_nmt.search.rules import StaticRules, TokenRules
from deepspeed_nmt.search.static_beam import Pacing, StaticBeamSearch
from deepspeed_nmt.search.static_step import positions_of_bucket, sentences_of_bucket
from deepspeed_nmt.selftest.models import VOCABULARY, methods, settings_of
from tests.models import BOS, padded, random_sources, sharp_transformer, sharpened

CPU = torch.device("cpu")
LEFT_TO_RIGHT = [method for method in methods() if settings_of(method).model.left_to_right]
RULES = {"min_length": 4, "no_repeat_ngram": 2, "suppress_unknown": True, "suppress_tokens": (7, 8)}
PREFIXES = [
    Request(line, prefix) for line, prefix in enumerate([(), (5, 7), (9,), (), (20, 21, 20, 22), (6,), (), ()])
]
TINY = Pacing(every=2, lag=1, least_positions=4)


class Recorder(TorchDispatchMode):
    """Records the operations of a step with their tensors, and replays them at the same addresses, as a GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.stores: list[Store] = []
        self.replayed = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        out = function(*arguments, **(options or {}))
        assert "_local_scalar_dense" not in str(function) and "nonzero" not in str(function), "the host would wait"
        self.calls.append((function, arguments, options or {}, out))
        return out

    def record(self, step: Callable[[], object]) -> Callable[[], None]:
        """Record a step, without an effect on the state."""
        flats = [flat for store in self.stores for flat in store._flat.values()]
        before = [flat.clone() for flat in flats]
        self.calls = []
        with self:
            step()
        for flat, content in zip(flats, before, strict=True):
            flat.copy_(content)
        return lambda calls=self.calls: self.replay(calls)  # type: ignore[misc]

    def replay(self, calls: Sequence[tuple[Any, Any, Any, Any]]) -> None:
        self.replayed += 1
        for function, arguments, options, recorded in calls:
            known = {
                each.untyped_storage().data_ptr() for each in tree_leaves((arguments, options)) if is_tensor(each)
            }
            out = function(*arguments, **options)
            for new, old in zip(tree_leaves(out), tree_leaves(recorded), strict=True):
                if is_tensor(old) and old.untyped_storage().data_ptr() not in known:
                    old.copy_(new)


def is_tensor(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


class Static:
    """A record of the searches that a test starts: their buckets, and the steps that they replay."""

    def __init__(self) -> None:
        self.pacing = TINY
        self.recorder = Recorder()
        self.searches: list[StaticBeamSearch] = []
        self.buckets: list[Bucket] = []

    def make(self, *arguments: Any, graphs: bool) -> StaticBeamSearch:
        assert graphs
        search = StaticBeamSearch(*arguments, pacing=self.pacing, record=self.recorder.record)
        self.recorder.stores.append(search._store)
        self.searches.append(search)
        run = search.replays.run

        def watched(key: Any) -> None:
            self.buckets.append(search.step.bucket)
            run(key)

        search.replays.run = watched  # type: ignore[method-assign]
        return search


@pytest.fixture
def static(monkeypatch: pytest.MonkeyPatch) -> Iterator[Static]:
    """Have searches with ``steps="graphs"`` record steps of tiny buckets."""
    made = Static()
    monkeypatch.setattr(beam, "static_search", made.make)
    monkeypatch.setattr(replay, "WARM_UP", 1)
    yield made


def sources(lengths: Sequence[int], vocab_size: int = 24, seed: int = 1) -> Tensor:
    return padded(random_sources(lengths, vocab_size, seed))


def pair_of(model: DecodableModel, **settings: Any) -> tuple[BeamSearch, BeamSearch]:
    """Return beam search, and beam search in steps of constant sizes."""
    config, vocabulary = BeamConfig.model_validate(settings), Vocabulary(model.vocab_size)
    return BeamSearch(config, model, vocabulary), BeamSearch(config, model, vocabulary, steps="graphs")


def assert_same(found: Sequence[Sequence[Hypothesis]], expected: Sequence[Sequence[Hypothesis]]) -> None:
    assert [[each.tokens for each in one] for one in found] == [[each.tokens for each in one] for one in expected]
    for name in ("score", "log_prob"):
        numbers = [[getattr(each, name) for one in lists for each in one] for lists in (found, expected)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-5, rel=1e-6)


@pytest.mark.parametrize("settings", [{"beam": 1}, {"beam": 4, "length_penalty": "mean", **RULES}], ids=["1", "4"])
@pytest.mark.parametrize("method", LEFT_TO_RIGHT)
def test_it_finds_what_beam_search_finds(method: str, settings: dict[str, Any], static: Static) -> None:
    torch.manual_seed(3)
    # The logits of random BERTs are small.
    model = sharpened(build_model(settings_of(method), VOCABULARY), end=0.0 if method == "berts" else 4.0)
    name = "deep_shallow" if settings_of(method).model.named_exits else "beam"
    config = SEARCHES[name].config.model_validate({**settings, "max_length_extra": 4})
    expected, found = (SEARCHES[name].build(config, model, VOCABULARY) for _ in range(2))
    for search in [found] if isinstance(found, BeamSearch) else found.searches:
        search._steps = "graphs"
    requests = PREFIXES if settings["beam"] > 1 else None
    for seed, lengths in enumerate([[4, 3, 3, 4, 2, 4, 4, 3], [10, 9, 3, 5, 2, 12, 5, 6]]):
        source_BS = sources(lengths, VOCABULARY.size, seed)
        with torch.no_grad():
            assert_same(found.search(source_BS, True, requests), expected.search(source_BS, True, requests))
    assert static.recorder.replayed > 5, "no step was replayed"
    assert len({bucket.sentences for bucket in static.buckets}) > 2, "no bucket became smaller"
    assert len({bucket.positions for bucket in static.buckets}) > 1, "no bucket became longer"


@pytest.mark.parametrize("pacing", [(1, 0), (1, 3), (3, 0), (4, 1), (5, 9), (50, 0)], ids=str)
def test_late_answers_change_nothing(pacing: tuple[int, int], static: Static) -> None:
    model, settings = sharpened(sharp_transformer(2), 0.25, end=2.0), {"beam": 3, "max_length_extra": 20}
    source_BS = sources([13, 2, 7, 7, 1, 5, 10, 3, 12, 4, 4])
    static.pacing = Pacing(1, 0, least_positions=4)
    expected, at_once = pair_of(model, **settings)
    assert_same(at_once.search(source_BS), expected.search(source_BS))
    sentences = [bucket.sentences for bucket in static.buckets]
    assert sentences == sorted(sentences, reverse=True) and len(set(sentences)) > 3
    static.buckets.clear()
    static.pacing = Pacing(*pacing, least_positions=4)
    _, found = pair_of(model, **settings)
    assert_same(found.search(source_BS), expected.search(source_BS))
    (every, lag), needed, limit = pacing, len(sentences), int(1.5 * 13) + 20
    assert needed < limit - 10
    assert min(needed + lag, limit) <= len(static.buckets) <= min(needed + max(every - 1, lag) + lag, limit)
    if every == 50:
        assert {bucket.sentences for bucket in static.buckets} == {12}, "nobody asked"


def test_a_search_goes_on_from_batch_to_batch(static: Static) -> None:
    expected, found = pair_of(sharp_transformer(1), beam=2)
    for seed, lengths in enumerate([[3, 2], [9, 8, 7, 6, 5], [20], [3, 2], [9, 8, 7, 6, 5], [2], [9, 8, 7, 6, 5]]):
        source_BS = sources(lengths, seed=seed)
        padded = len(set(lengths)) > 1
        assert_same(found.search(source_BS, padded), expected.search(source_BS, padded))
    assert len(static.searches) == 1
    (search,) = static.searches
    flats = search._store._flat.values()
    largest = sum(flat.numel() * flat.element_size() for flat in flats)
    assert len(set(static.buckets)) > 8 and len(search.replays) > 1
    moves = search._store.moves
    for lengths in ([9, 8, 7, 6, 5], [20], [2]):
        found.search(sources(lengths))
    assert search._store.moves == moves and sum(each.numel() * each.element_size() for each in flats) == largest


def test_a_batch_after_one_with_numbers_that_are_not_finite(static: Static) -> None:
    model = sharp_transformer(1)
    expected, found = pair_of(model, beam=2)
    source_BS = sources([9, 4, 6])
    known = {name: weight.clone() for name, weight in model.state_dict().items()}
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
    with pytest.raises(CheckpointError, match="NaN"):
        found.search(sources([12, 12, 12]))
    model.load_state_dict(known)
    assert_same(found.search(source_BS), expected.search(source_BS))


@pytest.mark.parametrize("weights", [None, [0.8, 0.2]])
def test_an_ensemble(weights: list[float] | None, static: Static) -> None:
    models = [sharp_transformer(1), sharp_transformer(2, decoder_layers=1)]
    expected, found = pair_of(Ensemble(models, weights).eval(), beam=3)
    source_BS = sources([9, 3, 6, 12, 4])
    assert_same(found.search(source_BS), expected.search(source_BS))
    assert static.recorder.replayed


@pytest.mark.parametrize("prepare", [pack_weights, join_weights])
@pytest.mark.parametrize(("norm", "activation"), [("pre", "relu"), ("deepnorm", "gelu")])
def test_an_exit_with_other_weights(
    norm: str, activation: str, prepare: Callable[[nn.Module], None], static: Static
) -> None:
    model = sharp_transformer(3, decoder_layers=3, norm=norm, activation=activation).at_exit("1-2")
    expected, found = pair_of(model, beam=3)
    source_BS = sources([9, 3, 6, 12, 4])
    plain = expected.search(source_BS)
    assert_same(found.search(source_BS), plain)
    assert static.recorder.replayed
    prepare(model)
    assert_same(found.search(source_BS), plain)
    assert_same(expected.search(source_BS), plain)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "self_attention" in name:
                weight.mul_(1.5)
    prepare(model)
    changed = expected.search(source_BS)
    assert [one[0].tokens for one in changed] != [one[0].tokens for one in plain]
    assert_same(found.search(source_BS), changed)


def test_validation_on_a_gpu_joins_weights_of_decoder_layers_for_a_while() -> None:
    model = sharp_transformer(1)
    using = {name for name, each in model.named_modules() if isinstance(each, UsesPackedWeights)}
    with packed_weights(model, torch.device("cuda")):
        joined = {name for name in using if model.get_submodule(name).packed is not None}
    assert joined == {"decoder.layers.0", "decoder.layers.1"}
    assert all(model.get_submodule(name).packed is None for name in using)


def test_in_16_bit_scores_are_nearly_the_same(static: Static) -> None:
    model = sharp_transformer(1)
    expected, found = pair_of(model, beam=2)
    source_BS = sources([9, 3, 6, 12, 4])
    best = [one[0].score for one in expected.search(source_BS)]
    join_weights(model.to(torch.bfloat16))
    assert [one[0].score for one in found.search(source_BS)] == pytest.approx(best, rel=0.1, abs=0.3)
    assert static.recorder.replayed


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_at_its_limit_a_hypothesis_ends(limit: int, static: Static) -> None:
    expected, found = pair_of(sharp_transformer(1), beam=4, max_length_ratio=0.0, max_length_extra=limit)
    source_BS = sources([5, 9])
    assert_same(found.search(source_BS), expected.search(source_BS))
    assert len(static.buckets) <= limit


def test_a_sentence_at_its_limit_lifts_no_rule_of_another(static: Static) -> None:
    expected, found = pair_of(sharp_transformer(2), beam=3, max_length_ratio=0.0, max_length_extra=2)
    requests = [Request(0), Request(1, (9, 10, 9, 10, 11, 12, 9)), Request(2, (5, 6, 7))]
    source_BS = sources([4, 4, 4])
    assert_same(found.search(source_BS, False, requests), expected.search(source_BS, False, requests))
    for request, hypotheses in zip(requests, found.search(source_BS, False, requests), strict=True):
        assert all(tuple(each.tokens[: len(request.prefix)]) == request.prefix for each in hypotheses)


def test_models_without_static_caches_are_searched_as_before(static: Static) -> None:
    whole = sharp_transformer(1)

    class Other(Ensemble):
        def begin_static(self, ancestry: object) -> None:
            return None

    expected, found = pair_of(Ensemble([whole, Other([sharp_transformer(2)])]).eval(), beam=2)
    assert_same(found.search(sources([4, 6])), expected.search(sources([4, 6])))
    assert not static.searches
    (without, _), cpu = pair_of(whole, beam=2), sources([4])
    without.search(cpu)
    assert not static.searches, "a CPU has the growing cache"


@pytest.mark.parametrize("ngram", [0, 1, 3])
def test_rules_at_a_position_are_those_of_the_tokens_before(ngram: int) -> None:
    settings = {"min_length": 3, "no_repeat_ngram": ngram, "suppress_tokens": (7, 8)}
    config, vocabulary = BeamConfig.model_validate(settings), Vocabulary(12)
    requests = [Request(0, (4, 5, 6, 4)), Request(1, ()), Request(2, (9,))]
    rules, static = TokenRules.of(config, vocabulary, requests, CPU), StaticRules(config, vocabulary, CPU)
    prefix_BL = torch.tensor([[4, 5, 6, 4], [-1] * 4, [9, -1, -1, -1]])
    generator = torch.Generator().manual_seed(ngram)
    changed = 0
    for length in [0, 1, 2, 3, 4, 7, 8] * 20:
        logits_RV = torch.randn(6, 12, generator=generator)
        history_RL = torch.randint(0, 6, (6, 8), generator=generator)
        found, expected = logits_RV.clone(), logits_RV.clone()
        tokens_RT = torch.cat([torch.full((6, 1), BOS), history_RL[:, :length]], dim=1)
        assert rules is not None
        rules.apply(expected, tokens_RT, range(3))
        static.apply_at(found, torch.tensor([length]), history_RL if ngram else None, prefix_BL)
        assert torch.equal(found, expected)
        changed += not torch.equal(found, logits_RV)
    assert changed == 140


def test_buckets() -> None:
    assert [sentences_of_bucket(count) for count in (1, 2, 3, 4, 5, 7, 9, 33, 200)] == [1, 2, 3, 4, 6, 8, 12, 48, 256]
    for count in range(8, 300):
        assert sentences_of_bucket(count * 2 // 3) < sentences_of_bucket(count)
    assert [positions_of_bucket(count) for count in (1, 32, 33, 200)] == [32, 32, 64, 256]


def test_steps_are_recorded_once_for_each_key_and_dropped_when_tensors_move() -> None:
    log: list[str] = []

    def record(step: Callable[[], object]) -> Callable[[], None]:
        number = sum(entry == "recorded" for entry in log)
        log.append("recorded")
        return lambda: log.append(f"replay {number}")

    replays = Replays(lambda: log.append("step"), record, most=2)
    for _ in range(WARM_UP + 2):
        replays.run("a")
    assert log == ["step"] * WARM_UP + ["recorded", "replay 0", "replay 0"]
    replays.at(1)
    for _ in range(WARM_UP + 1):
        replays.run("a")
    assert log[-WARM_UP - 2 :] == ["step"] * WARM_UP + ["recorded", "replay 1"]
    replays.at(1)
    replays.run("a")
    assert log[-1] == "replay 1"
    for key in "bc":
        for _ in range(WARM_UP + 1):
            replays.run(key)
    assert len(replays) == 2
    replays.run("a")
    assert log[-2:] == ["recorded", "replay 4"], "the one that was not used for longest is dropped"


def test_steps_that_cannot_be_recorded_run_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []

    def refuse(step: Callable[[], object]) -> Callable[[], None]:
        raise RuntimeError("CUDA error: operation not permitted\nwhen stream is capturing")

    replays = Replays(lambda: ran.append("step"), refuse)
    for _ in range(WARM_UP + 4):
        replays.run("a")
    assert len(ran) == WARM_UP + 4
    assert [each.getMessage() for each in caplog.records] == [
        "CUDA graphs cannot be captured, so decoding is slower: CUDA error: operation not permitted"
    ]


def test_a_store_gives_equal_sizes_equal_addresses() -> None:
    store, owner = Store(CPU), object()
    first = store.empty(owner, "x", (3, 4), torch.float32)
    assert store.view(owner, "x", (2, 2), torch.float32).data_ptr() == first.data_ptr()
    assert store.moves == 0
    first.copy_(torch.arange(12.0).view(3, 4))
    kept = store.moved(owner, "x", first, (2, 6), 0, torch.tensor([2, 1]))
    assert kept.tolist() == [[8.0, 9.0, 10.0, 11.0, 0.0, 0.0], [4.0, 5.0, 6.0, 7.0, 0.0, 0.0]]
    assert store.moves == 0 and kept.data_ptr() == first.data_ptr()
    longer = store.moved(owner, "x", kept, (2, 8), 0, None)
    assert longer[:, :6].tolist() == kept.tolist() or store.moves == 1
    assert longer.sum() == 60.0 and store.moves == 1
    assert replace(TINY, lag=2).lag == 2
