#!/usr/bin/env bash
# WMT 2014 English to French: about 36 million pairs.
#
#   launch/data/wmt14_enfr.sh [--out DIR] [--from DIR] [--vocab-size N] [--threads N]
#
#   --out DIR        directory of the results: archives/ raw/ text/ data/ [data/wmt14_enfr]
#   --from DIR       directory with all archives under their published names; nothing is fetched
#   --vocab-size N   tokens of the joint vocabulary [40,000]
#   --threads N      number of processes [all cores]
#
# Train: Europarl v7, Common Crawl, UN, News Commentary v9, Giga. Valid: newstest2012 and 2013. Test: newstest2014.
#
# Started again, it resumes. text/ is tokenised as Moses does it: train on data/, and score with
# `deepspeed-nmt score --tokenised`. Requires sacremoses (pip install sacremoses).

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
case "${1:-}" in -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;; esac
use_venv
exec python3 "$ROOT/launch/data/pipeline.py" wmt14_enfr "$@"
