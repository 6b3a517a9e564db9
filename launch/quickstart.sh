#!/usr/bin/env bash
# Install the package, prepare a corpus, train a translation model, translate its test set, and score the translation.
#
#   launch/quickstart.sh [--fresh] [--system] [--lock LOCK] [--wheelhouse DIR] [SOURCE TARGET]
#
#   SOURCE TARGET   your own text, one sentence a line: line N of TARGET translates line N of SOURCE. 5% of the pairs
#                   (at most 500) are held out for validation, and as many for the test. Also as SOURCE=... TARGET=...
#                   [a generated sample corpus]
#   --fresh         remove what an earlier run of this script made in OUT, and start over [resume after the last
#                   completed step]
#   --system        install missing system packages (python3, python3-venv) with apt-get [never]
#   --lock LOCK     requirements to install: cpu, cuda or v100; also as LOCK=... [chosen for this machine]
#   --wheelhouse D  install without a network from the directory D of launch/wheelhouse.sh; also as WHEELHOUSE=...
#
# Training runs under DeepSpeed with ZeRO-2 (launch/local.sh). Ctrl-C, SIGTERM and SIGHUP (the terminal is lost) end the
# current step, and the same command without --fresh resumes. The exit status is then 75 if training was saved, in
# another step 130, 143 or 129; after an error it is that of the step which failed.
#
# Settings from the environment:
#
#   RECIPE           recipe to train [sample_quick; for your own text sample_small]
#   OUT              directory of the results: new, empty, or written by this script [quickstart/]
#   RANKS            number of processes [one for each GPU; without a GPU 2]
#   VOCAB_SIZE       tokens of the joint vocabulary [500, 2,000 or 8,000, depending on the size of the text]
#   VENV             virtual environment [.venv]
#   PYTHON           Python that makes the virtual environment [python3]
#   SKIP_INSTALL=1   use the virtual environment as it is

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

MIN_LINES=200
STEPS=(corpus prepare train translate) # their numbers begin at 2

fresh=""
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;;
    --fresh) fresh=yes ;;
    --system) SYSTEM=yes ;;
    --lock) LOCK="$(lock_named "$@")" || exit; shift ;;
    --wheelhouse) WHEELHOUSE="$(directory_named "$@")" || exit; shift ;;
    -*) die "unknown option $1; see --help" ;;
    *) break ;;
    esac
    shift
done
case $# in
0) ;;
2) SOURCE="$1" TARGET="$2" ;;
*) die "$# arguments are given; give the files SOURCE and TARGET, or none" ;;
esac
SOURCE="${SOURCE:-}" TARGET="${TARGET:-}" OUT="${OUT:-$ROOT/quickstart}"
export LC_ALL="${LC_ALL:-C.UTF-8}"

lock="$(lock_to_install)"
[ -z "${RANKS:-}" ] || RANKS="$(number RANKS "$RANKS")"
[ -z "${VOCAB_SIZE:-}" ] || VOCAB_SIZE="$(number VOCAB_SIZE "$VOCAB_SIZE")"

count_lines() { LC_ALL=C awk 'END { print NR }' "$1"; }

check_text() {
    [[ -n "$SOURCE" && -n "$TARGET" ]] ||
        die "one of SOURCE and TARGET is missing; name the other file too"
    local file sources targets
    for file in "$SOURCE" "$TARGET"; do
        [[ -f "$file" && -r "$file" ]] ||
            die "$file is missing or cannot be read; check the path"
    done
    sources="$(count_lines "$SOURCE")" targets="$(count_lines "$TARGET")"
    [ "$sources" = "$targets" ] ||
        die "$SOURCE has $sources lines and $TARGET has $targets;" \
            "align them sentence by sentence"
    [ "$sources" -ge "$MIN_LINES" ] || die "$SOURCE has $sources lines, fewer than $MIN_LINES; add more text"
    # Also by another name, as a link: what is here may be overwritten or removed.
    for file in "$SOURCE" "$TARGET"; do
        [ -z "$(find -L "$MARKER" "$TEXT" "$OUT/data" "$RUN" "$OUT/test.translation" -samefile "$file" 2>/dev/null)" ] ||
            die "$file is among the files of OUT, $OUT;" \
                "copy it elsewhere, or set OUT to another path"
    done
}

# Print an identifier of the input. It is saved in $OUT, where it tells results of other text.
describe_input() {
    if [ -n "$SOURCE" ]; then
        LC_ALL=C cksum <"$SOURCE"
        LC_ALL=C cksum <"$TARGET"
    else
        echo "sample corpus"
    fi
}

# Make $OUT, unless an earlier run of this script has, and mark it by a file with the identifier of the input.
claim_out() {
    local input
    [ -d "$OUT" ] || [ ! -e "$OUT" ] || die "$OUT is a file; set OUT to another path"
    mkdir -p "$OUT" 2>/dev/null || true
    [[ -d "$OUT" && -w "$OUT" && -x "$OUT" ]] ||
        die "$OUT cannot be written; set OUT to another path"
    input="$(describe_input)"
    if [ ! -e "$MARKER" ]; then
        [ -z "$(ls -A "$OUT")" ] || [ "$(ls -A "$OUT")" = "${MARKER##*/}.new" ] ||
            die "$OUT has files that this script has not made; set OUT to another path"
    elif ! [[ -f "$MARKER" && "$(cat "$MARKER")" =~ ^(sample corpus|[0-9]+ [0-9]+$'\n'[0-9]+ [0-9]+)$ ]]; then
        die "$MARKER is not what this script writes; set OUT to another path"
    elif [ -n "$fresh" ]; then
        remove_results
    elif [ "$(cat "$MARKER")" != "$input" ]; then
        die "$OUT was made from other text; start over with --fresh, or set OUT"
    fi
    printf '%s\n' "$input" >"$MARKER.new" && mv "$MARKER.new" "$MARKER" # never half of it
}

# Remove what this script makes in $OUT, by name. Other files there stay, as do directories that have some.
remove_results() {
    rm -f "$OUT"/.done-* "$OUT/test.translation" "$TEXT/parts" "$TEXT"/{train,valid,test}.{en,de,source,target}
    rm -f "$OUT/data"/meta.json{,.sha256} "$OUT/data"/vocabulary.{model,json,*.json} \
        "$OUT/data"/{train,valid,test}.{source,target}{,.*.bin}
    rm -f "$RUN"/{config.yaml,{data,resolved,environment,origin,manifest}.json,manifest.json.sha256,{metrics,events,goodput}.jsonl,.lock} \
        "$RUN"/vocabulary.{model,json,*.json}
    rm -rf "$RUN"/{checkpoints,logs,tensorboard,validation}
    rmdir "$TEXT" "$OUT/data" "$RUN" 2>/dev/null || true
}

# step NUMBER OUTPUT...: run the function that STEPS names, unless an earlier run of this script has completed it and
# each OUTPUT still exists. The steps after one that runs are done again.
step() {
    local name="${STEPS[$1 - 2]}" complete=yes file
    for file in "$OUT/.done-$name" "${@:2}"; do
        [ -e "$file" ] || complete=""
    done
    if [ -n "$complete" ]; then
        say "$1/6 $name: done before"
        return
    fi
    for file in "${STEPS[@]:$1-2}"; do
        rm -f "$OUT/.done-$file"
    done
    say "$1/6 $name"
    attend_step "$name"
    touch "$OUT/.done-$name"
    [ -z "$stopped" ] || exit "$stopped"
}

# attend_step FUNCTION [ARGUMENT...]: run a function in the background, forwarding signals to it. Its last command
# replaces the shell (`exec`), which would die of the signal before a program that saves first.
attend_step() {
    attend forward "$@"
    exit_on_signals
}

# forward SIGNAL: send SIGNAL to the step that `attend` runs.
forward() {
    stopped="$(status_of "$1")"
    kill "-$1" -- "-$group" 2>/dev/null || true
}

# status_of SIGNAL: print the exit status after SIGNAL.
status_of() { echo $((128 + $(kill -l "$1"))); }

# pip ends with status 1 at Ctrl-C, which is no error of its own.
install_lock_of_machine() {
    trap 'exit 130' INT
    install "$lock"
}

exit_on_signals() {
    local name
    for name in $SIGNALS; do
        # shellcheck disable=SC2064 # the status is that of now
        trap "exit $(status_of "$name")" "$name"
    done
}

# Say how the script ended, unless all is done.
on_exit() {
    local status=$?
    trap '' PIPE # the program that reads our output may be gone
    case "$status" in
    0) ;;
    70 | 75 | 129 | 130 | 138 | 143)
        say "stopped with status $status; start the same command again${fresh:+ without --fresh} to resume"
        ;;
    *) say "failed with status $status; see the error above" ;;
    esac >&2 2>/dev/null || true
}

corpus() {
    if [ -z "$SOURCE" ]; then
        exec deepspeed-nmt sample-data --out "$TEXT" --train 30000 --valid 500 --test 500
    else
        split_text
    fi
}

# Split the text: every k-th pair goes to the validation or the test set, in turn, until each has 5% of the pairs, but
# at most 500. Leave out training pairs whose source is also held out: a sentence seen in training tests nothing.
split_text() {
    local lines held every
    lines="$(count_lines "$SOURCE")"
    held=$((lines / 20 < 500 ? lines / 20 : 500))
    every=$((lines / (2 * held)))
    mkdir -p "$TEXT"
    LC_ALL=C awk -v every="$every" -v held="$held" '
        function part(n) {
            if (n % every || n / every > 2 * held) return "train"
            return (n / every) % 2 ? "valid" : "test"
        }
        NR == FNR { if (part(FNR) != "train") held_out[$0]; next }
        part(FNR) != "train" { print part(FNR); next }
        { print ($0 in held_out) ? "left-out" : "train" }' "$SOURCE" "$SOURCE" >"$TEXT/parts"
    split_side "$SOURCE" source
    split_side "$TARGET" target
    say "of $lines pairs: $(sort "$TEXT/parts" | uniq -c | tr -s " \n" " ")"
}

# split_side FILE SUFFIX: copy line N of FILE to the file with SUFFIX that line N of $TEXT/parts names.
split_side() {
    LC_ALL=C awk -v parts="$TEXT/parts" -v text="$TEXT" -v suffix="$2" '
        { getline part <parts; print >(text "/" part "." suffix) }' "$1"
}

# Print a vocabulary size that is small compared to the training text.
vocab_size() {
    count_lines "$TEXT/train.$SOURCE_SUFFIX" | awk '{ print $1 < 2000 ? 500 : $1 < 50000 ? 2000 : 8000 }'
}

prepare() {
    exec deepspeed-nmt prepare --out "$OUT/data" --vocab-size "${VOCAB_SIZE:-$(vocab_size)}" \
        --train-source "$TEXT/train.$SOURCE_SUFFIX" --train-target "$TEXT/train.$TARGET_SUFFIX" \
        --valid-source "$TEXT/valid.$SOURCE_SUFFIX" --valid-target "$TEXT/valid.$TARGET_SUFFIX" \
        --test-source "$TEXT/test.$SOURCE_SUFFIX" --test-target "$TEXT/test.$TARGET_SUFFIX"
}

train() {
    local options=() preset=zero2
    [ "$lock" != cpu ] || options+=(--cpu) preset=cpu
    [ -z "${RANKS:-}" ] || options+=(--ranks "$RANKS")
    say "its curves: $(quoted "$VENV/bin/tensorboard" --logdir "$RUN")"
    # The seconds in the messages of both scripts count from the start of this one.
    exec env SECONDS="$SECONDS" "$ROOT/launch/local.sh" ${options[@]+"${options[@]}"} -- --recipe "$RECIPE" --data "$OUT/data" --run "$RUN" \
        engine.name=deepspeed engine.ds_config="$preset"
}

# quoted WORD...: print words as the shell reads them.
quoted() { printf '%q ' "$@"; }

translate() {
    exec deepspeed-nmt translate --run "$RUN" --checkpoint best \
        --input "$TEXT/test.$SOURCE_SUFFIX" --output "$OUT/test.translation"
}

score() {
    exec deepspeed-nmt score --hypothesis "$OUT/test.translation" \
        --reference "$TEXT/test.$TARGET_SUFFIX" --source "$TEXT/test.$SOURCE_SUFFIX"
}

case "$OUT" in /*) ;; *) OUT="$PWD/$OUT" ;; esac # the launcher's processes may have another working directory
TEXT="$OUT/text" RUN="$OUT/run" MARKER="$OUT/.quickstart" SOURCE_SUFFIX=en TARGET_SUFFIX=de
[ -z "$SOURCE" ] || SOURCE_SUFFIX=source TARGET_SUFFIX=target RECIPE="${RECIPE:-sample_small}"
RECIPE="${RECIPE:-sample_quick}"
compgen -G "$ROOT/deepspeed_nmt/recipes/*/$RECIPE.yaml" >/dev/null ||
    die "no recipe '$RECIPE'; docs/recipes.md lists the names for RECIPE"
[ -z "$SOURCE$TARGET" ] || check_text
claim_out

stopped="" # the exit status once a signal has come
trap on_exit EXIT
exit_on_signals

say "1/6 install (for this machine: requirements/$lock.txt)"
if [ "$SYSTEM" = yes ]; then
    install "$lock" # in the foreground, because sudo may ask for a password
else
    attend_step install_lock_of_machine
    [ -z "$stopped" ] || exit "$stopped"
fi
use_venv

step 2 "$TEXT"/{train,valid,test}."$SOURCE_SUFFIX" "$TEXT"/{train,valid,test}."$TARGET_SUFFIX"
step 3 "$OUT/data/meta.json"
step 4 "$RUN/checkpoints"
step 5 "$OUT/test.translation"
say "6/6 score"
attend_step score
for number in 1 2 3; do
    printf '%s\n' "" "source       $(sed -n "${number}p" "$TEXT/test.$SOURCE_SUFFIX")" \
        "translation  $(sed -n "${number}p" "$OUT/test.translation")" \
        "reference    $(sed -n "${number}p" "$TEXT/test.$TARGET_SUFFIX")"
done
echo
say "done; the run is in $RUN"
say "its curves: $(quoted "$VENV/bin/tensorboard" --logdir "$RUN")"
say "translate other text: $(quoted "$VENV/bin/deepspeed-nmt" translate --run "$RUN")--input FILE --output FILE"
