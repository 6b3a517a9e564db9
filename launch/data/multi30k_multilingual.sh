#!/usr/bin/env bash
# Multi30k for one model from English to German and French: the example of docs/multilingual.md. A corpus has a data
# directory for each target language, over one vocabulary. Each English sentence begins with the tag of the language to
# translate it to, <2de> or <2fr>.
#
#   launch/data/multi30k_multilingual.sh --from DIR [--out DIR] [OPTION ...]
#
#   --from DIR          directory with the text: train.en train.de train.fr, the same for val and test_2016_flickr;
#                       from https://github.com/multi30k/dataset, unpacked
#   --out DIR           directory of the results: vocabulary/ en_de/ en_fr/ [data/multi30k_multilingual]
#   --vocab-size N      tokens of the vocabulary of all three languages [8000]
#
# Other options are those of `deepspeed-nmt prepare`, for both corpora.
#
# Started again, it keeps what is there.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

from="" out="$ROOT/data/multi30k_multilingual" size=8000 options=()
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;;
    --from) from="$(value "$@")" || exit; shift ;;
    --out) out="$(value "$@")" || exit; shift ;;
    --vocab-size) size="$(number "$@")" || exit; shift ;;
    *) options+=("$1") ;;
    esac
    shift
done
[ -n "$from" ] || die "no --from, the directory with the text; see --help"
for part in train val test_2016_flickr; do
    for language in en de fr; do
        [ -f "$from/$part.$language" ] || die "--from $from lacks the file $part.$language; see --help"
    done
done
use_venv
prepare=(python3 -m deepspeed_nmt prepare)

mkdir -p "$out"
# English is there twice, so that its share of the vocabulary is half.
"${prepare[@]}" --train-source "$from/train.en" "$from/train.en" --train-target "$from/train.de" "$from/train.fr" \
    --valid-source "$from/val.en" --valid-target "$from/val.de" --out "$out/vocabulary" \
    --vocab-size "$size" --symbols '<2de>' '<2fr>'
for language in de fr; do
    "${prepare[@]}" --train-source "$from/train.en" --train-target "$from/train.$language" \
        --valid-source "$from/val.en" --valid-target "$from/val.$language" \
        --test-source "$from/test_2016_flickr.en" --test-target "$from/test_2016_flickr.$language" \
        --out "$out/en_$language" --vocab-from "$out/vocabulary" --tag-source "<2$language>" \
        --source-lang en --target-lang "$language" "${options[@]+"${options[@]}"}"
done
