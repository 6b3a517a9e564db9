"""Facts that a run settles before it starts: host memory, kernels that all ranks have, the library for products."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from deepspeed_nmt.build import build_meta_model
from deepspeed_nmt.config import load_config
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.training import DataOption, TrainingData
from deepspeed_nmt.engine.settings import EngineSettings
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels import choice
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.parallel.hardware import UNKNOWN, HostMemory, host_memory
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.run import resolve
from deepspeed_nmt.run.start import begin
from deepspeed_nmt.train.optimizers.adam import AdamConfig
from tests.support import prepare_sample

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 2**30


def test_available_memory_is_the_least_that_the_system_and_control_groups_leave(tmp_path: Path) -> None:
    assert host_memory(tmp_path) == (UNKNOWN, UNKNOWN, False)
    files = {
        "proc/meminfo": "MemTotal: 900 kB\nMemAvailable:  800 kB\n",
        "proc/self/cgroup": "1:name=systemd:/x\n0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "1\n",
        "sys/fs/cgroup/job/memory.max": "700000\n",
        "sys/fs/cgroup/job/memory.current": "500000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 100000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_memory(tmp_path) == (700_000, 300_000, True), "the cache of files can be taken back"
    (tmp_path / "sys/fs/cgroup/job/memory.max").write_text("max\n")
    assert host_memory(tmp_path) == (900 << 10, 800 << 10, False)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,memory:/job\n")
    group = tmp_path / "sys/fs/cgroup/memory/job"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("900000\n")
    (group / "memory.usage_in_bytes").write_text("890000\n")
    assert host_memory(tmp_path) == (900_000, 10_000, True)
    assert 0 < host_memory().available <= host_memory().total


def test_the_ranks_of_a_host_must_hold_their_models(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    large = ["model.dim=2048", "model.ffn_dim=8192", "model.encoder_layers=12", "model.decoder_layers=12"]
    model = build_meta_model(load_config(settings=large), Vocabulary(1000))
    count = sum(parameter.numel() for parameter in model.parameters())
    for name, value in {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    offload = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}

    bf16, fp32 = (EngineSettings(precision, AdamConfig()) for precision in ("bf16", "fp32"))  # type: ignore[arg-type]

    def refused(needed: int, world: World, engine: EngineSettings) -> None:
        """Check that a model is refused where there is less than it needs, and not where there is as much."""
        for total in (needed, needed - 1):
            caplog.clear()
            monkeypatch.setattr(resolve, "host_memory", lambda size=total: HostMemory(size, size, is_limited=True))
            if total == needed:
                resolve.check_size(model, engine, world)
            else:
                with pytest.raises(ConfigError, match=r"memory of .* \(limit of the job or container\)"):
                    resolve.check_size(model, engine, world)
            assert not caplog.text

    # On GPUs each rank builds the model in fp32 before it moves it there.
    refused(4 * count, World(0, 1, 0, GPU), bf16)
    # Offloaded state stays: 16 bytes for each parameter, divided over all ranks.
    refused(8 * (4 * count + 16 * count // 16), World(3, 16, 3, GPU), EngineSettings("bf16", AdamConfig(), offload))
    # On CPUs weights, gradients and moments stay, and the copy for validation.
    refused(8 * (4 + 4 + 8 + 4) * count, World(3, 16, 3, CPU), fp32)

    monkeypatch.setattr(resolve, "host_memory", lambda: HostMemory(64 * GIB, 4 * count - 1, is_limited=False))
    resolve.check_size(model, bf16, World(0, 1, 0, GPU))
    assert "of this host's memory are available, but the model's" in caplog.text


def test_if_a_rank_lacks_a_kernel_all_ranks_fall_back_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    asked = {"softmax": "triton", "layer_norm": "triton"}
    kernels = Kernels("linear=torch," + ",".join(f"{name}={backend}" for name, backend in asked.items()))
    monkeypatch.setattr(resolve, "fail_together", lambda world: nullcontext())

    def other_lacks(operation: str) -> None:
        """Fake a second rank with the same settings that fell back to torch for one operation."""

        def total(own: dict[str, float], world: World) -> dict[str, float]:
            other = {key: float(key == operation or key.partition(" ")[0] not in asked) for key in own}
            return {name: own[name] + other[name] for name in own}

        monkeypatch.setattr(resolve, "sum_over_ranks", total)

    other_lacks("none of them")
    assert resolve.agree_on_kernels(kernels, World(0, 2, 0, CPU), [torch.float32]) is kernels
    assert kernels.choices(CPU, torch.float32)["softmax"] == "triton"
    other_lacks("softmax torch.bfloat16")  # in another dtype all have it
    kernels = resolve.agree_on_kernels(kernels, World(0, 2, 0, CPU), [torch.float32, torch.bfloat16])
    chosen = kernels.choices(CPU, torch.float32)
    assert chosen["softmax"] == "torch" and chosen["layer_norm"] == "triton"


@pytest.mark.parametrize(
    ("setting", "recorded", "library", "message"),
    [
        ("auto", "torch", "torch", "by torch, as so far; a new run on this CPU would take onednn"),
        ("auto", "onednn", "onednn", ""),
        ("auto", None, "onednn", ""),
        ("auto", ["x"], "onednn", ""),
        ("linear=onednn", "torch", "onednn", ""),
    ],
)
def test_a_resumed_run_keeps_its_library_for_products(
    setting: str, recorded: object, library: str, message: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(choice, "preferred_on_cpu", lambda operation, dtype: "onednn")
    with caplog.at_level("INFO", logger="deepspeed_nmt"):
        kernels = resolve.keep_products(Kernels(setting), recorded, World(0, 1, 0, CPU))
    assert kernels.backend("linear", torch.empty(0)) == library
    assert message in caplog.text and bool(message) == bool(caplog.text)


def test_a_resumed_run_is_told_of_a_new_end_where_that_moves_its_learning_rate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = TrainingData([DataOption(prepare_sample(tmp_path, 300, train=60, valid=5, test=5))])
    for name, said in (("cosine", True), ("inverse_sqrt", False)):
        run = tmp_path / name
        short, long = (
            load_config(settings=[f"schedule.name={name}", f"training.max_updates={end}"]) for end in (100, 200)
        )
        begin(run, short, data)
        (run / "checkpoints" / "update-0000001").mkdir(parents=True)
        begin(run, long, data)
        assert ("training.max_updates was 100 and is 200" in capsys.readouterr().err) == said
