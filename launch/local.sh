#!/usr/bin/env bash
# Train on this machine: on all its GPUs, or on several CPU ranks, through DeepSpeed's launcher.
#
#   launch/local.sh [--ranks N] [--cpu] -- <arguments of `deepspeed-nmt train`>
#   launch/local.sh -- --recipe transformer_base --data DATA --run RUN batch.micro_tokens=8192
#
#   --ranks N   processes [one for each GPU; without a GPU 2]
#   --cpu       CPU ranks, on a machine with GPUs, too
#
# Ctrl-C saves and stops; the same command goes on. The exit status is that of `train` (75: stopped, start it again; 70:
# a rank was lost, start it again). $VENV names the environment [.venv here, if there is one; else what is on PATH],
# $OMP_NUM_THREADS the threads of each rank on a CPU [cores / ranks].

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

ranks="" cpu=""
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;;
    --ranks) ranks="$(number "$@")" || exit; shift ;;
    --cpu) cpu=yes ;;
    --) shift && break ;;
    *) die "'$1' is no option of this script; arguments of \`deepspeed-nmt train\` come after --" ;;
    esac
    shift
done
[ $# -gt 0 ] || die "arguments of \`deepspeed-nmt train\` are required after --, but there are none; see --help"

use_venv
make_scratch
gpus="$(list_gpus | wc -l)"
[ -z "$cpu" ] || gpus=0
settings=()
if [ "$gpus" = 0 ]; then
    ranks="${ranks:-2}"
    OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(threads_for "$ranks")}"
    export OMP_NUM_THREADS CUDA_VISIBLE_DEVICES=""
    settings=(engine.device=cpu)
fi
ranks="${ranks:-$gpus}"
where=(--num_gpus "$ranks")
if [ "$gpus" != 0 ] && [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    # DeepSpeed would forget which GPUs are ours.
    case "$CUDA_VISIBLE_DEVICES" in *[!0-9,]*) die "CUDA_VISIBLE_DEVICES must be numbers such as 0,1, but is $CUDA_VISIBLE_DEVICES" ;; esac
    visible="$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | head -n "$ranks")"
    ranks="$(wc -l <<<"$visible")"
    where=(--include "localhost:$(paste -sd, - <<<"$visible")")
fi
say "$ranks ranks on $([ "$gpus" = 0 ] && echo CPU || echo GPU)"
run_ranks deepspeed "${where[@]}" --master_port "$(free_port)" --module deepspeed_nmt train "$@" ${settings[@]+"${settings[@]}"}
