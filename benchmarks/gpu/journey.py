"""Do the commands work on this GPU as users call them, and are resumed runs the same to the bit?

Prepares the sample corpus, and calls `doctor`, `train` under each engine and precision, `translate` and
`score-pairs`, several at once, so that the seconds say nothing of speed. A row of an engine trains twice with
`engine.deterministic=true`, once without a pause and once with a stop half-way, and compares the weights. The others
compare a GPU with a CPU, or what is refused with what should be. The output of all commands is in journey.log.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from harness import Bench, Values
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
UPDATES, STOP, AT_ONCE = 24, 12, 8
SMALL = [
    *("model.dim=64", "model.ffn_dim=128", "model.heads=2", "model.encoder_layers=2", "model.decoder_layers=2"),
    *("optimizer.lr=2e-3", "schedule.warmup_updates=4", "batch.update_tokens=2000"),
    *("batch.micro_tokens=1024", "training.log_every=1", f"training.validate_every={STOP}"),
    *("validation.max_sentences=20", "validation.metrics=[]", "collapse.every=0", "search.beam=2"),
]
TRANSFORMER = ["--recipe", "transformer_base", *SMALL, "model.dropout=0.1"]
METHODS = ["--recipe", "deep_decoder_base_30_stabilised", *SMALL, "model.decoder_layers=4", "layer.drop_depth=1"]


def deepspeed(name: str) -> list[str]:
    """Return the settings of a DeepSpeed engine."""
    return ["engine.name=deepspeed", f"engine.ds_config={name}"]


ENGINES: dict[str, list[str]] = {
    "plain": TRANSFORMER,
    "fp16": [*TRANSFORMER, "engine.precision=fp16"],
    "fp32": [*TRANSFORMER, "engine.precision=fp32"],
    "padded": [*TRANSFORMER, "batch.layout=padded"],
    "recomputed": [*TRANSFORMER, "engine.recompute_encoder=1", "engine.recompute_decoder=1"],
    "methods": METHODS,
    "compiled": [*TRANSFORMER, "engine.compile=layers"],
    "zero1": [*TRANSFORMER, *deepspeed("zero1")],
    "zero2": [*TRANSFORMER, *deepspeed("zero2")],
    "zero3": [*TRANSFORMER, *deepspeed("zero3")],
    "zero3 methods": [*METHODS, *deepspeed("zero3")],
    "zero3_offload": [*TRANSFORMER, *deepspeed("zero3_offload")],
    "fp16 zero2": [*TRANSFORMER, "engine.precision=fp16", *deepspeed("zero2")],
}
"""Engines by name, the most wanted first."""
REHEARSED = ("plain", "zero1")


class Shell:
    """Calls commands, and keeps what they print.

    Args:
        scratch: directory of data and runs.
        log: file for the output.
        bench: says which device.
    """

    def __init__(self, scratch: Path, log: Path, bench: Bench) -> None:
        self.scratch, self.bench = scratch, bench
        self._log, self._lock = log, threading.Lock()
        self._environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *words: str, cpu: bool = False) -> subprocess.Popen[str]:
        """Start a command; ``cpu`` hides the GPU from it."""
        environment = dict(self._environment)
        if cpu:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        command = [sys.executable, "-m", "deepspeed_nmt", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen(command, cwd=self.scratch, env=environment, text=True, **pipes)  # type: ignore[call-overload, no-any-return]

    def end(self, process: subprocess.Popen[str], statuses: tuple[int, ...] = (0,)) -> str:
        """Wait for a command, and return what it printed.

        Raises:
            RuntimeError: if its exit status is none of ``statuses``, or it printed a traceback.
        """
        try:
            output = process.communicate(timeout=max(1.0, self.bench.seconds_left))[0]
        except subprocess.TimeoutExpired:
            process.kill()
            output = process.communicate()[0] + "\nkilled, because the time was over"
        words = " ".join(map(str, process.args[2:]))  # type: ignore[index]
        with self._lock, self._log.open("a", encoding="utf-8") as file:
            file.write(f"$ {words}\n{output}\nstatus {process.returncode}\n\n")
        if process.returncode not in statuses or "Traceback" in output:
            last = [line for line in output.splitlines() if line.strip()][-1:]
            raise RuntimeError(f"status {process.returncode} of {words[:60]}: {''.join(last)[-150:]}")
        return output

    def call(self, *words: str, statuses: tuple[int, ...] = (0,), cpu: bool = False) -> str:
        """Call a command to its end."""
        return self.end(self.start(*words, cpu=cpu), statuses)

    def train(self, run: str, settings: list[str], updates: int, cpu: bool = False) -> Path:
        """Train a run up to an update."""
        self.call("train", "--data", "data", "--run", run, *settings, f"training.max_updates={updates}", cpu=cpu)
        return self.scratch / run


def logged(run: Path, tag: str) -> dict[int, float]:
    """Return the values of a tag by update."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return {line["update"]: line[tag] for line in lines if tag in line}


def weights(run: Path, update: int) -> dict[str, torch.Tensor]:
    """Return the weights of a checkpoint."""
    parts = sorted((run / "checkpoints" / f"update-{update:07d}").glob("weights-*.safetensors"))
    return {name: tensor for part in parts for name, tensor in load_file(part).items()}


def difference(one: Path, other: Path, update: int) -> float:
    """Return the largest difference of two runs' weights."""
    first, second = weights(one, update), weights(other, update)
    if first.keys() != second.keys():
        raise RuntimeError("the runs have different weights")
    return float(
        torch.tensor([float((first[name].float() - second[name].float()).abs().max()) for name in first]).max()
    )


def engine(name: str, shell: Shell) -> Values:
    """Train with and without a stop, and compare."""
    settings = [*ENGINES[name], "engine.deterministic=true"]
    label = name.replace(" ", "-")
    straight = shell.train(f"{label}-straight", settings, UPDATES)
    shell.train(f"{label}-stopped", settings, STOP)
    resumed = shell.train(f"{label}-stopped", settings, UPDATES)
    losses = logged(straight, "train/loss")
    values = {
        "first_loss": losses[min(losses)],
        "last_loss": losses[max(losses)],
        "difference": difference(straight, resumed, UPDATES),
    }
    if not values["last_loss"] < values["first_loss"]:
        raise RuntimeError(f"the loss went from {values['first_loss']:.3f} to {values['last_loss']:.3f}")
    if values["difference"]:
        raise RuntimeError(f"the weights of a resumed run differ by {values['difference']:.2g}")
    return values


def devices(shell: Shell) -> Values:
    """Train in fp32 without dropout on the GPU and on a CPU, and translate with the first run on both."""
    settings = [*TRANSFORMER, "model.dropout=0.0", "engine.precision=fp32", "batch.layout=padded"]
    gpu = shell.train("on-gpu", settings, 150)
    cpu = shell.train("on-cpu", settings, UPDATES, cpu=True)
    ours, theirs = logged(gpu, "train/loss"), logged(cpu, "train/loss")
    worst = float(torch.tensor([abs(ours[update] / theirs[update] - 1.0) for update in theirs]).max())
    source = shell.scratch / "text" / "test.en"
    lines = {}
    for name, precision, hidden in (("gpu", "fp32", False), ("half", "auto", False), ("cpu", "fp32", True)):
        words = ("--run", "on-gpu", "--input", str(source), "--output", f"{name}.hyp", "--precision", precision)
        shell.call("translate", *words, cpu=hidden)
        lines[name] = (shell.scratch / f"{name}.hyp").read_text("utf-8").splitlines()
    same = {name: sum(map(str.__eq__, lines[name], lines["cpu"])) / len(lines["cpu"]) for name in ("gpu", "half")}
    if not worst <= 1e-4 or same["gpu"] < 0.99:
        raise RuntimeError(f"losses differ by {worst:.2g}; {same['gpu']:.1%} of the translations are the same")
    return {"difference": worst, "same_fp32": same["gpu"], "same_16_bit": same["half"]}


def interrupted(shell: Shell) -> Values:
    """Stop a run by a signal, as SLURM does, and resume it."""
    run = shell.scratch / "interrupted"
    words = ("train", "--data", "data", "--run", str(run), *TRANSFORMER)
    process = shell.start(*words, "training.max_updates=100000")
    while process.poll() is None and not (run / "checkpoints" / f"update-{STOP:07d}").exists():
        if shell.bench.seconds_left < 10:
            process.kill()
        time.sleep(0.1)
    begun = time.monotonic()
    process.send_signal(signal.SIGTERM)
    shell.end(process, (75,))
    spent = time.monotonic() - begun
    reached = int((run / "checkpoints" / "latest").read_text().strip().rpartition("-")[2])
    shell.call(*words, f"training.max_updates={reached + 5}")
    return {"stopped_at": reached, "seconds_to_stop": spent}


def refusal(shell: Shell) -> Values:
    """Ask for more memory than the GPU has."""
    settings = [*TRANSFORMER, "model.dim=1024", "model.heads=16", "model.ffn_dim=4096", "batch.micro_tokens=8000000"]
    wide = ["model.decoder_layers=24", "batch.update_tokens=8000000", "training.probe=always"]
    output = shell.call("train", "--data", "data", "--run", "refused", *settings, *wide, statuses=(1, 2))
    last = [line for line in output.splitlines() if line.strip()][-1]
    if "Lower batch.micro_tokens" not in last:
        raise RuntimeError(f"refused for another reason: {last[-150:]}")
    return {"says": last[-300:]}


def automatic(shell: Shell) -> Values:
    """Let the run choose its micro-batches."""
    run = shell.train("automatic", [*TRANSFORMER, "batch.micro_tokens=auto"], 4)
    resolved = json.loads((run / "resolved.json").read_text("utf-8"))
    return {"says": json.dumps(resolved)[:300]}


def others(shell: Shell) -> Values:
    """Score pairs on both devices with one of the runs."""
    shell.train("scored", [*TRANSFORMER, "engine.precision=fp32"], STOP)
    found = {}
    for name, cpu in (("gpu", False), ("cpu", True)):
        source, target = (str(shell.scratch / "text" / f"valid.{side}") for side in ("en", "de"))
        words = ("--run", "scored", "--source", source, "--target", target, "--output", f"{name}.scores")
        shell.call("score-pairs", *words, cpu=cpu)
        text = (shell.scratch / f"{name}.scores").read_text("utf-8")
        found[name] = [float(line.split()[0]) for line in text.splitlines() if re.match(r"-?\d", line)]
    worst = float(torch.tensor([abs(a - b) for a, b in zip(found["gpu"], found["cpu"], strict=True)]).max())
    if not worst <= 1e-3:
        raise RuntimeError(f"scores differ by {worst:.2g}")
    return {"difference": worst}


def doctor(shell: Shell) -> Values:
    """Examine the host."""
    output = shell.call("doctor", "--json", statuses=(0, 1))
    return {"says": output[-1500:]}


def run(bench: Bench) -> None:
    """Call everything, several commands at once."""
    engines = [name for name in ENGINES if not bench.tiny or name in REHEARSED]
    rows: dict[tuple[str, str], Callable[[Shell], Values]] = {
        ("command", "doctor"): doctor,
        ("command", "gpu and cpu"): devices,
        ("command", "signal"): interrupted,
        ("command", "refusal"): refusal,
        ("command", "micro_tokens auto"): automatic,
        ("command", "score-pairs"): others,
        **{("engine", name): partial(engine, name) for name in engines},
    }
    if bench.tiny:
        del rows["command", "refusal"], rows["command", "micro_tokens auto"]
    wanted = {key: row for key, row in rows.items() if bench.wants(what=key[0], of=key[1])}
    bench.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        shell = Shell(Path(directory), bench.out / "journey.log", bench)
        sides = (("source", "en"), ("target", "de"))
        words = [
            word
            for split in ("train", "valid")
            for side, end in sides
            for word in (f"--{split}-{side}", f"text/{split}.{end}")
        ]

        def sample() -> None:
            shell.call("sample-data", "--out", "text", "--train", "4000", "--valid", "100", "--test", "100")
            shell.call("prepare", *words, "--out", "data", "--vocab-size", "1000")

        if wanted:
            sample()
        with ThreadPoolExecutor(AT_ONCE if bench.on_gpu else 2) as pool:
            futures = {key: pool.submit(row, shell) for key, row in wanted.items()}
            for (what, of), future in futures.items():
                bench.measure(future.result, in_any_case=True, what=what, of=of)
