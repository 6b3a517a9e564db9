"""Training on two hosts: network namespaces with their own addresses, connected by a virtual cable."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from deepspeed_nmt.errors import EXIT_STOPPED
from tests.commands import await_until, shell_environment
from tests.support import ROOT, assert_same, run_ranks

ADDRESSES = ("10.91.7.1", "10.91.7.2")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
SSHD = """
HostKey {root}/host_key
AuthorizedKeysFile {root}/key.pub
PidFile none
PermitRootLogin yes
StrictModes no
UsePAM no
"""
SSH = """#!/bin/sh
exec {ssh} -i {root}/key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR "$@"
"""


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Names of the two namespaces."""
    ip = shutil.which("ip", path=PATH)
    if os.geteuid() != 0 or ip is None:
        pytest.skip("needs root and ip (Debian's iproute2): two network namespaces")
    names = [f"nmt{os.getpid()}-{number}" for number in (1, 2)]
    cables = [f"nmt{os.getpid() % 100000}{letter}" for letter in "ab"]

    def run(*words: str) -> None:
        done = subprocess.run([ip, *words], capture_output=True, text=True)
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
            subprocess.run([ip, "netns", "delete", name], capture_output=True)


def test_the_launcher_trains_across_two_hosts(hosts: list[str], data: Path, tmp_path: Path, small: list[str]) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{address} slots=1\n" for address in ADDRESSES))
    run = tmp_path / "run"
    settings = [*small, "engine.name=deepspeed", "engine.ds_config=zero2", "validation.metrics=[]"]
    words = ["--hostfile", str(hostfile), "--master", ADDRESSES[0], "--port", "29650", "--interface", "eth0"]
    training = ["--", "--recipe", "transformer_base", "--data", str(data), "--run", str(run), *settings]
    environment = shell_environment(PYTHONUNBUFFERED="1")
    logs = [tmp_path / f"{host}.log" for host in hosts]
    processes = []
    for number, (host, log) in enumerate(zip(hosts, logs, strict=True)):
        command = ["ip", "netns", "exec", host, str(ROOT / "launch/multinode.sh"), *words]
        command += ["--node-rank", str(number), *training]
        with log.open("wb") as stream:
            processes.append(subprocess.Popen(command, env=environment, stdout=stream, stderr=stream))
    try:
        statuses = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = [log.read_text() for log in logs]
    assert statuses == [0, 0], said
    assert "2 hosts, meeting at 10.91.7.1:29650" in said[0] and "2 x cpu; DeepSpeedEngine" in said[0]
    assert "done: 12 updates" in said[0]
    command = ["-m", "deepspeed_nmt", "train", "--recipe", "transformer_base", "--data", str(data)]
    run_ranks([*command, "--run", str(tmp_path / "one_host"), *settings], 2, tmp_path)
    assert_same(run, tmp_path / "one_host")


@pytest.fixture
def ssh(hosts: list[str], tmp_path: Path) -> Iterator[Path]:
    """A directory with an ``ssh`` that reaches the real daemons of both hosts without prompts."""
    found = {name: shutil.which(name, path=PATH) for name in ("sshd", "ssh", "ssh-keygen", "pdsh")}
    lacking = [name for name, path in found.items() if path is None]
    if lacking:
        pytest.skip(f"needs {' and '.join(lacking)} (Debian's openssh-server, openssh-client, pdsh)")
    for name in ("key", "host_key"):
        command = [str(found["ssh-keygen"]), "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(command, check=True)
    (tmp_path / "sshd_config").write_text(SSHD.format(root=tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(SSH.format(root=tmp_path, ssh=found["ssh"]))
    (tmp_path / "bin/ssh").chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd requires it
    daemons = []
    for host in hosts:
        with (tmp_path / f"{host}.sshd.log").open("wb") as log:
            command = [str(found["sshd"]), "-D", "-e", "-f", str(tmp_path / "sshd_config")]
            daemons.append(subprocess.Popen(["ip", "netns", "exec", host, *command], stdout=log, stderr=log))
    for host, address in zip(hosts, ADDRESSES, strict=True):
        answers = ["ip", "netns", "exec", host, "bash", "-c", f": </dev/tcp/{address}/22"]
        while subprocess.run(answers, capture_output=True).returncode:
            assert all(daemon.poll() is None for daemon in daemons)
            time.sleep(0.05)
    yield tmp_path / "bin"
    for daemon in daemons:
        daemon.terminate()
        daemon.wait(timeout=20)


def test_training_is_started_stopped_and_resumed_by_ssh(
    hosts: list[str], ssh: Path, data: Path, tmp_path: Path, small: list[str]
) -> None:
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("# the hosts\n" + "".join(f"{address} slots=1\n" for address in ADDRESSES))
    run = tmp_path / "a run (first)"
    words = ["--hostfile", str(hostfile), "--port", "29651", "--interface", "eth0", "--"]
    training = ["--recipe", "transformer_base", "--data", str(data), *small, "engine.name=plain"]
    training += ["validation.metrics=[]", "training.validate_every=100000", "training.save_every=4"]
    command = ["ip", "netns", "exec", hosts[0], str(ROOT / "launch/multinode.sh"), *words, *training, "--run"]
    environment = shell_environment(PYTHONUNBUFFERED="1", PATH=f"{ssh}:{os.environ['PATH']}")
    log = tmp_path / "log"
    with log.open("wb") as stream:
        endless = [*command, str(run), "training.max_updates=100000"]
        process = subprocess.Popen(endless, env=environment, stdout=stream, stderr=stream, start_new_session=True)
    try:
        await_until((run / "checkpoints/latest").exists, process, log)
        os.killpg(process.pid, signal.SIGINT)  # like Ctrl-C in a terminal
        assert process.wait(timeout=300) == EXIT_STOPPED, log.read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    said = log.read_text()
    assert "2 hosts, meeting at 10.91.7.1:29651" in said and "stopped by request after update" in said
    assert "exits with return code" not in said, "nothing failed"
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    stopped_at = int((run / "checkpoints/latest").read_text().strip().removeprefix("update-"))
    end = f"training.max_updates={stopped_at + 6}"
    done = subprocess.run([*command, str(run), end], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    straight = [*training, "--run", str(tmp_path / "one_host"), end]
    run_ranks(["-m", "deepspeed_nmt", "train", *straight], 2, tmp_path)
    assert_same(run, tmp_path / "one_host", stopped_at + 6)
