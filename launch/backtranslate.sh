#!/usr/bin/env bash
# Back-translation: monolingual text of the target language becomes a corpus to mix with parallel text. Its sources are
# translations by a model of the reverse direction (Sennrich, Haddow and Birch 2016).
#
#   launch/backtranslate.sh --run REVERSE --text F... --data DATA --out DIR [options] [-- <options of `translate`>]
#   launch/backtranslate.sh --run de_en --text news.de --data en_de --out bt --filters web -- --search sampling
#
#   --run REVERSE      run that translates from the target language to the source language; several are an ensemble
#   --text F...        monolingual text, one sentence a line; may be compressed (gzip, xz, zstd)
#   --data DATA        data directory of the parallel text, whose vocabulary and validation set are used
#   --out DIR          directory of the results
#   --checkpoint C     checkpoint of REVERSE [best]
#   --score-run RUN    run that translates as DATA does, and scores the pairs: mean log-probability of a target token
#   --min-score S      remove pairs with a lower score
#   --filters F        filters of `prepare`, for example web,language
#   --tag S            symbol of DATA's vocabulary that marks the corpus in a mixture, or none ['<bt>'; --distill: none]
#   --weight W         weight of the corpus in the mixture [1]
#   --distill          sequence-level distillation (Kim and Rush 2016): the text is of the source language, REVERSE is
#                      a teacher that translates as DATA does, and its translations are the targets
#   --train RECIPE     then train on the mixture; --new-run is required
#   --new-run DIR      run of --train
#   --workers N        processes on the CPU [without a GPU: one for each core]
#   --cpu              use the CPU even if there are GPUs
#
# Steps: text, translate, score, prepare, train. A step that is finished is skipped as long as its input and its
# options are the same. Files that were changed since, and pieces of a step with other options, are never removed. Ctrl-C stops; the same command resumes, translation and scores in pieces (exit status 75:
# stopped, start it again). DIR/data is the corpus; its report says what was removed. The last lines are the command
# that trains on the mixture, or on the corpus alone if it is distilled. Under SLURM: launch/backtranslate.sbatch.
#
# Settings from the environment: those of launch/local.sh.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

runs=() texts=() data="" out="" checkpoint=best scorer="" minimum="" filters="" tag="" weight=1 distill="" recipe="" new=""
workers="" cpu=""
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;;
    --run) run="$(value "$@")" || exit; runs+=("$run"); shift ;;
    --text)
        [ $# -gt 1 ] || die "--text has no value; see --help"
        while [ $# -gt 1 ] && [[ "$2" != --* ]]; do
            texts+=("$2")
            shift
        done
        ;;
    --data) data="$(value "$@")" || exit; shift ;;
    --out) out="$(value "$@")" || exit; shift ;;
    --checkpoint) checkpoint="$(value "$@")" || exit; shift ;;
    --score-run) scorer="$(value "$@")" || exit; shift ;;
    --min-score) minimum="$(value "$@")" || exit; shift ;;
    --filters) filters="$(value "$@")" || exit; shift ;;
    --tag) tag="$(value "$@")" || exit; shift ;;
    --weight) weight="$(value "$@")" || exit; shift ;;
    --distill) distill=yes ;;
    --train) recipe="$(value "$@")" || exit; shift ;;
    --new-run) new="$(value "$@")" || exit; shift ;;
    --workers) workers="$(number "$@")" || exit; shift ;;
    --cpu) cpu=yes ;;
    --) shift && break ;;
    *) die "unknown option $1; options of \`deepspeed-nmt translate\` come after --" ;;
    esac
    shift
done
options=("$@") # of translate
[ ${#runs[@]} -gt 0 ] || die "no --run, which translates the text; see --help"
[ ${#texts[@]} -gt 0 ] || die "no --text, which is monolingual; see --help"
[ -n "$data" ] || die "no --data, the directory of the parallel text; see --help"
[ -n "$out" ] || die "no --out, the directory of the results; see --help"
[ ! -e "$out" ] || [ -d "$out/.steps" ] || [ -z "$(ls -A "$out")" ] ||
    die "$out has files that this script has not made; choose another --out"
for file in "${texts[@]}"; do [ -f "$file" ] || die "no file $file; check --text"; done
[ -z "$scorer" ] || [ -n "$minimum" ] || die "no smallest score for --score-run; give --min-score, for example -3"
[ -n "$scorer" ] || [ -z "$minimum" ] || die "no run that scores the pairs for --min-score; give --score-run"
[ -z "$recipe" ] || [ -n "$new" ] || die "--train needs a directory for the run; give --new-run"
for word in ${options[@]+"${options[@]}"}; do
    case "$word" in --run | --input | --output | --checkpoint | --nbest | --token-scores | --alignment | --workers)
        die "$word cannot come after --, because each sentence gets one translation from the run of --run; leave it out" ;;
    esac
done
[ -n "$tag" ] || tag="$([ -n "$distill" ] && echo none || echo '<bt>')"
[ "$tag" != none ] || tag=""

use_venv
python="${PYTHON:-python3}"
srun="${DEEPSPEED_NMT_SRUN:-}" # launch/backtranslate.sbatch sets it
helper="$ROOT/launch/data/synthetic.py"
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
ranks=0 where=()
[ -n "$cpu$srun$workers" ] || ranks="$(list_gpus | wc -l)"
[ "$ranks" = 0 ] || take_gpus

# Pass a request to stop on to the step that is running.
asked=""
pass_on() {
    asked=yes
    # shellcheck disable=SC2154 # attend sets $group
    if [ -n "$srun" ] && [ "$1" = USR1 ]; then kill -USR1 -- "-$group"; else kill -TERM -- "-$group"; fi 2>/dev/null || true
}

# attended COMMAND...: run COMMAND; exit with 75 if it was asked to stop, with its status if it fails.
attended() {
    local status=0
    attend pass_on "$@" || status=$?
    if [ -n "$asked" ]; then
        (say "stopped; start the same command again to resume") 2>/dev/null || true
        exit 75
    fi
    [ "$status" = 0 ] || exit "$status"
}

# on_all_ranks PROGRAM [ARGUMENT ...]: run `deepspeed_nmt` or a script with Python, on all tasks, GPUs or workers.
on_all_ranks() {
    local module=() launched=() device=()
    case "$1" in
    deepspeed_nmt) module=(-m "$1") launched=(--module "$1") ;;
    *) module=("$1") launched=("$1") ;;
    esac
    shift
    if [ -n "$srun" ]; then
        attended srun --kill-on-bad-exit=1 "$python" "${module[@]}" "$@"
    elif [ "$ranks" != 0 ]; then
        attended deepspeed "${where[@]}" --master_port "$(free_port)" "${launched[@]}" "$@"
    else
        [ -z "$cpu" ] || device=(--device cpu)
        attended "$python" "${module[@]}" "$@" --workers "${workers:-$(cores)}" ${device[@]+"${device[@]}"}
    fi
}

digest() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi | cut -d ' ' -f 1; }
# record NAME LINE...: write lines to a file of $out/.steps.
record() { printf '%s\n' "${@:2}" >"$out/.steps/$1.new" && mv "$out/.steps/$1.new" "$out/.steps/$1"; }
# is_finished STEP KEY FILE: true if STEP has made FILE from what KEY stands for. Otherwise it begins, unless FILE is not
# as this script wrote it: it may be somebody's work.
is_finished() {
    local key="" hash=""
    { read -r key && read -r hash; } 2>/dev/null <"$out/.steps/$1" || true
    if [ -e "$3" ] && [ "$hash" != begun ]; then
        [ "$hash" = "$(digest <"$3")" ] ||
            die "$3 is not as this script wrote it; move it away, or choose another --out"
        [ "$key" != "$2" ] || { say "$1: finished before, $3" && return; }
    fi
    say "$1"
    record "$1" "$2" begun
    return 1
}
finish() { record "$1" "$2" "$(digest <"$3")"; } # STEP KEY FILE

checks=(--data "$data" --checkpoint "$checkpoint")
for run in "${runs[@]}"; do checks+=(--run "$run"); done
[ -z "$scorer" ] || checks+=(--score-run "$scorer")
[ -z "$distill" ] || checks+=(--distill)
[ -z "$tag" ] || checks+=(--tag "$tag")
[ -z "$scorer" ] || filters="${filters:+$filters,}score=$minimum"
[ -z "$filters" ] || checks+=(--filters "$filters")
mixture=(--data "$data" --data "$out/data=$weight${tag:+@$tag}")
[ -z "$distill" ] || [ -n "$tag" ] || mixture=(--data "$out/data")
checks+=(--corpus "${mixture[${#mixture[@]} - 1]}")
found="$("$python" "$helper" check "${checks[@]}")" || exit
lines=()
while IFS= read -r line; do lines+=("$line"); done <<<"$found"
model="${lines[0]}" scoring="${lines[1]}" parallel="${lines[2]}"
prepare=("${lines[@]:4}")
[ -z "${lines[3]}" ] || options+=(--suppress "${lines[3]}") # a text has no tag but in front of it
mkdir -p "$out/.steps" 2>/dev/null || die "$out cannot be written; choose another --out"
trap 'rm -f "$out/text.tmp" "$out/scores.tmp"' EXIT

key="$(cat -- "${texts[@]}" | digest)"
if ! is_finished text "$key" "$out/text"; then
    "$python" "$helper" text --output "$out/text.tmp" "${texts[@]}" ||
        die "$out/text could not be written, for the reason above; check the files of --text, and the free disk space"
    grep -q '[^[:space:]]' "$out/text.tmp" || die "${texts[*]} has no sentence; check --text"
    mv "$out/text.tmp" "$out/text"
    finish text "$key" "$out/text"
fi

text_digest="$(digest <"$out/text")"
key="$(printf '%s\n' "$model" "$checkpoint" "$text_digest" ${options[@]+"${options[@]}"} | digest)"
if ! is_finished translate "$key" "$out/translations"; then
    words=(--input "$out/text" --output "$out/translations" --checkpoint "$checkpoint" ${options[@]+"${options[@]}"})
    for run in "${runs[@]}"; do words+=(--run "$run"); done
    on_all_ranks deepspeed_nmt translate "${words[@]}"
    finish translate "$key" "$out/translations"
fi

source="$out/translations" target="$out/text"
[ -z "$distill" ] || source="$out/text" target="$out/translations"
key="$(printf '%s\n' "$scoring" "$text_digest" "$(digest <"$out/translations")" "$distill" | digest)"
if [ -n "$scorer" ]; then
    if ! is_finished score "$key" "$out/scores"; then
        parts="$out/scores.parts"
        [ ! -e "$parts" ] || [ "$(cat "$out/.steps/scoring" 2>/dev/null)" = "$key" ] ||
            die "$parts has scores by other options or of other text; give those again to resume, or move it away"
        record scoring "$key"
        mkdir -p "$parts"
        on_all_ranks "$helper" score --run "$scorer" --source "$source" --target "$target" --parts "$parts"
        cat -- "$parts"/[0-9]* >"$out/scores.tmp"
        mv "$out/scores.tmp" "$out/scores"
        finish score "$key" "$out/scores"
        rm -f "$parts"/[0-9]*
        rmdir "$parts"
    fi
    prepare+=(--train-scores "$out/scores")
fi

prepare=(prepare --train-source "$source" --train-target "$target" --out "$out/data" "${prepare[@]}")
[ -z "$filters" ] || prepare+=(--filters "$filters")
key="$(printf '%s\n' "$key" "$parallel" "${prepare[@]}" | digest)"
if ! is_finished prepare "$key" "$out/data/meta.json"; then
    one=()
    [ -z "$srun" ] || one=(srun --ntasks=1 --nodes=1)
    attended ${one[@]+"${one[@]}"} "$python" -m deepspeed_nmt "${prepare[@]}" --overwrite
    finish prepare "$key" "$out/data/meta.json"
fi

if [ -z "$recipe" ]; then
    echo "to train:"
    echo "deepspeed-nmt train --recipe RECIPE --run RUN$(printf " '%s'" "${mixture[@]}" | sed "s/'--data'/--data/g")"
    exit
fi
say "train"
exec "$ROOT/launch/local.sh" ${cpu:+--cpu} -- --recipe "$recipe" --run "$new" "${mixture[@]}"
