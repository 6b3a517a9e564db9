#!/usr/bin/env bash
# Install what the tests need, check the code, and run the tests.
#
#   launch/test.sh [--fast | --full] [--system] [--lock LOCK] [--wheelhouse DIR] [pytest arguments]
#
#   --fast          only quick checks: linters, types, unit tests, architecture, and one run from raw text to BLEU
#   (default)       all tests except those that take very long: comparison of engines and methods, launchers, SLURM, ...
#   --full          also tests that take very long (marked slow) or need a GPU (marked gpu)
#   --system        install missing system packages (python3, python3-venv, SLURM, ...) with apt-get [never]. An ssh
#                   daemon for one test, and a browser for the tests of pages (100 MB), are installed only by
#                   SYSTEM_EXTRA="openssh-server openssh-client pdsh chromium-headless-shell"
#   --lock LOCK     requirements to install: cpu, cuda or v100; also as LOCK=... [chosen for this machine]
#   --wheelhouse D  install without a network from the directory D of launch/wheelhouse.sh --test --docs; also as
#                   WHEELHOUSE=...
#
# Everything goes into the virtual environment .venv ($VENV names another one; SKIP_INSTALL=1 takes it as it
# is). Once installed, it runs without a network. $PYTHON names the Python to make it with. Three workers ($WORKERS; 0:
# none but pytest itself) run one file of tests each, in parallel with the type checker; many tests wait for other
# processes, so that two would leave two cores idle for half of the time. The exit status is 0 if all checks pass.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

selection="not slow and not gpu"
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;;
    --system) SYSTEM=yes ;;
    --lock) LOCK="$(lock_named "$@")" || exit; shift ;;
    --wheelhouse) WHEELHOUSE="$(directory_named "$@")" || exit; shift ;;
    --fast) selection="fast and not slow and not gpu" ;;
    --full) selection="slow or not slow" ;; # all tests; those marked gpu are skipped without a GPU
    *) break ;;
    esac
    shift
done

cd "$ROOT"
# A real SLURM of two nodes, two hosts in network namespaces, and a linter for these scripts. Tests that need one of
# them are skipped if it is missing.
if [ "$SYSTEM" = yes ] && command -v apt-get >/dev/null; then
    missing=()
    for package in munge slurmctld slurmd slurm-client iproute2 procps shellcheck ${SYSTEM_EXTRA:-}; do
        dpkg-query --show --showformat '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}" ||
        complain "apt-get could not install ${missing[*]}; tests that need one of them are skipped"
fi
lock="$(lock_to_install)"
install "$lock" test docs

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
# A killed build of an extension leaves a lock, on which the next build would wait forever.
export TORCH_EXTENSIONS_DIR="$scratch/torch_extensions"
OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(threads_for 3)}"
export OMP_NUM_THREADS
export PATH="$VENV/bin:$PATH"
unset PYTHONDONTWRITEBYTECODE # set in many containers: hundreds of processes would each compile the package again

status=0
check() {
    say "$*"
    "$VENV/bin/python" -m "$@" || {
        complain "'$*' failed: whatever the tests say below, the exit status will be 1"
        status=1
    }
}
check ruff check .
check ruff format --check .
"$VENV/bin/python" -m mypy --strict >"$scratch/mypy" 2>&1 &
types=$!
say "pytest"
"$VENV/bin/python" -m pytest -n "${WORKERS:-3}" --dist loadfile --no-loadscope-reorder -m "$selection" "$@" || status=1
say "mypy --strict"
wait "$types" || status=1
cat "$scratch/mypy"
exit "$status"
