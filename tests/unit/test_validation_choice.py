"""Names of validation sets, and the measure that chooses the best checkpoint among theirs."""

from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_nmt.config import load_config, validate
from deepspeed_nmt.data.data_directory import DataDirectory, Meta
from deepspeed_nmt.errors import ConfigError, DataError
from deepspeed_nmt.manifest import FileRecord
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.run import validation_sets
from deepspeed_nmt.run.validation_sets import check_sets_agree, digest, given_sets
from deepspeed_nmt.text import TextForm
from deepspeed_nmt.train.configuration import MEAN, ValidationConfig

RAW, TOKENISED = TextForm(form="raw"), TextForm(form="tokenised")


def chosen(text: TextForm, of: str, **settings: Any) -> list[str]:
    """The names of the metrics of a set."""
    return [metric.name for metric in ValidationConfig(sets={"news": "x"}, **settings).chosen(text, of)[0]]


def problem_of(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        validate({"validation": settings})
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize("name", ["mean", "bleu"])
def test_a_set_is_not_called_as_a_measure(name: str) -> None:
    expected = f"has the name '{name}', which is that of a measure; give another one"
    assert problem_of(sets={name: "x"}) == f"validation.sets {expected}"
    with pytest.raises(ConfigError, match=f"^--valid {expected}$"):
        given_sets([f"{name}=x"])


@pytest.mark.parametrize("name", ["a/b", "a.b", "-a", "", "x" * 51])
def test_names_of_sets_are_plain(name: str) -> None:
    assert "; use letters, digits, - and _, 50 at most" in problem_of(sets={name: "x"})


def test_values_of_the_option_are_name_and_directory() -> None:
    assert given_sets(["a=/x", "b-1=/y=z"]) == {"a": "/x", "b-1": "/y=z"}
    for value in ("a", "a=", "=x"):
        with pytest.raises(ConfigError, match=rf"^--valid is '{value}'; give NAME=DIR"):
            given_sets([value])
    with pytest.raises(ConfigError, match="--valid has the name a twice"):
        given_sets(["a=x", "a=y"])


def test_settings_override_options_and_null_removes_a_set() -> None:
    options = {"validation": {"sets": {"a": "/x", "b": "/y"}}}
    settings = ["validation.sets.a=null", "validation.sets.b=/z", "validation.sets.c=d"]
    config = load_config(settings=settings, options=options)
    assert config.validation.sets == {"b": "/z", "c": "d"}
    located = config.resolved().validation.sets
    assert located["b"] == "/z" and located["c"].startswith("/") and located["c"].endswith("/d")
    assert config.flat()["validation.sets.b"] == "/z"
    assert problem_of(sets={"a": ""}) == "validation.sets has no data directory for a; give one"
    assert problem_of(sets=["a"]) == "validation.sets is ['a']; give a section with keys"


@pytest.mark.parametrize("best_by", ["other/bleu", "news/auto", "news/", "news"])
def test_a_measure_that_no_set_has_is_refused(best_by: str) -> None:
    problem = problem_of(sets={"news": "x"}, best_by=best_by)
    assert f"validation.best_by is '{best_by}', which is none of auto, loss, bleu" in problem
    assert "news/ followed by a measure, mean/ followed by a measure" in problem


def test_measures_of_sets_are_among_the_metrics_and_need_sets() -> None:
    assert "add it to validation.metrics" in problem_of(sets={"news": "x"}, metrics=["bleu"], best_by="news/ter")
    assert "validation.best_by is 'mean/bleu'" in problem_of(best_by="mean/bleu")
    assert problem_of(sets={"mean": "x"}, best_by="news/bleu").startswith("validation.sets"), "reported once"


def test_each_set_has_the_metrics_that_its_text_allows_and_the_one_that_chooses() -> None:
    assert chosen(TOKENISED, "news") == ["bleu_tokenised"] and chosen(RAW, "") == ["bleu"]
    assert chosen(RAW, "news", best_by="news/chrf") == ["bleu", "chrf"]
    assert chosen(RAW, "", best_by="news/chrf") == ["bleu"]
    assert chosen(RAW, "", best_by="chrf") == ["bleu", "chrf"] and chosen(RAW, "news", best_by="chrf") == ["bleu"]
    assert chosen(RAW, "", best_by="mean/ter") == chosen(RAW, "news", best_by="mean/ter") == ["bleu", "ter"]
    best = ValidationConfig(sets={"news": "x"}, best_by="mean/ter").chosen(RAW)[1]
    assert best is not None and best.name == "ter" and MEAN == "mean"
    with pytest.raises(ConfigError) as caught:
        chosen(TOKENISED, "news", best_by="mean/bleu")
    assert "bleu needs plain text, but in validation.sets.news the text is tokenised" in str(caught.value)
    with pytest.raises(ConfigError, match=r"metric chrf needs plain text, but in validation\.sets\.news the text is"):
        chosen(TOKENISED, "news", metrics=["chrf"])


def test_hosts_whose_validation_sets_differ_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def directory(content: str) -> DataDirectory:
        meta = Meta.model_construct(
            files={"valid.source": FileRecord.of(content.encode())}, text=RAW, segmented=False
        )
        return DataDirectory(tmp_path / content, meta)

    one = World(0, 1, 0, torch.device("cpu"))
    of_main: dict[str, Any] = {}
    monkeypatch.setattr(validation_sets, "from_main", lambda own, world: of_main.setdefault("own", own))
    sets = {"": directory("x"), "news": directory("y")}
    for same in (sets, {"": directory("x"), "news": directory("y")}):
        check_sets_agree(same, one)
    with pytest.raises(DataError, match=r"the validation set news in .*/z is not that of rank 0"):
        check_sets_agree({**sets, "news": directory("z")}, one)
    assert digest(sets) != digest({"": directory("y"), "news": directory("x")}) != digest({"news": directory("y")})
