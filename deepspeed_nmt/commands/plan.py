"""Plan a run without starting it: parameters, disk space, memory of each GPU by part, speed, and settings to use.

    deepspeed-nmt plan --recipe deep_decoder_big_54_stabilised --gpu v100-32g --num-gpus 32

Memory is counted by running an update of the model on torch's meta device, where tensors have shapes and no data; see
docs/scale.md. GPUs: v100-16g, v100-32g, a100-40g, a100-80g, l40s-48g, h100-80g, h200-141g, or NAME:GiB. With `--data`
it also prints the micro-batches of the padded and of the packed layout.

A sweep is a grid of settings around a recipe, for example of a figure in a paper. `--sweep` lists its points;
`--point I` prints one of them as arguments for `train`:

    deepspeed-nmt plan --sweep deep_decoder_fig1
    deepspeed-nmt train $(deepspeed-nmt plan --sweep deep_decoder_fig1 --point 3) --data DATA --run RUN
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from deepspeed_nmt.commands.plan_options import add_machine, check

if TYPE_CHECKING:
    from deepspeed_nmt.config import RunConfig
    from deepspeed_nmt.planning.gpus import Gpu
    from deepspeed_nmt.run.plans import Planned

HELP = "plan memory and speed of a recipe, or list a sweep"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument("--recipe", metavar="NAME", help="named experiment to plan")
    subject.add_argument("--sweep", metavar="NAME", help="named grid of settings to list or plan")
    parser.add_argument("--config", metavar="F", help="YAML file of settings, which override the recipe")
    parser.add_argument(
        "--point", type=int, metavar="I", help="print this point of the sweep, counted from 1, for `train`"
    )
    parser.add_argument(
        "--vocab-size",
        metavar="V",
        help="size of the vocabulary, or SOURCE,TARGET (default: those of --data, of the recipe's BERTs, or 32000)",
    )
    parser.add_argument(
        "--data",
        action="append",
        metavar="DIR[=WEIGHT][@TAG]",
        help="data to plan for, as `train` takes it; prints what each layout makes of it",
    )
    add_machine(parser)
    parser.add_argument(
        "--json", action="store_true", help="print a JSON object for each recipe or point, one a line"
    )
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, which override the recipe")


def run(arguments: argparse.Namespace) -> int:
    """Plan a recipe or every point of a sweep, and print the plans.

    Raises:
        ConfigError: if an option or a setting is out of range, or unknown.
    """
    import json
    from pathlib import Path

    from deepspeed_nmt.console import output
    from deepspeed_nmt.errors import ConfigError
    from deepspeed_nmt.planning.gpus import gpu_named
    from deepspeed_nmt.recipes import load_sweep

    check(arguments)
    gpu = None if arguments.gpu is None else gpu_named(arguments.gpu)
    points = [(arguments.recipe, [])] if arguments.sweep is None else load_sweep(arguments.sweep)
    if arguments.point is not None:
        if not 1 <= arguments.point <= len(points):
            raise ConfigError(f"--point must be between 1 and {len(points)}, but is {arguments.point}")
        recipe, settings = points[arguments.point - 1]
        output(" ".join(["--recipe", recipe, *settings, *arguments.settings]))
        return 0
    from deepspeed_nmt.config import load_config  # imports torch, which the above does not need
    from deepspeed_nmt.data.training import DataOption, TrainingData
    from deepspeed_nmt.planning.checkpoints import CheckpointPlan
    from deepspeed_nmt.run.plans import Plans, layout_estimates, layout_notes, planned_vocabulary, tokens_of

    plans, file = Plans(), None if arguments.config is None else Path(arguments.config)
    options = [DataOption.parse(text) for text in arguments.data or ()]
    data = TrainingData(options) if options else None
    for number, (recipe, settings) in enumerate(points, 1):
        config = load_config(recipe, file, [*settings, *arguments.settings]).resolved()
        recipe, precision = recipe or str(file), None
        vocabulary = planned_vocabulary(arguments.vocab_size, config, None if data is None else data.main)
        trained, count = plans.parameters(config, vocabulary)
        result: dict[str, object] = {"recipe": recipe, "vocab_size": vocabulary.size, "parameters": count}
        if trained != count:
            result["trained"] = trained
        if arguments.sweep is not None:
            result = {"point": number, **result, "settings": settings}
        text = f"{recipe} with a vocabulary of {tokens_of(vocabulary)}: {count:,} parameters"
        if trained != count:
            text += f", {trained:,} of them trained"
        kept, speed = config.training, arguments.write_speed
        checkpoints = CheckpointPlan.of(trained, count - trained, kept.keep_last, kept.keep_best, speed)
        result |= checkpoints.as_json()
        if gpu is not None:
            on_gpu = plans.on(gpu, arguments.num_gpus, config, vocabulary)
            precision = on_gpu.engine.precision
            planned, table = _plan(on_gpu, config, arguments, gpu)
            result, text = {**result, **planned}, f"{text}\n{table}\n{checkpoints}"
        elif arguments.sweep is not None:
            text = f"{number:>3}  {count:>13,} parameters  --recipe {recipe} {' '.join(settings)}"
        else:
            text = f"{text}\n{checkpoints}"
        if data is not None:
            found = layout_estimates(config, data, arguments.num_gpus)
            lines = [text, *map(str, found), *layout_notes(config, found, gpu, precision)]
            result["layouts"], text = [vars(each) for each in found], "\n".join(lines)
        output(json.dumps(result) if arguments.json else text)
    return 0


def _plan(planned: Planned, config: RunConfig, arguments: argparse.Namespace, gpu: Gpu) -> tuple[dict[str, Any], str]:
    """Return the plan of a run for JSON and as text."""
    import torch

    from deepspeed_nmt.console import logger
    from deepspeed_nmt.kernels.backends import is_installed
    from deepspeed_nmt.kernels.precision import DTYPES
    from deepspeed_nmt.planning.checkpoints import gpu_days
    from deepspeed_nmt.planning.table import as_json, as_table, tokens_per_second

    if not is_installed("softmax", "triton"):
        logger.warning(
            "Triton is not installed here, so the plan has torch's own operations, which need more memory; CUDA "
            "builds of torch include it"
        )
    planner, engine, kernels = planned
    ranks = arguments.num_gpus
    advised, plain = planner.advised(gpu), planner.as_set(gpu.usable_gib)
    columns = {"as set": plain, "advised": advised}
    if any(advised.recompute):
        columns["... without recomputation"] = planner.unrecomputed(advised)
    speed = None if engine.precision == "fp32" else tokens_per_second(advised, gpu, ranks, arguments.mfu)
    updates, tokens = config.training.max_updates, config.batch.update_tokens
    days = None if speed is None else gpu_days(updates, tokens, speed, ranks)
    result = {
        "gpu": gpu.name,
        "num_gpus": ranks,
        "precision": engine.precision,
        "flops_per_token": advised.flops_per_token,
        "tokens_per_s": speed,
        "max_updates": updates,
        "gpu_days": days,
        "advice": planner.settings(advised),
        **{name: as_json(plan, gpu) for name, plan in (("as_set", plain), ("advised", advised))},
    }
    chosen = kernels.describe(torch.device("meta"), DTYPES[engine.precision])
    head = f"{ranks} x {gpu.name} ({engine.precision}); kernels: {chosen}"
    words = "" if speed is None else f"; at an MFU of {arguments.mfu:g}, {speed:,.0f} target tokens/s"
    if days is not None:
        words += f", and training.max_updates={updates} in {days:,.1f} GPU-days ({days / ranks:,.1f} days)"
    table = as_table(columns, planner.settings(advised), config.batch.update_tokens, gpu, words)
    return result, f"{head}\n\n{table}"
