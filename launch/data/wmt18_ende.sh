#!/usr/bin/env bash
# WMT 2018 English to German without ParaCrawl, lowercased: about 5.6 million pairs, as in "Multi-Layer Softmaxing
# during Training Neural Machine Translation for Flexible Decoding with Fewer Layers" (Dabre and Fujita 2019).
#
#   launch/data/wmt18_ende.sh [--out DIR] [--from DIR] [--vocab-size N] [--threads N]
#
#   --out DIR        directory of the results: archives/ raw/ text/ data/ [data/wmt18_ende]
#   --from DIR       directory with all archives under their published names; nothing is fetched
#   --vocab-size N   tokens of the joint vocabulary [32,000]
#   --threads N      number of processes [all cores]
#
# Train: Europarl v7, Common Crawl, News Commentary v13, Rapid 2016. Valid: newstest2017. Test: newstest2018.
#
# Started again, it resumes. text/ is tokenised as Moses does it: train on data/, and score with
# `deepspeed-nmt score --tokenised`. Requires sacremoses (pip install sacremoses).

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
case "${1:-}" in -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;; esac
use_venv
exec python3 "$ROOT/launch/data/pipeline.py" wmt18_ende "$@"
