"""TensorBoard's view of a run: the layout, also of a run that was resumed, and images of cross-attention."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.custom_scalars_plugin import CustomScalarsPlugin

from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.corpus import Corpus, CorpusWriter
from deepspeed_nmt.methods.transformer import TransformerConfig, build_transformer
from deepspeed_nmt.run.attention_images import AttentionImages
from deepspeed_nmt.train.log import LAYOUT, Metrics
from deepspeed_nmt.train.progress import Progress
from tests.support import batch_of

V = Vocabulary(50)
BLACK, WHITE = 0, 255


class Numbers:
    """A tokenizer whose pieces are the numbers of the tokens."""

    vocabulary = V

    def pieces(self, tokens: list[int], side: str = "target") -> list[str]:
        return [f"{side[0]}{token}" for token in tokens]


def test_a_resumed_run_and_a_second_one_have_each_chart_once(tmp_path: Path) -> None:
    for run, update in (("a", 0), ("a", 2), ("b", 0)):
        (tmp_path / run).mkdir(exist_ok=True)
        with Metrics(tmp_path / run, True, update, 9) as metrics:
            metrics.log(Progress(update=update + 1), {"valid/loss": 2.0})
            metrics.log(Progress(update=update + 2), {"valid/loss": 1.0})
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(tmp_path))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(tmp_path))
    plugin = CustomScalarsPlugin(TBContext(logdir=str(tmp_path), data_provider=provider, multiplexer=multiplexer))
    shown = json.loads(plugin.layout_impl(RequestContext(), ""))
    assert {each["title"]: [chart["title"] for chart in each["chart"]] for each in shown["category"]} == {
        category: list(charts) for category, charts in LAYOUT.items()
    }
    values = EventAccumulator(str(tmp_path / "a" / "tensorboard")).Reload()
    assert [event.step for event in values.Scalars("valid/loss")] == [1, 2, 3, 4]


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
