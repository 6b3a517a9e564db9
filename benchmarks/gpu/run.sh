#!/usr/bin/env bash
# Run parts of the GPU benchmark, each in a process of its own and within eight minutes. None ends another.
#
#   benchmarks/gpu/run.sh PART... [--out DIR] [--device cuda|cpu] [--tiny] [--limit SECONDS] [--only NAME...]
#
# Parts: smoke, journey, host, kernels, attention, training, ranks, marian, decoding, or all. Each writes a record, PART.json, into DIR
# (default: a temporary directory), row by row. `--device cpu --tiny` rehearses a part in seconds. --only takes all words
# up to the next option: rows by their labels, for instance `training --only big padded`. $PYTHON names the Python
# (default: python3). If pack.sh has collected packages, they are installed into a temporary directory first.
# The exit status is 1 if any part failed.
set -uo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;; esac
here="$PWD"
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 2
python="${PYTHON:-python3}"
parts=() options=() only=() out=""
while [ $# -gt 0 ]; do
    case "$1" in
    all) parts+=(smoke journey host kernels attention training ranks marian decoding) && shift ;;
    --out | --device | --limit)
        [ $# -gt 1 ] || { echo "$1 must have a value" >&2 && exit 2; }
        if [ "$1" = --out ]; then out=$2; else options+=("$1" "$2"); fi
        shift 2
        ;;
    --tiny) options+=("$1") && shift ;;
    --only)
        shift
        if [ $# -eq 0 ] || [ "${1#--}" != "$1" ]; then echo "--only must have a value" >&2 && exit 2; fi
        while [ $# -gt 0 ] && [ "${1#--}" = "$1" ]; do only+=("$1") && shift; done
        ;;
    smoke | journey | host | kernels | attention | training | ranks | marian | decoding) parts+=("$1") && shift ;;
    *)
        echo "PART must be smoke, journey, host, kernels, attention, training, ranks, marian, decoding or all, but is '$1'" >&2
        exit 2
        ;;
    esac
done
[ ${#only[@]} -eq 0 ] || options+=(--only "${only[@]}")
[ ${#parts[@]} -gt 0 ] || { sed -n '4p' "${BASH_SOURCE[0]}" >&2 && exit 2; }

scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT
out="${out:-$(mktemp -d)}"
case "$out" in /*) ;; *) out="$here/$out" ;; esac
site=""
if compgen -G ".gpu/*.whl" >/dev/null; then
    site="$scratch/site"
    "$python" -m pip install --quiet --no-index --no-deps --target "$site" .gpu/*.whl || exit 2
fi
export PYTHONPATH="$PWD${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}"
status=0
for part in "${parts[@]}"; do
    timeout --kill-after 10 470 "$python" benchmarks/gpu/run.py "$part" --out "$out" "${options[@]}" || {
        echo "$part failed with status $?" >&2
        status=1
    }
done
echo "results are in $out"
exit "$status"
