"""Measurements and warnings of the collapse monitor."""

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import Objective
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.loader import ValidationSet
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.nn.linear import Product
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.train.collapse import NLL, PREFIX_RELIANCE, RELIANCE, CollapseConfig, CollapseMonitor
from deepspeed_nmt.train.progress import Progress
from deepspeed_nmt.train.validation import Replica
from tests.support import random_corpus


class _Fixed(Replica):
    """Replica that returns a fixed model, without an engine."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.eval()

    @contextmanager
    def at(self, update: int) -> Iterator[torch.nn.Module]:
        yield self.model


def monitor(tmp_path: Path, pairs: int = 40, **settings: object) -> CollapseMonitor:
    corpus = random_corpus(tmp_path, pairs, vocab=50, seed=1, split="valid")
    torch.manual_seed(1)
    config = TransformerConfig(dim=16, ffn_dim=16, heads=2, encoder_layers=1, decoder_layers=2, dropout=0.3)
    vocabulary = Vocabulary(50)
    model = build_transformer(config, vocabulary)
    with torch.no_grad():  # predictions do not depend on the source
        for layer in model.decoder.layers:
            layer.cross_attention.out_proj.weight.zero_()
    return CollapseMonitor(
        CollapseConfig.model_validate({"sentences": 25, **settings}),
        100,
        ValidationSet(corpus, vocabulary, BatchConfig(micro_tokens=200), 0, 1),
        _Fixed(model),
        Objective(LabelSmoothed(0.1, 0)),
        World(rank=0, ranks=1, local_rank=0, device=torch.device("cpu")),
    )


def test_a_decoder_without_cross_attention_has_no_reliance(tmp_path: Path) -> None:
    values = monitor(tmp_path)(500)
    assert abs(values[RELIANCE]) < 1e-6
    assert values["collapse/cross_share/layer_01"] == 0.0 and values[NLL] > 3.0


@pytest.mark.parametrize(("pairs", "every"), [(1, 100), (1, 0), (2, 100)])
def test_that_nothing_is_measured_of_one_sentence_is_warned_of(
    pairs: int, every: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise ``collapse.action=stop`` and layers that adapt would be left without effect in silence."""
    caplog.set_level(logging.WARNING, logger="deepspeed_nmt")
    subject = monitor(tmp_path, pairs, every=every)
    assert subject.due(100) == (pairs > 1 and every > 0)
    assert ["so collapse is not measured" in message for message in caplog.messages] == [True] * (pairs < 2 <= every)


def test_prefixes_are_those_of_other_sentences(tmp_path: Path) -> None:
    subject = monitor(tmp_path)
    corpus, following = subject._validation.corpus, subject._other
    for batch in subject._validation.batches(subject._sentences):
        changed = subject._with_other_prefixes(batch)
        assert torch.equal(changed.target_output_BT, batch.target_output_BT)
        for row, sentence in enumerate(batch.sentence_ids_B.tolist()):
            words, length = corpus.target(sentence).tolist(), len(corpus.target(sentence))
            other = following[sentence]
            expected = [*corpus.target(other).tolist(), *corpus.target(following[other]).tolist()][:length]
            ours = changed.target_input_BT[row].tolist()
            assert ours[: len(expected) + 1] == [1, *expected] and ours[1 : length + 1] != words
            assert not any(ours[length + 1 :])


def test_reliance_and_shares_are_their_formulas(tmp_path: Path) -> None:
    subject = monitor(tmp_path)
    model, validation = subject._replica.model, subject._validation  # type: ignore[attr-defined]
    layers = list(model.decoder.layers)
    with torch.no_grad():
        for number, layer in enumerate(layers, 1):
            layer.cross_attention.out_proj.weight.normal_(0.0, 0.5 * number)
    outputs: dict[str, list[Product]] = {}
    sums, tokens, norms = Counter[str](), 0, Counter[str]()
    hooks = [
        getattr(layers[1], name).register_forward_hook(
            lambda _, __, output, name=name: outputs.setdefault(name, []).append(output)
        )
        for name in ("self_attention", "cross_attention", "feed_forward")
    ]

    def nll(batch: Batch) -> float:
        with torch.no_grad():
            log_p = model.projection(model.decode(batch.target_input_BT, model.encode(batch.source_BS))[0])
        picked = log_p.log_softmax(2).gather(2, batch.target_output_BT.unsqueeze(2)).squeeze(2)
        return -float((picked * batch.target_mask).sum())

    for batch, other in zip(
        validation.batches(subject._sentences), validation.batches(subject._sentences, subject._other), strict=True
    ):
        outputs.clear()
        sums["true"] += nll(batch)
        for name, (output,) in outputs.items():
            norms[name] += float((output.total().norm(dim=2) * batch.target_mask).sum())
        sums["prefixes"] += nll(subject._with_other_prefixes(batch))
        sums["sources"] += nll(other)
        tokens += batch.target_tokens
    for hook in hooks:
        hook.remove()
    values = subject(500)
    for tag, kind in ((RELIANCE, "sources"), (PREFIX_RELIANCE, "prefixes")):
        expected = (sums[kind] - sums["true"]) / tokens
        assert abs(expected) > 1e-2 and values[tag] == pytest.approx(expected, abs=1e-5), kind
    share = norms["cross_attention"] / sum(norms.values())
    assert values["collapse/cross_share/layer_02"] == pytest.approx(share, rel=1e-5) and 0.2 < share < 0.9


def test_a_decoder_that_ignores_its_prefix_has_no_prefix_reliance(tmp_path: Path) -> None:
    subject = monitor(tmp_path)
    assert abs(subject(500)[PREFIX_RELIANCE]) > 1e-3
    model = subject._replica.model  # type: ignore[attr-defined]
    with torch.no_grad():
        for layer in model.decoder.layers:
            layer.self_attention.out_proj.weight.zero_()
        model.target_embedding.weight = torch.nn.Parameter(torch.zeros_like(model.target_embedding.weight))
    assert abs(subject(600)[PREFIX_RELIANCE]) < 1e-6


def test_it_warns_after_grace_and_patience_and_again_if_the_collapse_persists(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check = monitor(tmp_path).check
    caplog.set_level(logging.WARNING, logger="deepspeed_nmt")
    low, good, lost = {RELIANCE: 0.01, NLL: 2.0}, {RELIANCE: 0.9, NLL: 2.0}, {RELIANCE: 0.9, NLL: 4.0}
    bad = 0
    for update, values in ((100, low), (200, low), (300, good), (400, low)):
        bad, fatal = check(update, values, bad, 2.0)
        assert not fatal
    assert not caplog.messages, "no warning in the grace period, nor without two bad measurements in a row"
    assert check(500, low, bad, 2.0) == (2, "")
    assert "update 500: the decoder ignores its source" in caplog.messages[0]
    assert "rises by only 0.010 nats a token (collapse.threshold is 0.2): it is turning" in caplog.messages[0]
    assert check(600, low, 2, 2.0) == (3, "")
    assert check(700, lost, 3, 2.0) == (4, "")
    assert "the decoder predicts worse than guessing. Its validation loss is 4.00 nats" in caplog.messages[1]
    assert "(guessing: 3.91)" in caplog.messages[1] and "layer.drop_ratio=1" not in caplog.messages[1]
    assert check(800, {**lost, PREFIX_RELIANCE: 0.9}, 5, 2.0) == (6, "")
    assert "prefixes" not in caplog.messages[2]
    assert check(900, {**lost, PREFIX_RELIANCE: 0.1}, 7, 2.0) == (8, "")
    assert "exchanged prefixes change nothing." in caplog.messages[3]
    assert "Remedies: model.init=depth_scaled with" in caplog.messages[3]
    adrift = {**good, PREFIX_RELIANCE: 0.1}
    assert check(1000, adrift, 0, 2.0) == (1, "") and check(1100, adrift, 1, 2.0) == (2, "")
    assert "update 1100: the decoder does not read what it has written. With the prefixes" in caplog.messages[4]
    assert "rises by only 0.100 nats a token" in caplog.messages[4] and "(layer.drop_ratio=1)" in caplog.messages[4]


def test_a_decoder_that_alternates_between_faults_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check, bad = monitor(tmp_path, patience=3).check, Progress().bad_measurements
    for update, values in (
        (500, {RELIANCE: 0.01, PREFIX_RELIANCE: 0.9, NLL: 2.0}),
        (600, {RELIANCE: 0.9, PREFIX_RELIANCE: 0.02, NLL: 2.0}),
        (700, {RELIANCE: 0.03, PREFIX_RELIANCE: 0.9, NLL: 2.0}),
    ):
        assert not caplog.messages
        bad, _ = check(update, values, bad, 2.0)
    (message,) = caplog.messages
    assert "update 700: the decoder ignores its source" in message and "only 0.030 nats a token" in message
    assert "Bad measurements in a row, in this or another way: 3." in message


def test_a_resumed_run_stops_at_the_next_bad_measurement(tmp_path: Path) -> None:
    check = monitor(tmp_path, action="stop", patience=3).check
    low, good = {RELIANCE: 0.0, NLL: 1.0}, {RELIANCE: 0.9, NLL: 1.0}
    assert [bool(check(500, low, bad, 1.0)[1]) for bad in range(5)] == [False, False, True, True, True]
    assert check(500, good, 4, 1.0) == (0, "")


# Measured every 20 updates, on the sample corpus and on the same with shuffled training sources, warm-up 60.
_LEARNING = ((3.934, 0.021), (3.605, 0.082), (3.383, 0.095), (3.155, 0.181), (3.013, 0.330), (2.887, 0.398))
_COLLAPSED = ((3.935, 0.0), (3.594, 0.0), (3.405, 0.0), (3.263, 0.0), (3.186, 0.0), (3.107, 0.0))


def test_there_is_no_alarm_while_the_loss_falls_as_at_the_start(tmp_path: Path) -> None:
    def alarms(measured: tuple[tuple[float, float], ...], **settings: object) -> list[int]:
        """Return the updates at which a monitor with a grace of 20 updates stops, of a vocabulary of 700."""
        subject = monitor(tmp_path, action="stop", every=20, **settings)
        subject._grace, subject._validation.vocabulary = 20, Vocabulary(700)
        stops, bad, before = [], 0, 4.448
        for update, (nll, reliance) in zip(range(100, 220, 20), measured, strict=True):
            bad, fatal = subject.check(update, {RELIANCE: reliance, NLL: nll}, bad, before)
            before = nll
            stops += [update] * bool(fatal)
        return stops

    assert alarms(_LEARNING) == [] and alarms(_COLLAPSED) == [160, 180, 200]
    assert alarms(_LEARNING, grace=20) == [120, 140, 160], "as it is set"


def test_sources_are_shuffled_among_sentences(tmp_path: Path) -> None:
    other = monitor(tmp_path)._other
    assert len(other) == 25 and sorted(other) == sorted(other.values())
    assert all(sentence != source for sentence, source in other.items())
