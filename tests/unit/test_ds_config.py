"""DeepSpeed configurations: completion and refusal."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from deepspeed_nmt.engine import build_engine
from deepspeed_nmt.engine.settings import (
    EngineSettings,
    complete_ds_config,
    load_ds_config,
    reconcile_precision,
    zero_stage,
)
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.train.optimizers.adam import AdamConfig
from tests.support import ROOT

FILES = sorted(path.stem for path in (ROOT / "ds_configs").glob("*.json"))


def problems(content: dict[str, Any], **changes: Any) -> list[str]:
    """Return the messages with which a configuration is refused."""
    settings: dict[str, Any] = {"ranks": 4, "clip_norm": 1.0, "precision": "fp32", **changes}
    with pytest.raises(ConfigError) as caught:
        complete_ds_config(content, **settings)
    return caught.value.problems


@pytest.mark.parametrize("name", FILES)
def test_each_file_is_completed_and_nothing_stays_auto(name: str) -> None:
    content = load_ds_config(name)
    precision = reconcile_precision(content, "auto")
    precision = "fp32" if precision == "auto" else precision
    completed = complete_ds_config(content, ranks=4, clip_norm=0.5, precision=precision)  # type: ignore[arg-type]
    assert "auto" not in json.dumps(completed)
    assert completed["train_batch_size"] == 4 and completed["gradient_accumulation_steps"] == 1
    assert completed["gradient_clipping"] == 0.5
    assert completed["fp16"]["enabled"] is (name == "v100_fp16")


def test_a_section_without_a_stage_is_stage_0() -> None:
    assert zero_stage({}) == zero_stage({"zero_optimization": {}}) == 0  # as in DeepSpeed
    assert zero_stage({"zero_optimization": {"stage": 3}}) == 3


def test_gradients_are_added_in_fp32_and_one_rank_overlaps_nothing() -> None:
    for name in ("zero1", "zero2", "zero3"):
        content = load_ds_config(name)
        alone, several = (complete_ds_config(content, ranks=n, clip_norm=1.0, precision="bf16") for n in (1, 4))
        assert alone["data_types"] == several["data_types"] == {"grad_accum_dtype": "fp32"}
        assert several["zero_optimization"]["overlap_comm"] and not alone["zero_optimization"]["overlap_comm"]
        assert content["zero_optimization"]["overlap_comm"], "the file's content is not changed"
    chosen = {"zero_optimization": {"stage": 2}, "data_types": {"grad_accum_dtype": "bf16"}}
    completed = complete_ds_config(chosen, ranks=4, clip_norm=1.0, precision="bf16")
    assert completed["data_types"] == {"grad_accum_dtype": "bf16"}


def test_zero_1_reduces_sums_of_16_bit_gradients_in_fp32() -> None:
    """ZeRO 2 and 3 reduce the gradients of each micro-batch, which have been rounded to 16 bit already."""
    for stage, reduced in ((1, "fp32"), (2, None), (3, None)):
        content = load_ds_config(f"zero{stage}")
        completed = complete_ds_config(content, ranks=4, clip_norm=1.0, precision="bf16")
        assert completed.get("communication_data_type") == reduced
        assert "communication_data_type" not in complete_ds_config(content, ranks=4, clip_norm=1.0, precision="fp32")
        chosen = complete_ds_config(
            {**content, "communication_data_type": "bf16"}, ranks=4, clip_norm=1.0, precision="bf16"
        )
        assert chosen["communication_data_type"] == "bf16"


def test_a_path_works_as_well_as_a_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"zero_optimization": {"stage": 1}}')
    assert zero_stage(load_ds_config(str(file))) == 1
    file.write_text("[1]")
    with pytest.raises(ConfigError, match="contains a list"):
        load_ds_config(str(file))
    for content in ('{"fp16": true}', '{"data_types": null}', '{"zero_optimization": {"offload_param": "cpu"}}'):
        file.write_text(content)
        with pytest.raises(ConfigError, match=r"in .*mine\.json; make it an object"):
            load_ds_config(str(file))
    file.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_ds_config(str(file))


def test_values_that_contradict_the_run_are_named_with_their_setting() -> None:
    assert problems({"gradient_clipping": None})[0].startswith("'gradient_clipping' is None")
    content = {"train_batch_size": 256, "gradient_clipping": 5.0, "zero_optimisation": {}, "optimizer": {}}
    found = problems(content)
    assert len(found) == 4
    assert any("'train_batch_size' is 256" in p and "batch.update_tokens" in p for p in found)
    assert any("'gradient_clipping'" in p and "optimizer.clip_norm" in p for p in found)
    assert any("'zero_optimisation' in the DeepSpeed configuration looks misspelt; did you mean" in p for p in found)
    assert any("'optimizer' is in" in p and "optimizer.*" in p for p in found)


@pytest.mark.parametrize("key", ["bfloat16", "managed_gradient_accumulation", "tensor_parallel"])
def test_keys_by_which_deepspeed_would_decide_for_the_run_are_refused(key: str) -> None:
    (sentence,) = problems({key: {"enabled": True}})
    assert sentence.startswith(f"'{key}' is in the DeepSpeed configuration")


@pytest.mark.parametrize(
    ("section", "key"), [("bf16", "check_grad_overflow"), ("zero_optimization", "compute_grad_norm")]
)
def test_keys_by_which_updates_without_a_finite_gradient_are_not_skipped_are_refused(section: str, key: str) -> None:
    (sentence,) = problems({section: {key: False}})
    assert sentence.startswith(f"'{section}.{key}' is False in the DeepSpeed configuration")
    complete_ds_config({section: {key: True}}, ranks=4, clip_norm=1.0, precision="fp32")


def test_an_order_of_parameters_in_which_weights_are_read_wrongly_is_refused() -> None:
    (sentence,) = problems({"zero_optimization": {"stage": 2, "round_robin_gradients": True}})
    assert sentence.startswith("'zero_optimization.round_robin_gradients' is set")
    given = {"zero_optimization": {"stage": 2, "round_robin_gradients": False}}
    complete_ds_config(given, ranks=4, clip_norm=1.0, precision="fp32")


def test_a_value_that_deepspeed_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Section(BaseModel):
        reduce_bucket_size: int

    def refuse(module: Any, optimizer: Any, ds_config: dict[str, Any], world: Any, dummy: Any) -> Section:
        return Section(**ds_config)

    monkeypatch.setitem(sys.modules, "deepspeed_nmt.engine.deepspeed", SimpleNamespace(DeepSpeedEngine=refuse))
    settings = EngineSettings("fp32", AdamConfig(), {"reduce_bucket_size": "much"})
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"DeepSpeed refuses 'reduce_bucket_size' in .*, which is 'much' \(Input"):
        build_engine(settings, nothing, nothing, nothing)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_zero_0_with_16_bit_is_refused(precision: str) -> None:
    (sentence,) = problems({"zero_optimization": {"stage": 0}}, precision=precision)
    assert "needs ZeRO stage 1 or more" in sentence and "engine.ds_config=zero1" in sentence


@pytest.mark.parametrize(
    ("content", "setting", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "auto", "both fp16 and bf16"),
        ({"fp16": {"enabled": True}}, "bf16", "enables fp16, but engine.precision is bf16"),
        ({"bf16": {"enabled": False}}, "bf16", "but the DeepSpeed configuration disables it"),
        ({"fp16": {"enabled": "true"}}, "auto", "'fp16.enabled' is 'true' in the DeepSpeed configuration; make it"),
    ],
)
def test_contradicting_precisions_are_refused(content: dict[str, Any], setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        reconcile_precision(content, setting)
