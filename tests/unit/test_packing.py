"""Micro-batches of the packed layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from deepspeed_nmt.config import validate
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig, Lengths, epoch_updates
from deepspeed_nmt.data.corpus import Corpus, CorpusWriter
from deepspeed_nmt.data.loader import Cursor, TrainLoader, collate_packed
from deepspeed_nmt.data.packing import PackedPart, pack_update, row_sizes
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.planning.layouts import yields
from deepspeed_nmt.run.resolve import resolve_layout
from tests.support import random_corpus

PAD, BOS, EOS = 0, 1, 2
VOCABULARY = Vocabulary(50)


def news(count: int, seed: int = 1) -> tuple[Lengths, Lengths]:
    """Draw lengths like those of news text: the target is 1.05 times as long, with a spread of 18%."""
    rng = np.random.default_rng(seed)
    source = np.clip(rng.gamma(3.0, 8.0, count), 2, 100)
    target = np.clip(source * 1.05 * np.exp(rng.normal(0.0, 0.18, count)), 2, 100)
    return source.astype(np.int32), target.astype(np.int32)


@pytest.mark.parametrize(("update", "micro", "ranks"), [(32768, 8192, 1), (32768, 4096, 8), (65536, 16384, 1)])
def test_rows_have_two_shapes_and_are_nearly_full(update: int, micro: int, ranks: int) -> None:
    source, target = news(60000)
    config = BatchConfig(update_tokens=update, micro_tokens=micro, layout="packed")
    plan = epoch_updates(source, target, 1, 0, update)
    sizes = row_sizes(plan, source, target, ranks, config)
    shapes, real, room = set(), 0, 0
    for number in range(len(plan) - 1):  # the last one is what is left
        cut = pack_update(plan[number], source, target, ranks, config, sizes)
        assert len({len(parts) for parts in cut}) == 1, "every rank makes equally many micro-batches"
        parts = [part for rank in cut for part in rank]
        assert sorted(np.concatenate([part.sentences for part in parts])) == sorted(plan[number])
        for part in parts:
            used = int(source[part.sentences].sum()), int(target[part.sentences].sum())
            assert used[0] < part.source <= micro and used[1] < part.target <= micro, "the tail has a position"
            shapes.add((part.source, part.target))
            real, room = real + sum(used), room + part.source + part.target
    assert len(shapes) <= 2
    assert real / room > 0.97


def test_small_updates_and_more_ranks_than_sentences() -> None:
    source, target = news(40)
    config = BatchConfig(update_tokens=100, micro_tokens=200, layout="packed")
    plan = epoch_updates(source, target, 1, 0, 100)
    sizes = row_sizes(plan, source, target, 16, config)
    for number in range(len(plan)):
        cut = pack_update(plan[number], source, target, 16, config, sizes)
        found = [part.sentences for parts in cut for part in parts]
        assert sorted(np.concatenate(found)) == sorted(plan[number]) and any(len(each) == 0 for each in found)


def test_a_sentence_that_fills_a_micro_batch_is_refused() -> None:
    source, target = news(100)
    target[41] = 256
    config = BatchConfig(update_tokens=1024, micro_tokens=256, layout="packed")
    sizes = row_sizes(epoch_updates(source, target, 1, 0, 1024), source, target, 1, config)
    with pytest.raises(ConfigError, match="above the longest sentence in the packed layout, which has 256 tokens"):
        pack_update(np.arange(100), source, target, 1, config, sizes)


def test_a_packed_batch(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path, "train", 50) as writer:
        writer.append([[7, 8, 9], [10]], [[11], [12, 13]])
    corpus = Corpus(tmp_path, "train")
    batch = collate_packed(corpus, PackedPart(np.array([0, 1]), 8, 7), VOCABULARY)
    assert batch.source_BS.tolist() == [[7, 8, 9, EOS, 10, EOS, PAD, PAD]]
    assert batch.target_input_BT.tolist() == [[BOS, 11, BOS, 12, 13, PAD, PAD]]
    assert batch.target_output_BT.tolist() == [[11, EOS, 12, 13, EOS, PAD, PAD]]
    assert (batch.source_tokens, batch.target_tokens, batch.padded_tokens) == (6, 5, 8)
    assert batch.source_rows().tolist() == [[7, 8, 9, EOS], [10, EOS, PAD, PAD]]
    assert batch.laid_out_source(batch.source_rows())[0, :6].tolist() == batch.source_BS[0, :6].tolist()
    assert batch.target_mask.tolist() == [[True, True, False], [True, True, True]]
    assert batch.sentence_ids_B.tolist() == [0, 1]
    empty = collate_packed(corpus, PackedPart(np.array([], dtype=np.int64), 8, 7), VOCABULARY)
    assert empty.source_tokens == empty.target_tokens == 0 and empty.sentence_ids_B.tolist() == [-1]
    assert not empty.target_mask.any() and empty.source_rows().tolist() == [[EOS]]


def test_updates_of_both_layouts_have_the_same_sentences(tmp_path: Path) -> None:
    corpus = random_corpus(tmp_path, pairs=200, vocab=50, seed=2)
    found = []
    for layout in ("padded", "packed"):
        config = BatchConfig(update_tokens=600, micro_tokens=200, layout=layout)  # type: ignore[arg-type]
        loader = TrainLoader(corpus, config, 3, 0, 1, VOCABULARY)
        updates = zip(range(12), loader.updates(Cursor(), 1), strict=False)
        found.append(
            [
                (sorted(int(i) for batch in update.micro_batches for i in batch.sentence_ids_B), update.target_tokens)
                for _, update in updates
            ]
        )
        largest = loader.largest()
        assert largest.update.number == 0 and largest.padded_tokens <= 200
    assert found[0] == found[1]


def test_the_layout_is_decided_by_device_precision_and_model() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
        plain = validate({})
        assert resolve_layout(plain, "bf16", gpu).layout == "packed"
        assert resolve_layout(plain, "fp32", gpu).layout == "padded"
        assert resolve_layout(plain, "bf16", cpu).layout == "padded"
        assert resolve_layout(validate({"model": {"attention_dropout": 0.1}}), "bf16", gpu).layout == "padded"
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
        assert resolve_layout(plain, "fp16", gpu).layout == "padded"
    assert resolve_layout(validate({"batch": {"layout": "packed"}}), "fp32", cpu).layout == "packed"


def test_a_plan_shows_the_yield_of_both_layouts() -> None:
    source, target = news(20000)
    config = BatchConfig(update_tokens=32768, micro_tokens=8192)
    padded, packed = yields(source, target, config, 1, 2)
    assert padded.empty <= 0.1 and packed.empty < 0.03
    assert packed.shapes <= 2 < padded.shapes
    assert packed.micro_batches < padded.micro_batches and packed.tokens > padded.tokens
    assert str(packed).startswith("packed: ") and "2 shapes" in str(packed)


def test_models_of_one_sentence_a_row_are_not_packed() -> None:
    from deepspeed_nmt.selftest.models import settings_of

    config = settings_of("abnet")
    packed = config.model_copy(update={"batch": config.batch.model_copy(update={"layout": "packed"})})
    with pytest.raises(ConfigError, match=r"batch\.layout must be padded for model\.name=abnet"):
        resolve_layout(packed, "bf16", torch.device("cpu"))
