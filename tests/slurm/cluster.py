"""A real SLURM cluster of two nodes on this machine. Each node has its own namespaces and can lose its power.

Needs root, and Debian's munge, slurmctld, slurmd and slurm-client.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "unshare")
NODES = (1, 2)
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"

CONFIG = """
ClusterName=test
# Jobs derive ports from their numbers. Several clusters may be up at once, because tests run side by side.
FirstJobId={first_job}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is queued again waits until its credentials expire, by default for two minutes.
AuthInfo=socket={root}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool.%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd.%n.pid
SlurmctldLogFile={root}/slurmctld.log
SlurmdLogFile={root}/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=5
SlurmctldTimeout=10
SlurmdTimeout=10
MinJobAge=3600
PropagateResourceLimits=NONE
SlurmdParameters=config_overrides
NodeName=node1 NodeHostname=node1 NodeAddr=127.0.1.1 Port={ports[1]} CPUs=2 RealMemory=8000
NodeName=node2 NodeHostname=node2 NodeAddr=127.0.1.2 Port={ports[2]} CPUs=2 RealMemory=8000
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=15
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""

NODE = """
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf
mount -t tmpfs tmpfs /dev/shm
slurmd -D -f "$2/slurm.conf" -N "$1" &
wait
"""


def missing() -> str:
    """Return the requirements of a cluster that this machine lacks; empty if there are none."""
    if os.geteuid() != 0:
        return "root"
    lacking = [program for program in PROGRAMS if shutil.which(program, path=PATH) is None]
    return " and ".join(lacking)


class Cluster:
    """Two nodes and a controller, as a context manager. All its processes end with it.

    Args:
        root: a directory that all users may enter (munge requires it), with a short path (sockets need one).
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        # An engine that a test made in this process has left its place among ranks.
        others = ("SLURM_", "SBATCH_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(others)},
            "SLURM_CONF": str(root / "slurm.conf"),
            "PATH": PATH,
        }

    def __enter__(self) -> Cluster:
        for name in ("state", "spool.node1", "spool.node2"):
            (self.root / name).mkdir(parents=True)
        sockets = [socket.socket() for _ in range(3)]
        for each in sockets:
            each.bind(("", 0))
        ports = [each.getsockname()[1] for each in sockets]
        for each in sockets:
            each.close()
        host = socket.gethostname().split(".")[0]
        first_job = random.SystemRandom().randrange(1, 1_000_000)
        config = CONFIG.format(host=host, ports=ports, root=self.root, first_job=first_job)
        (self.root / "slurm.conf").write_text(config)
        names = "".join(f"127.0.1.{node} node{node}\n" for node in NODES)
        (self.root / "hosts").write_text(Path("/etc/hosts").read_text() + names)
        (self.root / "nsswitch.conf").write_text("passwd: files\ngroup: files\nhosts: files\n")
        key = self.root / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(1024))
        munge = {"socket": "munge.socket", "key-file": "munge.key", "pid-file": "munge.pid", "log-file": "munge.log"}
        options = [f"--{name}={self.root / file}" for name, file in {**munge, "seed-file": "munge.seed"}.items()]
        try:
            self._daemons.append(self._start(["munged", "-F", *options]))
            self.until((self.root / "munge.socket").exists, 10, "munged")
            self._daemons.append(self._start(["slurmctld", "-D", "-f", str(self.root / "slurm.conf")]))
            for node in NODES:
                self.start_node(node)
            self.until(
                lambda: self.run("sinfo", "-h", "-t", "idle", "-p", "low", "-o", "%D") == "2", 30, "idle nodes"
            )
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for node in list(self._nodes):
            self.cut_power(node)
        for daemon in reversed(self._daemons):
            with contextlib.suppress(ProcessLookupError):
                daemon.kill()
            daemon.wait()

    def run(self, *command: str) -> str:
        """Return the output of a command of SLURM; empty if it fails thrice, as a busy controller may once."""
        for _ in range(3):
            done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
            if done.returncode == 0:
                return done.stdout.strip()
        return ""

    def submit(self, *words: str, cwd: Path) -> int:
        """Submit a batch job and return its number."""
        command = ["sbatch", "--parsable", *words]
        done = subprocess.run(command, env=self.environment, cwd=cwd, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def job(self, number: int, field: str) -> str:
        """Return a field of a job's record, such as JobState or Restarts."""
        record = self.run("scontrol", "show", "job", str(number), "--oneliner")
        return next((word[len(field) + 1 :] for word in record.split() if word.startswith(f"{field}=")), "")

    def ended(self, number: int, within: float) -> str:
        """Wait for a job's end and return its state."""
        final = (
            "COMPLETED",
            "FAILED",
            "CANCELLED",
            "TIMEOUT",
            "NODE_FAIL",
            "PREEMPTED",
            "BOOT_FAIL",
            "OUT_OF_MEMORY",
        )
        state = ""

        def has_ended() -> bool:
            nonlocal state
            state = self.job(number, "JobState")
            return state in final

        self.until(has_ended, within, f"the end of job {number}")
        return state

    def until(self, condition: Callable[[], bool], within: float, what: str) -> None:
        """Wait until a condition holds.

        Raises:
            AssertionError: with the cluster's logs, if it does not hold in time.
        """
        deadline = time.monotonic() + within
        while not condition():
            if time.monotonic() > deadline:
                logs = "".join(f"\n== {log.name}\n{log.read_text()[-2000:]}" for log in self.root.glob("*.log"))
                raise AssertionError(f"waited {within:.0f} s for {what}{logs}")
            time.sleep(0.1)

    def start_node(self, number: int) -> None:
        """Switch a node on."""
        command = ["unshare", "-m", "-u", "-p", "-f", "--kill-child", "--mount-proc", "bash", "-c", NODE, "node"]
        self._nodes[number] = self._start([*command, f"node{number}", str(self.root)])

    def cut_power(self, number: int) -> None:
        """Kill all processes of a node at once, so that none can notify the controller."""
        node = self._nodes.pop(number)
        node.send_signal(signal.SIGKILL)  # also kills the first process of the namespace, and thus all others
        node.wait()

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        with (self.root / "daemons.log").open("ab") as log:
            return subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
