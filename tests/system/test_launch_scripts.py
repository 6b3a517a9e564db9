"""launch/local.sh, launch/multinode.sh and torchrun, as a user calls them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from deepspeed_nmt.errors import EXIT_RANK_LOST, EXIT_STOPPED
from tests.commands import await_until, shell_environment
from tests.programs import Program
from tests.support import ROOT, free_port, rank_environment


def start(words: list[str], log: Path, script: str = "local.sh --ranks 2 --cpu") -> subprocess.Popen[bytes]:
    """Start a script in its own process group, like a terminal."""
    command = [str(ROOT / "launch" / script.split()[0]), *script.split()[1:], "--", *words]
    with log.open("wb") as stream:
        return subprocess.Popen(
            command, env=shell_environment(), stdout=stream, stderr=stream, start_new_session=True
        )


def below(process: subprocess.Popen[bytes], word: str) -> list[psutil.Process]:
    """Return the descendants of a process that have an argument beginning with ``word``."""
    descendants = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends while the script starts
            if any(argument.startswith(word) for argument in child.cmdline()):
                descendants.append(child)
    return descendants


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the script and all its descendants."""
    for child in below(process, "") if process.poll() is None else []:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.kill()
    process.wait()


def endless(data: Path, small: list[str], run: Path) -> list[str]:
    words = ["--recipe", "transformer_base", "--data", str(data), "--run", str(run), *small, "engine.name=plain"]
    words += ["validation.metrics=[]", "training.max_updates=100000", "training.validate_every=100000"]
    return [*words, "training.save_every=4", "engine.silent_s=3"]


def test_local_trains_and_ctrl_c_stops_it(data: Path, small: list[str], tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    process = start(endless(data, small, run), log)
    try:
        await_until((run / "checkpoints/latest").exists, process, log)
        os.killpg(process.pid, signal.SIGINT)  # like Ctrl-C in a terminal; the ranks have their own process group
        assert process.wait(timeout=300) == EXIT_STOPPED, log.read_text()
    finally:
        end(process)
    said = log.read_text()
    assert "2 ranks on CPU" in said and "stopped by request after update" in said
    assert "exits with return code" not in said and "[INFO]" not in said, "nothing failed; the launcher is quiet"
    assert sorted(path.name for path in (run / "logs").iterdir()) == ["rank-0.log", "rank-1.log"]


def test_ctrl_c_right_after_the_start_stops_the_run(data: Path, small: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(endless(data, small, tmp_path / "run"), log)
    try:
        await_until(lambda: "ranks on CPU" in log.read_text(), process, log)
        await_until(lambda: len(below(process, "--local_rank=")) == 2, process, log)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=300) == EXIT_STOPPED, log.read_text()
    finally:
        end(process)
    said = log.read_text()
    assert "start the same command again to resume" in said and "exits with return code" not in said


@pytest.mark.parametrize("victim", ["deepspeed.launcher.launch", "--local_rank=1"])
def test_a_killed_launcher_or_rank_is_an_error_and_leaves_no_processes(
    victim: str, data: Path, small: list[str], tmp_path: Path
) -> None:
    log, run = tmp_path / "log", tmp_path / "run"
    process = start(endless(data, small, run), log)
    try:
        await_until((run / "checkpoints/latest").exists, process, log)
        ranks = below(process, "--local_rank=")
        assert len(ranks) == 2
        below(process, victim)[0].kill()
        assert process.wait(timeout=300) == EXIT_RANK_LOST, log.read_text()
        _, alive = psutil.wait_procs(ranks, timeout=30)
        assert not alive, "ranks continue without their launcher"
    finally:
        end(process)
    assert "was killed; start the same command again to resume" in log.read_text()


def test_a_host_reports_that_it_waits_and_can_be_stopped(data: Path, small: list[str], tmp_path: Path) -> None:
    hostfile, log = tmp_path / "hostfile", tmp_path / "log"
    hostfile.write_text("127.0.0.1 slots=1\nlocalhost slots=1\n")
    script = f"multinode.sh --hostfile {hostfile} --node-rank 0 --port {free_port()}"
    process = start(endless(data, small, tmp_path / "run"), log, script)
    try:
        await_until(lambda: "rank 0 has been waiting for rank 1 for 1" in log.read_text(), process, log)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=300) == EXIT_STOPPED, log.read_text()
    finally:
        end(process)
    assert "stopped while waiting for rank 1; start the same command again" in log.read_text()


def test_wrong_arguments_are_named(tmp_path: Path) -> None:
    def fails(*words: str) -> str:
        done = subprocess.run(words, env=shell_environment(), capture_output=True, text=True)
        assert done.returncode == 2, done.stdout + done.stderr
        return done.stderr

    local, multinode = str(ROOT / "launch/local.sh"), str(ROOT / "launch/multinode.sh")
    assert "after --" in fails(local)
    assert "no --hostfile" in fails(multinode, "--", "--recipe", "x")
    assert "--recipe" in fails(multinode, "--recipe", "x")
    assert "submit this script with sbatch" in fails(str(ROOT / "launch/train.sbatch"), "--recipe", "x")
    assert "--ranks is '0'" in fails(local, "--ranks", "0", "--", "x")
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("one slots=1\ntwo\n")
    rest = ["--hostfile", str(hostfile), "--node-rank", "2", "--", "x"]
    assert "2:two" in fails(multinode, *rest)
    hostfile.write_text("one slots=1\ntwo slots=1\n")
    assert "--node-rank is 2" in fails(multinode, *rest)


# What DeepSpeed's launcher makes of arguments: by pdsh remote shells read them, and those with spaces are quoted.
LAUNCHER = """#!/usr/bin/env bash
echo "threads $OMP_NUM_THREADS: $*" | sed 's/ --module.*//' >"$LAUNCHED"
until [ "$1" = --module ]; do shift; done
for word in "${@:2}"; do
    case "$word" in *" "*) word="\\"${word//\\"/\\\\\\"}\\"" ;; esac
    words+=("$word")
done
if grep -q pdsh "$LAUNCHED"; then
    sh -c "printf '<%s>' ${words[*]//%%/%}" >>"$LAUNCHED"
else
    printf '<%s>' "${@:2}" >>"$LAUNCHED"
fi
echo 0 >"$DEEPSPEED_NMT_STATUS"
"""


def launched(script: str, *words: str, programs: Path, cwd: Path | None = None, **settings: str) -> str:
    """Return the options that a script gives DeepSpeed's launcher, and the arguments that ranks receive."""
    programs.mkdir(exist_ok=True)
    host = {"nvidia-smi": "#!/bin/sh\nprintf '9.0, 580\\n9.0, 580\\n'", "nproc": "#!/bin/sh\necho 24"}
    for name, content in {"deepspeed": LAUNCHER, "ssh": "", "pdsh": "", **host}.items():
        (programs / name).write_text(content)
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(ROOT / "launch" / script), *words],
        env=shell_environment(
            VENV=str(programs / "none"),
            PATH=path,
            LAUNCHED=str(programs / "launched"),
            OMP_NUM_THREADS="",
            **settings,
        ),
        capture_output=True,
        text=True,
        cwd=cwd,
    )
    return (programs / "launched").read_text() if done.returncode == 0 else done.stderr


def test_remote_shells_read_arguments_as_they_are(tmp_path: Path) -> None:
    (hostfile := tmp_path / "hostfile").write_text("# hosts\none slots=4\ntwo slots=8\n")
    words = ["d=1@<2de>", 'my $HOME run\\x "q" `id`', "it's", "[a, b]", "50%n", "a*b;c", "(1) 2"]
    options = ["--hostfile", str(hostfile), "--", *words]
    said = launched("multinode.sh", *options, programs=tmp_path / "bin")
    assert said.endswith("".join(f"<{word}>" for word in ("deepspeed_nmt", "train", *words)))
    assert said.startswith("threads 3: ")
    for number, threads in enumerate((6, 3)):
        said = launched("multinode.sh", "--node-rank", str(number), *options, programs=tmp_path / "bin")
        assert said.startswith(f"threads {threads}: ")
    (place := tmp_path / "a place").mkdir()
    refused = launched("multinode.sh", *options, programs=tmp_path / "bin", cwd=place)
    assert f"the path of the working directory as it is: {place}" in refused


# DeepSpeed's launcher: that a signal ended pdsh, whose status is negative then, is none of its errors.
BY_PDSH = """#!/usr/bin/env python3
import os, shutil, subprocess, sys
shutil.copy(os.environ["DS_ENV_FILE"], os.environ["LAUNCHED"])
sys.exit(max(0, subprocess.call(["pdsh"])))
"""


@pytest.mark.parametrize(("ending", "status"), [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 70)])
def test_hosts_get_variables_of_nccl_and_a_lost_pdsh_is_an_error(ending: str, status: int, tmp_path: Path) -> None:
    (hostfile := tmp_path / "hostfile").write_text("one slots=4\ntwo slots=8\n")
    for name, content in {"deepspeed": BY_PDSH, "ssh": "", "pdsh": f"#!/bin/sh\n{ending}\n"}.items():
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    variables = {"LAUNCHED": str(tmp_path / "launched"), "NCCL_DEBUG": "INFO", "VENV": str(tmp_path / "none")}
    words = ["--hostfile", str(hostfile), "--interface", "eth9", "--", "x"]
    done = subprocess.run(
        [str(ROOT / "launch/multinode.sh"), *words],
        env=shell_environment(PATH=path, **variables),
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stderr
    assert {"NCCL_DEBUG=INFO", "NCCL_SOCKET_IFNAME=eth9"} <= set((tmp_path / "launched").read_text().splitlines())


def test_local_trains_on_this_machine_by_the_settings_of_the_user(tmp_path: Path) -> None:
    said = launched("local.sh", "--cpu", "--", "--run", "my run", "engine.device=auto", programs=tmp_path / "bin")
    assert "--hostfile /dev/null" in said, "DeepSpeed's default may name other hosts"
    assert said.endswith("<train><engine.device=cpu><--run><my run><engine.device=auto>")
    assert said.startswith("threads 12: "), "of 24 cores"
    said = launched("local.sh", "--", "--run", "my run", programs=tmp_path / "bin")
    assert said.startswith("threads 12: --num_gpus 2") and "engine.device" not in said
    said = launched("local.sh", "--", "--run", "my run", programs=tmp_path / "bin", CUDA_VISIBLE_DEVICES="1")
    assert said.startswith("threads 24: ") and "--include localhost:1" in said


def test_tensorboard_reads_on_what_training_writes_after_choose_best(tmp_path: Path) -> None:
    (program := tmp_path / "tensorboard").write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    environment = shell_environment(VENV=str(tmp_path / "none"), PATH=f"{tmp_path}:{os.environ['PATH']}")
    for runs, named in (([str(tmp_path)], f"--logdir {tmp_path}"), ([str(tmp_path), str(ROOT)], "--logdir_spec ")):
        words = [str(ROOT / "launch/tensorboard.sh"), *runs]
        said = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
        assert named in said and "--port 6006 --reload_multifile true" in said


PROGRAMS = {
    # As at a time limit; the script passes the signal on, which ends this. Tasks of a preempted job get TERM, too.
    "srun": """case "$STATUS" in
        "") kill -USR1 $PPID; sleep 5 ;;
        preempted) kill -TERM $PPID; exit 75 ;;
        *) exit "$STATUS" ;;
    esac""",
    "scontrol": """case "$*" in
        "show job"*) echo "JobState=RUNNING PreemptTime=$PREEMPTED" ;;
        "show hostnames"*) echo localhost ;;
        *) echo "$@" >> "$CALLS" ;;
    esac""",
}


CRASHED, REQUEUED = "update JobId=7 Comment=crashes:1", "requeue 7"


@pytest.mark.parametrize(
    ("command", "status", "seconds", "preempted", "calls"),
    [
        ("translate", "", 100, "None", [CRASHED, REQUEUED]),  # it has kept no piece, so it would be queued for ever
        ("train", "", 100, "None", [REQUEUED]),
        ("train", "", 25, "None", [CRASHED, REQUEUED]),  # --time is too short
        ("train", "", 25, "2026-11-24T12:00:00", [REQUEUED]),  # PreemptParameters=send_user_signal
        ("train", "preempted", 25, "None", [REQUEUED]),
        ("train", "70", 100, "None", [CRASHED, REQUEUED]),
        ("train", "78", 100, "None", []),  # it got nowhere
    ],
)
def test_a_job_is_queued_again_by_its_status(
    command: str, status: str, seconds: int, preempted: str, calls: list[str], tmp_path: Path
) -> None:
    for name, content in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{content}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "localhost", "DEEPSPEED_NMT_COMMAND": command}
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), "SECONDS": str(seconds)}
    (tmp_path / "calls").touch()
    script = str(ROOT / "launch/train.sbatch")
    done = subprocess.run(
        [script, "--run", "x"],
        env=shell_environment(**job, **path, STATUS=status, PREEMPTED=preempted),
        capture_output=True,
        text=True,
    )
    assert f"ended with status {75 if status == 'preempted' else status or 138}" in done.stdout, (
        done.stdout + done.stderr
    )
    assert (tmp_path / "calls").read_text().splitlines() == calls


def batch(
    script: str, *words: str, place: Path, status: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a batch script, as if it stood in `place`, with programs in place of SLURM's."""
    place.mkdir(exist_ok=True)
    original = place / script
    programs = {
        "scontrol": f"echo '   Command={original} --like Command=/x my words'",
        "srun": 'printf "<%s>" "$@"',
        "train.sbatch": 'printf "<%s>" "$@"',
        "python3": "echo --recipe big model.x=1",
    }
    original.touch()
    for name, content in programs.items():
        (place / name).write_text(f"#!/usr/bin/env bash\n{content}\n")
        (place / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_NODELIST": "x"}
    path = f"{place}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(ROOT / "launch" / script), *words],
        env=shell_environment(**{**job, "PATH": path, "PYTHON": "python3", **variables}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_batch_scripts_find_those_beside_them_in_a_directory_with_spaces(tmp_path: Path) -> None:
    place = tmp_path / "my scripts"
    for script in ("doctor.sbatch", "translate.sbatch"):
        assert batch(script, "--run", "my run", place=place).stdout == "<--run><my run>"
    for script in ("prepare.sbatch", "train.sbatch"):
        assert f"<{place}/container.sh>" in batch(script, place=place, CONTAINER="image.sif").stdout


def test_a_sweep_trains_each_recipe_on_all_data_that_is_given(tmp_path: Path) -> None:
    runs = ["--runs", "runs"]
    words = ["--recipes", "a,b", "--data", "one", *runs, "--data", "two=3"]
    said = batch("sweep.sbatch", *words, "optimizer.lr=1", place=tmp_path / "my scripts").stdout
    assert said == "<--recipe><b><--data><one><--data><two=3><--run><runs/2><optimizer.lr=1>"
    data = ["--data", "one"]
    for wrong, message in (
        ([*runs, *data, "--recipes"], "--recipes has no value"),
        ([*runs, *data, "--recipes", "a,b", "--sweep", "depths"], "exclude one another"),
        ([*runs, *data, "--recipes", "a"], "--array has 2, beyond the recipes"),
        ([*runs, "--recipes", "a,b"], "--data or --runs is missing"),
        ([*runs, *data, "--recipes", "a,b", "--recipe", "c"], "--recipe is set by the sweep; leave it out"),
        ([*runs, *data, "--sweep", "depths", "model.x=3"], "model.x is set by the sweep; leave it out"),
    ):
        assert message in batch("sweep.sbatch", *wrong, place=tmp_path, status=2).stderr
    zero = batch("sweep.sbatch", *runs, *data, "--recipes", "a", place=tmp_path, status=2, SLURM_ARRAY_TASK_ID="0")
    assert zero.stderr == "error: --array has 0, beyond the recipes; see --help\n"


def test_crashes_that_are_no_number_do_not_queue_a_job_again_for_ever(tmp_path: Path) -> None:
    said = batch("train.sbatch", "--run", "x", place=tmp_path, status=2, CRASHES="3x")
    assert "CRASHES is '3x', which is no whole number" in said.stderr and not said.stdout


def test_a_port_in_use_is_named(data: Path, small: list[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = ["-m", "deepspeed_nmt", "train", *endless(data, small, tmp_path / "run")]
        assert Program(command, rank_environment(0, 2, port, tmp_path), tmp_path / "log").wait() == 2
    said = (tmp_path / "log").read_text()
    assert f"rank 0 cannot listen on MASTER_PORT {port}" in said and "`deepspeed-nmt doctor`" in said


def test_torchrun_as_documented(data: Path, small: list[str], tmp_path: Path) -> None:
    (line,) = re.findall(
        r"^torchrun .* train .*$", (ROOT / "docs/launch.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    words = line.split()
    for word, replacement in (("DATA", str(data)), ("RUN", str(tmp_path / "run")), ("8", "2")):
        words[words.index(word)] = replacement
    words[words.index("transformer_big")] = "transformer_base"
    command = [sys.executable, "-m", "torch.distributed.run", "--master-port", str(free_port()), *words[1:]]
    done = subprocess.run(
        [*command, *small, "training.max_updates=2", "engine.name=plain", "validation.metrics=[]"],
        env=shell_environment(),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 x cpu" in done.stderr and "done: 2 updates" in done.stderr
