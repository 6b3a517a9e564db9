"""Cross-attention drop whose ratio follows the collapse monitor: a function of what was measured, within bounds."""

import pytest

from deepspeed_nmt.build import build_model
from deepspeed_nmt.config import load_config
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods.cross_attention_drop import CrossAttentionDropConfig, CrossAttentionDropLayer

ADAPTED = ["layer.name=cross_attention_drop", "layer.drop_depth=2", "layer.drop_ratio=0.5", "layer.target_reliance=2"]


def ratios(reliances: list[float], **settings: float) -> list[float]:
    """Return the ratio after each of a series of measurements."""
    config = CrossAttentionDropConfig(drop_depth=2, drop_ratio=0.5, target_reliance=2.0, **settings)
    ratio, found = None, []
    for reliance in reliances:
        ratio = config.adapted(ratio, reliance)
        found.append(ratio)
    return found


def test_the_ratio_rises_while_reliance_is_low_and_falls_when_it_recovers() -> None:
    assert ratios([1.5, 1.0, 0.0]) == pytest.approx([0.525, 0.575, 0.675])
    assert ratios([2.0, 2.0]) == [0.5, 0.5], "at the target it stays"
    assert ratios([3.0, 4.0, 9.0]) == pytest.approx([0.45, 0.35, 0.25])
    assert ratios([0.0, 0.0, 4.0, 4.0]) == pytest.approx([0.6, 0.7, 0.6, 0.5])


def test_the_ratio_stays_within_its_bounds_and_a_step_of_the_last_one() -> None:
    falls = ratios([-50.0] * 9, adapt_step=0.2, max_ratio=0.8, min_ratio=0.3)
    assert falls[:2] == pytest.approx([0.7, 0.8]) and max(falls) == falls[-1] == 0.8
    recovers = ratios([1e9] * 9, adapt_step=0.2, max_ratio=0.8, min_ratio=0.3)
    assert recovers[0] == pytest.approx(0.3) and min(recovers) == recovers[-1] == 0.3
    assert 0.0 <= ratios([float("nan")])[0] <= 0.9


def test_a_ratio_continues_from_the_one_that_was_saved() -> None:
    series = [1.0, 0.2, 0.1, 3.0, 2.5, 0.0]
    config, straight = CrossAttentionDropConfig(drop_depth=2, drop_ratio=0.5, target_reliance=2.0), ratios(series)
    saved = straight[2]
    for reliance, expected in zip(series[3:], straight[3:], strict=True):
        saved = config.adapted(saved, reliance)
        assert saved == expected


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("layer.drop_ratio=1", "layer.drop_depth is 2 and layer.drop_ratio 1,"),
        ("layer.drop_depth=0", "layer.drop_depth is 0 and layer.drop_ratio 0.5,"),
        ("layer.min_ratio=0.6", "layer.drop_depth is 2 and layer.drop_ratio 0.5,"),
        ("layer.max_ratio=1", "layer.max_ratio is 1;"),
        ("layer.target_reliance=-1", "layer.target_reliance is -1;"),
        ("layer.adapt_step=0", "layer.adapt_step is 0;"),
        ("collapse.every=0", "collapse.every is 0, so nothing is measured"),
        ("layer={name: merged_attention}", "layer.target_reliance is a setting of layer.name=cross_attention_drop"),
    ],
)
def test_what_cannot_be_adapted_is_refused(setting: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(settings=[*ADAPTED, setting])
    assert any(sentence.startswith(problem) for sentence in caught.value.problems), caught.value.problems


def test_only_the_lowest_layers_adapt_and_only_if_the_settings_say_so() -> None:
    small = ["model.dim=16", "model.ffn_dim=16", "model.heads=2", "model.encoder_layers=1", "model.decoder_layers=3"]

    def rates(*settings: str) -> list[float | None]:
        model = build_model(load_config(settings=[*small, *settings]), Vocabulary(20))
        model.set_drop_ratio(0.75)
        layers = [getattr(layer, "layer", layer) for layer in model.decoder.layers]
        return [layer.rate if isinstance(layer, CrossAttentionDropLayer) else None for layer in layers]

    assert rates(*ADAPTED) == [0.75, 0.75, None]
    assert rates(*ADAPTED, "layer.drop_ratio=0", "layer.beyond=0.25") == [0.75, 0.75, 0.25]
    assert rates(*ADAPTED, "model.name=transparent_attention") == [0.75, 0.75, None], "layers within other ones"
    assert rates(*ADAPTED, "layer.target_reliance=0") == [0.5, 0.5, None]
    assert rates() == [None, None, None]
