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
    --port) port="$(number "$@")" || exit; shift ;;
    -*) die "'$1' is no option of this script; see --help" ;;
    *) break ;;
    esac
    shift
done
[ $# -gt 0 ] || die "a run, or a directory of runs, is required; see --help"
named=""
for directory in "$@"; do
    [ -d "$directory" ] || die "$directory must be a directory, but is none"
    case "$directory" in *[,:]*) [ $# = 1 ] || die "names of several runs must not have commas or colons, but $directory has" ;; esac
    named="$named${named:+,}$directory:$directory" # a sweep's runs have the same last names as another's
done
use_venv
say "http://localhost:$port"
if [ $# = 1 ]; then
    exec tensorboard --logdir "$1" --port "$port"
fi
exec tensorboard --logdir_spec "$named" --port "$port"
