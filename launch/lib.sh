# shellcheck shell=bash
# Functions of the launch scripts: messages, options, the ranks, and the virtual environment. Sourced, never executed.
# Compatible with bash 3.2 (macOS).

unset CDPATH # by which `cd launch/..` may go elsewhere, and print where
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
WHEELHOUSE="${WHEELHOUSE:-}" # of launch/wheelhouse.sh
case "$WHEELHOUSE" in '' | /*) ;; *) WHEELHOUSE="$PWD/$WHEELHOUSE" ;; esac
SYSTEM="${SYSTEM:-}" # "yes" allows apt-get
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }
complain() { printf 'error: %s\n' "$*" >&2; }
# Complain and exit with status 2, which is also the status of `deepspeed-nmt` for an error of the user.
die() {
    complain "$@"
    exit 2
}

# value OPTION [VALUE]: print VALUE, which is required.
value() { [ -n "${2:-}" ] || die "$1 has no value; see --help"; printf '%s\n' "$2"; }
# number OPTION [VALUE]: print VALUE, which must be a positive whole number.
number() {
    case "${2:-}" in '' | *[!0-9]* | 0*) die "$1 is '${2:-}', which is no positive whole number; see --help" ;; esac
    printf '%s\n' "$2"
}
# lock_named OPTION [NAME]: print NAME, which must be that of a lock in requirements/.
lock_named() {
    case "${2:-}" in
    cpu | cuda | v100) printf '%s\n' "$2" ;;
    *) die "$1 is '${2:-}'; use cpu, cuda or v100, or leave it out to have the one for this machine" ;;
    esac
}
# directory_named OPTION [DIR]: print the absolute path of DIR, which must be a directory.
directory_named() {
    [ -d "${2:-}" ] || die "no directory '${2:-}'; check $1"
    (cd "$2" && pwd)
}

# print_help SCRIPT: print the comment at the top of SCRIPT.
print_help() { sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$1"; }

cores() { nproc 2>/dev/null || getconf _NPROCESSORS_ONLN; }

# threads_for RANKS: print the number of OpenMP threads for each of RANKS processes. More threads than cores slow down
# all ranks.
threads_for() {
    local threads=$(($(cores) / $1))
    echo $((threads > 0 ? threads : 1))
}

# Put the programs of $VENV, if it exists, first on PATH.
use_venv() { if [ -x "$VENV/bin/python" ]; then export PATH="$VENV/bin:$PATH"; fi; }

# Print a TCP port that is free now.
free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'; }

SIGNALS="INT TERM HUP USR1" # request a stop
ONE_REQUEST_S=2 # signals within this time are one request: the shell and the kernel both report a lost terminal

# attend HANDLER COMMAND...: run COMMAND in the background, in its own process group $group, which the terminal's Ctrl-C
# does not reach, and return its status. Meanwhile each of $SIGNALS calls HANDLER with its name. Bash would defer that to
# the end of a command in the foreground.
attend() {
    local handler="$1" group="" interrupted="" status name
    shift
    for name in $SIGNALS; do
        # shellcheck disable=SC2064 # the name is that of now
        trap "interrupted=$name; $handler $name" "$name"
    done
    set -m # gives the command its own process group
    "$@" </dev/null &
    group=$!
    set +m
    trap '' PIPE
    [ -z "$interrupted" ] || "$handler" "$interrupted" # it came before there was a group
    while :; do # a signal ends `wait` before the command ends
        interrupted="" status=0
        wait "$group" || status=$?
        [ -n "$interrupted" ] || break
    done
    # shellcheck disable=SC2086 # several names
    trap - $SIGNALS PIPE
    return "$status"
}

# run_ranks COMMAND...: run DeepSpeed's launcher and return its status; make_scratch comes before it. The first signal
# asks the ranks to save and stop, because the launcher would kill them. A later one kills them.
run_ranks() {
    local asked="" status=0
    attend stop_ranks "$@" || status=$?
    # Ranks that end as they should leave their status in a file, because the launcher reports any but 0 as an error.
    if [ "$status" = 0 ] && [ -s "$SCRATCH/status" ]; then
        status="$(cat "$SCRATCH/status")"
    elif [ -z "$asked" ] && [ "$status" -gt 128 ]; then
        # The launcher reports a signal as 128 plus its number or as 256 minus it.
        complain "a rank was killed; start the same command again to resume from the last checkpoint"
        status=70
    elif [ "$status" = 0 ]; then
        # DeepSpeed reports status 0 when its launcher is killed. The ranks notice the loss, save and stop.
        complain "the launcher was killed; start the same command again to resume"
        status=70
    fi
    return "$status"
}

# Make $SCRATCH, a temporary directory of this start, where the ranks look for a stop request and leave their status.
make_scratch() {
    SCRATCH="$(mktemp -d)"
    trap 'rm -rf "$SCRATCH"' EXIT
    export DEEPSPEED_NMT_STOP="$SCRATCH/stop" DEEPSPEED_NMT_STATUS="$SCRATCH/status"
}

# Ask the ranks to save and stop. A script with ranks on other hosts defines its own version.
request_stop() { touch "$SCRATCH/stop"; }

# Ask the ranks to stop at the first signal ($asked: the time of it), kill process group $group at a later one.
stop_ranks() {
    if [ -z "$asked" ]; then
        asked="$SECONDS"
        # The message comes second and may fail: Ctrl-C may also have ended the program that reads our output.
        request_stop || true
        (say "saving, then stopping; Ctrl-C again stops at once") 2>/dev/null || true
    elif [ $((SECONDS - asked)) -ge "$ONE_REQUEST_S" ]; then
        kill -TERM -- "-$group" 2>/dev/null || true
    fi
}

# Print one line "compute capability, driver version" per NVIDIA GPU; none if CUDA_VISIBLE_DEVICES hides all of them.
list_gpus() {
    [ -n "${CUDA_VISIBLE_DEVICES-all}" ] || return 0
    command -v nvidia-smi >/dev/null || return 0
    nvidia-smi --query-gpu=compute_cap,driver_version --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.[0-9]+, *[0-9]' || true
}

# Set $where, options of DeepSpeed's launcher for $ranks GPUs, and $ranks to fewer if CUDA_VISIBLE_DEVICES has fewer.
# shellcheck disable=SC2034 # the caller uses $where
take_gpus() {
    where=(--num_gpus "$ranks")
    [ -n "${CUDA_VISIBLE_DEVICES:-}" ] || return 0
    # With --num_gpus, DeepSpeed ignores CUDA_VISIBLE_DEVICES and starts at GPU 0.
    case "$CUDA_VISIBLE_DEVICES" in *[!0-9,]*) die "CUDA_VISIBLE_DEVICES is $CUDA_VISIBLE_DEVICES; use numbers such as 0,1" ;; esac
    local visible
    visible="$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | head -n "$ranks")"
    ranks="$(wc -l <<<"$visible")"
    where=(--include "localhost:$(paste -sd, - <<<"$visible")")
}

# Print the name of the lock for this machine: cuda, v100 (a GPU or driver too old for CUDA 13), or cpu.
choose_lock() {
    list_gpus | awk -F'[., ]+' '
        $1 < 7 || ($1 == 7 && $2 < 5) || $3 < 580 { old = 1 }
        END { print NR == 0 ? "cpu" : old ? "v100" : "cuda" }'
}

# Print the name of the lock to install: $LOCK, or that of $WHEELHOUSE, or the one for this machine.
lock_to_install() {
    local lock="${LOCK:-}"
    [ -n "$lock" ] || [ -z "$WHEELHOUSE" ] || lock="$(of_wheelhouse lock)"
    [ -n "$lock" ] || lock="$(choose_lock)"
    lock_named LOCK "$lock"
}

# of_wheelhouse NAME: print the lock, the python or the machine of $WHEELHOUSE, or the requirements that it has also.
of_wheelhouse() { sed -n "s/^$1=//p" "$WHEELHOUSE/wheelhouse.txt" 2>/dev/null || true; }

# check_wheelhouse NAME: check that $WHEELHOUSE has requirements/NAME.txt for this machine and the Python of $VENV, and,
# once, that it is whole.
check_wheelhouse() {
    [ -f "$WHEELHOUSE/SHA256SUMS" ] ||
        die "$WHEELHOUSE was not completed by launch/wheelhouse.sh;" \
            "complete it where there is a network, and copy all of it"
    local name needed found
    for name in machine python; do
        needed="$(uname -m)"
        [ "$name" = machine ] || needed="$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
        found="$(of_wheelhouse "$name")"
        [ "$needed" = "$found" ] ||
            die "$WHEELHOUSE is for the $name $found, not for $needed;" \
                "make another with --$name $needed"
    done
    found="$(of_wheelhouse lock) $(of_wheelhouse also)"
    case " $found " in *" $1 "*) ;; *)
        die "$WHEELHOUSE lacks requirements/$1.txt, and is for $found; see launch/wheelhouse.sh --help" ;;
    esac
    [ "$WHEELHOUSE" != "$whole_wheelhouse" ] || return 0
    say "checking $WHEELHOUSE"
    (cd "$WHEELHOUSE" && sha256sum --check --quiet SHA256SUMS) >&2 ||
        die "the files above of WHEELHOUSE have changed since launch/wheelhouse.sh; copy them again"
    whole_wheelhouse="$WHEELHOUSE"
}
whole_wheelhouse="" # the one that is known to be whole

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

# Print the name of a Python >= 3.10: $PYTHON if set, else python3, else one with a version in its name.
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

# Make $VENV, unless it exists and works.
make_venv() {
    [ -x "$VENV/bin/python" ] && is_new_enough "$VENV/bin/python" && "$VENV/bin/python" -m pip --version >/dev/null 2>&1 && return
    if [ -e "$VENV" ] && [ ! -e "$VENV/pyvenv.cfg" ]; then
        die "$VENV is no virtual environment; set VENV to another path"
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
        die "the modules venv and ensurepip are required, but $python lacks them;" \
            "install them (Debian, Ubuntu: apt-get install python3-venv), and start this script again"
    say "making the virtual environment $VENV with $("$python" --version)"
    "$python" -m venv --clear "$VENV"
}

# stamped NAME FILE... -- COMMAND...: run COMMAND, unless it has succeeded with the same content of FILEs.
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
    [ -z "$WHEELHOUSE" ] || set -- --no-index --find-links "$WHEELHOUSE" "$@"
    "$VENV/bin/python" -m pip install --progress-bar "$bar" "$@" || {
        complain "pip could not install what is needed; correct the error above, and start this script again"
        return 1
    }
}

install_lock() {
    local other
    say "installing requirements/$1.txt"
    [ -z "$WHEELHOUSE" ] || check_wheelhouse "$1"
    case "$1" in cpu | cuda | v100)
        for other in cpu cuda v100; do
            if [ "$other" != "$1" ] && [ -e "$VENV/.installed-$other" ]; then
                # pip would keep torch: its build for other hardware has the same version.
                rm "$VENV/.installed-$other"
                "$VENV/bin/python" -m pip uninstall --quiet --yes torch
            fi
        done
        ;;
    esac
    # Once the other packages are installed, pip asks PyTorch's index for torch only. If that index cannot be reached,
    # this saves the retries for every other package.
    case "$1" in cpu | cuda | v100) pip_install --no-deps -r "$ROOT/requirements/common.txt" || return ;; esac
    pip_install -r "$ROOT/requirements/$1.txt"
}

install_package() {
    say "installing this package (editable)"
    # The lock contains setuptools, so that a build without isolation fetches nothing.
    pip_install --quiet --no-deps --no-build-isolation -e "$ROOT"
}

# install LOCK...: install these locks and this package into $VENV, unless they are installed. SKIP_INSTALL=1 uses
# $VENV as it is.
install() {
    if [ -n "${SKIP_INSTALL:-}" ]; then
        [ -x "$VENV/bin/python" ] ||
            die "$VENV is no virtual environment, which SKIP_INSTALL needs; set VENV to one"
        return
    fi
    make_venv
    local lock
    for lock in "$@"; do
        stamped "$lock" requirements/common.txt "requirements/$lock.txt" -- install_lock "$lock"
    done
    stamped package setup.py pyproject.toml -- install_package
}
