#!/usr/bin/env bash
# Install the package, prepare a corpus, train a translation model, translate its test set, and score the translation.
#
#   launch/quickstart.sh [--fresh] [--system] [SOURCE TARGET]
#
#   SOURCE TARGET   your own text, one sentence a line: line N of TARGET translates line N of SOURCE. 5% of the pairs
#                   (at most 500) are held out for validation, and as many for the test. Also as SOURCE=... TARGET=...
#                   [a generated sample corpus]
#   --fresh         start over [resume after the last step that was completed]
#   --system        install missing system packages (python3, python3-venv) with apt-get [never]
#
# Training runs under DeepSpeed with ZeRO-2 (launch/local.sh). Ctrl-C saves; the same command resumes.
#
# Settings from the environment:
#
#   OUT              directory of the results [quickstart/]
#   RANKS            number of processes [one for each GPU; without a GPU 2]
#   VOCAB_SIZE       tokens of the joint vocabulary [500, 2,000 or 8,000, depending on the size of the text]
#   VENV             virtual environment [.venv]
#   PYTHON           Python that makes the virtual environment [python3]
#   LOCK             requirements to install: cpu, cuda or v100 [chosen for this machine]
#   SKIP_INSTALL=1   use the virtual environment as it is

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

MIN_LINES=200

fresh=""
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;;
    --fresh) fresh=yes ;;
    --system) SYSTEM=yes ;;
    -*) die "unknown option $1; see --help" ;;
    *) break ;;
    esac
    shift
done
case $# in
0) ;;
2) SOURCE="$1" TARGET="$2" ;;
*) die "SOURCE and TARGET must be two files or none, but $# arguments are given; see --help" ;;
esac
SOURCE="${SOURCE:-}" TARGET="${TARGET:-}" OUT="${OUT:-$ROOT/quickstart}"
export LC_ALL="${LC_ALL:-C.UTF-8}"

count_lines() { LC_ALL=C awk 'END { print NR }' "$1"; }

check_text() {
    [[ -n "$SOURCE" && -n "$TARGET" ]] ||
        die "SOURCE and TARGET must be given together, but one is missing; name the other file too"
    local file sources targets
    for file in "$SOURCE" "$TARGET"; do
        [[ -f "$file" && -r "$file" ]] ||
            die "$file must be a text file, but is missing or cannot be read; check the path"
    done
    sources="$(count_lines "$SOURCE")" targets="$(count_lines "$TARGET")"
    [ "$sources" = "$targets" ] ||
        die "line N of TARGET must translate line N of SOURCE, but $SOURCE has $sources lines and $TARGET has $targets;" \
            "align them sentence by sentence"
    [ "$sources" -ge "$MIN_LINES" ] || die "$SOURCE must have at least $MIN_LINES lines, but has $sources; add more text"
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

# step NUMBER NAME: run the function NAME, unless an earlier start of this script has completed it.
step() {
    if [ -e "$OUT/.done-$2" ]; then
        say "$1/6 $2: done before"
    else
        say "$1/6 $2"
        "$2"
        touch "$OUT/.done-$2"
    fi
}

corpus() {
    if [ -z "$SOURCE" ]; then
        deepspeed-nmt sample-data --out "$TEXT" --train 30000 --valid 500 --test 500
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
    deepspeed-nmt prepare --out "$OUT/data" --vocab-size "${VOCAB_SIZE:-$(vocab_size)}" \
        --train-source "$TEXT/train.$SOURCE_SUFFIX" --train-target "$TEXT/train.$TARGET_SUFFIX" \
        --valid-source "$TEXT/valid.$SOURCE_SUFFIX" --valid-target "$TEXT/valid.$TARGET_SUFFIX" \
        --test-source "$TEXT/test.$SOURCE_SUFFIX" --test-target "$TEXT/test.$TARGET_SUFFIX"
}

train() {
    local options=()
    [ "$lock" != cpu ] || options+=(--cpu)
    [ -z "${RANKS:-}" ] || options+=(--ranks "$RANKS")
    say "watch it with: $VENV/bin/tensorboard --logdir $RUN"
    "$ROOT/launch/local.sh" ${options[@]+"${options[@]}"} -- --recipe sample_small --data "$OUT/data" --run "$RUN" \
        engine.name=deepspeed engine.ds_config=zero2
}

translate() {
    deepspeed-nmt translate --run "$RUN" --checkpoint best \
        --input "$TEXT/test.$SOURCE_SUFFIX" --output "$OUT/test.translation"
}

score() {
    deepspeed-nmt score --hypothesis "$OUT/test.translation" \
        --reference "$TEXT/test.$TARGET_SUFFIX" --source "$TEXT/test.$SOURCE_SUFFIX"
}

[ -z "$SOURCE$TARGET" ] || check_text
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)" # absolute: the launcher's processes may have another working directory
TEXT="$OUT/text" RUN="$OUT/run" SOURCE_SUFFIX=en TARGET_SUFFIX=de
[ -z "$SOURCE" ] || SOURCE_SUFFIX=source TARGET_SUFFIX=target
if [ -n "$fresh" ]; then
    rm -rf "$TEXT" "$OUT/data" "$RUN" "$OUT/test.translation" "$OUT/input" "$OUT"/.done-*
fi
if [ -e "$OUT/input" ] && [ "$(cat "$OUT/input")" != "$(describe_input)" ]; then
    die "$OUT must hold results of the same text, but was made from other text; start over with --fresh, or set OUT"
fi
describe_input >"$OUT/input"

lock="${LOCK:-$(choose_lock)}"
say "1/6 install (for this machine: requirements/$lock.txt)"
install "$lock"
use_venv

on_exit() {
    local status=$?
    [ "$status" = 0 ] || say "stopped with status $status; start the same command again to resume" >&2
}
trap on_exit EXIT
trap 'exit 130' INT TERM

step 2 corpus
step 3 prepare
step 4 train
step 5 translate
say "6/6 score"
score
say "done; the run is in $RUN; its curves: $VENV/bin/tensorboard --logdir $RUN"
