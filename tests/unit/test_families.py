"""GNMT, ConvS2S, MAtt, layer-wise coordination, MSC: equations, gradients, sizes, decoding, and refusals."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from deepspeed_nmt.build import build_meta_model, build_model
from deepspeed_nmt.config import RunConfig, load_config, validate
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.description import NotStandardError
from deepspeed_nmt.core.model import TOP, TranslationModel
from deepspeed_nmt.core.objective import Objective, Passes, TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods.label_smoothed import LabelSmoothed
from deepspeed_nmt.methods.msc import MSCConfig
from deepspeed_nmt.parity import settings_of
from deepspeed_nmt.search.searches import SEARCHES
from tests import family_equations, transformer_equations
from tests.models import padded, random_sources, two_pairs

V = Vocabulary(40)
FAMILIES: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "gnmt": (family_equations.gnmt, [{"encoder_layers": 4, "decoder_layers": 4}]),
    "convs2s": (
        family_equations.convs2s,
        [{"encoder_convolutions": [[1, 8, 5]], "decoder_convolutions": [[2, 8, 4]]}],
    ),
    "merged": (family_equations.merged, [{"norm": "pre"}]),
    "coordination": (family_equations.coordination, [{"norm": "post", "heads": 2}]),
    "msc": (family_equations.msc, [{"norm": "post", "encoder_layers": 2}]),
}
"""The transcription of each family, and settings that change those of its `SelfTest`."""
OWN_LAYERS = ["gnmt", "convs2s", "coordination", "msc"]
"""Those that are models, and not decoder layers of a Transformer."""
ODD: dict[str, list[dict[str, Any]]] = {
    "gnmt": [{"dim": 1}, {"dim": 7, "encoder_layers": 2, "decoder_layers": 2}],
    "convs2s": [{"dim": 1, "encoder_convolutions": [[1, 1, 1]], "decoder_convolutions": [[1, 3, 1]]}],
    "merged": [{"dim": 2, "heads": 1, "encoder_layers": 1, "decoder_layers": 1}],
    "coordination": [{"dim": 3, "heads": 3, "encoder_layers": 1, "decoder_layers": 1}],
    "msc": [{"dim": 3, "heads": 3, "encoder_layers": 1, "decoder_layers": 1}],
}
"""Odd sizes that train and decode."""
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model": {"name": "gnmt", "decoder_layers": 1}}, "model.decoder_layers is 1"),
    ({"model": {"name": "gnmt", "encoder_layers": 1}}, "model.encoder_layers is 1"),
    (
        {"model": {"name": "gnmt", "encoder_loops": 2}},
        "model.encoder_loops is a setting of model.name=recurrent only",
    ),
    (
        {"model": {"name": "convs2s", "encoder_convolutions": [[2, 8, 2]]}},
        "has the kernel width 2, which has no middle",
    ),
    ({"model": {"name": "convs2s", "decoder_convolutions": []}}, "decoder_convolutions has 0 blocks"),
    ({"model": {"name": "convs2s", "decoder_convolutions": [[1, 0, 2]]}}, "decoder_convolutions has [1, 0, 2]"),
    ({"model": {"name": "convs2s", "decoder_loops": 2}}, "model.decoder_loops is a setting of model.name=recurrent"),
    ({"model": {"name": "coordination", "encoder_layers": 3}}, "encoder_layers is 3 and decoder_layers 6"),
    ({"model": {"name": "coordination", "norm": "deepnorm"}}, "norm is deepnorm"),
    ({"model": {"name": "coordination", "decoder_norm": "post"}}, "decoder_norm is post and norm pre"),
    ({"model": {"name": "msc", "encoder_layers": 8}}, "encoder_layers is 8, but the decoder's 6 layers attend"),
    ({"model": {"name": "msc", "encoder_layers": 4}}, "use encoder_layers=6"),
    ({"model": {"name": "msc", "norm": "deepnorm"}}, "norm is deepnorm"),
    ({"model": {"name": "coordination", "heads": 3}}, "heads is 3, which does not divide dim 512"),
    (
        {"model": {"name": "relative_positions"}, "layer": {"name": "merged_attention"}},
        "has no self-attention, by which model.name=relative_positions knows positions",
    ),
    ({"model": {"name": "gnmt", "heads": 2}}, "model.heads is a setting of model.name=transformer or"),
]
COUNTS = [
    # Shazeer et al., "Outrageously Large Neural Networks" (2017), print 278M for GNMT.
    ("gnmt_wmt14_ende", 32_000, None, 278),
    # Both rows of Zhang et al., 72.3M and 154.3M, fit vocabularies of 55,000 together.
    ("matt_ds_init_20", 27_500, 27_500, 154.3),
    # An estimate of Wang et al. (2019).
    ("coordination_big", 33_000, None, 210),
    # Both rows of Wei et al. fit embeddings of 37,000 tokens for each side.
    ("msc_base_48", 37_000, None, 272),
    ("msc_big_18", 37_000, None, 512),
]
"""Recipe, sizes of the target's and the source's vocabulary, and printed parameters in millions."""
CASES = [(name, changes) for name, (_, variants) in FAMILIES.items() for changes in ({}, *variants)]
ODD_CASES = [(name, changes) for name, variants in ODD.items() for changes in variants]


def settings(name: str, changes: Mapping[str, Any]) -> RunConfig:
    """Return the settings of a family's `SelfTest` with some changes of the model."""
    content = settings_of(name).model_dump(mode="json")
    content["model"] |= {**changes, "dropout": 0.0}
    if "activation" in content["model"]:
        content["model"]["activation"] = "relu"  # as in the transcriptions
    return validate(content)


def family(name: str, changes: Mapping[str, Any], noise: float = 0.1) -> TranslationModel:
    """Return a random model in float64 whose parameters all matter."""
    model = build_model(settings(name, changes), V).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=noise)
    return model


def smoothed_loss(model: TranslationModel, data: Batch) -> torch.Tensor:
    return TrainModule(model, Objective(LabelSmoothed(0.1, V.pad)))(data).loss


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_loss_and_gradients_are_those_of_the_equations(name: str, changes: dict[str, Any]) -> None:
    model, data = family(name, changes).train(), two_pairs()
    transcription, _ = FAMILIES[name]
    expected = torch.zeros((), dtype=torch.float64)
    states_BTD = model(data)
    for row, (source, target) in enumerate([([7, 8, 9, 10, 11, 2], [17, 18, 19]), ([12, 13, 14, 2], [22])]):
        states = transcription(model, source, [V.bos, *target])
        torch.testing.assert_close(states_BTD[row, : len(states)], states, rtol=1e-6, atol=1e-6)
        bias = 0.0 if model.projection.bias is None else model.projection.bias
        log_probs = torch.log_softmax(states @ model.projection.weight.T + bias, dim=1)
        expected = expected + transformer_equations.smoothed_loss(log_probs, [*target, V.eos], 0.1)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad(expected, list(parameters.values()))
    smoothed_loss(model, data).backward()
    for (key, parameter), gradient in zip(parameters.items(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-5, atol=1e-6, msg=lambda text, n=key: n + text)
        assert float(gradient.abs().max()) > 1e-9, f"{key} matters nowhere"


@pytest.mark.parametrize(("name", "changes"), CASES)
@torch.inference_mode()
def test_a_sentence_is_translated_alone_as_among_others(name: str, changes: dict[str, Any]) -> None:
    """Sentences leave the batch one by one, and hypotheses are reordered in every step."""
    model = family(name, changes, noise=0.3).eval()
    search = SEARCHES["beam"].build(SEARCHES["beam"].config(beam=4, max_length=12), model, V)
    sources = random_sources([7, 1, 4, 2, 7], vocab_size=40)
    together = search.search(padded(sources))
    for source, expected in zip(sources, together, strict=True):
        (alone,) = search.search(padded([source]), padded=False)
        assert [each.tokens for each in alone] == [each.tokens for each in expected]
        assert [each.log_prob for each in alone] == pytest.approx([each.log_prob for each in expected], abs=1e-6)
    # The score of the search is that of teacher forcing.
    best = together[0][0]
    memory = model.encode(padded([sources[0]]))
    states_TD = model.decode(torch.tensor([[V.bos, *best.tokens]]), memory)[0][0]
    log_p_TV = torch.log_softmax(model.projection(states_TD), dim=1)
    own = sum(float(log_p_TV[place, token]) for place, token in enumerate([*best.tokens, V.eos]))
    assert own == pytest.approx(best.log_prob, abs=1e-5)


@pytest.mark.parametrize(("name", "changes"), ODD_CASES)
def test_odd_sizes_train_and_decode(name: str, changes: dict[str, Any]) -> None:
    model = family(name, changes).train()
    loss = smoothed_loss(model, two_pairs())
    loss.backward()
    assert torch.isfinite(loss) and all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    search = SEARCHES["beam"].build(SEARCHES["beam"].config(beam=2, max_length=4), model.eval(), V)
    (hypotheses,) = search.search(torch.tensor([[V.eos]]))
    assert hypotheses


@pytest.mark.parametrize("name", [*FAMILIES, "transparent"])
def test_a_second_pass_runs_all_layers(name: str) -> None:
    model, data = build_model(settings_of(name), V).eval(), two_pairs()
    passes = Passes(model, data)
    passes.add_pass(passes.add_source(data.source_BS))
    for states in passes.run():
        torch.testing.assert_close(states[TOP], model(data))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_empty_micro_batch_has_no_loss_and_no_gradient(name: str) -> None:
    model, data = family(name, {}).train(), two_pairs()
    pads = {
        key: torch.full_like(getattr(data, key), V.pad)
        for key in ("source_BS", "target_input_BT", "target_output_BT")
    }
    empty = Batch(**{**vars(data), **pads, "source_tokens": 0, "target_tokens": 0})
    loss = smoothed_loss(model, empty)
    loss.backward()
    assert float(loss.detach()) == 0.0 and all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize(("content", "said"), REFUSED)
def test_settings_that_a_family_lacks_are_refused(content: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(content)
    assert len(error.value.problems) == 1 and said in error.value.problems[0]


@pytest.mark.parametrize("name", OWN_LAYERS)
def test_methods_of_transformers_are_refused(name: str) -> None:
    config = settings_of(name)
    content = config.model_dump(mode="json")
    refused = {
        "objective": {"multi_softmax": {}},
        "layer": {"name": "cross_attention_drop", "drop_depth": 1},
    }
    if not config.model.sliceable:
        refused["engine"] = {"tensor_parallel": 2}
    for section, values in refused.items():
        with pytest.raises(ConfigError) as error:
            validate({**content, section: values})
        assert [f"model.name={config.model.name}" in said for said in error.value.problems] == [True]


@pytest.mark.parametrize("name", OWN_LAYERS)
def test_a_run_of_another_family_is_named(name: str) -> None:
    ours, other = settings_of(name).model, settings_of("vanilla").model
    assert f"model.name is transformer there and {ours.name} here" in " ".join(ours.composition_differences(other))


def test_blocks_of_another_size_are_named() -> None:
    """A deeper encoder takes the layers of a shallower one (`--init-from`), which are in other blocks then."""
    shallow, deeper, equal = (MSCConfig(encoder_layers=n, decoder_layers=m) for n, m in ((4, 2), (8, 2), (8, 4)))
    assert deeper.composition_differences(shallow) == ["blocks have 2 encoder layers there and 4 here"]
    assert not equal.composition_differences(shallow) + shallow.composition_differences(shallow)


@pytest.mark.parametrize("name", FAMILIES)
def test_export_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(NotStandardError) as reason:
        build_meta_model(settings_of(name), V).described()
    assert str(reason.value) != TranslationModel.not_standard


@pytest.mark.parametrize(("recipe", "target", "source", "printed"), COUNTS)
def test_parameters_are_as_many_as_printed(recipe: str, target: int, source: int | None, printed: float) -> None:
    vocabulary = Vocabulary(target, own_source=None if source is None else Vocabulary(source))
    model = build_meta_model(load_config(recipe), vocabulary)
    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(printed * 1e6, rel=0.01)
