"""The choice of backends, with fake GPUs and packages."""

import copy
import importlib.util
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from deepspeed_nmt.build import build_model, build_objective
from deepspeed_nmt.cli import main
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.model import TranslationModel
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels import choice, torch_ops
from deepspeed_nmt.kernels.choice import DEFAULT, ENVIRONMENT, EXPECTED, OPERATIONS, Kernels, UsesKernels, use_kernels
from deepspeed_nmt.parity import VOCABULARY, settings_of

CUDA, CPU, META = torch.device("cuda"), torch.device("cpu"), torch.device("meta")
APEX = {"fused_layer_norm_cuda", "scaled_masked_softmax_cuda", "scaled_upper_triang_masked_softmax_cuda"}
Machine = Callable[..., None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A function that fakes a machine with a GPU of some capability and some packages."""

    def make(capability: tuple[int, int], packages: set[str], works: bool | str = True) -> None:
        find = importlib.util.find_spec
        ours = {"triton", "apex", *APEX}
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, *rest: (object() if name in packages else None) if name in ours else find(name, *rest),
        )
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Fake GPU")
        failure = None if works is True else str(works)
        monkeypatch.setattr(choice, "failure", lambda *arguments: failure)

    return make


def chosen(
    kernels: Kernels | None = None, device: torch.device = CUDA, dtype: torch.dtype = torch.float16
) -> dict[str, str]:
    kernels = kernels or Kernels()
    return {operation: kernels._choose(operation, device, dtype) for operation in OPERATIONS}


def test_without_triton_and_apex_everything_is_torch(machine: Machine) -> None:
    machine((9, 0), set())
    assert set(chosen().values()) == {"torch"}


def test_a_measured_gpu_gets_the_fastest_backends(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((8, 6), {"triton"})
    fastest = dict.fromkeys(OPERATIONS, "torch") | {"softmax": "triton"}
    monkeypatch.setitem(choice.MEASURED, (8, 6), {torch.float16: fastest})
    assert chosen() == fastest
    assert chosen(dtype=torch.bfloat16) == EXPECTED, "this type was not measured"
    monkeypatch.setitem(choice.MEASURED, (8, 6), {torch.float16: {"softmax": "torch"}})
    assert chosen() == {**EXPECTED, "softmax": "torch"}, "the others were not measured"
    machine((8, 0), {"triton"})
    assert chosen() == EXPECTED


def test_apex_counts_only_with_its_compiled_parts(machine: Machine) -> None:
    machine((7, 0), {"apex"})
    assert set(chosen().values()) == {"torch"}, "PyPI has another package called apex"
    machine((7, 0), {"apex", *APEX})
    assert {name for name, how in chosen().items() if how == "apex"} == {"layer_norm", "softmax"}
    machine((7, 0), {"triton", "fused_layer_norm_cuda"})
    assert chosen()["layer_norm"] == "apex" and chosen()["softmax"] == "triton"


def test_a_backend_that_fails_its_trial_falls_back_to_torch(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine((9, 0), {"triton"}, works="triton fails on it (RuntimeError: Failed to find C compiler)")
    with caplog.at_level(logging.WARNING, logger="deepspeed_nmt"):
        assert set(chosen().values()) == {"torch"}
    assert "softmax: triton fails on it (RuntimeError: Failed to find C compiler), so torch is used" in caplog.text


def test_the_trial_finds_errors_and_wrong_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Fake GPU")
    load = choice.load

    def with_triton(function: Callable[..., Any]) -> None:
        monkeypatch.setattr(
            choice, "load", lambda operation, name: function if name == "triton" else load(operation, name)
        )

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no compiler")

    asked = ("layer_norm", "triton", CPU, torch.float32)
    with_triton(broken)
    assert choice.failure(*asked) == "triton fails on Fake GPU (RuntimeError: no compiler)"
    with_triton(lambda *arguments: torch_ops.layer_norm(*arguments) * 1.1)
    assert "triton is wrong by" in (choice.failure(*asked) or "")
    with_triton(lambda *arguments: torch_ops.layer_norm(*arguments) * float("nan"))
    assert "triton is wrong by inf" in (choice.failure(*asked) or "")
    with_triton(torch_ops.layer_norm)
    assert choice.failure(*asked) is None


def test_the_environment_overrides_the_configuration(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((8, 0), {"triton"})
    kernels = Kernels("torch")
    assert set(chosen(kernels).values()) == {"torch"}
    monkeypatch.setenv(ENVIRONMENT, "softmax=triton, layer_norm=triton")
    found = chosen(kernels)
    assert {name for name, how in found.items() if how == "triton"} == {"softmax", "layer_norm"}


def test_an_unavailable_backend_in_the_settings_is_an_error(machine: Machine) -> None:
    machine((8, 0), set())
    with pytest.raises(ConfigError, match=r"triton is not installed.*softmax=torch"):
        chosen(Kernels("softmax=triton"))


def test_a_cpu_and_fp64_get_torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine((8, 0), {"triton", *APEX})
    assert set(chosen(Kernels("linear=torch"), CPU).values()) == {"torch"}
    assert set(chosen(dtype=torch.float64).values()) == {"torch"}
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="Triton needs a CUDA device"):
        chosen(Kernels("softmax=triton"), CPU)


@pytest.mark.parametrize(
    ("vendor", "widest", "mkl", "backend"),
    [
        ("AuthenticAMD", "AVX512", True, "onednn"),
        ("AuthenticAMD", "AVX2", True, "torch"),
        ("AuthenticAMD", "AVX512", False, "torch"),
        ("GenuineIntel", "AVX512", True, "torch"),
    ],
)
def test_the_library_for_products_follows_from_facts_about_the_cpu_and_the_build(
    monkeypatch: pytest.MonkeyPatch, vendor: str, widest: str, mkl: bool, backend: str
) -> None:
    monkeypatch.setattr(choice, "cpu_vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: widest)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: mkl)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert chosen(device=CPU, dtype=torch.float32)["linear"] == backend
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert chosen(device=CPU, dtype=torch.float32)["linear"] == "torch"
    with pytest.raises(ConfigError, match=r"oneDNN.*linear=onednn"):
        chosen(Kernels("linear=onednn"), CPU)


@pytest.mark.parametrize("how", ["no_grad", "inference", "checkpoint"])
def test_a_trial_works_in_any_mode_of_autograd(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Fake GPU")
    load = choice.load
    monkeypatch.setattr(choice, "load", lambda operation, name: load(operation, "torch"))
    found: list[str | None] = []

    def first_use(x: torch.Tensor) -> torch.Tensor:
        found.extend(choice.failure(operation, "triton", CPU, torch.float32) for operation in OPERATIONS)
        return x * x

    x = torch.ones(2, requires_grad=True)
    if how == "checkpoint":
        checkpoint(first_use, x, use_reentrant=False).sum().backward()
        assert x.grad is not None and len(found) == 2 * len(OPERATIONS)
    else:
        with torch.no_grad() if how == "no_grad" else torch.inference_mode():
            first_use(x)
    assert found and set(found) == {None}


@pytest.mark.parametrize("variable", ["auto", "softmax=triton"])
def test_fixing_overrides_all_settings(machine: Machine, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    machine((8, 0), {"triton"})
    monkeypatch.setenv(ENVIRONMENT, variable)
    kernels = Kernels()
    derived = kernels.fixing({"softmax": "torch"}).fixing({"cross_entropy": "torch"})
    expected = chosen(kernels) | {"softmax": "torch", "cross_entropy": "torch"}
    assert chosen(kernels)["softmax"] == "triton" and chosen(derived) == expected
    assert chosen(derived.planned_for((8, 0)), META) == expected


def test_a_plan_for_a_gpu_counts_its_kernels(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--recipe", "transformer_base", "--gpu", "v100-32g", "model.attention_dropout=0.1"]
    words += ["model.encoder_layers=1", "model.decoder_layers=1", "--json"]
    assert main([*words, "engine.kernels=torch"]) == 0
    plain = capsys.readouterr().out
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs triton")
    assert main([*words, "engine.kernels=triton"]) == 0
    activations = [json.loads(each)["as_set"]["bytes"]["activations"] for each in (plain, capsys.readouterr().out)]
    assert activations[1] < 0.95 * activations[0], "Triton draws masks again instead of storing them"


def model_and_loss(kernels: Kernels, device: torch.device) -> tuple[TranslationModel, Callable[[], torch.Tensor]]:
    """Return a small model with these kernels, and a function that trains it on a batch and returns its loss."""
    config = settings_of("growing")
    with device:
        model, objective = build_model(config, VOCABULARY), build_objective(config, VOCABULARY)
    use_kernels(model, kernels)
    model.train()

    def loss() -> torch.Tensor:
        tokens = torch.randint(5, VOCABULARY.size, (3, 4), generator=torch.Generator().manual_seed(2)).to(device)
        batch = Batch(
            source_BS=tokens,
            target_input_BT=tokens,
            target_output_BT=tokens,
            sentence_ids_B=torch.arange(3, device=device),
            target_tokens=tokens.numel(),
            source_tokens=tokens.numel(),
            pad=VOCABULARY.pad,
        )
        result: torch.Tensor = objective(model, batch).loss
        result.backward()
        return result.detach()

    return model, loss


def test_models_with_different_kernels_train_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The models use torch on a CPU, Triton's interpreter, and Triton planned for a GPU, in turns."""
    if importlib.util.find_spec("triton") is None or not choice.interpreting():
        pytest.skip("needs Triton's interpreter")
    kinds = {
        "torch": (Kernels.only("torch"), CPU),
        "triton": (Kernels("triton", "fused"), CPU),
        "planned": (Kernels("triton", "fused").planned_for((8, 0)), META),
    }
    called: list[tuple[str, str, str]] = []
    load = choice.load

    def watched(operation: str, name: str) -> Callable[..., Any]:
        function = load(operation, name)

        def call(x: Any, *arguments: Any) -> Any:
            called.append((operation, name, (x[0] if isinstance(x, list) else x).device.type))
            return function(x, *arguments)

        return call

    monkeypatch.setattr(choice, "load", watched)
    models = {name: model_and_loss(*kind) for name, kind in kinds.items()}
    losses = {}
    for name in [*models, *models]:
        called.clear()
        losses[name] = models[name][1]()
        backend, device = ("torch" if name == "torch" else "triton"), kinds[name][1].type
        assert {each[1:] for each in called if each[0] != "linear"} == {(backend, device)}
        wanted = {"layer_norm", "bias_dropout_add_layer_norm", "bias_gelu_dropout", "cross_entropy"}
        assert wanted <= {operation for operation, _, _ in called}
    assert losses["planned"].device == META
    assert float(losses["triton"]) == pytest.approx(float(losses["torch"]), abs=1e-4)


def test_kernels_are_found_by_every_module_and_shared_by_copies() -> None:
    kernels = Kernels("torch")
    model = build_model(settings_of("growing"), VOCABULARY)
    before = list(model.state_dict())
    assert all(module.kernels is DEFAULT for module in model.modules() if isinstance(module, UsesKernels))
    use_kernels(model, kernels)
    for each in (model, copy.deepcopy(model), model.at_exit("shallow")):
        found = [module.kernels for module in each.modules() if isinstance(module, UsesKernels)]
        assert found and all(one is kernels for one in found)
    assert list(model.state_dict()) == before
