"""Speed and memory of training: engines, models and precisions on the same synthetic corpus.

Each row builds engine and loader as `train` does and makes updates of 32,768 target tokens: some to warm up, then
some that are timed. In the packed layout the clock starts when every shape has run twice, so that nothing is compiled
or chosen while it runs; `compiled` counts what torch.compile compiled nevertheless. `data_wait` is the share of the
time in which the program waited for the loader. `kernel_ms` and `idle` come from a profile of a few micro-batches:
the time in kernels, and the share of the time without a profiler in which the GPU had none to run. `kernels` are
those that were chosen for the precision. `planned_gib` is what `plan` computes for the largest micro-batch that ran.

To measure something else, add a line to `VARIANTS`; `--only` takes the names in its first column.
"""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from harness import Bench, Skipped, Values, peak_flops, write_corpus
from timing import seconds_of as wall_seconds
from timing import synchronise
from torch.profiler import ProfilerActivity, profile

from deepspeed_nmt.build import build_kernels, build_meta_model, build_model, build_objective
from deepspeed_nmt.config import RunConfig, load_config
from deepspeed_nmt.core.batch import Batch
from deepspeed_nmt.core.objective import TrainModule
from deepspeed_nmt.core.vocabulary import Vocabulary
from deepspeed_nmt.data.corpus import Corpus
from deepspeed_nmt.data.loader import Prefetcher, TrainLoader, Update, collate
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine import build_engine
from deepspeed_nmt.engine.contract import Engine
from deepspeed_nmt.engine.settings import EngineSettings, resolve_engine, uses_deepspeed
from deepspeed_nmt.kernels.precision import DTYPES, capability_of
from deepspeed_nmt.parallel.world import World, join_world, leave_world
from deepspeed_nmt.planning.counting import Counts, count_rates
from deepspeed_nmt.planning.memory import GIB
from deepspeed_nmt.run.batches import layout_on
from deepspeed_nmt.run.plans import make_planner
from deepspeed_nmt.train.log import Workload

PAIRS, WARMUP, TIMED = 320_000, 30, 50
LEAST_WARMUP, LEAST_TIMED = 2, 8
"""Updates that are made even if the time of a row is over. Fewer that are timed would say nothing."""
PROFILED = 4
"""Micro-batches in the profile."""
COMMON = ("batch.update_tokens=32768", "batch.micro_tokens=16384", "optimizer.clip_norm=1.0")
TINY = (
    *("model.dim=16", "model.ffn_dim=32", "model.heads=2", "model.encoder_layers=2", "model.decoder_layers=2"),
    *("batch.update_tokens=300", "batch.micro_tokens=200"),
)


@dataclass(frozen=True)
class Variant:
    """One row of the table.

    Attributes:
        row: name of the row.
        name: of the model, for the table.
        recipe: recipe that the settings change.
        precision: of the forward and backward pass.
        settings: further settings, which the table shows.
        tiny: further settings of a rehearsal.
    """

    row: str
    name: str
    recipe: str
    precision: str = "bf16"
    settings: tuple[str, ...] = ()
    tiny: tuple[str, ...] = ()

    def config(self, tiny: bool) -> RunConfig:
        """Return the settings of the run."""
        size = (*TINY, *self.tiny) if tiny else ()
        precision = f"engine.precision={self.precision}"
        return load_config(self.recipe, settings=[*COMMON, precision, *self.settings, *size])

    def labels(self, tiny: bool) -> dict[str, str]:
        """Return the first columns of the table."""
        return {"row": self.row, "model": self.name, "precision": self.precision, "settings": self.label(tiny)}

    def label(self, tiny: bool) -> str:
        """Return the settings that run, for the table; a rehearsal may replace some."""
        wanted = [word.split("=", 1) for word in self.settings]
        replaced = dict(word.split("=", 1) for word in self.tiny) if tiny else {}
        words = [f"{key}={replaced.get(key, value)}" for key, value in wanted]
        if missing := [f"{key}={value}" for key, value in wanted if replaced.get(key, value) != value]:
            words.append(f"({' '.join(missing)} is not rehearsed)")
        return " ".join(words)


BIG = Variant("big", "BIG 6+6", "transformer_big")
PADDED = Variant("padded", "BIG 6+6", "transformer_big", settings=("batch.layout=padded",))
DEEP = "deep_decoder_big_54"
# A rehearsal on a CPU has other values: compilation takes minutes there, and `auto` is padded, so packed is tried.
COMPILED, INTERPRETED = ("engine.compile=layers",), ("engine.compile=off",)
VARIANTS = (  # the most wanted first, in case the time runs out, and compiled ones last, which take long to begin
    BIG,
    replace(PADDED, tiny=("batch.layout=packed",)),
    Variant("deep", "BIG 27+27", f"{DEEP}_plain_stabilised"),
    Variant("deep-methods", "BIG 27+27, CAD DDR ALD", f"{DEEP}_stabilised", tiny=("layer.drop_depth=1",)),
    Variant("fp16", "BIG 6+6", "transformer_big", "fp16"),
    replace(PADDED, row="padded-0.25", settings=("batch.layout=padded", "batch.max_padding=0.25")),
    replace(BIG, row="zero1", settings=("engine.name=deepspeed", "engine.ds_config=zero1")),
    Variant("base", "BASE 6+6", "transformer_base"),
    replace(BIG, row="compiled", settings=COMPILED, tiny=INTERPRETED),
    Variant("deep-compiled", "BIG 27+27", f"{DEEP}_plain_stabilised", settings=COMPILED, tiny=INTERPRETED),
)


@dataclass(frozen=True)
class Training:
    """A run that is ready to make updates.

    Attributes:
        config: settings.
        settings: of the engine, resolved.
        vocabulary: of the corpus.
        world: this process.
        engine: carries out the updates.
        loader: of the synthetic corpus.
    """

    config: RunConfig
    settings: EngineSettings
    vocabulary: Vocabulary
    world: World
    engine: Engine
    loader: TrainLoader

    @property
    def backends(self) -> Values:
        """The columns that say which layout and kernels were chosen."""
        kernels = build_kernels(self.config).describe(self.world.device, DTYPES[self.settings.precision])
        if self.config.engine.compile == "layers":
            kernels = f"torch.compile; outside of layers: {kernels}"
        return {"layout": self.loader.config.layout, "kernels": kernels}

    def update(self, update: Update) -> None:
        """Make an update."""
        self.engine.update(update.micro_batches, update.target_tokens, 1e-5)


@contextmanager
def training(config: RunConfig, corpus: Corpus, bench: Bench) -> Iterator[Training]:
    """Build engine and loader of a run, and free them at the end."""
    device, vocabulary = bench.device, bench.vocabulary
    deepspeed = uses_deepspeed(config.engine, 1)
    world = join_world(device.type) if deepspeed else World(0, 1, 0, device)
    try:
        settings = resolve_engine(config.engine, config.optimizer, world)
        model = build_model(config, vocabulary, build_kernels(config))
        if config.engine.compile == "layers":
            model.compile_layers()
        module = TrainModule(model, build_objective(config, vocabulary)).to(device)
        dummy = collate(corpus, np.empty(0, dtype=np.int64), vocabulary)
        engine = build_engine(settings, module, world, dummy)
        layout = layout_on(config, settings.precision, capability_of(device))
        batch = config.batch.model_copy(update={"layout": layout})
        loader = TrainLoader.of_corpus(corpus, batch, config.training.seed, 0, 1, vocabulary)
        yield Training(config, settings, vocabulary, world, engine, loader)
        engine.close()
    finally:
        if deepspeed:
            leave_world()


@dataclass
class Speed:
    """Updates that were timed.

    Attributes:
        seconds: from the first to the last.
        updates: number of updates.
        source_tokens: without padding.
        target_tokens: without padding.
        micro_batches: number of micro-batches.
        positions: source and target positions, with padding.
        shapes: shapes of micro-batches, with those that warmed up.
        largest: padded tokens of the largest of these.
        waited: seconds spent waiting for the loader.
        compiled: parts of the model that torch.compile compiled in this time.
    """

    seconds: float = 0.0
    updates: int = 0
    source_tokens: int = 0
    target_tokens: int = 0
    micro_batches: int = 0
    positions: int = 0
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    largest: int = 0
    waited: float = 0.0
    compiled: int = 0

    def see(self, update: Update) -> None:
        """Record the sizes of an update's micro-batches."""
        for batch in update.micro_batches:
            self.shapes.update([(*batch.source_BS.shape, *batch.target_input_BT.shape)])
            self.largest = max(self.largest, batch.padded_tokens)

    def values(self) -> Values:
        """Return the columns of the table."""
        tokens = self.source_tokens + self.target_tokens
        return {
            "updates": self.updates,
            "tokens_per_s": self.target_tokens / self.seconds,
            "update_ms": 1e3 * self.seconds / self.updates,
            "micro_batches": self.micro_batches / self.updates,
            "shapes": len(self.shapes),
            "padding": 1.0 - tokens / self.positions,
            "data_wait": self.waited / self.seconds,
            "compiled": self.compiled,
        }


def compiled_graphs() -> int:
    """Return the number of graphs that torch.compile has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["stats"]["unique_graphs"]) if dynamo is not None else 0


def timed(make: Callable[[Update], None], loader: TrainLoader, bench: Bench, budget_s: float) -> Speed:
    """Time updates, with the loader's work in the background as in training.

    Args:
        make: makes an update.
        loader: of the updates.
        bench: says how many.
        budget_s: seconds after which no further update is made, but for the least number; a third of them warms up,
            or two thirds if not every shape of packed rows has run twice.
    """
    warmup, count = (1, 2) if bench.tiny else (WARMUP, TIMED)
    speed = Speed()
    packed = loader.config.layout == "packed"
    prefetcher = Prefetcher(loader.updates(Cursor(), 1))
    try:
        started = time.monotonic()
        for number in itertools.count(1):
            update = prefetcher.next()
            make(update)
            speed.see(update)
            synchronise(bench.device)
            spent = time.monotonic() - started
            known = not packed or min(speed.shapes.values()) > 1
            enough = number >= warmup or (number >= LEAST_WARMUP and spent > budget_s / 3)
            if (enough and known) or (number >= LEAST_WARMUP and spent > budget_s * 2 / 3):
                break
        least = min(LEAST_TIMED, count)
        compiled, timer = compiled_graphs(), time.perf_counter()
        while speed.updates < count and (speed.updates < least or time.monotonic() - started < budget_s):
            begun = time.perf_counter()
            update = prefetcher.next()
            speed.waited += time.perf_counter() - begun
            make(update)
            speed.updates += 1
            speed.micro_batches += len(update.micro_batches)
            speed.source_tokens += sum(batch.source_tokens for batch in update.micro_batches)
            speed.target_tokens += update.target_tokens
            speed.positions += update.padded_positions
            speed.see(update)
        synchronise(bench.device)
        speed.seconds = time.perf_counter() - timer
        speed.compiled = compiled_graphs() - compiled
    finally:
        prefetcher.close()
    return speed


_GROUPS = (  # the first that matches counts
    ("attention", r"flash|fmha|sdpa|attention"),
    ("optimizer", r"adam|multi_tensor|foreach|lpnorm"),
    ("products", r"gemm|gemv|cutlass|nvjet|cublas|xmma|wgmma|aten::(mm|addmm|bmm|baddbmm)$"),
    ("copies", r"memcpy|memset|copy"),
)


def profiled(make: Callable[[], object], device: torch.device) -> Values:
    """Return the time in kernels, the idle share, and each group's share of the kernels' time."""
    make()  # compiles, and plans for these shapes
    wall = wall_seconds(make, device)
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        make()
        synchronise(device)
    seconds: dict[str, float] = {}
    launches = 0
    for event in found.events():
        # Annotations such as that of an optimizer's step span the kernels that they cover.
        if on_gpu == (event.device_type == torch.autograd.DeviceType.CUDA) and not getattr(
            event, "is_user_annotation", False
        ):
            spent = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            named = (group for group, pattern in _GROUPS if re.search(pattern, event.name.lower()))
            group = next(named, "other")
            seconds[group] = seconds.get(group, 0.0) + 1e-6 * spent
            launches += 1
    total = sum(seconds.values())
    shares = {group: seconds.get(group, 0.0) / max(total, 1e-9) for group in [*dict(_GROUPS), "other"]}
    idle = {"idle": max(0.0, 1.0 - total / wall)} if on_gpu else {}  # a CPU's operations overlap the profiler's work
    return {"kernel_ms": 1e3 * total, **idle, "launches": launches, **shares}


def utilisation(run: Training, speed: Speed) -> float | None:
    """Return the MFU; None if the peak of the device is not known."""
    peak = peak_flops(run.world.device)
    if peak is None:
        return None
    kernels = build_kernels(run.config).planned_for(torch.cuda.get_device_capability(run.world.device))
    model, objective = (
        build_meta_model(run.config, run.vocabulary, kernels),
        build_objective(run.config, run.vocabulary),
    )
    rates = count_rates(model, objective, run.vocabulary)
    workload = Workload(rates.source, rates.target, peak)
    return workload.utilisation(speed.source_tokens, speed.target_tokens, speed.seconds)


def planned_gib(run: Training, largest: int, counted: dict[str, Counts]) -> float:
    """Return the memory that the planner expects, with micro-batches of this many tokens; see `make_planner`."""
    batch = run.config.batch.model_copy(update={"micro_tokens": largest})
    config = run.config.model_copy(update={"batch": batch})
    kernels = build_kernels(config).planned_for(capability_of(run.world.device))
    return make_planner(config, run.vocabulary, run.settings, 1, kernels, counted).as_set(float("inf")).total / GIB


def sample_of(update: Update, bench: Bench) -> tuple[list[Batch], int]:
    """Return the first micro-batches of an update, for a profile, and their target tokens."""
    chosen = update.micro_batches[: 1 if bench.tiny else PROFILED]
    return chosen, sum(batch.target_tokens for batch in chosen)


def measure(
    config: RunConfig, corpus: Corpus, bench: Bench, budget_s: float, counted: dict[str, Counts]
) -> Iterator[Values]:
    """Train for a while, and yield the columns of the table, speed first."""
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    with training(config, corpus, bench) as run:
        yield run.backends
        speed = timed(run.update, run.loader, bench, budget_s)
        yield speed.values()
        if bench.on_gpu:
            peak, reserved = (
                torch.cuda.max_memory_allocated(bench.device),
                torch.cuda.max_memory_reserved(bench.device),
            )
            yield {"peak_gib": peak / GIB, "reserved_gib": reserved / GIB}
        yield {"mfu": utilisation(run, speed)}
        yield {"planned_gib": planned_gib(run, speed.largest, counted)}
        sample, tokens = sample_of(next(run.loader.updates(Cursor(), 1)), bench)
        yield profiled(lambda: run.engine.update(sample, tokens, 1e-5), bench.device)


def run(bench: Bench) -> None:
    """Measure all variants."""
    with tempfile.TemporaryDirectory() as directory:
        corpus = write_corpus(Path(directory), 400 if bench.tiny else PAIRS, bench.vocabulary)
        counted: dict[str, Counts] = {}
        wanted = [each for each in VARIANTS if bench.wants(**each.labels(bench.tiny))]
        for number, variant in enumerate(wanted):
            budget = bench.seconds_left / (len(wanted) - number)

            def one(variant: Variant = variant, budget: float = budget) -> Iterator[Values]:
                if variant.precision == "bf16" and bench.half == "fp16":
                    raise Skipped("this GPU has no bf16")
                return measure(variant.config(bench.tiny), corpus, bench, budget, counted)

            bench.measure(one, **variant.labels(bench.tiny))
