#!/usr/bin/env bash
# Train on this machine with DeepSpeed's launcher, on all its GPUs or on CPU ranks.
#
#   launch/local.sh [--ranks N] [--cpu] -- <arguments of `deepspeed-nmt train`>
#   launch/local.sh -- --recipe transformer_base --data DATA --run RUN batch.micro_tokens=8192
#
#   --ranks N   number of processes [one for each GPU; without a GPU 2]
#   --cpu       use CPU ranks even if there are GPUs
#
# Ctrl-C saves and stops; the same command resumes; a second Ctrl-C stops at once. The exit status is that of `train`
# (75: stopped, start it again; 70: a rank was lost, start it again).
#
# Settings from the environment:
#
#   VENV                   virtual environment [.venv of this repository if it exists, otherwise the programs on PATH]
#   OMP_NUM_THREADS        threads of each rank [cores / ranks]
#   CUDA_VISIBLE_DEVICES   numbers of the GPUs to use, empty for CPU ranks [all]

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
    *) die "unknown option $1; arguments of \`deepspeed-nmt train\` come after --" ;;
    esac
    shift
done
[ $# -gt 0 ] || die "no arguments of \`deepspeed-nmt train\` after --; see --help"

use_venv
make_scratch
gpus="$(list_gpus | wc -l)"
[ -z "$cpu" ] || gpus=0
settings=()
if [ "$gpus" = 0 ]; then
    ranks="${ranks:-2}"
    export CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu
    settings=(engine.device=cpu)
fi
ranks="${ranks:-$gpus}"
where=(--num_gpus "$ranks")
[ "$gpus" = 0 ] || take_gpus
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(threads_for "$ranks")}"
say "$ranks ranks on $([ "$gpus" = 0 ] && echo CPU || echo GPU)"
# No hostfile: DeepSpeed would take /job/hostfile, and start on the hosts that it names. Settings of the user come last.
run_ranks deepspeed "${where[@]}" --hostfile /dev/null --log_level error --master_port "$(free_port)" \
    --module deepspeed_nmt train ${settings[@]+"${settings[@]}"} "$@"
