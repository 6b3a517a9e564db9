"""One rank of a world that trains a small model under several engines in turn.

Arguments: corpus directory, output file, methods with commas between them (a single one with "+mixture" for a mixture
of corpora), then engines (see deepspeed_nmt/parity.py; with "+r_drop" for R-Drop in place of all regularizers).
$TENSOR_RANKS ranks share a model; $MODEL has settings of the model in JSON, which override the method's own. If
$JOINED is 1, queries, keys and values are projected in one product, as on a GPU. The output is JSON: for each method
and engine the losses, gradient norms and all weights after some updates, and the same for a run that was probed,
stopped half-way, probed again and restored.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from deepspeed_nmt import parity as models
from deepspeed_nmt.build import build_model
from deepspeed_nmt.data.loader import TrainLoader, Update
from deepspeed_nmt.data.update_order import Cursor
from deepspeed_nmt.engine.contract import Engine, UpdateResult
from deepspeed_nmt.engine.hashes import digest_of
from deepspeed_nmt.errors import TrainingError
from deepspeed_nmt.kernels.choice import Kernels
from deepspeed_nmt.parallel.collectives import gather_lists
from deepspeed_nmt.parallel.world import World, join_world, leave_world
from deepspeed_nmt.parity import Saved, build, train
from deepspeed_nmt.registry import SelfTest
from deepspeed_nmt.train.faults import attribute, has_replicas
from deepspeed_nmt.train.growth import Grown
from tests.support import parity_loader

UPDATES = 8
STOPPED, RESUMED = 2, 4
GROWING = ("zero1", "zero2", "zero3")
REPEATS = 16  # a power of two, so that the factor on the loss is exact


def lost_in_sums(engine: Engine, update: Update) -> float:
    """Return the relative error of the gradient of equal micro-batches, compared with that of one of them.

    Adam's first moment is 0.1 g after the first update, and 0.09 g + 0.1 h after the second.
    """
    moments = []
    for repeats in (1, REPEATS):
        engine.update(update.micro_batches[:1] * repeats, update.target_tokens * repeats, 0.0)
        states = {state.name: state.states["exp_avg"].clone() for state in engine.state()}
        moments.append(states["decoder.layers.0.feed_forward.up_proj.weight"])
    g, h = 10 * moments[0], 10 * (moments[1] - 0.9 * moments[0])
    return float((h - g).norm() / g.norm())


def message_of_unequal_graphs(engine: Engine, update: Update, rank: int) -> str:
    """Return the message of an update in which rank 1 has the gradient of a bias before that of its weight."""
    alike = Kernels.linear

    def linear(
        self: Kernels, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        if bias is None:
            return alike(self, x, weight)
        return alike(self, x, weight) + bias if rank == 1 else alike(self, x, weight, bias.clone())

    Kernels.linear = linear  # type: ignore[method-assign]
    try:
        engine.update(update.micro_batches, update.target_tokens, 0.0)
    except TrainingError as error:
        return str(error)
    finally:
        Kernels.linear = alike  # type: ignore[method-assign]
    return ""


def before_the_step(engine: Engine, loader: TrainLoader, cursor: Cursor, world: World, directory: Path) -> Any:
    """Return what is known before the step of an update, and hashes of its gradients, made three times.

    The last time a gradient of rank 1 is damaged after its micro-batch was hashed.
    """
    update, file = next(loader.updates(cursor, 1)), directory / f"gradients-{world.rank}.jsonl"
    file.unlink(missing_ok=True)
    engine.hash_gradients(file)
    weights = digest_of(engine.module.parameters())
    same: list[bool] = []
    causes: list[str] = []

    def on_gradient(result: UpdateResult) -> None:
        same.append(digest_of(engine.module.parameters()) == weights)
        norms.append(result.grad_norm)
        if has_replicas(engine.module):
            again = lambda rank: next(loader.of_rank(rank).updates(cursor, 1)).micro_batches  # noqa: E731
            causes.append(attribute(engine.module, again, result, world, loader.corpora))

    norms: list[float] = []
    first = engine.update(update.micro_batches, update.target_tokens, 0.0, on_gradient=on_gradient)
    engine.update(update.micro_batches, update.target_tokens, 0.0)
    damaged = engine.module.model.get_parameter("decoder.layers.0.feed_forward.up_proj.bias")
    if world.rank == world.ranks - 1:
        damaged.register_hook(lambda gradient: gradient + 1.0)
    engine.update(update.micro_batches, update.target_tokens, 0.0)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    count = len(lines) // 3
    runs = gather_lists([[lines[:count], lines[count : 2 * count], lines[2 * count :]]], world)
    known = {"same": same, "norms": [*norms, first.grad_norm], "causes": causes, "hashes": runs}
    return {**known, "stays": stays(engine, update)}


def stays(engine: Engine, update: Update) -> bool:
    """Return True if an update with an infinite gradient leaves weights and optimizer states as they are."""

    def tensors() -> list[torch.Tensor]:
        return [tensor.clone() for state in engine.state() for tensor in (state.weight, *state.states.values())]

    before, result = tensors(), engine.update(update.micro_batches, 1e-42, 1e-3)
    return result.skipped and all(map(torch.equal, before, tensors()))


def loss_scales(engine_name: str, world: World, directory: Path, update: Update) -> list[Any]:
    """Return an engine's scalars at the end of a window, and the next two updates, without and with a resume.

    Of these are the loss scales, the norms, and by how much the first moment has grown since an update before. The
    third item is the scale after a resume after an overflow at a scale of 1.
    """

    def momentum() -> float:
        return float(max(state.states["exp_avg"].norm() for state in engine.state()))

    engine = build("vanilla", engine_name, world, directory)
    engine.update(update.micro_batches, update.target_tokens, 0.0)
    first = momentum()
    scaler = engine._scaler()  # type: ignore[attr-defined]
    scaler.cur_iter, scaler.last_overflow_iter, scaler.cur_hysteresis = scaler.scale_window, -1, 1
    saved, scalars = Saved(engine.state()), engine.scalars()
    found = []
    for resume in (False, True):
        if resume:
            engine = build("vanilla", engine_name, world, directory, weights=saved.weights)
            engine.restore(saved, replace(scalars, loss_scale=1.0, good_updates=0))
            least = engine.scalars().loss_scale
            engine.restore(saved, scalars)
        before = engine.scalars()
        results = [engine.update(update.micro_batches, update.target_tokens, 0.0) for _ in range(2)]
        known = [[result.loss_scale for result in results], [result.grad_norm for result in results]]
        found.append([vars(before), *known, momentum() / first])
        engine.close()
    return [*found, least]


def after_a_growth(
    case: SelfTest, engine_name: str, loader: TrainLoader, world: World, directory: Path
) -> dict[str, Any]:
    """Return losses and weights of updates after a growth from 2+2 to 3+4 layers; the deep case stays."""
    before = models.settings_of("vanilla")
    engine = build("vanilla", engine_name, world, directory)
    done = train(engine, loader, world, 1, STOPPED, Cursor())
    saved, scalars = Saved(engine.state()), engine.scalars()
    engine.close()
    deeper = replace(case, settings={"model": {**case.settings["model"], "encoder_layers": 3, "decoder_layers": 4}})
    models.self_tests = partial(dict, {"vanilla": deeper})
    after = models.settings_of("vanilla")
    deep = build_model(after, models.VOCABULARY)
    grown = Grown(saved, saved.weights, deep, before=before.model, after=after.model, by="interpolate")
    weights = {name: grown.weight(name) for name, _ in deep.named_parameters()}
    engine = build("vanilla", engine_name, world, directory, weights=weights)
    engine.restore(grown, scalars)
    rest = train(engine, loader, world, STOPPED + 1, RESUMED, done["cursor"])
    ends = {state.name: state.weight.flatten().tolist() for state in engine.parameters()}
    engine.close()
    return {"loss": rest["loss"], "weights": ends}


def report_of(
    method: str, case: SelfTest, engines: Sequence[str], world: World, directory: Path, mixture: bool
) -> dict[str, Any]:
    """Return the report of each engine on a method."""
    shape = {**case.settings["model"], **json.loads(os.environ.get("MODEL", "{}"))}
    case = replace(case, settings={**case.settings, "model": shape})
    r_drop = replace(case, settings={**case.settings, "objective": {"r_drop": {"weight": 0.7}}})
    report: dict[str, Any] = {}
    for engine_name in engines:
        cases = {method: r_drop if "r_drop" in engine_name else case}
        models.self_tests = partial(dict, cases)
        loader = parity_loader(directory, world, engine_name, mixture=mixture)
        engine = build(method, engine_name, world, directory)
        report[engine_name] = train(engine, loader, world, 1, UPDATES, Cursor())
        report[engine_name]["hooked_in_layers"] = sum(
            bool(part._forward_pre_hooks)
            for layer in engine.module.model.all_layers()
            for part in layer.modules()
            if part is not layer
        )
        del report[engine_name]["cursor"]
        report[engine_name]["weights"] = {s.name: s.weight.flatten().tolist() for s in engine.parameters()}
        engine.close()
        if method == "vanilla" and ":" in engine_name and world.tensor_ranks == 1:
            engine = build(method, engine_name, world, directory)
            report[engine_name]["lost_in_sums"] = lost_in_sums(engine, next(loader.updates(Cursor(), 1)))
            engine.close()
        if engine_name == "zero2:fp16" and method == "vanilla":
            update = next(loader.updates(Cursor(), 1))
            report[engine_name]["scales"] = loss_scales(engine_name, world, directory, update)
        if engine_name == "zero2" and world.tensor_ranks == 1:
            engine = build(method, engine_name, world, directory)
            update = next(loader.updates(Cursor(), 1))
            report[engine_name]["unequal"] = message_of_unequal_graphs(engine, update, world.rank)
            engine.close()
        # Stop half-way, restore the state in a new engine, and continue. Dropout is on: its masks must be the same.
        # Compiled layers do without, since they would be compiled once more.
        ends, dropout = [], 0.0 if "compile" in engine_name else 0.1
        for resume in (False, True):
            engine = build(method, engine_name, world, directory, dropout=dropout)
            if resume:
                engine.probe(loader.largest())
            done = train(engine, loader, world, 1, STOPPED, Cursor())
            if resume:
                saved, scalars = Saved(engine.state()), engine.scalars()
                engine.close()
                engine = build(method, engine_name, world, directory, dropout=dropout, weights=saved.weights)
                engine.probe(loader.largest())
                engine.restore(saved, scalars)
            rest = train(engine, loader, world, STOPPED + 1, RESUMED, done["cursor"])
            ends.append((rest["loss"], [s.weight.flatten().tolist() for s in engine.parameters()], engine.scalars()))
            is_compared = method == "vanilla" and not mixture and world.ranks == 2 and world.tensor_ranks == 1
            if is_compared and not resume and "compile" not in engine_name:
                known = before_the_step(engine, loader, done["cursor"], world, directory)
                report[engine_name]["before_the_step"] = known
            engine.close()
        if (is_compared and engine_name in GROWING) or (
            method == "vanilla" and engine_name == "plain" and not mixture
        ):
            report[engine_name]["grown"] = after_a_growth(case, engine_name, loader, world, directory)
        report[engine_name]["resumed_bitwise"] = ends[0] == ends[1]
        report[engine_name]["resumed_loss"] = [ends[0][0], ends[1][0]]
    return report


def main() -> None:
    if os.environ.get("JOINED") == "1":
        Kernels.joins_products = lambda self, x: torch.is_grad_enabled()  # type: ignore[method-assign]
    # Compiled layers are traced, split into forward and backward, but run by torch: code would take minutes.
    torch.compile = partial(torch.compile, backend="aot_eager")
    # Fills new memory with NaN, so that no engine can depend on what it held.
    torch.set_deterministic_debug_mode("warn")
    world = join_world("cpu", timeout_s=300, tensor_ranks=int(os.environ.get("TENSOR_RANKS", "1")))
    directory, out, (methods, _, data) = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].partition("+")
    cases = models.self_tests()
    reports = {
        method: report_of(method, cases[method], sys.argv[4:], world, directory, data == "mixture")
        for method in methods.split(",")
    }
    if world.is_main:
        out.write_text(json.dumps(reports))
    leave_world()


if __name__ == "__main__":
    main()
