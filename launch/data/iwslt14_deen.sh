#!/usr/bin/env bash
# IWSLT 2014 German to English, lowercased: 160,000 pairs from talks.
#
#   launch/data/iwslt14_deen.sh [--out DIR] [--from DIR] [--vocab-size N] [--threads N]
#
#   --out DIR        directory of the results: archives/ raw/ text/ data/ [data/iwslt14_deen]
#   --from DIR       directory with all archives under their published names; nothing is fetched
#   --vocab-size N   tokens of the joint vocabulary [10,000]
#   --threads N      number of processes [all cores]
#
# Valid: every 23rd training pair. Test: dev2010, dev2012 and tst2010 to 2012.
#
# Started again, it resumes. text/ is tokenised as Moses does it: train on data/, and score with
# `deepspeed-nmt score --tokenised`. Requires sacremoses (pip install sacremoses).

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
case "${1:-}" in -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;; esac
use_venv
exec python3 "$ROOT/launch/data/pipeline.py" iwslt14_deen "$@"
