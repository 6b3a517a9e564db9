"""Train with the planner's advice on a GPU of restricted memory, and compare planned and measured memory.

    python benchmarks/planned.py --data DATA --out OUT [--recipe R] [--gib 16] [--updates 100] [key=value ...]

The script prints planned and measured peak memory, and target tokens a second and MFU over the second half of the
updates. Without a GPU, memory is not restricted and the figures are meaningless.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from deepspeed_nmt.build import build_kernels
from deepspeed_nmt.cli import main as deepspeed_nmt
from deepspeed_nmt.config import load_config
from deepspeed_nmt.data.directory import DataDirectory
from deepspeed_nmt.engine.settings import resolve_engine_for
from deepspeed_nmt.planning.advice import GIB
from deepspeed_nmt.planning.gpus import CONTEXT_GIB, Gpu, kind_of
from deepspeed_nmt.run.resolve import make_planner

RECIPE = "deep_decoder_big_54_stabilised"


def main() -> None:
    """Plan, train, and print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="data directory, made by `deepspeed-nmt prepare`")
    parser.add_argument("--out", type=Path, required=True, help="directory for the run")
    parser.add_argument("--recipe", default=RECIPE, help="recipe to train (default: %(default)s)")
    parser.add_argument("--gib", type=float, default=16.0, help="memory of the GPU in GiB (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=100, help="number of updates (default: %(default)s)")
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings, which override the recipe")
    arguments = parser.parse_args()
    name, gpu = "CPU", Gpu("CPU", arguments.gib, 0.0, "fp32")
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        kind = kind_of(name)
        gpu = Gpu(name, arguments.gib, 0.0 if kind is None else kind.tflops)
        whole = torch.cuda.get_device_properties(0).total_memory / GIB
        torch.cuda.set_per_process_memory_fraction(min(1.0, (arguments.gib - CONTEXT_GIB) / whole))
    vocabulary = DataDirectory.open(arguments.data).tokenizer().vocabulary
    config = load_config(arguments.recipe, settings=arguments.settings)
    engine = resolve_engine_for(
        config.engine, config.optimizer.clip_norm, ranks=1, data_ranks=1, native=gpu.precision
    )
    planner = make_planner(config, vocabulary, engine, 1, build_kernels(config).planned_for(gpu.capability))
    plan = planner.advised(gpu)
    run = arguments.out / f"{arguments.recipe}-{arguments.gib:g}"
    half = arguments.updates // 2
    words = ["train", "--recipe", arguments.recipe, "--data", str(arguments.data), "--run", str(run)]
    words += [
        *planner.settings(plan),
        f"engine.precision={gpu.precision}",
        f"training.max_updates={arguments.updates}",
    ]
    words += [f"training.log_every={half}", "validation.metrics=[]", "collapse.every=0"]
    status = deepspeed_nmt([*words, *arguments.settings])
    if status:
        sys.exit(status)
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = {key: value for entry in entries for key, value in entry.items()}
    planned, measured = plan.total / GIB, last["perf/memory"]
    lines = [
        f"{arguments.recipe} on {name} restricted to {arguments.gib:g} GiB, torch {torch.__version__}",
        f"advice: {' '.join(planner.settings(plan))}",
        f"memory: planned {planned:.2f} GiB, measured {measured:.2f} GiB, ratio {planned / measured:.2f}",
        f"{last['perf/target_tokens_per_s']:,.0f} target tokens/s, MFU {last.get('perf/mfu', float('nan')):.3f}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
