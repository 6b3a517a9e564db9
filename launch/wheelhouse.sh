#!/usr/bin/env bash
# Collect all that an installation needs in a directory, for machines without a network: the wheels of a lock, the wheel
# of this package, and their SHA-256.
#
#   launch/wheelhouse.sh --out DIR [--lock cpu|cuda|v100] [--python 3.12] [--machine x86_64] [--test] [--docs]
#
#   --out DIR      directory of the wheels: new, empty, or written by this script, which completes it
#   --lock LOCK    requirements to collect: cpu, cuda or v100; also as LOCK=... [for this machine, which may have no GPU
#                  although those that compute have]
#   --python V     Python of the machines that install [that of this machine]
#   --machine M    processors of the machines that install, x86_64 or aarch64 [those of this machine]
#   --test         also what launch/test.sh needs
#   --docs         also what launch/docs.sh and launch/test.sh need
#
# On a machine without a network, with a copy of this repository:
#
#   launch/quickstart.sh --wheelhouse DIR          # also launch/test.sh and launch/docs.sh
#   pip install --no-index --find-links DIR -r DIR/requirements.txt      # or by hand; needs no copy
#
# The machines that install run Linux with glibc 2.28 or newer. Settings from the environment: VENV, PYTHON, as in
# launch/quickstart.sh, and those of pip.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

out="" python="" machine="" also=()
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;;
    --out) out="$(value "$@")" || exit; shift ;;
    --lock) LOCK="$(lock_named "$@")" || exit; shift ;;
    --python) python="$(value "$@")" || exit; shift ;;
    --machine) machine="$(value "$@")" || exit; shift ;;
    --test | --docs) also+=("${1#--}") ;;
    *) die "unknown option $1; see --help" ;;
    esac
    shift
done
[ -n "$out" ] || die "no --out, the directory of the wheels; see --help"
case "$python" in '' | 3.1[0-9]) ;; *) die "--python is '$python'; give a version such as 3.12" ;; esac
machine="${machine:-$(uname -m)}"
case "$machine" in arm64) machine=aarch64 ;; esac # as macOS calls it
case "$machine" in x86_64 | aarch64) ;; *) die "--machine is '$machine'; use x86_64 or aarch64" ;; esac
WHEELHOUSE="" # what is to be made, not used
lock="$(lock_to_install)"
make_venv
python="${python:-$("$VENV/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')}"
exec "$VENV/bin/python" "$ROOT/launch/wheelhouse.py" "$out" "$lock" "$python" "$machine" ${also[@]+"${also[@]}"}
