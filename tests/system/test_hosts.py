"""Two hosts: network namespaces with addresses of their own, which reach each other through a cable alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT, assert_same, run_ranks

ADDRESSES = ("10.91.7.1", "10.91.7.2")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of the two namespaces."""
    ip = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if os.geteuid() != 0 or ip is None:
        pytest.skip("needs root and ip (Debian's iproute2): two network namespaces")
    names = [f"nmt{os.getpid()}-{number}" for number in (1, 2)]
    cables = [f"nmt{os.getpid() % 100000}{letter}" for letter in "ab"]

    def run(*words: str) -> None:
        done = subprocess.run([ip, *words], capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr

    try:
        for name in names:
            run("netns", "add", name)
        run("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            run("link", "set", cable, "netns", name)
            run("-n", name, "link", "set", cable, "name", "eth0")
            run("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            run("-n", name, "link", "set", "eth0", "up")
            run("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run([ip, "netns", "delete", name], capture_output=True, timeout=20)


def test_the_launcher_trains_across_two_hosts(hosts: list[str], data: Path, tmp_path: Path, small: list[str]) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    run = tmp_path / "run"
    settings = [*small, "engine.name=deepspeed", "engine.ds_config=zero2", "validation.bleu=false"]
    words = ["--hostfile", str(hostfile), "--master", ADDRESSES[0], "--port", "29650", "--interface", "eth0"]
    training = ["--", "--recipe", "transformer_base", "--data", str(data), "--run", str(run), *settings]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {"VENV": sys.prefix, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    logs = [tmp_path / f"{host}.log" for host in hosts]
    processes = []
    for number, (host, log) in enumerate(zip(hosts, logs, strict=True)):
        command = ["ip", "netns", "exec", host, str(ROOT / "launch/multinode.sh"), *words]
        with log.open("wb") as stream:
            processes.append(
                subprocess.Popen(
                    [*command, "--node-rank", str(number), *training], env=environment, stdout=stream, stderr=stream
                )
            )
    try:
        statuses = [process.wait(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = [log.read_text() for log in logs]
    assert statuses == [0, 0], said
    assert "2 hosts, meeting at 10.91.7.1:29650" in said[0] and "2 x cpu; DeepSpeedEngine" in said[0]
    assert "done: 12 updates" in said[0]
    command = ["-m", "deepspeed_nmt", "train", "--recipe", "transformer_base", "--data", str(data)]
    run_ranks([*command, "--run", str(tmp_path / "one_host"), *settings], 2, tmp_path, timeout=100)
    assert_same(run, tmp_path / "one_host")
