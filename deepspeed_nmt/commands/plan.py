"""Plan a run without starting it: parameters, disk space, memory of each GPU by part, speed, and settings to use.

    deepspeed-nmt plan --recipe deep_decoder_big_54_stabilised --gpu v100-32g --num-gpus 32

Memory is counted by running an update of the model on torch's meta device, where tensors have shapes and no data; see
docs/scale.md. GPUs: v100-16g, v100-32g, a100-40g, a100-80g, l40s-48g, h100-80g, h200-141g, or NAME:GiB. With `--data`
it also prints the micro-batches of the padded and of the packed layout. With several GPUs it estimates what they send
each other, and the share of an update that this takes on each link.

A sweep is a grid of settings around a recipe, for example of a figure in a paper. `--sweep` lists its points;
`--point I` prints one of them as arguments for `train`:

    deepspeed-nmt plan --sweep deep_decoder_fig1
    deepspeed-nmt train $(deepspeed-nmt plan --sweep deep_decoder_fig1 --point 3) --data DATA --run RUN

`--probe` builds the model, and measures it before any update: how far source and prefix move the decoder's top state,
and the gradients of its layers.

`--mtbf 3h` proposes how often to save in a job that fails every three hours on average, from the time that a
checkpoint takes, and names the goodput to expect.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed_nmt.console import logger, output
from deepspeed_nmt.errors import ConfigError, shown, typed

if TYPE_CHECKING:
    from deepspeed_nmt.config import RunConfig
    from deepspeed_nmt.planning.checkpoints import CheckpointPlan, IntervalPlan
    from deepspeed_nmt.planning.gpus import Gpu
    from deepspeed_nmt.run.plans import Planned

_MAX_GPUS = 1_000_000
_RESTART_S = 120.0
"""Seconds from a failure to the next update, if nothing is known: a rank is missed, and the job starts again."""
_OPTIONS: tuple[tuple[str, str, type, object, str], ...] = (
    ("config", "F", str, None, "YAML file of settings, which override the recipe"),
    ("point", "I", int, None, "print this point of the sweep, counted from 1, for `train`"),
    ("vocab-size", "V", str, None,
     "size of the vocabulary, or SOURCE,TARGET (default: those of --data, of the recipe's BERTs, or 32000)"),
    ("gpu", "G", str, None, "GPU to plan memory and speed for (default: none)"),
    ("num-gpus", "N", int, 1, "number of GPUs (default: %(default)s)"),
    ("mfu", "U", float, 0.3, "expected share of the GPU's peak (default: %(default)s)"),
    ("bandwidth", "GB/S", float, None,
     "bandwidth in one direction that collectives reach (default: 80%% of each link of the GPU, by its data sheet)"),
    ("write-speed", "MB/S", float, 300.0,
     "assumed speed of writing checkpoints, their hashes included (default: %(default)g)"),
    ("mtbf", "T", str, None,
     "mean time between failures of the job, such as 45m or 3h: propose how often to save"),
    ("run", "DIR", Path, None, "run whose times of a checkpoint, restart and update --mtbf takes"),
    ("saving-time", "T", str, None,
     "time for which a checkpoint stops training (default: that of --run, or of writing it by --write-speed)"),
    ("restart-time", "T", str, None,
     f"time from a failure to the next update (default: that of --run, or {_RESTART_S:g} s)"),
)  # fmt: skip
"""Options with name, metavar, type, default and help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument("--recipe", metavar="NAME", help="named experiment to plan")
    subject.add_argument("--sweep", metavar="NAME", help="named grid of settings to list or plan")
    parser.add_argument(
        "--data", action="append", default=[], metavar="DIR[=WEIGHT][@TAG]",
        help="data to plan for, as `train` takes it; prints what each layout makes of it",
    )  # fmt: skip
    for name, metavar, kind, default, text in _OPTIONS:
        parser.add_argument(f"--{name}", metavar=metavar, type=kind, default=default, help=text)
    parser.add_argument(
        "--probe", action="store_true", help="build the untrained model, and measure its inputs' effect and gradients"
    )
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object for each recipe or point, one a line"
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, which override the recipe")


def _check(arguments: argparse.Namespace) -> None:
    """Check the options; a ConfigError lists all that are out of range, or contradict each other."""
    from deepspeed_nmt.core.vocabulary import MAX_VOCABULARY

    sizes = (arguments.vocab_size or "4").split(",")
    is_size = [text.isascii() and text.isdecimal() and 4 <= int(text[:20]) <= MAX_VOCABULARY for text in sizes]
    times = ("run", "saving_time", "restart_time")
    unused = [typed(name) for name in times if getattr(arguments, name) is not None]
    problems = {
        "nothing to plan is named; give --recipe, --config or --sweep":
            arguments.recipe is arguments.sweep is arguments.config is None,
        "--sweep plans recipes, but --config is given; leave out one of them":
            arguments.sweep is not None and arguments.config is not None,
        f"--vocab-size is {shown(arguments.vocab_size)}; give a number from 4 to {MAX_VOCABULARY:,}, or two":
            len(sizes) > 2 or not all(is_size) or arguments.vocab_size == "",
        f"--num-gpus is {shown(arguments.num_gpus)}; give 1 to {_MAX_GPUS:,}":
            not 1 <= arguments.num_gpus <= _MAX_GPUS,
        f"--mfu is {arguments.mfu}; give a share above 0, at most 1": not 0.0 < arguments.mfu <= 1.0,
        f"--bandwidth is {arguments.bandwidth}; give a positive number of GB/s":
            not 0.0 < (1.0 if arguments.bandwidth is None else arguments.bandwidth) < math.inf,
        "--bandwidth is that of GPUs, but --gpu is not given; give it too":
            arguments.bandwidth is not None and arguments.gpu is None,
        f"--write-speed is {arguments.write_speed}; give a positive number of MB/s":
            not 0.0 < arguments.write_speed < math.inf,
        f"{' and '.join(unused)} without --mtbf; give it too": unused and arguments.mtbf is None,
        "--point is the number of a point of --sweep, which is missing; give both":
            arguments.point is not None and arguments.sweep is None,
    }  # fmt: skip
    if wrong := [text for text, is_wrong in problems.items() if is_wrong]:
        raise ConfigError(wrong)


def run(arguments: argparse.Namespace) -> int:
    """Plan a recipe or every point of a sweep, and print the plans."""
    import json

    from deepspeed_nmt.planning.gpus import gpu_named
    from deepspeed_nmt.recipes import load_sweep

    _check(arguments)
    gpu = None if arguments.gpu is None else gpu_named(arguments.gpu)
    points = [(arguments.recipe, [])] if arguments.sweep is None else load_sweep(arguments.sweep)
    if arguments.point is not None:
        if not 1 <= arguments.point <= len(points):
            raise ConfigError(f"--point is {arguments.point}; give 1 to {len(points)}")
        recipe, settings = points[arguments.point - 1]
        output(" ".join(["--recipe", recipe, *settings, *arguments.settings]))
        return 0
    from deepspeed_nmt.config import load_config  # imports torch, which the above does not need
    from deepspeed_nmt.data.training import DataOption, TrainingData
    from deepspeed_nmt.engine.contract import checkpoint_bytes
    from deepspeed_nmt.planning.checkpoints import CheckpointPlan
    from deepspeed_nmt.run.plans import Plans, layout_estimates, layout_notes, planned_vocabulary, tokens_of
    from deepspeed_nmt.run.probe import probe

    plans, file = Plans(), None if arguments.config is None else Path(arguments.config)
    data = TrainingData([DataOption.parse(text) for text in arguments.data]) if arguments.data else None
    for number, (recipe, settings) in enumerate(points, 1):
        config = load_config(recipe, file, [*settings, *arguments.settings]).resolved()
        recipe, precision, update_s = recipe or str(file), None, None
        vocabulary = planned_vocabulary(arguments.vocab_size, config, None if data is None else data.main)
        trained, count, states = plans.parameters(config, vocabulary)
        kept, validation = config.training, config.validation
        chooser = validation.commands.get(validation.best_measure)
        late_keep = validation.late_keep if chooser is not None and chooser.late else 0
        size = checkpoint_bytes(trained, count - trained, states)
        checkpoints = CheckpointPlan(size, kept.keep_last, kept.keep_best, late_keep, arguments.write_speed)
        result: dict[str, Any] = {"point": number} if arguments.sweep is not None else {}
        result |= {"recipe": recipe, "vocab_size": vocabulary.size, "parameters": count}
        result |= {"trained": trained} if trained != count else {}
        result |= {**({"settings": settings} if arguments.sweep is not None else {}), **checkpoints.as_json()}
        some = f", {trained:,} of them trained" if trained != count else ""
        lines = [f"{recipe} with a vocabulary of {tokens_of(vocabulary)}: {count:,} parameters{some}"]
        sizes = {str(at): plans.parameters(config.for_update(at), vocabulary)[1] for at in config.growth.at}
        result |= {"until_update": sizes} if sizes else {}
        lines += [f"until update {int(at):,}, {size:,} parameters" for at, size in sizes.items()]
        if gpu is not None:
            planned = plans.on(gpu, arguments.num_gpus, config, vocabulary)
            precision = planned.engine.precision
            longest = 0 if data is None else max(data.corpora(config.mixture).longest)
            plan, table = _plan(planned, config, arguments, gpu, plans.flops(config, vocabulary), longest)
            batch = config.batch.model_copy(update={"micro_tokens": plan["as_set"]["micro_tokens"]})
            config = config.model_copy(update={"batch": batch})  # of auto, for the estimates of layouts
            if plan["tokens_per_s"]:
                update_s = config.batch.update_tokens / plan["tokens_per_s"]
            result |= plan
            lines += [table, str(checkpoints)]
        elif arguments.sweep is not None:
            lines = [f"{number:>3}  {count:>13,} parameters  --recipe {recipe} {' '.join(settings)}"]
        else:
            lines.append(str(checkpoints))
        if arguments.probe:
            probed = probe(config, vocabulary)
            result["probe"] = vars(probed)
            lines.append(str(probed))
        if arguments.mtbf is not None:
            interval = _interval(arguments, checkpoints, update_s)
            result["saving"] = interval.as_json()
            lines.append(str(interval))
        if data is not None:
            layouts = layout_estimates(config, data, arguments.num_gpus)
            result["layouts"] = list(map(vars, layouts))
            lines += [*map(str, layouts), *layout_notes(config, layouts, gpu, precision)]
        output(json.dumps(result) if arguments.json else "\n".join(lines))
    return 0


def _interval(arguments: argparse.Namespace, checkpoints: CheckpointPlan, update_s: float | None) -> IntervalPlan:
    """Return how often to save, by times that are given, measured in a run, or estimated."""
    from deepspeed_nmt.planning.checkpoints import IntervalPlan, seconds_of
    from deepspeed_nmt.run.plans import MeasuredTimes
    from deepspeed_nmt.train.goodput import GOODPUT_FILE, read_ledger

    measured = MeasuredTimes()
    if arguments.run is not None:
        measured = MeasuredTimes.of(read_ledger(arguments.run))
        if measured.saving_s is None and arguments.saving_time is None:
            raise ConfigError(f"no checkpoint in {arguments.run / GOODPUT_FILE}; train longer, or give --saving-time")
    saving, restart = arguments.saving_time, arguments.restart_time
    saving_s = seconds_of(saving, "--saving-time") if saving is not None else measured.saving_s or checkpoints.seconds
    restart_s = seconds_of(restart, "--restart-time") if restart is not None else measured.restart_s or _RESTART_S
    return IntervalPlan(seconds_of(arguments.mtbf, "--mtbf"), saving_s, restart_s, measured.update_s or update_s)


def _plan(
    planned: Planned,
    config: RunConfig,
    arguments: argparse.Namespace,
    gpu: Gpu,
    flops: Mapping[int, float],
    longest: int,
) -> tuple[dict[str, Any], str]:
    """Return values for JSON, and text; for ``flops`` see :meth:`Plans.flops`, ``longest`` is that of a sentence."""
    import torch

    from deepspeed_nmt.kernels.choice import is_installed
    from deepspeed_nmt.kernels.precision import DTYPES
    from deepspeed_nmt.planning import communication
    from deepspeed_nmt.planning.planner import as_text, notes_on, plan_for

    if not is_installed("softmax", "triton"):
        logger.warning(
            "Triton is not installed here, so the plan has torch's own operations, which need more memory; CUDA "
            "builds of torch include it"
        )
    planner, engine, kernels = planned
    ranks = arguments.num_gpus
    advised, plain = planner.advised(gpu, longest), planner.as_set(gpu.usable_gib, longest)
    columns = {"as set": plain, "advised": advised}
    if any(advised.recompute):
        columns["... without recomputation"] = plan_for(planner.counts, advised.layout, advised.micro_tokens, (0, 0))
    (*_, updates), (*_, work), tokens = flops, flops.values(), config.batch.update_tokens
    rate = 0.0 if engine.precision == "fp32" else arguments.mfu * gpu.tflops * 1e12
    speed = ranks * rate / work if rate else None
    total = sum((end - start) * tokens * flops[end] for start, end in pairwise([0, *flops]))
    days = total / rate / 86_400 if rate else None
    sent = planner.sent(advised)
    links = [] if speed is None else communication.on_links(sent, gpu, tokens / speed, arguments.bandwidth)
    advice, notes = planner.settings(advised), notes_on(advised, tokens, gpu)
    result = {
        "gpu": gpu.name,
        "num_gpus": ranks,
        "precision": engine.precision,
        "flops_per_token": work,
        "tokens_per_s": speed,
        "max_updates": updates,
        "gpu_days": days,
        "advice": advice,
        "notes": notes,
        **({"communication": communication.as_json(sent, links)} if ranks > 1 else {}),
        **{name: plan.as_json(gpu) for name, plan in (("as_set", plain), ("advised", advised))},
    }
    chosen = kernels.describe(torch.device("meta"), DTYPES[engine.precision])
    head = f"{ranks} x {gpu.name} ({engine.precision}); kernels: {chosen}"
    words = f"{work / 1e9:,.2f} GFLOP for each target token{' of the grown model' if len(flops) > 1 else ''}"
    if speed is not None:
        words += f"; at an MFU of {arguments.mfu:g}, {speed:,.0f} target tokens/s"
    if days is not None:
        words += f", and training.max_updates={updates} in {days:,.1f} GPU-days ({days / ranks:,.1f} days)"
    text = f"{as_text(columns, advice, notes, gpu)}\n{words}"
    if ranks > 1:
        text += f"\n\n{communication.as_text(sent, links)}"
    return result, f"{head}\n\n{text}"
