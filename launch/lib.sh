# shellcheck shell=bash
# What the launch scripts share: messages, the virtual environment, and the locks. Sourced, never run.
# Works with bash 3.2 (macOS) and later.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
SYSTEM="${SYSTEM:-}" # "yes" allows apt-get
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }
complain() { printf 'error: %s\n' "$*" >&2; }
# value OPTION [VALUE]: the value, which is required. number OPTION [VALUE]: a positive one.
value() { [ -n "${2:-}" ] || die "$1 needs a value, but has none; see --help"; printf '%s\n' "$2"; }
number() {
    case "${2:-}" in '' | *[!0-9]* | 0) die "$1 must be a positive number, but is '${2:-}'; see --help" ;; esac
    printf '%s\n' "$2"
}
die() { # status 2: the same as the program's own for a mistake of the user
    complain "$@"
    exit 2
}

# The comment that heads a script, as its help.
print_help() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1"; }

cores() { nproc 2>/dev/null || getconf _NPROCESSORS_ONLN; }

# threads_for RANKS: OMP threads for each of RANKS processes. More threads than cores make ranks fight.
threads_for() {
    local threads=$(($(cores) / $1))
    echo $((threads > 0 ? threads : 1))
}

# Programs of $VENV, if there is one, before those on PATH.
use_venv() { if [ -x "$VENV/bin/python" ]; then export PATH="$VENV/bin:$PATH"; fi; }

# A TCP port that nobody listens on just now.
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }

# run_ranks COMMAND...: run DeepSpeed's launcher and return its status. Ctrl-C or SIGTERM asks the ranks to save and
# stop, instead of having the launcher kill them; a second one ends them at once.
run_ranks() {
    local group status asked=0 heard
    set -m # in a process group of its own, which the terminal's Ctrl-C does not reach
    "$@" </dev/null &
    group=$!
    set +m
    trap 'heard=yes asked=$((asked + 1)); stop_ranks "$group" "$asked"' INT TERM HUP
    trap '' PIPE
    while :; do
        heard="" status=0
        wait "$group" || status=$?
        [ -n "$heard" ] || break
    done
    trap - INT TERM HUP PIPE
    if [ "$asked" = 0 ] && [ "$status" -gt 128 ]; then
        # 128 and the signal's number, or 256 minus it.
        complain "a rank was killed; start the same command again to go on from the last checkpoint"
        status=70
    elif [ "$status" = 0 ] && [ ! -e "$SCRATCH/done" ]; then
        # DeepSpeed calls it success when its launcher is killed. The ranks notice, save, and stop.
        complain "the launcher was killed; start the same command again to go on"
        status=70
    fi
    return "$status"
}

# A directory of this start alone, where ranks look for requests and say that they are done.
make_scratch() {
    SCRATCH="$(mktemp -d)"
    trap 'rm -rf "$SCRATCH"' EXIT
    export DEEPSPEED_NMT_STOP="$SCRATCH/stop"
}

# Ask the ranks of this host to save and stop.
ask_ranks() { touch "$SCRATCH/stop"; }

stop_ranks() { # GROUP TIMES
    # The request first: whoever read our messages may have gone with the same Ctrl-C.
    if [ "$2" = 1 ]; then
        ask_ranks || true
        (say "saving, then stopping; once more, and it stops at once") 2>/dev/null || true
    else
        kill -TERM -- "-$1" 2>/dev/null || true
    fi
}

# One line "compute capability, driver version" per NVIDIA GPU; nothing where there is none.
list_gpus() {
    command -v nvidia-smi >/dev/null || return 0
    nvidia-smi --query-gpu=compute_cap,driver_version --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.[0-9]+, *[0-9]' || true
}

# The lock that fits this machine: cuda, v100 (older GPU or driver than CUDA 13 accepts), or cpu.
choose_lock() {
    list_gpus | awk -F'[., ]+' '
        $1 < 7 || ($1 == 7 && $2 < 5) || $3 < 580 { old = 1 }
        END { print NR == 0 ? "cpu" : old ? "v100" : "cuda" }'
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

# A Python >= 3.10: $PYTHON if set, else python3, else a versioned one.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
        if is_new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    return 1
}

apt_install() {
    local sudo=""
    [ "$(id -u)" = 0 ] || sudo="sudo"
    say "apt-get install $*"
    $sudo apt-get update -q && $sudo env DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends "$@"
}

# Make $VENV, unless it is there and works.
make_venv() {
    [ -x "$VENV/bin/python" ] && is_new_enough "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
    if [ -e "$VENV" ] && [ ! -e "$VENV/pyvenv.cfg" ]; then
        die "VENV must be a virtual environment or a new directory, but $VENV is something else; set VENV to another path"
    fi
    if [ "$SYSTEM" = yes ] && command -v apt-get >/dev/null; then
        if ! find_python >/dev/null || ! "$(find_python)" -c 'import ensurepip, venv' 2>/dev/null; then
            apt_install python3 python3-venv
        fi
    fi
    local python
    python="$(find_python)" ||
        die "Python 3.10 or newer is required, but ${PYTHON:-python3} is $("${PYTHON:-python3}" --version 2>&1 | tail -n 1);" \
            "install one (Debian, Ubuntu: apt-get install python3 python3-venv), or set PYTHON to its path"
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "the modules venv and ensurepip are required, but $python has not got them;" \
            "install them (Debian, Ubuntu: apt-get install python3-venv) and run this again"
    say "making the virtual environment $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV"
}

# stamped NAME FILE... -- COMMAND...: run COMMAND unless it has succeeded before with just these FILEs.
stamped() {
    local stamp="$VENV/.installed-$1" files=() sum
    shift
    while [ "$1" != -- ]; do
        files+=("$1")
        shift
    done
    shift
    sum="$(cd "$ROOT" && cksum "${files[@]}") $ROOT"
    [ "$(cat "$stamp" 2>/dev/null)" = "$sum" ] && return
    "$@" || return
    printf '%s\n' "$sum" >"$stamp"
}

pip_install() {
    local bar=off
    [ -t 1 ] && bar=on
    "$VENV/bin/python" -m pip install --progress-bar "$bar" "$@" || {
        complain "pip could not install what is needed; the lines above say why. Mend that and run this again"
        return 1
    }
}

install_lock() {
    say "installing requirements/$1.txt"
    # With everything else in place, pip asks PyTorch's own index about torch alone: where that index cannot be
    # reached, that saves its retries for each of the other packages.
    case "$1" in cpu | cuda | v100) pip_install --no-deps -r "$ROOT/requirements/common.txt" || return ;; esac
    pip_install -r "$ROOT/requirements/$1.txt"
}

install_package() {
    say "installing this package (editable)"
    # The lock has setuptools: without an isolated build nothing needs to be fetched.
    pip_install --quiet --no-deps --no-build-isolation -e "$ROOT"
}

# install LOCK...: the virtual environment with these locks and this package; quick when all is there already.
# With SKIP_INSTALL=1 $VENV is taken as it is.
install() {
    if [ -n "${SKIP_INSTALL:-}" ]; then
        [ -x "$VENV/bin/python" ] || die "SKIP_INSTALL needs a virtual environment, but there is none at $VENV; set VENV to one"
        return
    fi
    make_venv
    local lock
    for lock in "$@"; do
        stamped "$lock" requirements/common.txt "requirements/$lock.txt" -- install_lock "$lock"
    done
    stamped package setup.py pyproject.toml -- install_package
}
