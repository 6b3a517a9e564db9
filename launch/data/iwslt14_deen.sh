#!/usr/bin/env bash
# IWSLT 2014 German to English, lowercased: 160,000 pairs of talks.
#
#   launch/data/iwslt14_deen.sh [--out DIR] [--from DIR] [--vocab-size N] [--threads N]
#
#   --out DIR        everything goes there: archives/ raw/ text/ data/ [data/iwslt14_deen]
#   --from DIR       take archives that are there already, under their published names; nothing is fetched
#   --vocab-size N   tokens of the joint vocabulary [10,000]
#   --threads N      processes [all cores]
#
# Valid: every 23rd training pair. Test: dev2010, dev2012 and tst2010 to 2012.
#
# Started again it goes on where it stopped. text/ is tokenised by Moses' rules, so train on data/ and compare
# with `deepspeed-nmt score --tokenised`. Needs sacremoses: pip install sacremoses.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
case "${1:-}" in -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;; esac
use_venv
exec python3 "$ROOT/launch/data/road.py" iwslt14_deen "$@"
