#!/usr/bin/env bash
# Install the package, prepare a corpus, train a translation model, translate its test set, and score the translation.
#
#   launch/quickstart.sh [--minutes N] [--fresh] [--system] [--lock LOCK] [--wheelhouse DIR] [SOURCE TARGET] \
#       [-- key=value ...]
#
#   SOURCE TARGET   your own text, one sentence a line: line N of TARGET translates line N of SOURCE. 5% of the pairs
#                   (at most 500) are held out for validation, and as many for the test. Also as SOURCE=... TARGET=...
#                   [a generated sample corpus]
#   --minutes N     how long to train, with a trial of the speed and all validations; installation, preparation and the
#                   final translation come on top. Once trained, a larger number trains on [15 to 60, depending on the
#                   size of the text and the device]
#   -- key=value    settings of training, such as optimizer.lr=1e-3, which override all others
#   --fresh         remove what an earlier run of this script made in OUT, and start over [resume after the last
#                   completed step]
#   --system        install missing system packages (python3, python3-venv) with apt-get [never]
#   --lock LOCK     requirements to install: cpu, cuda or v100; also as LOCK=... [chosen for this machine]
#   --wheelhouse D  install without a network from the directory D of launch/wheelhouse.sh; also as WHEELHOUSE=...
#
# Recipe, vocabulary and length for your own text follow from its size, the device, the minutes, and the speed of some
# updates (deepspeed_nmt/recipes/own_text.py); OUT/plan has them, with the reason. What pip and the launcher print goes
# to OUT/log. Training runs under DeepSpeed with ZeRO-2 (launch/local.sh). Ctrl-C, SIGTERM and SIGHUP (the terminal is lost) end the
# current step, and the same command without --fresh resumes. The exit status is then 75 if training was saved, in
# another step 130, 143 or 129; after an error it is that of the step which failed.
#
# Settings from the environment:
#
#   RECIPE           recipe to train, for as long as it says [sample_quick; for your own text a planned one]
#   OUT              directory of the results: new, empty, or written by this script [quickstart/]
#   RANKS            number of processes [one for each GPU; without a GPU 2]
#   VOCAB_SIZE       tokens of the joint vocabulary [500, 2,000 or 8,000, depending on the size of the text, and more
#                    for scripts of many characters]
#   VENV             virtual environment [.venv]
#   PYTHON           Python that makes the virtual environment [python3]
#   SKIP_INSTALL=1   use the virtual environment as it is

set -euo pipefail
environment=() # to repeat in the command that trains on
for name in OUT RECIPE RANKS VOCAB_SIZE LOCK VENV PYTHON WHEELHOUSE SKIP_INSTALL; do
    [ -z "${!name:-}" ] || environment+=("$name=${!name}")
done
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

MIN_LINES=200
STEPS=(corpus prepare train translate) # the second and following; the last one is `score`

fresh="" minutes="" texts=() settings=() lock_option=()
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;;
    --minutes) minutes="$(number "$@")" || exit; shift ;;
    --fresh) fresh=yes ;;
    --system) SYSTEM=yes ;;
    --lock) LOCK="$(lock_named "$@")" || exit; lock_option=("$1" "$2"); shift ;;
    --wheelhouse) WHEELHOUSE="$(directory_named "$@")" || exit; shift ;;
    --) shift; settings=("$@"); break ;;
    -*) die "unknown option $1; see --help" ;;
    *) texts+=("$1") ;;
    esac
    shift
done
case ${#texts[@]} in
0) ;;
2) SOURCE="${texts[0]}" TARGET="${texts[1]}" ;;
*) die "${#texts[@]} arguments are given; give the files SOURCE and TARGET, or none" ;;
esac
for setting in ${settings[@]+"${settings[@]}"}; do
    [[ "$setting" =~ ^[A-Za-z_]+\.[A-Za-z0-9_.]+= ]] || die "$setting is no setting; after -- write section.key=value"
done
[ -z "$minutes" ] || [ -z "${RECIPE:-}" ] ||
    die "RECIPE has a length of its own, but --minutes is given; leave out one of them"
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
        case "$(head -c 2 "$file" | od -An -tx1)" in *"ff fe"* | *"fe ff"*)
            die "$file is UTF-16, whose lines cannot be split; convert it by iconv -f UTF-16 -t UTF-8" ;;
        esac
    done
    sources="$(count_lines "$SOURCE")" targets="$(count_lines "$TARGET")"
    [ "$sources" = "$targets" ] ||
        die "$SOURCE has $sources lines and $TARGET has $targets;" \
            "align them sentence by sentence"
    [ "$sources" -ge "$MIN_LINES" ] || die "$SOURCE has $sources lines, fewer than $MIN_LINES; add more text"
    # Also by another name, as a link: what is here may be overwritten or removed.
    for file in "$SOURCE" "$TARGET"; do
        [ -z "$(find -L "$MARKER" "$TEXT" "$OUT/data" "$OUT/speed" "$RUN" "$OUT"/{log,plan,test.translation} -samefile "$file" 2>/dev/null)" ] ||
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
    [ -z "${VOCAB_SIZE:-}" ] || [ ! -e "$OUT/.done-prepare" ] || [ "$(cat "$OUT/.done-prepare")" = "$VOCAB_SIZE" ] ||
        die "$OUT was prepared with another VOCAB_SIZE; start over with --fresh, or set OUT"
    printf '%s\n' "$input" >"$MARKER.new" && mv "$MARKER.new" "$MARKER" # never half of it
}

# Remove what this script makes in $OUT, by name. Other files there stay, as do directories that have some.
remove_results() {
    local run
    rm -f "$OUT"/.done-* "$OUT"/{log,plan,plan.new,test.translation} "$TEXT/parts" "$TEXT"/{train,valid,test,left-out}.{en,de,source,target}
    rm -f "$OUT/data"/meta.json{,.sha256} "$OUT/data"/vocabulary.{model,json,*.json} \
        "$OUT/data"/{train,valid,test}.{source,target}{,.*.bin}
    for run in "$RUN" "$OUT/speed"; do
        rm -f "$run"/{config.yaml,{data,resolved,environment,origin,test_scores,manifest}.json,manifest.json.sha256,{metrics,events,goodput}.jsonl,.lock} \
            "$run"/vocabulary.{model,json,*.json}
        rm -rf "$run"/{checkpoints,gradients,logs,tensorboard,validation}
    done
    rmdir "$TEXT" "$OUT/data" "$RUN" "$OUT/speed" 2>/dev/null || true
}

# step NAME KEY OUTPUT...: run the function NAME of STEPS, unless an earlier run of this script has completed it with the
# same KEY and each OUTPUT still exists. The steps after one that runs are done again.
step() {
    local name="$1" key="$2" number=0 complete=yes file
    while [ "${STEPS[$number]}" != "$name" ]; do
        number=$((number + 1))
    done
    for file in "$OUT/.done-$name" "${@:3}"; do
        [ -e "$file" ] || complete=""
    done
    if [ -n "$complete" ] && [ "$(cat "$OUT/.done-$name")" = "$key" ]; then
        say "$((number + 2))/$LAST $name: done before"
        return
    fi
    for file in "${STEPS[@]:number}"; do
        rm -f "$OUT/.done-$file"
    done
    say "$((number + 2))/$LAST $name"
    in_log=yes
    if [ "$name" = train ]; then attend_training; else attend_step logged "$name"; fi
    in_log=""
    printf '%s' "$key" >"$OUT/.done-$name"
    [ -z "$stopped" ] || exit "$stopped"
}

# logged COMMAND...: run a command, whose output goes to $LOG.
logged() {
    exec >>"$LOG" 2>&1
    set -f # words of settings are no patterns
    "$@"
}

# Train. All that the launcher prints goes to $LOG, the lines of validations also to our output.
attend_training() {
    local reader status=0
    exec 4> >(show_validations)
    reader=$!
    attend forward train || status=$?
    exit_on_signals
    exec 4>&-
    wait "$reader" 2>/dev/null || true # its last lines
    return "$status"
}

# Signals and a lost terminal must not end this before the training, which would then have nowhere to print.
show_validations() {
    # shellcheck disable=SC2086 # several names
    trap '' $SIGNALS PIPE
    local line
    while IFS= read -r line || [ -n "$line" ]; do
        printf '%s\n' "$line" >>"$LOG"
        case "$line" in
        *" update "*": valid "*) say "update ${line#* update }" 2>/dev/null || true ;;
        *" warning: "*) say "${line#* }" 2>/dev/null || true ;;
        esac
    done
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
    *)
        [ -z "$in_log" ] || { echo "the end of $LOG:" && tail -n 15 "$LOG"; }
        say "failed with status $status; see the error above"
        ;;
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
    say "$lines pairs: $(pairs_of train) to train, $(pairs_of valid) to validate, $(pairs_of test) to test;" \
        "$(pairs_of left-out) with the source of a held-out pair are left out" >&3
    [ -s "$TEXT/train.source" ] || die "no pair is left to train; give text of more than some repeated lines"
}

# pairs_of PART: print the number of its pairs.
pairs_of() { grep -cx "$1" "$TEXT/parts" || true; }

# split_side FILE SUFFIX: copy line N of FILE to the file with SUFFIX that line N of $TEXT/parts names.
split_side() {
    (cd "$TEXT" && LC_ALL=C awk -v suffix="$2" '{ getline part <"parts"; print >(part "." suffix) }' "$1")
}

# plan COMMAND ARGUMENT...: print what the rules for own text say.
plan() { "$VENV/bin/python" -m deepspeed_nmt.recipes.own_text "$@"; }

prepare() {
    local vocabulary="--vocab-size 2000" # of the sample corpus
    [ -z "$SOURCE" ] || vocabulary="$(plan vocabulary "$TEXT/train.$SOURCE_SUFFIX" "$TEXT/train.$TARGET_SUFFIX")" || return
    # shellcheck disable=SC2086 # several words
    exec deepspeed-nmt prepare --out "$OUT/data" $vocabulary ${VOCAB_SIZE:+--vocab-size "$VOCAB_SIZE"} \
        --train-source "$TEXT/train.$SOURCE_SUFFIX" --train-target "$TEXT/train.$TARGET_SUFFIX" \
        --valid-source "$TEXT/valid.$SOURCE_SUFFIX" --valid-target "$TEXT/valid.$TARGET_SUFFIX" \
        --test-source "$TEXT/test.$SOURCE_SUFFIX" --test-target "$TEXT/test.$TARGET_SUFFIX"
}

# launch_training RUN LIMIT ARGUMENT...: train in the directory RUN with these arguments, and the settings of the command
# line, for at most LIMIT: nothing, or seconds and a number of updates (0: any).
launch_training() {
    local run="$1" limit="$2" options=() preset=zero2
    shift 2
    # shellcheck disable=SC2206 # two words
    [ -z "$limit" ] || watched=("$VENV/bin/python" -m deepspeed_nmt.recipes.own_text watch "$run" $limit)
    [ "$lock" != cpu ] || options+=(--cpu) preset=cpu
    [ -z "${RANKS:-}" ] || options+=(--ranks "$RANKS")
    # The seconds in the messages of both scripts count from the start of this one.
    exec env SECONDS="$SECONDS" ${watched[@]+"${watched[@]}"} "$ROOT/launch/local.sh" ${options[@]+"${options[@]}"} -- "$@" --data "$OUT/data" --run "$run" \
        engine.name=deepspeed engine.ds_config="$preset" ${settings[@]+"${settings[@]}"} ${measuring[@]+"${measuring[@]}"}
}
watched=() # program that limits training
measuring=() # settings that override those of the command line

# Measure how fast updates are, from which follows how many the minutes have room for.
speed() {
    local words
    words="$(plan trial "$OUT" "$device" ${minutes:+"$minutes"})" || return
    measuring=(training.max_updates=1000 training.log_every=1 training.validate_every=1000 collapse.every=0)
    # shellcheck disable=SC2086 # several words
    set -- $words
    launch_training "$OUT/speed" "$1 20" "${@:2}"
}

# make_plan SPENT: write $OUT/plan, unless it is there for as many minutes: a reason, a warning, the minutes, the seconds of
# training, options that train on, and arguments of `train`, one a line. The trial took SPENT seconds.
make_plan() {
    local before=""
    [ ! -f "$OUT/plan" ] || before="$(sed -n 3p "$OUT/plan")"
    if [ -z "$before" ] || { [ -n "$minutes" ] && [ "$minutes" != "$before" ]; }; then
        plan plan "$OUT" "$device" "$metric" "$1" ${minutes:+"$minutes"} >"$OUT/plan.new"
        mv "$OUT/plan.new" "$OUT/plan"
    fi
    say "$(sed -n 1p "$OUT/plan")"
    before="$(sed -n 2p "$OUT/plan")"
    [ -z "$before" ] || say "warning: $before"
    say "$(sed -n 3p "$OUT/plan") min end $(sed -n 4p "$OUT/plan") s after the first update; the final translation comes on top"
}

train() {
    exec >&4 2>&1 4>&-
    set -f
    say "its curves: $(quoted "$VENV/bin/tensorboard" --logdir "$RUN")" >&3
    if [ -n "$planned" ]; then
        # shellcheck disable=SC2046 # several words
        launch_training "$RUN" "$(sed -n 4p "$OUT/plan") 0" $(sed 1,5d "$OUT/plan")
    else
        launch_training "$RUN" "" --recipe "$RECIPE"
    fi
}

# quoted WORD...: print words as the shell reads them.
quoted() { printf '%q ' "$@"; }

translate() {
    local checkpoint=best # there is one once the run is validated
    grep -qs '"valid/loss"' "$RUN/metrics.jsonl" || checkpoint=last
    exec deepspeed-nmt translate --run "$RUN" --checkpoint "$checkpoint" \
        --input "$TEXT/test.$SOURCE_SUFFIX" --output "$OUT/test.translation"
}

score() {
    local metrics=()
    [ "$metric" = bleu ] || metrics=(--metrics "$metric" chrf)
    exec deepspeed-nmt score ${metrics[@]+"${metrics[@]}"} --hypothesis "$OUT/test.translation" \
        --reference "$TEXT/test.$TARGET_SUFFIX" --source "$TEXT/test.$SOURCE_SUFFIX"
}

# Say whether the validation score still rises, and the command that trains on.
say_outlook() {
    local outlook longer=() words=() verb="train on"
    outlook="$(plan outlook "$RUN")"
    words=(${settings[@]+"${settings[@]}"})
    if [ -n "$planned" ]; then
        IFS=" " read -r -a longer < <(sed -n 5p "$OUT/plan")
    else
        words+=("training.max_updates=$((2 * $(sed -n 2p <<<"$outlook")))")
    fi
    say "$(sed -n 1p <<<"$outlook")"
    case "${longer[*]-}" in *--fresh*) verb="start over" ;; esac
    say "$verb: $(quoted ${environment[@]+env "${environment[@]}"} "$ROOT/launch/quickstart.sh" ${longer[@]+"${longer[@]}"} \
        ${lock_option[@]+"${lock_option[@]}"} ${SOURCE:+"$SOURCE" "$TARGET"} ${words[@]+-- "${words[@]}"})"
}

# The launcher's processes may have another working directory, and awk takes a name such as lang=de for an assignment.
for name in OUT SOURCE TARGET; do
    case "${!name}" in '' | /*) ;; *) printf -v "$name" %s "$PWD/${!name}" ;; esac
done
TEXT="$OUT/text" RUN="$OUT/run" MARKER="$OUT/.quickstart" SOURCE_SUFFIX=en TARGET_SUFFIX=de
LOG="$OUT/log" LAST=6 device=cpu planned="" metric=bleu
[ -z "$SOURCE" ] || SOURCE_SUFFIX=source TARGET_SUFFIX=target
if [[ -z "${RECIPE:-}" && -n "$SOURCE$minutes" ]]; then
    STEPS=(corpus prepare speed train translate) LAST=7 planned=yes
    [ "$lock" = cpu ] || [ -z "$(list_gpus)" ] || device=gpu
fi
RECIPE="${RECIPE:-sample_quick}"
compgen -G "$ROOT/deepspeed_nmt/recipes/*/$RECIPE.yaml" >/dev/null ||
    die "no recipe '$RECIPE'; docs/recipes.md lists the names for RECIPE"
[ -z "$SOURCE$TARGET" ] || check_text
claim_out
[ -z "$planned" ] || [ ! -f "$RUN/metrics.jsonl" ] || [ -f "$OUT/plan" ] ||
    die "$RUN was trained as its recipe says, without --minutes; start over with --fresh, or set OUT"

stopped="" # the exit status once a signal has come
in_log="" # "yes" while what is done prints to $LOG
exec 3>&1 # our output, for functions whose own goes to $LOG
trap on_exit EXIT
exit_on_signals

say "1/$LAST install (for this machine: requirements/$lock.txt); all output: $LOG"
in_log=yes
if [ "$SYSTEM" = yes ]; then
    (install "$lock") >>"$LOG" 2>&1 # in the foreground, because sudo may ask for a password
else
    attend_step logged install_lock_of_machine
    [ -z "$stopped" ] || exit "$stopped"
fi
in_log=""
use_venv
if [ ${#settings[@]} -gt 0 ]; then # a mistake in them should not show after minutes
    deepspeed-nmt plan --recipe "$RECIPE" "${settings[@]}" >>"$LOG"
fi

step corpus "" "$TEXT"/{train,valid,test}."$SOURCE_SUFFIX" "$TEXT"/{train,valid,test}."$TARGET_SUFFIX"
VOCAB_SIZE="${VOCAB_SIZE:-$(cat "$OUT/.done-prepare" 2>/dev/null || true)}"
step prepare "$VOCAB_SIZE" "$OUT/data/meta.json"
[ -z "$SOURCE" ] || metric="$(plan metric "$TEXT/valid.$TARGET_SUFFIX")"
began="$SECONDS"
[ -z "$planned" ] || step speed ""
[ -z "$planned" ] || make_plan $((SECONDS - began))
step train "$RECIPE$([ -z "$planned" ] || sed 1,2d "$OUT/plan")${settings[*]+${settings[*]}}" "$RUN/checkpoints"
step translate "" "$OUT/test.translation"
say "$LAST/$LAST score"
attend_step score
for number in 1 2 3; do
    printf '%s\n' "" "source       $(sed -n "${number}p" "$TEXT/test.$SOURCE_SUFFIX")" \
        "translation  $(sed -n "${number}p" "$OUT/test.translation")" \
        "reference    $(sed -n "${number}p" "$TEXT/test.$TARGET_SUFFIX")"
done
echo
say "done; the run is in $RUN"
say "translate other text: $(quoted "$VENV/bin/deepspeed-nmt" translate --run "$RUN")--input FILE --output FILE"
say_outlook
