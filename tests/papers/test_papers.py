"""Every row and point of the papers can be run, and every setting of their recipes is accounted for."""

import json
import re
import shlex
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.cli import main
from deepspeed_nmt.commands.recipes import description
from deepspeed_nmt.config import RunConfig, validate
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.loader import TrainLoader
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.plain import PlainEngine
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.parity import VOCABULARY, train, write_corpus
from deepspeed_nmt.recipes import load_recipe, load_sweep, recipe_files, recipes, sweeps
from deepspeed_nmt.reports.sweep import Sweep
from deepspeed_nmt.run.plans import Plans
from tests.docs.pages import ROOT
from tests.papers.pages import NOT_STATED, PAPERS, parsed, recipes_of, resolved, rows, settings, value_of

OF_NO_PAPER = {"sample_quick", "sample_small", "multi30k_cpu", "multi30k_tiny", "grown_base_24", "completep_base_50"}
DECIDING = [
    *("model.dim", "model.ffn_dim", "model.heads", "model.encoder_layers", "model.decoder_layers", "model.norm"),
    *("model.init", "model.dropout", "model.attention_dropout", "model.activation_dropout"),
    *("optimizer.lr", "optimizer.beta1", "optimizer.beta2", "optimizer.eps", "optimizer.clip_norm"),
    *("schedule.name", "schedule.warmup_updates", "batch.update_tokens", "training.max_updates"),
    *("search.beam", "search.length_penalty"),
]
"""Settings that the tables must have for each recipe whose model has them."""
OF_THE_MACHINE = (
    *(
        "batch.micro_tokens",
        "training.validate_every",
        "training.log_every",
        "training.save_every",
        "training.keep_last",
        "model.name",
    ),
    *("layer.name", "search.name", "validation."),
)
"""Settings of recipes that the tables need not have."""


def test_every_recipe_and_sweep_is_listed() -> None:
    listed = {recipe for page in PAPERS for recipe in recipes_of(page)}
    assert listed | OF_NO_PAPER == set(recipes())
    points = {point for row in rows() for point in row.points()}
    assert points == {(name, number + 1) for name in sweeps() for number in range(len(load_sweep(name)))}


@pytest.mark.parametrize("name", sweeps())
def test_points_of_a_sweep_differ_on_its_axes(name: str) -> None:
    sweep = Sweep(name)
    values = [tuple(map(point.value, sweep.axes)) for point in sweep.points]
    assert len(set(map(str, values))) == len(values)


def test_the_options_of_other_commands_exist() -> None:
    for row in rows():
        for command in row.commands:
            if not command.startswith("train"):
                parsed(shlex.split(command))


@pytest.mark.parametrize("page", PAPERS, ids=lambda page: page.stem)
def test_the_settings_of_recipes_are_those_of_the_table(page: Path) -> None:
    table, problems = settings(page), []
    own = set(recipes_of(page))
    for row in table:
        if row.here != row.paper and not row.reason:
            problems.append(f"{row.key}: {row.here} instead of {row.paper} needs a reason")
    runs = {run for row in rows() for run in row.runs() if run[0] in own}
    for recipe, given in sorted({(recipe, ()) for recipe in own} | runs):
        config = resolved(recipe, given)
        dumped = config.model_dump(mode="json")
        named = {row.key for row in table if row.names(recipe) and _has(dumped, row.key)}
        varied = {word.partition("=")[0] for word in given}
        for key in sorted({*_needed(recipe, config), *named} - varied):
            row = next((row for row in reversed(table) if row.key == key and row.names(recipe)), None)
            if row is None:
                problems.append(f"{recipe}: {key} has no row")
            elif row.here != NOT_STATED and value_of(config, key) != row.here:
                problems.append(f"{recipe}: {key} is {value_of(config, key)}, but the table has {row.here}")
    assert not problems, "\n".join(problems)


def test_every_row_and_point_is_planned_and_each_combination_trained(tmp_path: Path) -> None:
    runs = {run for row in rows() for run in row.runs()}
    runs |= {(recipe, ()) for page in PAPERS for recipe in recipes_of(page)}
    plans, combinations = Plans(), {}
    for recipe, given in sorted(runs):
        config = resolved(recipe, given)
        trained, total, _ = plans.parameters(config, Vocabulary(32_000))
        assert 0 < trained <= total, (recipe, given)
        combinations.setdefault(_combination(config), config)
    write_corpus(tmp_path, pairs=60, longest=20)
    for config in combinations.values():
        _train_two_updates(config, tmp_path)


def _needed(recipe: str, config: RunConfig) -> Iterator[str]:
    """Yield the keys that a recipe must have in the table."""
    dumped = config.model_dump(mode="json")
    for key in DECIDING:
        section, name = key.split(".")
        if name in dumped[section]:
            yield key
    yield from (f"objective.{name}.smoothing" for name, part in dumped["objective"].items() if "smoothing" in part)
    for key in _keys(load_recipe(recipe)):
        if not key.startswith(OF_THE_MACHINE) and _has(dumped, key):
            yield key


def _keys(content: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in content.items():
        if isinstance(value, dict) and value:
            yield from _keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _has(dumped: dict[str, Any], key: str) -> bool:
    for part in key.split("."):
        if part not in dumped:
            return False
        dumped = dumped[part]
    return True


def _combination(config: RunConfig) -> str:
    """Return what is combined in a run, without its numbers."""
    dumped = config.model_dump(mode="json")
    layer, objective = dumped["layer"], dumped["objective"]
    tosses = any(0.0 < layer.get(rate, 0.0) < 1.0 for rate in ("drop_ratio", "beyond"))
    model = {**_choices(dumped["model"]), "fusion_scale": dumped["model"].get("fusion_scale")}
    objectives = {name: _choices(part) for name, part in objective.items() if part is not None}
    combined = [model, layer["name"], tosses, objectives, config.search.name]
    return json.dumps(combined, sort_keys=True)


def _choices(part: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a part that are no numbers."""
    return {key: value for key, value in part.items() if isinstance(value, str | bool | list)}


def _train_two_updates(config: RunConfig, directory: Path) -> None:
    """Train a narrow model of the run's depth."""
    narrow: dict[str, Any] = {"dim": 16, "heads": 2, "ffn_dim": 32}
    narrow |= {f"{side}_convolutions": [[2, 16, 3], [1, 24, 1]] for side in ("encoder", "decoder")}
    content = config.model_dump(mode="json")
    if "source" in content["model"]:
        for side in ("source", "target"):
            content["model"][side] |= {key: narrow[key] for key in ("dim", "heads", "ffn_dim")}
    else:
        content["model"] |= {key: value for key, value in narrow.items() if key in content["model"]}
    config = validate(content)
    torch.manual_seed(1)
    module = TrainModule(build_model(config, VOCABULARY), build_objective(config, VOCABULARY))
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    world = World(0, 1, 0, torch.device("cpu"))
    engine = PlainEngine(module, config.optimizer, "fp32", world)
    loader = TrainLoader.of_corpus(
        Corpus(directory, "train"), BatchConfig(update_tokens=64, micro_tokens=64), 1, 0, 1, VOCABULARY
    )
    report = train(engine, loader, world, 1, 2, Cursor())
    assert len(report["loss"]) == 2 and all(0.0 < loss < 100.0 for loss in report["loss"])
    assert not any(report["skipped"])
    for name, parameter in module.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter, before[name])
    assert any(not torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())


def test_recipes_are_listed_by_group_with_their_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "deep_decoder", "54_plain", "En-Fr"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "deep_decoder" and len(lines) == 2
    assert lines[1].split()[:6] == ["deep_decoder_base_54_plain_enfr", "27", "+", "27,", "D", "512"]
    assert lines[1].endswith("Plain BASE 27-27 on En-Fr (deep decoder paper, Table 1: 0.65 BLEU).")
    assert main(["recipes", "nothing-like-it"]) == 2
    assert "nothing-like-it" in capsys.readouterr().err
    files = recipe_files()
    assert [name for name, file in files.items() if not description(file.read_text("utf-8")).endswith(".")] == []


EXACT = {  # second corrections of the audit: settings that a paper fixes, or leaves to its baseline
    "recurrent_*": {"model.attention_dropout": 0.1, "model.activation_dropout": 0.1},
    "closed_chain_*": {"model.attention_dropout": 0.1, "model.activation_dropout": 0.1},
    "bert_*": {"optimizer.clip_norm": 0.0},
    "multi_softmax_*": {"validation.metrics": ["bleu_intl"]},
}


def test_settings_that_the_corrections_fix() -> None:
    for pattern, fixed in EXACT.items():
        names = [name for name in recipes() if fnmatchcase(name, pattern)]
        assert names, pattern
        for name in names:
            config = resolved(name)
            assert {key: value_of(config, key) for key in fixed} == fixed, name


def test_big_runs_of_vaswani_average_twenty_checkpoints() -> None:
    of_vaswani = [row for row in rows() if "Vaswani et al. 2017, BIG" in row.name and row.page == "deep-decoder.md"]
    assert len(of_vaswani) == 2
    for row in of_vaswani:
        assert "average --last 20" in row.commands
        ((recipe, given),) = row.runs()
        assert resolved(recipe, given).training.keep_last == 20


def test_sections_of_costs_have_rows_and_the_scorer_is_named() -> None:
    places = {row.place for row in rows() if row.page == "multi-layer-softmaxing.md"}
    assert {"Section 5.1", "Section 5.2"} <= places
    vanilla = load_sweep("multi_softmax_vanilla")
    counts = [Plans().parameters(resolved(name, tuple(given)), Vocabulary(32_000))[1] for name, given in vanilla]
    assert sum(counts) / 1e6 == pytest.approx(1517, rel=0.001) and counts[-1] / 1e6 == pytest.approx(60.5, rel=0.002)
    text = (ROOT / "docs" / "papers" / "multi-layer-softmaxing.md").read_text("utf-8")
    assert "1,517M" in text and "--metrics bleu_intl --lowercase" in text


def test_depth_scaled_initialisation_is_a_row() -> None:
    (row,) = (row for row in rows() if "+ DS-Init (Zhang" in row.name)
    ((recipe, given),) = row.runs()
    assert resolved(recipe, given).model.model_dump()["init"] == "depth_scaled"


def test_every_page_names_its_segmentation_and_published_papers_are_cited_so() -> None:
    texts = {page.stem: page.read_text("utf-8") for page in PAPERS if page.stem != "rivals"}
    assert all(re.search("SentencePiece|WordPiece", text) for text in texts.values())
    assert "10.18653/v1/2022.findings-acl.39" in texts["deep-decoder"] and "459-471" in texts["deep-decoder"]
    assert "February 2024" in texts["parallel-decoder"]
    assert "little more than 2" in texts["recurrent-layers"] and "wmt16_en_de.tar.gz" in texts["recurrent-layers"]
    assert all(word in texts["deep-decoder"] for word in ("wmt14_enfr.sh", "1.5 times", "250"))


def test_no_system_is_only_cited() -> None:
    """Cited are results that a paper copied from another one, and runs that have a row elsewhere."""
    cited = [row for row in rows() if row.text.startswith("cited")]
    for row in cited:
        assert re.search(r"\]\(|takes the result from", row.text), f"{row.name}: where does it run?"
    linked = [row for row in rows() if not row.commands and row not in cited]
    assert all("](rivals.md#" in row.text for row in linked), [row.name for row in linked]
