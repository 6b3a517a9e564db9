#!/usr/bin/env bash
# From nothing to a trained translation model: install, prepare, train, translate, score.
#
#   launch/quickstart.sh [--fresh] [--system] [SOURCE TARGET]
#
#   SOURCE TARGET   your own text, one sentence a line, line N of one translating line N of the other (also
#                   as SOURCE=... TARGET=...); every k-th line is held out to validate and to test on.
#                   Without them: a sample corpus that is made on the spot.
#   --fresh         start over; otherwise running it again goes on where it stopped
#   --system        allow apt-get for what is missing (python3, python3-venv); never done without
#
# Trains with the DeepSpeed launcher, ZeRO-2: a process for each NVIDIA GPU, or 2 processes on the CPU.
# Settings from the environment: OUT (directory of the results, default quickstart/), RANKS (processes),
# VOCAB_SIZE, VENV (default .venv), PYTHON, LOCK (cpu, cuda, v100), SKIP_INSTALL=1 (take $VENV as it is).

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

MIN_LINES=200
STEPS=6

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
*) die "either no text or two files, SOURCE and TARGET, are required, but $# arguments were given; see --help" ;;
esac
SOURCE="${SOURCE:-}"
TARGET="${TARGET:-}"
OUT="${OUT:-$ROOT/quickstart}"
export LC_ALL="${LC_ALL:-C.UTF-8}"

count_lines() { LC_ALL=C awk 'END { print NR }' "$1"; }

check_text() {
    [[ -n "$SOURCE" && -n "$TARGET" ]] ||
        die "both SOURCE and TARGET are required, but only one of them is given; name the other file too"
    local file sources targets
    for file in "$SOURCE" "$TARGET"; do
        [[ -f "$file" && -r "$file" ]] || die "$file must be a text file, but is missing or cannot be read; check the path"
    done
    sources="$(count_lines "$SOURCE")"
    targets="$(count_lines "$TARGET")"
    [ "$sources" = "$targets" ] ||
        die "line N of SOURCE must translate line N of TARGET, but $SOURCE has $sources lines and $TARGET has $targets;" \
            "align them sentence by sentence"
    [ "$sources" -ge "$MIN_LINES" ] ||
        die "at least $MIN_LINES sentence pairs are required, but $SOURCE has $sources; add more text"
}

# What the results are made from: a directory that holds the results of other text is not gone on with.
describe_input() {
    if [ -n "$SOURCE" ]; then
        LC_ALL=C cksum <"$SOURCE"
        LC_ALL=C cksum <"$TARGET"
    else
        echo "sample corpus"
    fi
}

# step NUMBER NAME COMMAND...: run COMMAND, unless an earlier run of this script has finished it.
step() {
    local number="$1" name="$2" done="$OUT/.done-$2"
    shift 2
    if [ -e "$done" ]; then
        say "$number/$STEPS $name: done before"
        return
    fi
    say "$number/$STEPS $name"
    "$@"
    touch "$done"
}

make_corpus() {
    if [ -z "$SOURCE" ]; then
        deepspeed-nmt sample-data --out "$TEXT" --train 30000 --valid 500 --test 500
    else
        split_text
    fi
}

# Every k-th pair is held out, in turn to validate and to test on, until each has its 5% (at most 500). Other pairs
# with a held-out source are left out of the training text: what was seen in training is no test.
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
    deal_out "$SOURCE" "$SOURCE_SUFFIX"
    deal_out "$TARGET" "$TARGET_SUFFIX"
    say "of $lines pairs: $(sort "$TEXT/parts" | uniq -c | tr -s " \n" " ")"
}

# deal_out FILE SUFFIX: line N goes to the file that line N of `parts` names.
deal_out() {
    LC_ALL=C awk -v parts="$TEXT/parts" -v text="$TEXT" -v suffix="$2" '
        { getline part <parts; print >(text "/" part "." suffix) }' "$1"
}

text_file() { echo "$TEXT/$1.$2"; }

prepare() {
    deepspeed-nmt prepare \
        --train-source "$(text_file train "$SOURCE_SUFFIX")" --train-target "$(text_file train "$TARGET_SUFFIX")" \
        --valid-source "$(text_file valid "$SOURCE_SUFFIX")" --valid-target "$(text_file valid "$TARGET_SUFFIX")" \
        --test-source "$(text_file test "$SOURCE_SUFFIX")" --test-target "$(text_file test "$TARGET_SUFFIX")" \
        --out "$DATA" --vocab-size "$(vocab_size)"
}

# A vocabulary must be small against the text that it is learnt from.
vocab_size() {
    if [ -n "${VOCAB_SIZE:-}" ]; then
        echo "$VOCAB_SIZE"
    else
        count_lines "$(text_file train "$SOURCE_SUFFIX")" | awk '{ print $1 < 2000 ? 500 : $1 < 50000 ? 2000 : 8000 }'
    fi
}

train() {
    local port
    port="$("$VENV/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
    say "watch it with: $VENV/bin/tensorboard --logdir $RUN"
    deepspeed --num_gpus "$RANKS" --master_port "$port" --module deepspeed_nmt train --recipe sample_small \
        --data "$DATA" --run "$RUN" engine.name=deepspeed engine.ds_config=zero2
}

translate() {
    deepspeed-nmt translate --run "$RUN" --checkpoint best \
        --input "$(text_file test "$SOURCE_SUFFIX")" --output "$OUT/test.translation"
}

score() {
    deepspeed-nmt score --hypothesis "$OUT/test.translation" \
        --reference "$(text_file test "$TARGET_SUFFIX")" --source "$(text_file test "$SOURCE_SUFFIX")"
}

[ -z "$SOURCE$TARGET" ] || check_text
mkdir -p "$OUT"
OUT="$(cd "$OUT" && pwd)" # the launcher's processes may work in another directory
TEXT="$OUT/text" DATA="$OUT/data" RUN="$OUT/run"
SOURCE_SUFFIX=en TARGET_SUFFIX=de
[ -z "$SOURCE" ] || { SOURCE_SUFFIX=source TARGET_SUFFIX=target; }
if [ -n "$fresh" ]; then
    rm -rf "$TEXT" "$DATA" "$RUN" "$OUT/test.translation" "$OUT/input" "$OUT"/.done-*
fi
if [ -e "$OUT/input" ] && [ "$(cat "$OUT/input")" != "$(describe_input)" ]; then
    die "$OUT must hold results of the same text, but was made from other text; start over with --fresh, or set OUT"
fi
describe_input >"$OUT/input"

lock="${LOCK:-$(choose_lock)}"
if [ "$lock" = cpu ]; then
    RANKS="${RANKS:-2}"
    export DS_ACCELERATOR=cpu
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(threads_for "$RANKS")}"
    export OMP_NUM_THREADS
else
    gpus="$(list_gpus | wc -l)"
    RANKS="${RANKS:-$((gpus > 0 ? gpus : 1))}"
fi

say "1/$STEPS install (for this machine: requirements/$lock.txt)"
install "$lock"
export PATH="$VENV/bin:$PATH"
scratch="$(mktemp -d)"
on_exit() {
    local status=$?
    rm -rf "$scratch"
    [ "$status" = 0 ] || say "stopped with status $status; run the same again to go on from here" >&2
}
trap on_exit EXIT
trap 'exit 130' INT TERM
# A build of an extension that was killed leaves a lock behind on which the next one waits for ever.
export TORCH_EXTENSIONS_DIR="$scratch/torch_extensions"

step 2 corpus make_corpus
step 3 prepare prepare
step 4 train train
step 5 translate translate
say "6/$STEPS score"
score
say "done; the run is in $RUN; its curves: $VENV/bin/tensorboard --logdir $RUN"
