"""Plans against measured allocations and against arithmetic."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from deepspeed_nmt.build import build_meta_model, build_model, build_objective
from deepspeed_nmt.cli import main
from deepspeed_nmt.config import RunConfig, load_config
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.batching import BatchConfig
from deepspeed_nmt.data.data_directory import DataDirectory
from deepspeed_nmt.engine.settings import EngineConfig, EngineSettings, uses_deepspeed
from deepspeed_nmt.errors import ConfigError
from deepspeed_nmt.kernels.choice import DEFAULT, Kernels
from deepspeed_nmt.parallel.world import World
from deepspeed_nmt.planning import counting, planner
from deepspeed_nmt.planning.checkpoints import (
    IntervalPlan,
    daly_interval,
    expected_seconds,
    young_interval,
)
from deepspeed_nmt.planning.counting import (
    Counts,
    RecomputedLayers,
    Work,
    count_model,
    count_rates,
    count_update,
    interpolated,
)
from deepspeed_nmt.planning.gpus import Gpu, kind_of
from deepspeed_nmt.planning.memory import GIB, Layout, state_bytes
from deepspeed_nmt.planning.planner import Plan, Planner, notes_on, plan_for
from deepspeed_nmt.run.plans import MeasuredTimes, Plans
from deepspeed_nmt.run.resolve import resolve_memory
from deepspeed_nmt.train.goodput import Entry
from deepspeed_nmt.train.optimizers.adam import AdamConfig
from tests.support import batch_of, prepare_sample

V = Vocabulary(2000)
NARROW = ["model.dim=128", "model.ffn_dim=512", "model.heads=4"]
SHALLOW = ["model.encoder_layers=2", "model.decoder_layers=2"]


def peak_allocation(config: RunConfig, recompute: int, tokens: int) -> int:
    """Measure the peak allocation of an update's second micro-batch on the CPU with torch's profiler."""
    model = build_model(config, V)
    model.recompute(recompute, recompute)
    module = TrainModule(model, build_objective(config, V)).train()
    rows = tokens // 32
    text = [torch.randint(4, V.size, (rows, 32)) for _ in range(3)]
    batch = replace(batch_of(*text, pad=V.pad), source_tokens=tokens - 1)
    module(batch).loss.backward()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        module(batch).loss.backward()
    held = most = 0
    assert trace.profiler is not None
    for event in sorted(trace.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "settings", "recompute"),
    [
        ("transformer_base", SHALLOW, 1),
        ("deep_decoder_base_30", ["model.encoder_layers=2", "model.decoder_layers=5", "layer.drop_depth=2"], 0),
        ("recurrent_base_8_4", ["model.encoder_layers=4", "model.encoder_loops=2", "model.decoder_layers=2"], 1),
        ("depth_growing_base_8", [*SHALLOW, "model.attend=h1_plus_input"], 1),
    ],
)
def test_planned_activations_and_logits_equal_the_allocation(
    recipe: str, settings: Sequence[str], recompute: int
) -> None:
    config = load_config(recipe, settings=[*NARROW, *settings])
    with torch.device("meta"):
        model = build_model(config, V)
    work = count_update(model, build_objective(config, V), V, 512, (recompute, recompute))
    assert work.activations + work.logits == pytest.approx(peak_allocation(config, recompute, 512), rel=0.1)


@pytest.mark.long
def test_other_sizes_are_interpolated_from_two_counts() -> None:
    config = load_config(
        "deep_decoder_base_30",
        settings=[*NARROW, "model.encoder_layers=4", "model.decoder_layers=6", "layer.drop_depth=2"],
    )
    with torch.device("meta"):
        model = build_model(config, V)

    def count(tokens: int, recompute: RecomputedLayers) -> Work:
        return count_update(model, build_objective(config, V), V, tokens, recompute)

    none, encoder, decoder = ((count(2048, each), count(8192, each)) for each in ((0, 0), (1, 0), (0, 1)))
    work = interpolated(none, encoder, decoder, (4, 6))
    cases = [(4096, (0, 0)), (16384, (1, 1)), (4096, (2, 3)), (4096, (9, 1))]
    for tokens, recompute in cases:
        counted, followed = count(tokens, recompute), work(tokens, recompute)
        total = counted.activations + counted.logits
        assert followed.activations + followed.logits == pytest.approx(total, rel=0.1)
        assert followed.flops == pytest.approx(counted.flops, rel=0.05)


@pytest.mark.long
def test_logits_on_a_gpu_are_followed_through_the_size_of_a_chunk() -> None:
    """Up to 4,096 rows all logits are held at once, beyond that only a chunk of them."""
    config = load_config("transformer_base", settings=[*NARROW, *SHALLOW])
    kernels = Kernels.only("torch").planned_for((9, 0))
    objective = build_objective(config, V)
    work = count_model(build_meta_model(config, V, kernels), objective, V, "bf16", 1).work
    model = build_meta_model(config, V, kernels).to(torch.bfloat16)
    for tokens in (512, 4096, 32768):
        counted, followed = count_update(model, objective, V, tokens, (0, 0)), work(tokens, (0, 0))
        total = counted.activations + counted.logits
        assert followed.activations + followed.logits == pytest.approx(total, rel=0.05), tokens


def test_work_of_a_transformer_is_six_operations_for_each_weight_and_token() -> None:
    config = load_config("transformer_base")
    with torch.device("meta"):
        model = build_model(config, Vocabulary(32000))
    work = count_update(model, build_objective(config, V), V, 1024, (0, 0))
    layers = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name)
    attention = 18 * 3 * 4 * 1024 * 32 * 512  # 1 x forward, 2 x backward; q k^T and its product with v
    assert work.flops == pytest.approx(6 * 1024 * (layers + 32000 * 512) + attention, rel=1e-6)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_lstms_are_counted_as_if_step_by_step() -> None:
    size = ["model.dim=128", "model.encoder_layers=3", "model.decoder_layers=3"]
    config = load_config(settings=["model.name=gnmt", *size])
    model = build_meta_model(config, V)
    work = count_update(model, build_objective(config, V), V, 512, (0, 0))
    products = sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embedding" not in name)
    assert work.flops == pytest.approx(6 * 512 * products + 6 * 512 * 32 * 128, rel=1e-9)  # with the weighted sum
    with torch.backends.mkldnn.flags(enabled=False):  # its LSTM has memory of its own
        assert work.activations + work.logits == pytest.approx(peak_allocation(config, 0, 512), rel=0.03)


def test_work_of_a_regularizer_counts_as_often_as_it_is_due() -> None:
    def work(*settings: str) -> float:
        layers = ["model.encoder_layers=1", "model.decoder_layers=1"]
        config = load_config("transformer_base", settings=[*NARROW, *layers, *settings])
        return sum(count_rates(build_meta_model(config, V), build_objective(config, V), V))

    plain, always, fifth = work(), work("objective.ald={}"), work("objective.ald.every=5")
    assert fifth == pytest.approx(plain + (always - plain) / 5) and plain < fifth


def test_a_model_of_few_positions_is_counted() -> None:
    """Less is attended to, as the sentences that are counted are shorter; all else is the same for each token."""
    blocks = [f"model.{side}_convolutions=[[2, 64, 3]]" for side in ("encoder", "decoder")]
    few, many = (
        load_config(settings=["model.name=convs2s", f"model.positions={positions}", *blocks])
        for positions in (10, 1024)
    )
    rates = [count_rates(build_meta_model(config, V), build_objective(config, V), V) for config in (few, many)]
    assert 0.5 * rates[1][0] < rates[0][0] < rates[1][0] and rates[0][1] == pytest.approx(rates[1][1], rel=0.02)
    work = count_update(build_meta_model(few, V), build_objective(few, V), V, 1024, (0, 0))
    assert work.tokens == 1020  # 102 sentences


@pytest.mark.long
def test_work_of_a_random_number_of_loops_is_that_of_the_mean_number() -> None:
    """On either side 1, 2 or 3 loops are drawn, and every loop has the same work."""

    def work(encoder: int, decoder: int, *settings: str) -> float:
        sizes = ["model.encoder_layers=1", "model.decoder_layers=1", "model.share_embeddings=none"]
        loops = [f"model.encoder_loops={encoder}", f"model.decoder_loops={decoder}"]
        config = load_config(settings=["model.name=recurrent", *NARROW, *sizes, *loops, *settings])
        return sum(count_rates(build_meta_model(config, V), build_objective(config, V), V))

    drawn = ("exits=1x1", "full_depth=false")
    settings = ["objective.label_smoothed=null", *(f"objective.multi_softmax.{setting}" for setting in drawn)]
    assert work(3, 3, *settings) == pytest.approx(work(2, 2), rel=0.02)


def test_memory_is_that_of_an_update_in_which_all_layers_attend() -> None:
    def activations(ratio: float) -> int:
        drop = ["layer.name=cross_attention_drop", "layer.drop_depth=2", f"layer.drop_ratio={ratio}"]
        config = load_config(settings=[*NARROW, *SHALLOW, *drop])
        return count_update(build_meta_model(config, V), build_objective(config, V), V, 1024, (0, 0)).activations

    assert activations(0.9) == activations(0.0)


def test_exits_that_are_added_count_beside_an_equal_model_without() -> None:
    """A report lists a run with added exits beside the one that it began with."""
    exits = ["objective.label_smoothed=null", "objective.added_exits.exits=[1]"]
    plain, added = (load_config(settings=[*NARROW, *SHALLOW, *more]) for more in ([], exits))
    plans = Plans()
    (_, before, _), (trained, count, states) = (plans.parameters(config, V) for config in (plain, added))
    assert (trained, count, states) == (2 * 128, before + 2 * 128, 4 * 128)


def test_the_states_of_muon_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--recipe", "transformer_base", "--vocab-size", "2000", "--gpu", "a100-40g", "--num-gpus", "8"]
    settings = [*NARROW, *SHALLOW, "engine.name=plain", "optimizer.name=muon"]
    assert main([*words, *settings, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    count, in_layers = planned["parameters"], (2 * 4 + 2 * 8) * 128**2 + 4 * 2 * 128 * 512
    states = in_layers + 2 * (count - in_layers)
    assert planned["checkpoint_bytes"] == 4 * (count + states)
    assert planned["as_set"]["bytes"]["optimizer"] == 4 * (count + states), "with fp32 masters"
    assert planned["advised"]["zero_stage"] is None, "ZeRO 1 to 3 would divide the matrices"


def test_bytes_of_each_parameter() -> None:
    def by_parameter(**layout: object) -> list[float]:
        sizes = state_bytes(1000, 0, Layout(**{"ranks": 4, "zero": {"reduce_bucket_size": 0}, **layout}))  # type: ignore[arg-type]
        return [sizes[part] / 1000 for part in ("weights", "gradients", "optimizer", "buffers")]

    assert by_parameter(stage=None, bits=32) == [4, 4, 8, 0]
    assert by_parameter(stage=None, bits=16) == [2, 4, 12, 6]
    assert by_parameter(stage=1) == [2, 4, 3, 1]
    assert by_parameter(stage=2) == [2, 1, 3, 1]
    assert by_parameter(stage=3)[0] == 0.5
    frozen = state_bytes(100, 900, Layout(2, 4, zero={"reduce_bucket_size": 0}))
    assert frozen["weights"] == 2000 and frozen["optimizer"] == 300
    offloaded = {"reduce_bucket_size": 0, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    assert by_parameter(stage=3, zero=offloaded)[::2] == [0, 0]
    unset = {**offloaded, "offload_optimizer": None, "offload_param": None}
    assert by_parameter(stage=3, zero=unset) == by_parameter(stage=3, zero={"reduce_bucket_size": 0})
    assert by_parameter(stage=1, zero={"reduce_bucket_size": "much"}) == by_parameter(stage=1, zero={})


def test_validation_has_a_copy_in_the_precision_of_training_where_activations_were() -> None:
    def plan(activations: int, **layout: object) -> Plan:
        made = Layout(**{"stage": 3, "ranks": 8, "zero": {"reduce_bucket_size": 0}, **layout})  # type: ignore[arg-type]
        return plan_for(
            Counts(lambda tokens, recompute: Work(tokens, activations, 0, 1), 1000, 200), made, 512, (0, 0)
        )

    small, large = plan(100), plan(10_000)
    assert small.parts["validation"] == large.parts["validation"] == 2 * 1200
    assert large.total - small.total == 10_000 - 2400
    assert plan(100, bits=32).parts["validation"] == 4 * 1200
    files = 4 * 1200 + 8 * 1000
    assert small.host == 2 * 1200 + files + 4 * 200, "the copy in 16 bit, a checkpoint, and frozen weights"
    assert small.host_ranks == 8 and small.host_sum == 8 * (4 * 1200 + 4 * 200), "the model in fp32 on each rank"
    fp32 = plan(100, bits=32, ranks=16)
    assert fp32.host_ranks == 8 and fp32.host_sum == 8 * (4 * 1200 + 4 * 200) + files
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    assert plan(100, zero=offload).host == small.host + 16 * 1000 // 8 + 2 * 1200 // 8


def test_advice_is_the_fastest_plan_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(tokens: int, recompute: RecomputedLayers) -> Work:
        share = sum(0.0 if every == 0 else 0.5 / every for every in recompute)
        return Work(tokens, int(tokens * 1e6 * (1.0 - 0.9 * share)), 0, int(tokens * 1e9 * (1.0 + share / 3)))

    zero = {stage: {"reduce_bucket_size": 0} for stage in (1, 2)}
    zero[3] = {"reduce_bucket_size": 0, "stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}

    monkeypatch.setattr(planner, "load_ds_config", lambda name: {"zero_optimization": zero[int(name[-1])]})

    def advised(gib: float) -> tuple[int | None, RecomputedLayers, int, bool]:
        gpu, counts = Gpu("some", gib, 100.0), Counts(work, 300_000_000, 0)
        plan = Planner(counts, EngineConfig(), BatchConfig(), Layout(None, 8)).advised(gpu)
        assert gpu.usable_gib == pytest.approx((gib - 1.0) * 0.94)
        assert plan.fits(gpu.usable_gib) == (plan.total <= gpu.usable_gib * GIB)
        return plan.layout.stage, plan.recompute, plan.micro_tokens, plan.fits(gpu.usable_gib)

    assert advised(80.0) == (1, (0, 0), 4096, True)
    assert advised(3.0) == (2, (1, 1), 4096, True), "recomputation costs less than ZeRO-3"
    stage, recompute, tokens, fits = advised(5.0)
    assert fits and (stage != 1 or any(recompute) or tokens < 4096), "a plan for a small GPU must save memory"
    assert not advised(1.1)[3]


def test_micro_batches_of_auto_hold_the_longest_sentence() -> None:
    batch = BatchConfig(micro_tokens="auto", update_tokens=1000)
    made = Planner(
        Counts(lambda tokens, recompute: Work(tokens, 0, 0, 1), 1000, 0), EngineConfig(), batch, Layout(None, 8)
    )
    sizes = [made.as_set(1.0, longest).micro_tokens for longest in (0, 512, 600, 70_000)]
    assert sizes == [512, 512, 1024, 65536], "although an update leaves 125 tokens for a GPU"
    gpu = Gpu("some", 40.0, 100.0)
    assert [made.advised(gpu, longest).micro_tokens for longest in (0, 512, 600, 70_000)] == sizes


def test_a_gpu_is_known_by_the_name_of_its_device() -> None:
    devices = ["Tesla V100-SXM2-16GB", "NVIDIA A100-SXM4-40GB", "NVIDIA GH200 480GB", "NVIDIA RTX A1000", "H20"]
    kinds = [kind and kind.name for kind in map(kind_of, devices)]
    assert kinds == ["v100-32g", "a100-80g", "h200-141g", None, None]
    assert kind_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb") is None, "a slice, of unknown peak"
    cards = {name: kind_of(name) for name in ("Tesla V100-PCIE-32GB", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3")}
    assert [kind and kind.tflops for kind in cards.values()] == [112.0, 756.0, 989.0]


@pytest.mark.parametrize(
    ("ranks", "tensor_ranks", "gib", "phrases"),
    [
        (16, 1, 80.0, []),
        (64, 1, 80.0, ["32,768 tokens leaves 512 for", "batch.update_tokens=131072", "at most 16 GPUs"]),
        (64, 2, 80.0, ["32,768 tokens leaves 1,024 for", "batch.update_tokens=65536", "at most 32 GPUs"]),
        (8, 1, 2.9, ["micro-batches have 1,024 tokens"]),
    ],
)
def test_few_tokens_for_a_gpu_are_noted(
    ranks: int, tensor_ranks: int, gib: float, phrases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(tokens: int, recompute: RecomputedLayers) -> Work:
        return Work(tokens, int(tokens * 1e6), 0, int(tokens * 1e9))

    gpu, counts = Gpu("some", gib, 100.0), Counts(work, 100_000_000, 0)
    monkeypatch.setattr(planner, "load_ds_config", lambda name: {"zero_optimization": {"reduce_bucket_size": 0}})
    plan = Planner(counts, EngineConfig(), BatchConfig(), Layout(None, ranks, tensor_ranks)).advised(gpu)
    notes = notes_on(plan, 32768, gpu)
    assert plan.fits(gpu.usable_gib) and len(notes) == min(1, len(phrases))
    assert all(phrase in notes[0] for phrase in phrases)


@pytest.mark.parametrize(
    ("chooser", "checkpoints", "named"), [("auto", 11, ", validation.late_keep=4"), ("loss", 7, ""), ("bleu", 7, "")]
)
def test_disk_space_is_for_checkpoints_that_await_late_scores(
    capsys: pytest.CaptureFixture[str], chooser: str, checkpoints: int, named: str
) -> None:
    late = ["validation.metrics=[late:/opt/comet,bleu]", f"validation.best_by={chooser}", "validation.late_keep=4"]
    words = ["plan", "--recipe", "deep_decoder_base_30", *NARROW, *SHALLOW, *late, "--vocab-size", "500"]
    assert main([*words, "layer.drop_depth=1"]) == 0
    assert f"training.keep_last=5, the best one{named} and the one being written" in capsys.readouterr().out
    assert main([*words, "layer.drop_depth=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["disk_bytes"] == checkpoints * found["checkpoint_bytes"]


@pytest.mark.long
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    own = [*NARROW, *SHALLOW, "layer.drop_depth=1", "objective.ald.every=5", "training.max_updates=1000"]
    own += ["layer.drop_ratio=0.5", "growth.at=[600]", "growth.decoder_layers=[1]"]
    words = ["plan", "--recipe", "deep_decoder_base_30", *own, "--vocab-size", "500"]
    assert main([*words, "--gpu", "v100-16g", "--num-gpus", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] > 0 and found["advised"]["fits"]
    *parts, total = found["advised"]["bytes"].values()
    assert total == sum(parts) - parts[-1], "activations are larger than the copy for validation"
    assert any(word.startswith("batch.micro_tokens=") for word in found["advice"])
    assert found["checkpoint_bytes"] == 12 * found["parameters"]
    assert found["disk_bytes"] == 7 * found["checkpoint_bytes"], "five newest, the best, and one being written"
    assert found["save_seconds"] == pytest.approx(found["checkpoint_bytes"] / 300e6)
    assert [link["link"] for link in found["communication"]["links"]] == ["NVLink", "InfiniBand", "PCIe"]
    assert found["communication"]["estimated"] and found["communication"]["bytes"]["micro_batches"] == 1
    assert found["notes"] == [], "4,096 tokens for a GPU are enough"
    config, vocabulary = load_config("deep_decoder_base_30", settings=own), Vocabulary(500)
    small, large = (
        sum(count_rates(build_meta_model(of, vocabulary), build_objective(of, vocabulary), vocabulary))
        for of in (config.for_update(600), config)
    )
    assert found["flops_per_token"] == large and found["tokens_per_s"] == pytest.approx(8 * 0.3 * 125e12 / large)
    flops = config.batch.update_tokens * (600 * small + 400 * large)
    assert found["gpu_days"] == pytest.approx(flops / (0.3 * 125e12) / 86400)
    assert main([*words, "--gpu", "some:0.5", "--num-gpus", "8", "engine.tensor_parallel=2"]) == 0
    text = capsys.readouterr().out
    assert "no plan fits" in text and "GFLOP" in text and "tokens/s" not in text and "GPU-days" not in text
    assert main([*words, "--gpu", "v100-16g", "--num-gpus", "3", "engine.tensor_parallel=2"]) == 2
    assert "engine.tensor_parallel is 2, which does not divide --num-gpus 3" in capsys.readouterr().err


@pytest.mark.long
def test_a_plan_with_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = str(prepare_sample(tmp_path, 300, train=100, valid=5, test=5))
    config = tmp_path / "own.yaml"
    config.write_text("batch: {update_tokens: 600, micro_tokens: 300}\n", encoding="utf-8")
    words = ["plan", "--config", str(config), "--data", data, *NARROW, *SHALLOW]
    size = DataDirectory.open(Path(data)).meta.vocabulary_size

    def said(*more: str, status: int = 0) -> str:
        assert main([*words, *more]) == status
        found = capsys.readouterr()
        return found.err if status else found.out

    capsys.readouterr()
    text = said()
    assert f"own.yaml with a vocabulary of {size:,}: " in text and "padded: " in text and "packed: " in text
    assert f"--vocab-size is 999, but that of --data is {size:,}" in said("--vocab-size", "999", status=2)
    assert "batch.layout=auto on v100-16g in fp16 is p" in said("--gpu", "v100-16g")
    slow = "there attention copies each sentence into a padded row"
    assert slow not in said("--gpu", "v100-16g", "batch.layout=packed")
    assert slow in said("--gpu", "v100-16g", "batch.layout=packed", "engine.precision=fp32")
    monkeypatch.setattr(planner, "_MICRO_TOKENS", (8, 512, 4096))
    found = json.loads(said("--gpu", "v100-16g", "--num-gpus", "80", "batch.micro_tokens=auto", "--json"))
    sizes = [found[which]["micro_tokens"] for which in ("as_set", "advised")]
    assert sizes == [512, 512], "the longest sentence fits, although an update leaves 7 tokens for a GPU"


@pytest.mark.long
@pytest.mark.parametrize(
    ("gpus", "given", "engine"),
    [
        (1, ["engine.ds_config=zero3_offload"], ["engine.name=plain", "engine.ds_config=null"]),
        (8, ["engine.name=plain"], ["engine.name=deepspeed", "engine.ds_config=zero1"]),
    ],
)
def test_the_settings_that_a_plan_prints_fit_those_given(
    gpus: int, given: list[str], engine: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*NARROW, *SHALLOW, "layer.drop_depth=1", "engine.recompute_encoder=1", *given]
    words = ["plan", "--recipe", "deep_decoder_base_30", *settings, "--vocab-size", "500", "--json"]
    assert main([*words, "--gpu", "a100-80g", "--num-gpus", str(gpus)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["as_set"]["zero_stage"] is None) == (gpus == 8)
    assert [word for word in found["advice"] if word.startswith(("engine.name=", "engine.ds_"))] == engine
    followed = load_config("deep_decoder_base_30", settings=[*settings, *found["advice"]])
    assert uses_deepspeed(followed.engine, gpus) == (gpus == 8)
    recompute = [followed.engine.recompute_encoder, followed.engine.recompute_decoder]
    assert recompute == found["advised"]["recompute"] == [0, 0]


@pytest.mark.long
def test_recomputation_by_a_memory_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[tuple[int, RecomputedLayers], Work] = {}

    def counted_once(*arguments: Any) -> Work:
        key = arguments[3:5]
        if key not in counts:
            counts[key] = count_update(*arguments)
        return counts[key]

    monkeypatch.setattr(counting, "count_update", counted_once)  # all plans are of the same model
    auto = ["engine.recompute_encoder=auto", "engine.recompute_decoder=auto"]
    alone = World(0, 1, 0, torch.device("cpu"))

    def chosen(*settings: str) -> tuple[int, int]:
        config = load_config("transformer_base", settings=[*NARROW, "batch.micro_tokens=8192", *settings])
        return resolve_memory(config, V, EngineSettings("fp32", AdamConfig()), alone, DEFAULT)[0]

    assert chosen("engine.recompute_decoder=2") == (0, 2)
    # Counted for this model: none takes 0.95 GiB, the encoder alone 0.64, the decoder alone 0.53, all 0.22.
    assert chosen(*auto, "engine.memory_gib=64") == (0, 0)
    assert chosen(*auto, "engine.memory_gib=0.65") == (1, 0), "the encoder is cheaper to recompute"
    assert chosen(*auto, "engine.memory_gib=0.55") == (0, 1)
    assert chosen(*auto, "engine.memory_gib=0.22") == (1, 1)
    assert chosen(*auto, "engine.memory_gib=0.1") == (1, 1), "nothing fits; this takes the least"
    assert chosen(auto[0], "engine.recompute_decoder=1", "engine.memory_gib=0.55") == (0, 1)

    def tokens(*settings: str, recorded: int | None = None) -> int:
        config = load_config("transformer_base", settings=[*NARROW, "batch.micro_tokens=auto", *settings])
        return resolve_memory(config, V, EngineSettings("fp32", AdamConfig()), alone, DEFAULT, recorded)[1]

    assert tokens() == 4096, "a CPU has the default"
    assert tokens("engine.memory_gib=64") == 65536, "an update is one micro-batch"
    assert tokens("engine.memory_gib=0.1") == 512
    assert tokens("engine.memory_gib=0.6") == 4096
    assert tokens("engine.memory_gib=64", "batch.update_tokens=3000") == 4096, "an update has no more"
    assert tokens("engine.memory_gib=64", recorded=1024) == 1024, "a resumed run keeps its own"
    with pytest.raises(ConfigError, match=r"set engine\.memory_gib"):
        chosen(*auto)
    for wrong in ("-1", "some", "0.5"):
        with pytest.raises(ConfigError, match=r"engine\.recompute_decoder is "):
            load_config("transformer_base", settings=[f"engine.recompute_decoder={wrong}"])


def simulated_goodput(plan: IntervalPlan, interval_s: float, failures: int) -> float:
    """Share of time in surviving updates and checkpoints over some Poisson failures; they strike restarts, too."""
    random, useful, total = Random(7), 0.0, 0.0
    for _ in range(failures):
        alive = random.expovariate(1.0 / plan.mtbf_s)
        total += alive
        segment = interval_s + plan.saving_s
        useful += max(0.0, alive - plan.restart_s) // segment * segment
    return useful / total


@pytest.mark.parametrize(("saving_s", "restart_s", "mtbf_s"), [(5.0, 60.0, 10800.0), (20.0, 30.0, 600.0)])
def test_checkpoints_at_the_planned_interval_lose_least(saving_s: float, restart_s: float, mtbf_s: float) -> None:
    plan = IntervalPlan(mtbf_s, saving_s, restart_s)
    interval = plan.interval_s
    assert plan.goodput() == pytest.approx(simulated_goodput(plan, interval, 100_000), abs=0.003)

    def trained(seconds: float) -> float:
        return seconds / expected_seconds(seconds, saving_s, restart_s, mtbf_s)

    best = max((interval * factor / 100 for factor in range(20, 500)), key=trained)
    assert interval == pytest.approx(best, rel=0.02), "the optimum of Daly's expected time"
    assert trained(interval) >= trained(young_interval(saving_s, mtbf_s)), "first order is not better"
    for factor in (0.3, 3.0):
        shares = [simulated_goodput(plan, s, 20_000) * s / (s + saving_s) for s in (interval, factor * interval)]
        assert shares[0] > shares[1]


def test_times_of_a_run_are_those_of_its_ledger() -> None:
    def line(update: int, updates: float = 0.0, saving: float = 0.0, imports: float = 0.0, **begins: bool) -> Entry:
        seconds: Any = {"updates": updates, "saving": saving, "imports": imports, "restore": imports}
        return Entry(time=1.0, update=update, seconds={} if begins else seconds, **begins)

    first = [line(0, begins=True), line(10, 20.0, 0.5, 4.0), line(15, 30.0, 0.5, 4.0), line(20, 40.0, 1.5, 4.0)]
    grown = [line(20, begins=True), line(20)]  # in the same process
    measured = MeasuredTimes.of([*first, *grown, line(10, begins=True), line(20, 20.0, 3.0, 6.0)])
    assert measured == MeasuredTimes(saving_s=1.0, restart_s=10.0, update_s=2.0)
    assert MeasuredTimes.of(first[:1]) == MeasuredTimes.of([]) == MeasuredTimes(None, None, None)


def test_a_plan_proposes_how_often_to_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--recipe", "sample_small", "--vocab-size", "500", "--json"]
    assert main([*words, "--mtbf", "3h", "--restart-time", "60s"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["saving"]["saving_s"] == plan["save_seconds"] and plan["saving"]["restart_s"] == 60.0
    assert plan["saving"]["interval_s"] == daly_interval(plan["save_seconds"], 10_800.0)
    lines = [
        '{"time": 1, "update": 0, "begins": true}',
        '{"time": 9, "update": 100, "seconds": {"imports": 3.0, "updates": 50.0, "saving": 0.25}}',
    ]
    (tmp_path / "goodput.jsonl").write_text("\n".join(lines))
    assert main([*words, "--mtbf", "3h", "--run", str(tmp_path)]) == 0
    saving = json.loads(capsys.readouterr().out)["saving"]
    assert (saving["saving_s"], saving["restart_s"]) == (0.25, 3.0)
    assert saving["save_every"] == round(daly_interval(0.25, 10_800.0) / 0.5)
    assert main([*words, "--mtbf", "3h", "--run", str(tmp_path / "none")]) == 2
    assert "no checkpoint in" in capsys.readouterr().err
