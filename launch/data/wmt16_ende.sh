#!/usr/bin/env bash
# WMT 2016 English to German: about 4.5 million pairs, as in "Recurrent multiple shared layers in Depth for Neural
# Machine Translation" (Li and Li 2021).
#
#   launch/data/wmt16_ende.sh [--out DIR] [--from DIR] [--text raw|moses] [OPTION ...]
#
#   --out DIR           directory of the results: archives/ raw/ moses/ data/ [data/wmt16_ende]
#   --from DIR          directory with all archives under their published names; nothing is fetched
#   --text FORM         raw, or moses: tokenised by Moses' rules, which validation, `score --like` and
#                       `translate --detokenise` undo
#   --normalise         moses: as fairseq's scripts for WMT, normalise punctuation, remove control characters, and split
#                       words at dashes
#   --vocab-size N      tokens of the joint vocabulary; or --tokenizer hf:BERT,BERT, or --vocab-from DIR
#   --max-length N      leave out training pairs with a longer side, in tokens of the vocabulary
#   --ratio R           leave out training pairs whose longer side has more than R times the tokens of the shorter
#   --dedup             leave out training pairs that were seen before (--no-dedup keeps them)
#   --threads N         number of processes [all cores]
#
# Other options are those of `deepspeed-nmt prepare`. The defaults are the paper's, and 250 tokens, which it does not
# state:
#
#   --text moses --vocab-size 32000 --normalization none --max-length 250 --no-dedup --no-normalise
#
# Train: Europarl v7, Common Crawl, News Commentary v11. Valid: newstest2013 (sacreBLEU's wmt13). Test: newstest2014
# (wmt14/full).
#
# Started again, it resumes. Test sets of sacreBLEU are read from its cache, $SACREBLEU or ~/.sacrebleu.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
case "${1:-}" in -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;; esac
use_venv
exec python3 "$ROOT/launch/data/pipeline.py" wmt16_ende "$@"
