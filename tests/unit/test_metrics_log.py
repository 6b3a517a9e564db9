"""metrics.jsonl and TensorBoard's view of a run, with images of cross-attention."""

import errno
import json
import math
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from deepspeed_nmt.console import setup_logging
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.corpus import Corpus, CorpusWriter
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.reports.run_log import RunLog
from deepspeed_nmt.run.attention_images import AttentionImages
from deepspeed_nmt.train.log import METRICS_FILE, Metrics
from deepspeed_nmt.train.progress import Progress
from tests.support import batch_of

GOOD = [{"update": update, "train/target_tokens": 100.0 * update, "valid/bleu": 1.0 * update} for update in (1, 2, 3)]
BAD = [
    b'{"update": 4, "note": "\xff"}',
    b'{"train/target_tokens": 500.0, "valid/bleu": 9.0}',
    b'{"update": "four", "train/target_tokens": 500.0}',
    b'{"update": NaN, "train/target_tokens": 500.0}',
    b"null",
    b'{"update": 5, "train/tar',
]


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """A run whose log has good lines and bad ones."""
    good = [json.dumps(entry).encode() for entry in GOOD]
    (tmp_path / METRICS_FILE).write_bytes(b"\n".join([good[0], *BAD[:-1], *good[1:], BAD[-1]]))
    return tmp_path


def test_a_run_continues_a_damaged_log(damaged: Path) -> None:
    with Metrics(damaged, True, 2, 9) as metrics:
        metrics.log(Progress(update=3), {"valid/bleu": 5.0})
    lines = (damaged / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["update"] for line in lines] == [1, 2, 3]


def test_training_continues_without_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    setup_logging()
    with Metrics(tmp_path, True, 0, 9) as metrics:
        metrics.log(Progress(update=1), {"valid/bleu": 1.0})
        board = metrics._board
        assert board is not None
        board.flush()
        with monkeypatch.context() as disk:
            disk.setattr(RecordWriter, "write", full)
            for update in (2, 3, 4):
                metrics.log(Progress(update=update), {"valid/bleu": 2.0})
                if metrics._board is not None:
                    with suppress(OSError):
                        metrics._board.flush()
        metrics.log(Progress(update=5), {"valid/bleu": 5.0})
    error = capsys.readouterr().err
    assert error.count("metrics could not be written") == 1 and "Traceback" not in error
    lines = (tmp_path / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["update"] for line in lines] == [1, 2, 3, 4, 5]


def test_the_log_is_valid_json_and_numbers_that_are_not_finite_are_read_as_nan(tmp_path: Path) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    with Metrics(tmp_path, True, 0, 9) as metrics:
        metrics.log(Progress(update=1, target_tokens=70), {"train/grad_norm": math.inf, "train/loss": math.nan})
    infinite = b'{"update": 2, "train/target_tokens": 90.0, "train/loss": NaN, "train/grad_norm": -Infinity}\n'
    file = tmp_path / METRICS_FILE
    assert json.loads(file.read_text(), parse_constant=refuse) == {
        "update": 1, "train/target_tokens": 70.0, "train/grad_norm": None, "train/loss": None,
    }  # fmt: skip
    file.write_bytes(file.read_bytes() + infinite)
    log = RunLog.read(tmp_path)
    assert log.damaged == 0 and log.tokens == 90
    for series in map(log.series, ("train/loss", "train/grad_norm")):
        assert series.updates == [1, 2] and not any(map(math.isfinite, series.values))


V = Vocabulary(50)
BLACK, WHITE = 0, 255


class Numbers:
    """A tokenizer whose pieces are the numbers of the tokens."""

    vocabulary = V

    def pieces(self, tokens: list[int], side: str = "target") -> list[str]:
        return [f"{side[0]}{token}" for token in tokens]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Pairs of which the second and the last two have suitable lengths."""
    lengths = [(7, 9), (8, 25), (26, 10), (10, 26), (9, 8), (12, 11)]
    pairs = [([4 + row] * source, [14 + row] * target) for row, (source, target) in enumerate(lengths)]
    with CorpusWriter(tmp_path, "valid", V.size) as writer:
        writer.append(*map(list, zip(*pairs, strict=True)))
    return Corpus(tmp_path, "valid")


def model_of(layers: int = 5) -> TranslationModel:
    torch.manual_seed(1)
    config = TransformerConfig(dim=16, ffn_dim=16, heads=2, encoder_layers=1, decoder_layers=layers, dropout=0.0)
    return build_transformer(config, V).eval()


def test_the_weights_of_three_layers_are_drawn_for_sentences_of_suitable_length(
    corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[list[np.ndarray], list[str], list[str], list[str]]] = []

    def draw(*arguments: object) -> np.ndarray:
        drawn.append(arguments)  # type: ignore[arg-type]
        return np.zeros((1, 1), dtype=np.uint8)

    monkeypatch.setattr("deepspeed_nmt.run.attention_images.heat_maps", draw)
    model = model_of()
    images = AttentionImages(corpus, Numbers(), 3)(model, torch.device("cpu"))  # type: ignore[arg-type]
    assert list(images) == [f"attention/sentence_{number}" for number in (1, 2, 3)]
    assert [(rows[0], len(rows), columns[0], len(columns)) for _, _, rows, columns in drawn] == [
        *(("t15", 26, "s5", 9), ("t18", 9, "s8", 10), ("t19", 12, "s9", 13))
    ]
    maps, titles, rows, columns = drawn[2]
    assert titles == ["decoder layer 1", "decoder layer 3", "decoder layer 5"]
    assert (rows[-1], columns[-1]) == (f"t{V.eos}", f"s{V.eos}")
    # Against the weights of the sentence alone, in a forward pass that nothing else shares.
    attentions = model.cross_attentions()
    seen = {}
    for layer in (1, 3, 5):
        attentions[layer].register_forward_pre_hook(
            lambda module, args, kwargs, layer=layer: seen.update({layer: module.weights(*args[:2])}),
            with_kwargs=True,
        )
    with torch.no_grad():
        source, target = torch.tensor([[9] * 12 + [V.eos]]), [19] * 11
        model(batch_of(source, torch.tensor([[V.bos, *target]]), torch.tensor([[*target, V.eos]])))
    for found, layer in zip(maps, (1, 3, 5), strict=True):
        np.testing.assert_allclose(found, seen[layer][0].numpy(), atol=1e-5)
        np.testing.assert_allclose(found.sum(axis=1), 1.0, atol=1e-5)
