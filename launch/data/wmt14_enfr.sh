#!/usr/bin/env bash
# WMT 2014 English to French: about 36 million pairs, as in "What Works and Doesn't Work, A Deep Decoder for Neural
# Machine Translation" (anonymous ACL submission) and "Recurrent multiple shared layers in Depth for Neural Machine
# Translation" (Li and Li 2021). "Depth Growing for Neural Machine Translation" (Wu et al. 2019) has a vocabulary of
# 45,000: --out data/wmt14_enfr_growing --vocab-size 45000 --normalise.
#
#   launch/data/wmt14_enfr.sh [--out DIR] [--from DIR] [--text raw|moses] [OPTION ...]
#
#   --out DIR           directory of the results: archives/ raw/ moses/ data/ [data/wmt14_enfr]
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
# Other options are those of `deepspeed-nmt prepare`. The defaults are the papers', and 250 tokens and a ratio of 1.5 as
# in fairseq's scripts, which the first two papers do not state:
#
#   --text moses --vocab-size 40000 --normalization none --max-length 250 --ratio 1.5 --no-dedup --no-normalise
#
# Train: Europarl v7, Common Crawl, UN, News Commentary v9, Giga. They have more pairs than the papers' 36 million; only
# "Depth Growing" says how they were filtered: by fairseq's scripts. Valid: newstest2012 and 2013 (sacreBLEU's wmt12,
# wmt13). Test: newstest2014 (wmt14/full).
#
# Started again, it resumes. Test sets of sacreBLEU are read from its cache, $SACREBLEU or ~/.sacrebleu.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
case "${1:-}" in -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;; esac
use_venv
exec python3 "$ROOT/launch/data/pipeline.py" wmt14_enfr "$@"
