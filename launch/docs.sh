#!/usr/bin/env bash
# Build the documentation as a site in site/, and fail on any warning.
#
#   launch/docs.sh [--serve [--port P]] [--wheelhouse DIR]
#
#   --serve         serve the site, and build it again whenever a page changes
#   --port P        port of localhost [8000]
#   --wheelhouse D  install without a network from the directory D of launch/wheelhouse.sh --docs; also as WHEELHOUSE=...
#
# This needs Python 3.11 or newer and installs requirements/docs.txt, which is the same for every --lock of the other
# scripts, into .venv ($VENV names another one; SKIP_INSTALL=1 takes it as it is). The site loads nothing from other
# hosts.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

serve="" port=8000
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;;
    --serve) serve=yes ;;
    --port) port="$(number "$@")" || exit; shift ;;
    --wheelhouse) WHEELHOUSE="$(directory_named "$@")" || exit; shift ;;
    *) die "unknown option $1; see --help" ;;
    esac
    shift
done

cd "$ROOT"
if [ -z "${SKIP_INSTALL:-}" ]; then
    make_venv
    stamped docs requirements/common.txt requirements/test.txt requirements/docs.txt -- install_lock docs
fi
"$VENV/bin/python" -c 'import zensical' 2>/dev/null ||
    die "the documentation needs zensical and Python 3.11 or newer, but $VENV lacks one of them;" \
        "set PYTHON to a newer Python and VENV to a new directory"

export PYTHONPATH="$ROOT/launch/docs${PYTHONPATH:+:$PYTHONPATH}" # fences.py
if [ -n "$serve" ]; then
    exec "$VENV/bin/python" -m zensical serve --dev-addr "localhost:$port"
fi
rm -rf site
"$VENV/bin/python" launch/docs/strict.py
say "the site is in $ROOT/site"
