#!/usr/bin/env bash
# Train on several hosts through DeepSpeed's launcher: from one of them by ssh, or started by hand on each.
#
#   launch/multinode.sh --hostfile FILE [options] -- <arguments of `deepspeed-nmt train`>
#
#   --hostfile FILE   lines "host slots=N": the hosts, and how many ranks each has
#   --master ADDRESS  of the first host, as the others reach it [its name in the hostfile]
#   --port P          free on the first host, the same everywhere [29500]
#   --node-rank I     no ssh: this is host number I of the hostfile, from 0; start this on every host yourself
#   --interface IF    network interface of the ranks' own traffic, for NCCL and Gloo [their choice]
#
# With ssh (pdsh is needed, and a key without a passphrase) it is started on one host, and the repository, the data
# and the run have the same paths on all. $VENV as in launch/local.sh.
#
# Ctrl-C saves and stops, on all hosts; a second one ends it at once. The exit status is that of `train`.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

# The value of --run among arguments, as a pattern that matches it.
run_directory() {
    local previous="" word
    for word in "$@"; do
        case "$word" in --run=*) previous=--run word="${word#--run=}" ;; esac
        if [ "$previous" = --run ]; then
            printf '%s\n' "${word//[^A-Za-z0-9_\/-]/.}"
            return
        fi
        previous="$word"
    done
}

hostfile="" master="" port=29500 node_rank="" interface=""
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;;
    --hostfile) hostfile="${2:?--hostfile needs a file}" && shift ;;
    --master) master="${2:?--master needs an address}" && shift ;;
    --port) port="${2:?--port needs a number}" && shift ;;
    --node-rank) node_rank="${2:?--node-rank needs a number}" && shift ;;
    --interface) interface="${2:?--interface needs a name}" && shift ;;
    --) shift && break ;;
    *) die "'$1' is no option of this script; arguments of \`deepspeed-nmt train\` come after --" ;;
    esac
    shift
done
[ -n "$hostfile" ] || die "--hostfile is required: lines such as 'host1 slots=8'; see --help"
[ -f "$hostfile" ] || die "--hostfile must be a file, but $hostfile is none"
[ $# -gt 0 ] || die "arguments of \`deepspeed-nmt train\` are required after --, but there are none; see --help"
master="${master:-$(awk '!/^#/ && NF { print $1; exit }' "$hostfile")}"

use_venv
if [ -n "$interface" ]; then
    export GLOO_SOCKET_IFNAME="$interface" NCCL_SOCKET_IFNAME="$interface"
fi
launcher=(--hostfile "$hostfile" --master_addr "$master" --master_port "$port")
if [ -n "$node_rank" ]; then
    launcher+=(--no_ssh --node_rank "$node_rank")
else
    launcher+=(--launcher pdsh --force_multi)
    # What the launcher hands on to the hosts: it takes NCCL's variables by itself, Gloo's from this file alone.
    environment="$(mktemp)"
    trap 'rm -f "$environment"' EXIT
    for name in GLOO_SOCKET_IFNAME OMP_NUM_THREADS DEEPSPEED_NMT_KERNELS PATH; do
        [ -z "${!name:-}" ] || printf '%s=%s\n' "$name" "${!name}" >>"$environment"
    done
    export DS_ENV_FILE="$environment"
    hosts="$(awk '!/^#/ && NF { print $1 }' "$hostfile" | paste -sd, -)"
    run="$(run_directory "$@")"
    ask_ranks() {
        # The brackets keep it from finding the shell that carries it out.
        PDSH_RCMD_TYPE=ssh pdsh -w "$hosts" "pkill -USR1 -f '[-]m deepspeed_nmt --local_rank=[0-9]+ train .*$run'"
    }
fi
say "$(grep -cE '^[^#]+slots=' "$hostfile") hosts, meeting at $master:$port"
run_ranks deepspeed "${launcher[@]}" --module deepspeed_nmt train "$@"
