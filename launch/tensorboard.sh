#!/usr/bin/env bash
# Serve the curves of runs to a browser, with TensorBoard.
#
#   launch/tensorboard.sh [--port P] DIR [DIR ...]
#
#   DIR        a run or a directory of runs
#   --port P   port of localhost [6006]
#
# To see them on another machine: ssh -L 6006:localhost:6006 <this host>. $VENV as in launch/local.sh.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

port=6006
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;;
    --port) port="$(number "$@")" || exit; shift ;;
    -*) die "unknown option $1; see --help" ;;
    *) break ;;
    esac
    shift
done
[ $# -gt 0 ] || die "no DIR, a run or a directory of runs; see --help"
named=""
for directory in "$@"; do
    [ -d "$directory" ] || die "no directory $directory; check the path"
    case "$directory" in *[,:]*) [ $# = 1 ] || die "$directory has a comma or a colon; show it alone" ;; esac
    named="$named${named:+,}$directory:$directory" # the whole path: runs of two sweeps have the same last names
done
use_venv
say "http://localhost:$port/#custom_scalars"
# Otherwise it reads nothing more of a file that training writes after `choose-best` has begun a newer one.
all=(--port "$port" --reload_multifile true)
if [ $# = 1 ]; then
    exec tensorboard --logdir "$1" "${all[@]}"
fi
exec tensorboard --logdir_spec "$named" "${all[@]}"
