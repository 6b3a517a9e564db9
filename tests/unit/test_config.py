"""Configuration: precedence, validation, messages, recipes."""

import json
from pathlib import Path

import pytest

from deepspeed_nmt.cli import main
from deepspeed_nmt.commands.settings import settings_reference
from deepspeed_nmt.config import RunConfig, load_config
from deepspeed_nmt.engine.settings import EngineSettings, resolve_engine_for, uses_deepspeed
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.methods.transformer import TransformerConfig
from deepspeed_nmt.recipes import recipes
from deepspeed_nmt.recipes.reading import parse_yaml
from deepspeed_nmt.train.optimizers.adam import AdamConfig
from tests.support import ROOT


def problems(*settings: str, recipe: str | None = None) -> list[str]:
    """Return the messages with which settings are refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, settings=settings)
    return caught.value.problems


def test_precedence_of_recipe_file_and_command_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("optimizer: {lr: 1e-3}\nmodel: {dropout: 0.2}\n")
    config = load_config("transformer_big", file, ["model.dropout=0.4"])
    assert isinstance(config.model, TransformerConfig)
    assert config.model.dim == 1024 and config.model.encoder_layers == 6, (
        "from the recipe and the one that it extends"
    )
    assert config.optimizer.lr == 1e-3, "from the file, over the recipe"
    assert config.model.dropout == 0.4, "from the command line, over all"
    assert config.optimizer.beta2 == 0.98


@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("model.encoder_layer=6", "there is no setting 'model.encoder_layer'; did you mean 'model.encoder_layers'?"),
        ("extends=base", "extends is for recipes; name the recipe beside the file: --recipe NAME --config F"),
        ("update_tokens=100", "there is no setting 'update_tokens'; did you mean 'batch.update_tokens'?"),
        ("model.lr=1", "there is no setting 'model.lr'; did you mean 'optimizer.lr'?"),
        ("collapse.zzz=1", "there is no setting 'collapse.zzz'; known: collapse.action, collapse.every, "
         "collapse.grace, collapse.patience, collapse.sentences, collapse.threshold"),
    ],
)  # fmt: skip
def test_an_unknown_setting_gets_a_suggestion(setting: str, problem: str) -> None:
    assert problems(setting) == [problem]


def test_errors_of_types_and_ranges_name_the_required_and_the_given_value() -> None:
    assert problems("model.dim=wide") == ["model.dim is 'wide'; give a whole number"]
    assert problems("optimizer.lr=-1") == ["optimizer.lr is -1; give a number greater than 0"]
    assert problems("model=3") == ["model is 3; give a section with keys"]
    (sentence,) = problems("dim")
    assert "'dim'" in sentence and "section.key=value" in sentence


MANY = "objective.label_smoothed=null"
SMALL = (MANY, "model.encoder_layers=1", "model.decoder_layers=2")
CAD = "layer.name=cross_attention_drop"
WEIGHTS = "objective.multi_softmax.weights"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (("model.dim=512", "model.heads=7"), "model: heads is 7, which does not divide dim 512; use 4 or 8"),
        (("model.name=transfomer",), "did you mean 'transformer'?"),
        (("objective.ddr.weight=1", "objective.r_drop.weight=1"), "objective.ddr and objective.r_drop"),
        ((CAD, "layer.drop_depth=7", "layer.drop_ratio=0.5"), "drop_depth is 7, more than model.decoder_layers=6"),
        ((CAD, "layer.drop_depth=6"), "leave none of the 6 layers of model.decoder_layers any cross-attention"),
        ((MANY, "objective.multi_softmax.exits=7x2"), "draws 7 exits, but model.encoder_layers is 6"),
        ((MANY, "objective.multi_softmax.full_depth=false"), "leaves layers of model.name=transformer out of an"),
        ((MANY, "objective.multi_softmax.teacher=1", "objective.ddr.weight=1"), "teacher and objective.ddr both"),
        ((MANY, WEIGHTS + "={7-1: 2.0, 6-6: 1.0}"), "names 7-1; use exits n-m up to 6-6"),
        ((MANY, "objective.multi_softmax.exits=all", CAD, "layer.drop_depth=2"),
         "layer.name=cross_attention_drop leave that layer no cross-attention"),
        ((*SMALL, WEIGHTS + "={1-1: 0, 1-2: 0}"), "gives all exits of exits=all weight 0"),
        ((MANY, "objective.multi_softmax.exits=1x1", "objective.multi_softmax.teacher=1"),
         "trains exit 6-6 alone with exits=1x1"),
        ((CAD, "layer.drop_ratio=0.5"), "layer.name=cross_attention_drop drops nothing"),
        (("search.name=deep_shallow",),
         "needs a model with the exits deep and shallow, but model.name=transformer does not have them"),
    ],
)  # fmt: skip
def test_settings_that_contradict_one_another_are_refused(settings: tuple[str, ...], problem: str) -> None:
    (sentence,) = problems(*settings)
    assert problem in sentence


def test_parts_of_an_objective_are_added_and_removed_by_name() -> None:
    config = load_config("deep_decoder_base_30", settings=["objective.ald=null", "objective.ddr.weight=5"])
    assert set(config.objective) == {"label_smoothed", "ddr"}
    assert config.objective["ddr"].model_dump()["weight"] == 5.0
    assert problems("objective.drd.weight=1") == ["objective has no part 'drd'; did you mean 'ddr'?"]
    assert problems("objective.ald.p_ald=0.5") == ["objective.ald.p_ald is 0.5; give a number less than 0.5"]
    assert "objective has none of" in problems("objective.label_smoothed=null")[0]
    both = problems("objective.multi_softmax.exits=all", recipe="transformer_base")
    assert both == [
        "objective has label_smoothed and multi_softmax of label_smoothed, multi_softmax, masked_tokens, "
        "added_exits; keep one, and set the others to null"
    ]


def test_a_setting_of_another_component_names_that_component() -> None:
    assert problems("model.encoder_loops=2") == [
        "model.encoder_loops is a setting of model.name=recurrent only; set that, too, or leave it out"
    ]
    assert "search.alpha is a setting of search.name=deep_shallow only" in problems("search.alpha=0.3")[0]
    assert load_config(settings=["model.name=recurrent", "model.encoder_loops=2"])


def test_another_part_leaves_the_settings_of_the_one_before_but_not_those_that_are_given() -> None:
    config = load_config("multi30k_cpu", settings=["optimizer.clip_norm=3", "optimizer.name=adafactor"])
    assert config.optimizer.lr == 1e-2 and config.optimizer.clip_norm == 3.0
    given = load_config("multi30k_cpu", settings=["optimizer.lr=1e-3", "optimizer.name=adafactor"])
    assert given.optimizer.lr == 1e-3
    recipe = load_config("transformer_base")
    muon = load_config("transformer_base", settings=["optimizer.name=muon"])
    assert (muon.optimizer.lr, muon.optimizer.model_dump()["beta2"]) == (recipe.optimizer.lr, 0.98)
    assert load_config("deep_decoder_base_30", settings=["layer.name=standard"]).layer.name == "standard"
    (problem,) = problems("optimizer.name=adafactor", "optimizer.beta1=0.5")
    assert problem.startswith("optimizer.beta1 is a setting of ")


@pytest.mark.parametrize("name", recipes())
def test_recipes_round_trip_through_yaml(name: str, tmp_path: Path) -> None:
    config = load_config(name)
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert load_config(file=file) == config != RunConfig()


def uses_deepspeed_on(ranks: int, config: RunConfig) -> bool:
    """Return True if a run of these settings uses DeepSpeed."""
    return uses_deepspeed(config.engine, ranks)


def test_a_configuration_of_deepspeed_chooses_deepspeed_on_one_rank_too(tmp_path: Path) -> None:
    assert not uses_deepspeed_on(1, load_config()) and uses_deepspeed_on(2, load_config())
    file = tmp_path / "mine.yaml"
    file.write_text("engine: {ds_config: zero2}\n")
    for config in (load_config(settings=["engine.ds_config=zero2"]), load_config(file=file)):
        assert uses_deepspeed_on(1, config)
        assert (config.engine.name, config.engine.ds_config) == ("deepspeed", "zero2"), "so it is recorded"
    assert not uses_deepspeed_on(1, load_config(file=file, settings=["engine.ds_config=null"]))

    def resolved(ranks: int, *settings: str) -> EngineSettings:
        engine = load_config(settings=settings).engine
        return resolve_engine_for(engine, AdamConfig(), ranks=ranks, data_ranks=ranks, native="fp32")

    assert [resolved(1).zero_stage, resolved(2).zero_stage] == [None, 2]
    assert resolved(1, "engine.ds_config=zero3_offload").zero_stage == 3


def test_a_configuration_of_deepspeed_is_refused_with_plain_torch(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("engine: {ds_config: mine.json}\n")
    message = r"ds_config is 'mine\.json'.* engine\.name=plain"
    with pytest.raises(ConfigError, match=message):
        load_config(settings=["engine.name=plain", "engine.ds_config=mine.json"])
    with pytest.raises(ConfigError, match=message):
        load_config(file=file, settings=["engine.name=plain"])
    config = load_config(file=file, settings=["engine.name=plain", "engine.ds_config=null"])
    assert not uses_deepspeed_on(8, config)


@pytest.mark.parametrize(
    ("recipe", "vocab", "millions"),
    [
        ("recurrent_baseline_20_6", 32_000, 104.7),
        ("recurrent_base_20_4", 32_000, 96.2),
        ("closed_chain_base_8_4", 32_000, 58.4),
        ("multi_softmax_base", 32_000, 60.5),
        ("deep_decoder_big_54_plain", 33_000, 830),
        ("deep_decoder_base_54", 36_000, 199),
        ("deep_decoder_big_54", 33_000, 760),
    ],
)
def test_plan_counts_the_papers_parameters(
    recipe: str, vocab: int, millions: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--recipe", recipe, "--vocab-size", str(vocab), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] / 1e6 == pytest.approx(millions, rel=0.015)


def test_the_reference_is_up_to_date() -> None:
    assert (ROOT / "docs/configuration.md").read_text(encoding="utf-8").endswith(f"\n\n{settings_reference()}")


@pytest.mark.parametrize(("text", "seed"), [("010", 10), ("-0_1", -1), ("0x10", 16), ("1_000", 1000)])
def test_integers_are_decimal_whatever_zeros_they_begin_with(text: str, seed: int) -> None:
    assert parse_yaml(f"a: [{text}]", "a") == {"a": [seed]}


@pytest.mark.parametrize("text", ["2:00", "1:30.5"])
def test_times_are_no_numbers(text: str) -> None:
    assert parse_yaml(f"a: {text}", "a") == {"a": text}
    with pytest.raises(ConfigError, match=f"training.max_updates.*{text}"):
        load_config(settings=[f"training.max_updates={text}"])


def test_off_is_the_word_although_yaml_reads_it_as_false(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("engine:\n  compile: off\n", encoding="utf-8")
    assert load_config(file=tmp_path / "run.yaml").engine.compile == "off"
    assert load_config("multi30k_tiny", settings=["engine.compile=off"]).engine.compile == "off"
