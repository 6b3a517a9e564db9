"""Speed and memory of training: engines, models and precisions on the same synthetic corpus.

Each row builds engine and loader as `train` does and makes updates of 32,768 target tokens: some to warm up, then
some that are timed. In the packed layout the clock starts when every shape has run twice, so that nothing is compiled
or chosen while it runs; `compiled` counts what torch.compile compiled nevertheless. `data_wait` is the share of the
time in which the program waited for the loader. `kernel_ms` and `idle` come from a profile of a few micro-batches:
the time in kernels, and the share of the time without a profiler in which the GPU had none to run. `kernels` are
those that were chosen for the precision. `planned_gib` is what `plan` computes for the largest micro-batch that ran.

`micro_tokens` is the size of a micro-batch. Where a row names none, it is the largest power of two up to 16,384 that
fits the GPU's memory by the plan. Rows that end in `-4096` have the default of 4,096 tokens.

To measure something else, add a line to `VARIANTS`; `--only` takes the names in its first column.
"""

from __future__ import annotations

import itertools
import os
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
from harness import NO_KERNELS, Bench, Skipped, Values, peak_flops, write_corpus
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
from deepspeed_nmt.kernels.precision import DTYPES, Capability, capability_of
from deepspeed_nmt.parallel.world import World, join_world, leave_world
from deepspeed_nmt.planning.counting import Counts, count_rates
from deepspeed_nmt.planning.gpus import usable_gib
from deepspeed_nmt.planning.memory import GIB
from deepspeed_nmt.run.batches import layout_on
from deepspeed_nmt.run.plans import make_planner
from deepspeed_nmt.train.log import Workload

PAIRS, WARMUP, TIMED = 160_000, 30, 50
LEAST_WARMUP, LEAST_TIMED = 2, 8
"""Updates that are made even if the time of a row is over. Fewer that are timed would say nothing."""
PROFILED, NAMED = 4, 12
"""Most micro-batches in the profile, and kernels that are named."""
MICRO_TOKENS = (65536, 32768, 16384, 8192, 4096, 2048, 1024)
"""Sizes of micro-batches, of which the largest that fits is measured."""
DEFAULT_TOKENS, TINY_TOKENS = 4096, 200
COMMON = ("batch.update_tokens=32768", "optimizer.clip_norm=1.0")
TINY = (
    *("model.dim=16", "model.ffn_dim=32", "model.heads=2", "model.encoder_layers=2", "model.decoder_layers=2"),
    *("batch.update_tokens=300", f"batch.micro_tokens={TINY_TOKENS}"),
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
        micro_tokens: of a micro-batch; None for as many as fit.
        more_tokens: tokens that the vocabulary has besides those of the corpus.
    """

    row: str
    name: str
    recipe: str
    precision: str = "bf16"
    settings: tuple[str, ...] = ()
    tiny: tuple[str, ...] = ()
    micro_tokens: int | None = None
    more_tokens: int = 0

    def config(self, tiny: bool) -> RunConfig:
        """Return the settings of the run, with the largest micro-batches that there are if any may be taken."""
        size = (*TINY, *self.tiny) if tiny else ()
        tokens = f"batch.micro_tokens={self.micro_tokens or MICRO_TOKENS[0]}"
        precision = f"engine.precision={self.precision}"
        return load_config(self.recipe, settings=[*COMMON, tokens, precision, *self.settings, *size])

    def default(self) -> Variant:
        """Return the same run with micro-batches of the default size."""
        return replace(self, row=f"{self.row}-{DEFAULT_TOKENS}", micro_tokens=DEFAULT_TOKENS)

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
BASE = Variant("base", "BASE 6+6", "transformer_base")
FLAGSHIP = "deep_decoder_big_54"
DEEP = Variant("deep", "BIG 27+27", f"{FLAGSHIP}_plain_stabilised")
METHODS = Variant("deep-methods", "BIG 27+27, CAD DDR ALD", f"{FLAGSHIP}_stabilised", tiny=("layer.drop_depth=1",))
# A rehearsal on a CPU has other values: compilation takes minutes there, and `auto` is padded, so packed is tried.
COMPILED, INTERPRETED = ("engine.compile=layers",), ("engine.compile=off",)
VARIANTS = (  # the most wanted first, in case the time runs out, and compiled ones last, which take long to begin
    BIG,
    replace(PADDED, tiny=("batch.layout=packed",)),
    DEEP,
    METHODS,
    BIG.default(),
    BASE.default(),
    DEEP.default(),
    METHODS.default(),
    replace(BIG, row="odd-vocabulary", more_tokens=1),
    replace(BIG, row="fp16", precision="fp16"),
    replace(PADDED, row="padded-0.25", settings=("batch.layout=padded", "batch.max_padding=0.25")),
    replace(BIG, row="zero1", settings=("engine.name=deepspeed", "engine.ds_config=zero1")),
    BASE,
    replace(BIG, row="compiled", settings=COMPILED, tiny=INTERPRETED),
    replace(DEEP, row="deep-compiled", settings=COMPILED, tiny=INTERPRETED),
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
        """The columns that say which layout, kernels and micro-batches were chosen."""
        kernels = build_kernels(self.config).describe(self.world.device, DTYPES[self.settings.precision])
        if self.config.engine.compile == "layers":
            kernels = f"torch.compile; outside of layers: {kernels}"
        batch = self.loader.config
        return {
            "vocabulary": self.vocabulary.size,
            "micro_tokens": batch.micro_tokens,
            "layout": batch.layout,
            "kernels": kernels,
        }

    def update(self, update: Update) -> None:
        """Make an update."""
        self.engine.update(update.micro_batches, update.target_tokens, 1e-5)


class Memory:
    """The planner's view of the memory of one device, with counts of models that variants share.

    Args:
        gib: memory of the device.
        capability: of the device; None for a CPU.
    """

    def __init__(self, gib: float, capability: Capability | None) -> None:
        self._gib, self._capability = gib, capability
        self._counts: dict[str, Counts] = {}

    @classmethod
    def of(cls, device: torch.device) -> Memory:
        """Return that of a device."""
        if device.type == "cuda":
            size = torch.cuda.get_device_properties(device).total_memory
        else:
            size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return cls(size / GIB, capability_of(device))

    def planned_gib(self, config: RunConfig, vocabulary: Vocabulary, settings: EngineSettings, tokens: int) -> float:
        """Return the memory that the planner expects, with micro-batches of this many tokens."""
        batch = config.batch.model_copy(update={"micro_tokens": tokens})
        config = config.model_copy(update={"batch": batch})
        kernels = build_kernels(config).planned_for(self._capability)
        planner = make_planner(config, vocabulary, settings, 1, kernels, self._counts)
        return planner.as_set(float("inf")).total / GIB

    def fitting_tokens(self, config: RunConfig, vocabulary: Vocabulary, settings: EngineSettings) -> int:
        """Return the tokens of the largest micro-batch, up to that of the settings, that fits.

        Raises:
            Skipped: if none fits.
        """
        most = config.batch.micro_tokens
        for tokens in [most, *(size for size in MICRO_TOKENS if size < most)]:
            if self.planned_gib(config, vocabulary, settings, tokens) <= usable_gib(self._gib):
                return tokens
        raise Skipped(f"micro-batches of {MICRO_TOKENS[-1]:,} tokens do not fit {self._gib:.1f} GiB")


@contextmanager
def training(variant: Variant, corpus: Corpus, bench: Bench, memory: Memory) -> Iterator[Training]:
    """Build engine and loader of a run, and free them at the end."""
    device, config = bench.device, variant.config(bench.tiny)
    vocabulary = replace(bench.vocabulary, size=bench.vocabulary.size + variant.more_tokens)
    deepspeed = uses_deepspeed(config.engine, 1)
    world = join_world(device.type) if deepspeed else World(0, 1, 0, device)
    try:
        settings = resolve_engine(config.engine, config.optimizer, world)
        layout = layout_on(config, settings.precision, capability_of(device))
        fixed = config.batch.micro_tokens if variant.micro_tokens else None
        tokens = fixed or memory.fitting_tokens(config, vocabulary, settings)
        batch = {"layout": layout, "micro_tokens": tokens}
        config = config.model_copy(update={"batch": config.batch.model_copy(update=batch)})
        model = build_model(config, vocabulary, build_kernels(config))
        if config.engine.compile == "layers":
            model.compile_layers()
        module = TrainModule(model, build_objective(config, vocabulary)).to(device)
        dummy = collate(corpus, np.empty(0, dtype=np.int64), vocabulary)
        engine = build_engine(settings, module, world, dummy)
        loader = TrainLoader.of_corpus(corpus, config.batch, config.training.seed, 0, 1, vocabulary)
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
    """Return the time in kernels, the idle share, the shares of groups of kernels, and the slowest kernels."""
    make()  # compiles, and plans for these shapes
    wall = wall_seconds(make, device)
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as found:
        make()
        synchronise(device)
    seconds, named = Counter[str](), Counter[str]()
    calls = Counter[str]()
    for event in found.events():
        # Annotations such as that of an optimizer's step span the kernels that they cover.
        if on_gpu == (event.device_type == torch.autograd.DeviceType.CUDA) and not getattr(
            event, "is_user_annotation", False
        ):
            spent = event.time_range.elapsed_us() if on_gpu else event.self_cpu_time_total
            groups = (group for group, pattern in _GROUPS if re.search(pattern, event.name.lower()))
            seconds[next(groups, "other")] += 1e-6 * spent
            named[event.name] += 1e-6 * spent
            calls[event.name] += 1
    launches, total = calls.total(), seconds.total()
    if on_gpu and not launches:
        raise RuntimeError(NO_KERNELS)
    shares = {group: seconds[group] / max(total, 1e-9) for group in [*dict(_GROUPS), "other"]}
    slowest = (f"{1e3 * spent:.2f} ms in {calls[name]} of {name[:90]}" for name, spent in named.most_common(NAMED))
    idle = {"idle": max(0.0, 1.0 - total / wall)} if on_gpu else {}  # a CPU's operations overlap the profiler's work
    return {"kernel_ms": 1e3 * total, **idle, "launches": launches, **shares, "slowest": "; ".join(slowest)}


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


def sample_of(update: Update, bench: Bench) -> tuple[list[Batch], int]:
    """Return the first micro-batches of an update, for a profile, and their target tokens."""
    chosen = update.micro_batches[: 1 if bench.tiny else PROFILED]
    return chosen, sum(batch.target_tokens for batch in chosen)


def measure(variant: Variant, corpus: Corpus, bench: Bench, budget_s: float, memory: Memory) -> Iterator[Values]:
    """Train for a while, and yield the columns of the table, speed first."""
    if bench.on_gpu:
        torch.cuda.reset_peak_memory_stats(bench.device)
    with training(variant, corpus, bench, memory) as run:
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
        yield {"planned_gib": memory.planned_gib(run.config, run.vocabulary, run.settings, speed.largest)}
        sample, tokens = sample_of(next(run.loader.updates(Cursor(), 1)), bench)
        yield profiled(lambda: run.engine.update(sample, tokens, 1e-5), bench.device)


def run(bench: Bench) -> None:
    """Measure all variants."""
    with tempfile.TemporaryDirectory() as directory:
        corpus = write_corpus(Path(directory), 400 if bench.tiny else PAIRS, bench.vocabulary)
        memory = Memory.of(bench.device)
        wanted = [each for each in VARIANTS if bench.wants(**each.labels(bench.tiny))]
        for number, variant in enumerate(wanted):
            budget = bench.seconds_left / (len(wanted) - number)

            def one(variant: Variant = variant, budget: float = budget) -> Iterator[Values]:
                if variant.precision == "bf16" and bench.half == "fp16":
                    raise Skipped("this GPU has no bf16")
                return measure(variant, corpus, bench, budget, memory)

            bench.measure(one, **variant.labels(bench.tiny))
