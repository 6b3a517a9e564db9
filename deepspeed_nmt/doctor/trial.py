"""Trial of a process group: ranks add numbers, and the program ends.

    python -m deepspeed_nmt.doctor.trial BACKEND STORE_ADDRESS STORE_PORT PREFIX RANK RANKS GPU SECONDS

A process of its own, because a library that cannot connect may wait without end, or end its process. It prints a JSON
object with the fields of :class:`Outcome`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from deepspeed_nmt.doctor.findings import last_line, run_program
from deepspeed_nmt.files import system_lines

_MIB = {"gloo": 4, "nccl": 256}
"""MiB of the tensor whose sum is timed."""
_TIMES = 3
"""Number of timed sums."""
_CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : .* via (\S+)")


@dataclass(frozen=True)
class Outcome:
    """Result of a trial on one rank: the reason if it could not take part, and NCCL's version and transports.

    The bandwidth is that of a sum over all ranks as each rank sees it: what it sends in a ring.
    """

    gigabytes_per_s: float = 0.0
    problem: str = ""
    nccl: str = ""
    transports: tuple[str, ...] = ()


def run_trial(
    backend: str, address: tuple[str, int], prefix: str, rank: int, ranks: int, gpu: int, limit_s: float
) -> Outcome:
    """Run the trial of this rank with a time limit in seconds.

    All ranks reach the store at ``address``, in which the trial's keys begin with ``prefix``. ``gpu`` is for "nccl".
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        log = Path(scratch, "nccl.log")
        environment = {**os.environ, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
        environment["NCCL_DEBUG_SUBSYS"] = "INIT,ENV,NET,GRAPH,P2P,SHM"
        words = map(str, (backend, *address, prefix, rank, ranks, gpu, limit_s))
        done = run_program([sys.executable, "-m", "deepspeed_nmt.doctor.trial", *words], limit_s, environment)
        answer = next((line for line in done.text.splitlines() if line.startswith("{")), None)
        if answer is None:
            return Outcome(problem=done.problem or "no answer")
        lines = system_lines(log)
    transports = {_transport(match[1]) for line in lines if (match := _CHANNEL.search(line))}
    return replace(Outcome(**json.loads(answer)), transports=tuple(sorted(transports)))


def _transport(words: str) -> str:
    parts = words.split("/")
    direct = " with GPUDirect" if "GDRDMA" in parts else ""
    return "/".join(parts[:2] if parts[0] in ("NET", "P2P") else parts[:1]) + direct


def trial_on_this_host(backend: str, ranks: int, limit_s: float) -> list[Outcome]:
    """Try a process group of several ranks on this host; with "nccl" each has the GPU of its number."""
    from deepspeed_nmt.parallel.shared_work import local_store

    store = local_store()
    address = ("127.0.0.1", store.port)
    with ThreadPoolExecutor(ranks) as pool:
        trials = [
            pool.submit(run_trial, backend, address, "trial", rank, ranks, rank, limit_s) for rank in range(ranks)
        ]
        return [trial.result() for trial in trials]


def _add(backend: str, store: Any, rank: int, ranks: int, gpu: int, limit: timedelta) -> Outcome:
    """Add numbers over all ranks, check the sum, and measure the bandwidth."""
    import torch
    import torch.distributed as dist

    device, nccl = torch.device("cpu"), ""
    if backend == "nccl":
        device = torch.device("cuda", gpu)
        torch.cuda.set_device(device)
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    wait: Callable[[], None] = torch.cuda.synchronize if backend == "nccl" else lambda: None
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=limit)
    numbers = torch.full((_MIB[backend] * 2**18,), float(rank + 1), device=device)
    dist.all_reduce(numbers)
    if not bool((numbers == ranks * (ranks + 1) / 2).all()):
        return Outcome(problem="the sum is wrong", nccl=nccl)
    wait()
    began = time.perf_counter()
    for _ in range(_TIMES):
        dist.all_reduce(numbers)
    wait()
    seconds = (time.perf_counter() - began) / _TIMES
    dist.barrier(device_ids=[gpu] if backend == "nccl" else None)
    dist.destroy_process_group()
    return Outcome(numbers.nbytes * 2 * (ranks - 1) / ranks / seconds / 1e9, nccl=nccl)


def main(words: list[str]) -> None:
    """Run as one rank of a trial."""
    import torch.distributed as dist

    backend, host, port, prefix, rank, ranks, gpu, seconds = words
    limit = timedelta(seconds=float(seconds))
    try:
        store = dist.TCPStore(host, int(port), is_master=False, timeout=limit)  # type: ignore[attr-defined]
        shared = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
        outcome = _add(backend, shared, int(rank), int(ranks), int(gpu), limit)
    except Exception as error:  # of torch, NCCL, a driver or the network
        outcome = Outcome(problem=last_line(str(error)) or type(error).__name__)
    sys.stdout.write(json.dumps(asdict(outcome)) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads of a library that has failed may wait for another rank


if __name__ == "__main__":
    main(sys.argv[1:])
