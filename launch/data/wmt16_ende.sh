#!/usr/bin/env bash
# WMT 2016 English to German, as the recurrent paper has it: some 4.5 million pairs.
#
#   launch/data/wmt16_ende.sh [--out DIR] [--from DIR] [--vocab-size N] [--threads N]
#
#   --out DIR        everything goes there: archives/ raw/ text/ data/ [data/wmt16_ende]
#   --from DIR       take archives that are there already, under their published names; nothing is fetched
#   --vocab-size N   tokens of the joint vocabulary [32,000]
#   --threads N      processes [all cores]
#
# Train: Europarl v7, Common Crawl, News Commentary v11. Valid: newstest2013. Test: newstest2014.
#
# Started again it goes on where it stopped. text/ is tokenised by Moses' rules, so train on data/ and compare
# with `deepspeed-nmt score --tokenised`. Needs sacremoses: pip install sacremoses.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
case "${1:-}" in -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;; esac
use_venv
exec python3 "$ROOT/launch/data/road.py" wmt16_ende "$@"
