#!/usr/bin/env bash
# Show the curves of runs in a browser.
#
#   launch/tensorboard.sh [--port P] DIR [DIR ...]
#
#   --port P   to listen on, of this host alone [6006]
#
# A DIR is a run or a directory of runs. From another machine: ssh -L 6006:localhost:6006 <this host>.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

port=6006
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;;
    --port) port="${2:?--port needs a number}" && shift ;;
    *) break ;;
    esac
    shift
done
[ $# -gt 0 ] || die "a run, or a directory of runs, is required; see --help"
named=""
for directory in "$@"; do
    [ -d "$directory" ] || die "$directory must be a directory, but is none"
    named="$named${named:+,}$(basename "$(cd "$directory" && pwd)"):$directory"
done
use_venv
say "http://localhost:$port"
if [ $# = 1 ]; then
    exec tensorboard --logdir "$1" --port "$port"
fi
exec tensorboard --logdir_spec "$named" --port "$port"
