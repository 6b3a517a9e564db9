"""Which backend is chosen, with GPUs and packages that are not there."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepspeed_nmt.cli import main
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels import dispatch, torch_ops

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
APEX = {"fused_layer_norm_cuda", "scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda"}
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A function that makes this a machine with a GPU of some capability and some packages."""

    def make(capability: tuple[int, int], packages: set[str], works: bool | str = True) -> None:
        find = importlib.util.find_spec
        ours = {"triton", "apex", *APEX}
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest: (object() if name in packages else None) if name in ours else find(name, *rest),
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Pretended GPU")
        failure = None if works is True else str(works)
        monkeypatch.setattr(dispatch, "_failure", lambda *arguments: failure)
        dispatch.use("auto")

    return make


def chosen(device: torch.device = CUDA, dtype: torch.dtype = torch.float16) -> dict[str, str]:
    return {operation: dispatch.choose(operation, device, dtype) for operation in dispatch.OPERATIONS}


def test_without_triton_and_apex_everything_is_torch(machine: Machine) -> None:
    machine((9, 0), set())
    assert set(chosen().values()) == {"torch"}


def test_an_unmeasured_gpu_gets_what_is_expected(machine: Machine) -> None:
    machine((7, 0), {"triton"})
    assert chosen() == dispatch.EXPECTED


def test_a_measured_gpu_gets_what_was_fastest(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((8, 6), {"triton"})
    fastest = dict.fromkeys(dispatch.OPERATIONS, "torch") | {"softmax": "triton"}
    monkeypatch.setitem(dispatch.MEASURED, (8, 6), {torch.float16: fastest})
    assert chosen() == fastest
    assert chosen(dtype=torch.bfloat16) == dispatch.EXPECTED, "that was not measured"
    machine((8, 0), {"triton"})
    assert chosen() == dispatch.EXPECTED


def test_apex_counts_only_with_its_compiled_parts(machine: Machine) -> None:
    machine((7, 0), {"apex"})
    assert set(chosen().values()) == {"torch"}, "the package of that name on PyPI is another one"
    machine((7, 0), {"apex", *APEX})
    assert {name for name, how in chosen().items() if how == "apex"} == {"layer_norm", "softmax"}
    machine((7, 0), {"triton", "fused_layer_norm_cuda"})
    assert chosen()["layer_norm"] == "apex" and chosen()["softmax"] == "triton"


def test_what_fails_its_trial_gives_way_to_torch(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine((9, 0), {"triton"}, works="triton fails on it (RuntimeError: Failed to find C compiler)")
    with caplog.at_level(logging.WARNING, logger="deepspeed_nmt"):
        assert set(chosen().values()) == {"torch"}
    assert "softmax: triton fails on it (RuntimeError: Failed to find C compiler), so torch is used" in caplog.text


def test_the_trial_finds_errors_and_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Pretended GPU")
    load = dispatch._load

    def with_triton(function: Callable[..., Any]) -> None:
        monkeypatch.setattr(
            dispatch, "_load", lambda operation, name: function if name == "triton" else load(operation, name)
        )

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no compiler")

    asked = ("layer_norm", "triton", CPU, torch.float32)
    with_triton(broken)
    assert dispatch._failure(*asked) == "triton fails on Pretended GPU (RuntimeError: no compiler)"
    with_triton(lambda *arguments: torch_ops.layer_norm(*arguments) * 1.1)
    assert "triton is wrong by" in (dispatch._failure(*asked) or "")
    with_triton(lambda *arguments: torch_ops.layer_norm(*arguments) * float("nan"))
    assert "triton is wrong by inf" in (dispatch._failure(*asked) or "")
    with_triton(torch_ops.layer_norm)
    assert dispatch._failure(*asked) is None


def test_the_environment_overrides_the_configuration(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((8, 0), {"triton"})
    dispatch.use("torch")
    assert set(chosen().values()) == {"torch"}
    monkeypatch.setenv(dispatch.ENVIRONMENT, "softmax=triton, layer_norm=triton")
    found = chosen()
    assert {name for name, how in found.items() if how == "triton"} == {"softmax", "layer_norm"}


def test_what_was_asked_for_and_cannot_be_had_is_an_error(machine: Machine) -> None:
    machine((8, 0), set())
    dispatch.use("softmax=triton")
    with pytest.raises(ConfigError, match="but triton is not installed; use softmax=torch"):
        chosen()
    dispatch.use("layer_norm=apex")
    with pytest.raises(ConfigError, match="fused_layer_norm_cuda is not installed"):
        chosen()


def test_a_cpu_and_fp64_get_torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((8, 0), {"triton", *APEX})
    assert set(chosen(CPU).values()) == {"torch"}
    assert set(chosen(CUDA, torch.float64).values()) == {"torch"}
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    dispatch.use("softmax=triton")
    with pytest.raises(ConfigError, match="Triton needs a CUDA device"):
        chosen(CPU)
    dispatch.use("apex")
    with pytest.raises(ConfigError, match="apex needs a CUDA device"):
        chosen(CPU)


@pytest.mark.parametrize("how", ["no_grad", "inference", "autocast", "checkpoint"])
def test_a_trial_is_not_disturbed_by_where_it_is_made(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Pretended GPU")
    load = dispatch._load
    monkeypatch.setattr(dispatch, "_load", lambda operation, name: load(operation, "torch"))
    found: list[str | None] = []

    def first_use(x: torch.Tensor) -> torch.Tensor:
        found.extend(dispatch._failure(operation, "triton", CPU, torch.float32) for operation in dispatch.OPERATIONS)
        return x * x

    x = torch.ones(2, requires_grad=True)
    if how == "checkpoint":
        checkpoint(first_use, x, use_reentrant=False).sum().backward()
        assert x.grad is not None and len(found) == 2 * len(dispatch.OPERATIONS)
    elif how == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            first_use(x)
    else:
        with torch.no_grad() if how == "no_grad" else torch.inference_mode():
            first_use(x)
    assert found and set(found) == {None}


def test_planning_leaves_the_choices_for_real_devices_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_for: list[torch.device] = []
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *a: chosen_for.append(a[1]) or choose(*a))
    dispatch.choices(CPU, torch.float32)
    with dispatch.planned_for((8, 0)):
        dispatch.choices(torch.device("meta"), torch.float32)
    dispatch.choices(CPU, torch.float32)
    assert [device.type for device in chosen_for].count("cpu") == len(dispatch.OPERATIONS)


def test_one_backend_alone_wins_over_all_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(dispatch.ENVIRONMENT, "triton")
    with dispatch.only("torch"):
        assert set(chosen(CPU).values()) == {"torch"}


def test_automatic_in_the_environment_wins_too(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((8, 0), {"triton"})
    dispatch.use("torch")
    monkeypatch.setenv(dispatch.ENVIRONMENT, "auto")
    assert chosen() == dispatch.EXPECTED
    monkeypatch.setenv(dispatch.ENVIRONMENT, "softmax=auto")
    assert chosen()["softmax"] == "triton" and chosen()["cross_entropy"] == "torch"


def test_a_plan_with_kernels_that_are_not_installed_says_so(
    machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine((8, 0), set())
    words = ["plan", "--recipe", "transformer_base", "--gpu", "v100-32g", "model.encoder_layers=1"]
    assert main([*words, "engine.kernels=softmax=triton"]) == 2
    assert "softmax is to be triton, which is not installed here" in capsys.readouterr().err
    assert main([*words, "engine.kernels=tritn"]) == 2
    assert "engine.kernels: it must be auto, one of torch, triton, apex" in capsys.readouterr().err
    machine((8, 0), {"apex", *APEX})
    assert main([*words, "model.decoder_layers=1"]) == 0, "apex knows no meta device: its tensors are like torch's"


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tritn", "engine.kernels must be auto, one of torch, triton, apex, .* did you mean 'triton'"),
        ("softmx=triton", "names 'softmx'; did you mean 'softmax'"),
        ("softmax=cuda", "softmax can be torch or triton or apex, but is to be 'cuda'"),
        ("cross_entropy=apex", "cross_entropy can be torch or triton, but is to be 'apex'"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dispatch.use(setting)


def test_the_choices_are_told_in_one_line(machine: Machine) -> None:
    assert dispatch.describe(CPU, torch.float32) == "torch"
    dispatch.use("softmax=triton" if dispatch.interpreting() else "auto")
    if dispatch.interpreting():
        told = dispatch.describe(CPU, torch.float32)
        assert told.startswith("layer_norm torch, ") and "softmax triton" in told


def test_a_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.use("auto")
    x, calls = torch.randn(2, 3), []
    choose = dispatch.choose
    monkeypatch.setattr(dispatch, "choose", lambda *arguments: calls.append(1) or choose(*arguments))
    for _ in range(3):
        dispatch.implementation("layer_norm", x)
    assert len(calls) == 1


def test_a_plan_for_a_gpu_counts_its_kernels(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--recipe", "transformer_base", "--gpu", "v100-32g", "model.attention_dropout=0.1"]
    words += ["model.encoder_layers=1", "model.decoder_layers=1", "--json"]
    assert main([*words, "engine.kernels=torch"]) == 0
    plain = capsys.readouterr().out
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    assert main([*words, "engine.kernels=triton"]) == 0
    activations = [json.loads(each)["as_set"]["bytes"]["activations"] for each in (plain, capsys.readouterr().out)]
    assert activations[1] < 0.95 * activations[0], "masks are drawn again, not kept"
