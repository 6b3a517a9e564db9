"""Tell what a recipe needs, without building it: parameters, memory of each GPU by part, work, and what to set.

    deepspeed-nmt plan --recipe deep_decoder_big_54 --gpu v100-32g --num-gpus 32

Memory is counted by carrying out an update of the model on torch's meta device, where tensors have shapes only; see
docs/scale.md. GPUs: v100-16g, v100-32g, a100-40g, a100-80g, l40s-48g, h100-80g, h200-141g, or NAME:GiB.

A sweep is a small grid of settings around a recipe, one of the papers' figures for example. `--sweep` lists its
points; with `--point I` it prints one as arguments for `train`:

    deepspeed-nmt plan --sweep deep_decoder_fig1
    deepspeed-nmt train $(deepspeed-nmt plan --sweep deep_decoder_fig1 --point 3) --data DATA --run RUN
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed_nmt.config import RunConfig
    from deepspeed_nmt.core.vocabulary import Vocabulary
    from deepspeed_nmt.planning.advice import Plan
    from deepspeed_nmt.planning.gpus import Gpu

_VOCAB_SIZE = "32000"
HELP = "tell what a recipe needs of a machine, or list a sweep"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--recipe", metavar="R", help="a named experiment")
    what.add_argument("--sweep", metavar="S", help="a named grid of settings around a recipe")
    parser.add_argument("--point", type=int, metavar="I", help="print point I of the sweep, from 1, for `train`")
    parser.add_argument(
        "--vocab-size",
        metavar="V",
        help="tokens of the vocabulary, or of source,target [those of named BERTs, or 32000]",
    )
    parser.add_argument("--gpu", metavar="G", help="plan memory and speed for this GPU")
    parser.add_argument("--num-gpus", type=int, default=1, metavar="N", help="so many of them [1]")
    parser.add_argument("--mfu", type=float, default=0.3, metavar="U", help="share of the GPU's peak to expect [0.3]")
    parser.add_argument("--json", action="store_true", help="one JSON object for each recipe or point, one a line")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, on top of the recipe")


def run(arguments: argparse.Namespace) -> int:
    """Count on the meta device, where parameters have shapes and no memory."""
    import json

    from deepspeed_nmt.config import load_config, sweep
    from deepspeed_nmt.console import output
    from deepspeed_nmt.errors import ConfigError
    from deepspeed_nmt.planning.gpus import gpu_named

    _check(arguments)
    gpu = None if arguments.gpu is None else gpu_named(arguments.gpu)
    points = [(arguments.recipe, [])] if arguments.sweep is None else sweep(arguments.sweep)
    if arguments.point is not None:
        if not 1 <= arguments.point <= len(points):
            raise ConfigError(f"--point must be between 1 and {len(points)}, but is {arguments.point}")
        recipe, settings = points[arguments.point - 1]
        output(" ".join(["--recipe", recipe, *settings, *arguments.settings]))
        return 0
    for number, (recipe, settings) in enumerate(points, 1):
        config = load_config(recipe, settings=[*settings, *arguments.settings])
        config = config.resolved()
        vocabulary = _vocabulary(arguments.vocab_size, config)
        trained, count = _parameters(config, vocabulary)
        result: dict[str, object] = {"recipe": recipe, "vocab_size": vocabulary.size, "parameters": count}
        if trained != count:
            result["trained"] = trained
        if arguments.sweep is not None:
            result = {"point": number, **result, "settings": settings}
        text = f"{recipe} with a vocabulary of {_tokens(vocabulary)}: {count:,} parameters"
        if trained != count:
            text += f", {trained:,} of them trained"
        if gpu is not None:
            planned, table = _plan(config, vocabulary, arguments, gpu)
            result, text = {**result, **planned}, f"{text}\n{table}"
        elif arguments.sweep is not None:
            text = f"{number:>3}  {count:>13,} parameters  --recipe {recipe} {' '.join(settings)}"
        output(json.dumps(result) if arguments.json else text)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    from deepspeed_nmt.errors import ConfigError

    problems = []
    sizes = (arguments.vocab_size or _VOCAB_SIZE).split(",")
    if len(sizes) > 2 or not all(size.isdecimal() and int(size) >= 4 for size in sizes):
        problems.append(f"--vocab-size must be at least 4, or two such numbers, but is {arguments.vocab_size}")
    if arguments.num_gpus < 1:
        problems.append(f"--num-gpus must be at least 1, but is {arguments.num_gpus}")
    if not 0.0 < arguments.mfu <= 1.0:
        problems.append(f"--mfu must be above 0 and at most 1, but is {arguments.mfu}")
    if arguments.point is not None and arguments.sweep is None:
        problems.append("--point needs --sweep: it is the number of one of its points")
    if problems:
        raise ConfigError(problems)


def _vocabulary(sizes: str | None, config: RunConfig) -> Vocabulary:
    from deepspeed_nmt.core.vocabulary import Vocabulary
    from deepspeed_nmt.data.bert_tokenizer import BertTokenizer
    from deepspeed_nmt.methods.bert import BertPair

    if sizes is None and isinstance(config.model, BertPair):
        named = (config.model.source_encoder, config.model.target_encoder)
        if all(named):
            return BertTokenizer.from_berts(
                ",".join(named), "model.source_encoder and model.target_encoder"
            ).vocabulary
    *source, target = (Vocabulary(int(size)) for size in (sizes or _VOCAB_SIZE).split(","))
    return replace(target, own_source=source[0]) if source else target


def _tokens(vocabulary: Vocabulary) -> str:
    if vocabulary.own_source is None:
        return f"{vocabulary.size:,}"
    return f"{vocabulary.own_source.size:,} and {vocabulary.size:,}"


def _parameters(config: RunConfig, vocabulary: Vocabulary) -> tuple[int, int]:
    """Of the model: those that are trained, and all."""
    import torch

    from deepspeed_nmt.runs import build_model

    with torch.device("meta"):
        model = build_model(config, vocabulary)
    counts = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(count for count, trained in counts if trained), sum(count for count, _ in counts)


def _plan(
    config: RunConfig, vocabulary: Vocabulary, arguments: argparse.Namespace, gpu: Gpu
) -> tuple[dict[str, Any], str]:
    """What the run needs on these GPUs: as JSON, and as text."""
    import torch

    from deepspeed_nmt.commands.planner import Planner, precision_of
    from deepspeed_nmt.engine.base import DTYPES
    from deepspeed_nmt.runs import build_kernels

    kernels = build_kernels(config).planned_for(gpu.capability)
    precision = precision_of(config, gpu, arguments.num_gpus)
    planner = Planner(config, vocabulary, precision, arguments.num_gpus, kernels)
    advised, plain = planner.advised(gpu), planner.as_set(gpu.usable_gib)
    columns = {"as set": plain, "advised": advised}
    if any(advised.recompute):
        columns["... without recomputation"] = planner.unrecomputed(advised)
    speed = None if precision == "fp32" else _tokens_per_second(advised, gpu, arguments)
    result = {
        "gpu": gpu.name,
        "num_gpus": arguments.num_gpus,
        "precision": precision,
        "flops_per_token": advised.flops_per_token,
        "tokens_per_s": speed,
        "advice": planner.settings(advised),
        **{name: _as_json(plan, gpu) for name, plan in (("as_set", plain), ("advised", advised))},
    }
    chosen = kernels.describe(torch.device("meta"), DTYPES[precision])
    head = f"{arguments.num_gpus} x {gpu.name} ({precision}); kernels: {chosen}"
    return result, _text(head, columns, planner.settings(advised), config, arguments, gpu, speed)


def _tokens_per_second(plan: Plan, gpu: Gpu, arguments: argparse.Namespace) -> float | None:
    if not gpu.tflops:
        return None
    return float(arguments.num_gpus * arguments.mfu * gpu.tflops * 1e12 / plan.flops_per_token)


def _as_json(plan: Plan, gpu: Gpu) -> dict[str, Any]:
    return {
        "zero_stage": plan.layout.stage,
        "micro_tokens": plan.micro_tokens,
        "recompute": plan.recompute,
        "bytes": {**plan.parts, "total": plan.total},
        "fits": plan.fits(gpu.usable_gib),
    }


def _text(
    head: str,
    columns: dict[str, Plan],
    advice: Sequence[str],
    config: RunConfig,
    arguments: argparse.Namespace,
    gpu: Gpu,
    speed: float | None,
) -> str:
    from deepspeed_nmt.planning.advice import GIB, SMALLEST_MICRO_TOKENS
    from deepspeed_nmt.planning.memory import PARTS

    width = max(12, *map(len, columns)) + 2
    lines = [
        head,
        "",
        f"{'GiB on a GPU':<14}" + "".join(f"{name:>{width}}" for name in columns),
    ]
    for part in PARTS:
        lines.append(f"{part:<14}" + "".join(f"{plan.parts[part] / GIB:>{width}.2f}" for plan in columns.values()))
    lines.append(f"{'total':<14}" + "".join(f"{plan.total / GIB:>{width}.2f}" for plan in columns.values()))
    fits = ["yes" if plan.fits(gpu.usable_gib) else "no" for plan in columns.values()]
    lines.append(f"{'fits':<14}" + "".join(f"{word:>{width}}" for word in fits))
    lines += ["", f"set: {' '.join(advice)}"]
    plan = columns["advised"]
    if not plan.fits(gpu.usable_gib):
        lines.append(
            "this is the smallest plan, and does not fit: use larger GPUs, more of them (perhaps with "
            "engine.tensor_parallel), or offload (engine.name=deepspeed engine.ds_config=zero3_offload)"
        )
    share = config.batch.update_tokens * plan.layout.tensor_ranks // plan.layout.ranks
    if share < SMALLEST_MICRO_TOKENS:
        lines.append(
            f"an update of {config.batch.update_tokens:,} tokens leaves {share} for a GPU, too few to be fast: use "
            "fewer GPUs, or raise batch.update_tokens"
        )
    work = f"{plan.flops_per_token / 1e9:,.2f} GFLOP for each target token"
    at = "" if speed is None else f"; at an MFU of {arguments.mfu:g}, {speed:,.0f} target tokens/s"
    lines.append(work + at)
    return "\n".join(lines)
