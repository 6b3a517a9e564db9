#!/usr/bin/env bash
# IWSLT 2014 German to English: talks, as in "Parallel Mechanism Decoders in Pretrained Language Model-based Neural
# Machine Translation" (anonymous ACL submission): raw text for BERTs. With --text moses it is tokenised and lowercased,
# for models with a vocabulary of their own.
#
#   launch/data/iwslt14_deen.sh [--out DIR] [--from DIR] [--text raw|moses] [OPTION ...]
#
#   --out DIR           directory of the results: archives/ raw/ moses/ data/ [data/iwslt14_deen]
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
# Other options are those of `deepspeed-nmt prepare`. The defaults are the paper's:
#
#   --text raw --tokenizer hf:dbmdz/bert-base-german-uncased,bert-base-uncased --max-length 400 --no-dedup
#   --no-normalise
#
# With --text moses: --vocab-size 10000 --normalization none instead of the BERTs' tokenizers.
# Train: about 174,000 pairs. Valid: dev2010 and dev2012 (2,052). Test: tst2010 to 2012 (4,698).
#
# Started again, it resumes. Test sets of sacreBLEU are read from its cache, $SACREBLEU or ~/.sacrebleu.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
case "${1:-}" in -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;; esac
use_venv
exec python3 "$ROOT/launch/data/pipeline.py" iwslt14_deen "$@"
