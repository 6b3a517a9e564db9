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
# Ranks wait for one another for engine.timeout_s seconds, and say so. Ctrl-C, on one host, lets all save and stop; a
# second one ends it at once. The exit status is that of `train`.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

hostfile="" master="" port=29500 node_rank="" interface=""
while [ $# -gt 0 ]; do
    case "$1" in
    -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;;
    --hostfile) hostfile="$(value "$@")" || exit; shift ;;
    --master) master="$(value "$@")" || exit; shift ;;
    --port) port="$(number "$@")" || exit; shift ;;
    --node-rank) node_rank="$(value "$@")" || exit; shift ;;
    --interface) interface="$(value "$@")" || exit; shift ;;
    --) shift && break ;;
    *) die "'$1' is no option of this script; arguments of \`deepspeed-nmt train\` come after --" ;;
    esac
    shift
done
[ -n "$hostfile" ] || die "--hostfile is required: lines such as 'host1 slots=8'; see --help"
[ -f "$hostfile" ] || die "--hostfile must be a file, but $hostfile is none"
[ $# -gt 0 ] || die "arguments of \`deepspeed-nmt train\` are required after --, but there are none; see --help"
wrong="$(grep -vnE '^[[:space:]]*(#|$)|^[^[:space:]#]+[[:space:]]+slots=[1-9][0-9]*[[:space:]]*(#.*)?$' "$hostfile" | head -n 1 || true)"
[ -z "$wrong" ] || die "--hostfile must have lines such as 'host1 slots=8', but $hostfile has $wrong"
hosts="$(awk '!/^[ \t]*(#|$)/ { print $1 }' "$hostfile" | paste -sd, -)"
[ -n "$hosts" ] || die "--hostfile must name a host, but $hostfile names none"
count="$(tr ',' '\n' <<<"$hosts" | wc -l | tr -d ' ')"
case "$node_rank" in *[!0-9]*) die "--node-rank must be a number from 0 to $((count - 1)), but is '$node_rank'" ;; esac
[ -z "$node_rank" ] || [ "$node_rank" -lt "$count" ] ||
    die "--node-rank must be at most $((count - 1)), because $hostfile names $count hosts, but is $node_rank"
master="${master:-${hosts%%,*}}"

use_venv
make_scratch
if [ -n "$interface" ]; then
    export GLOO_SOCKET_IFNAME="$interface" NCCL_SOCKET_IFNAME="$interface"
fi
launcher=(--hostfile "$hostfile" --master_addr "$master" --master_port "$port")
if [ -n "$node_rank" ]; then
    launcher+=(--no_ssh --node_rank "$node_rank")
else
    command -v pdsh >/dev/null || die "pdsh is required to start ranks by ssh; install it, or use --node-rank on each host"
    for host in $(tr ',' ' ' <<<"$hosts"); do
        ssh -o BatchMode=yes -o ConnectTimeout=10 "$host" true </dev/null 2>"$SCRATCH/ssh" ||
            die "ssh must reach $host without a question, but does not: $(tail -n 1 "$SCRATCH/ssh"); mend that, or use --node-rank"
    done
    launcher+=(--launcher pdsh --force_multi)
    # What the launcher hands on to the hosts: it takes NCCL's variables by itself, others from this file alone.
    export DS_ENV_FILE="$SCRATCH/environment"
    for name in GLOO_SOCKET_IFNAME OMP_NUM_THREADS DEEPSPEED_NMT_KERNELS DEEPSPEED_NMT_STOP PATH; do
        [ -z "${!name:-}" ] || printf '%s=%s\n' "$name" "${!name}" >>"$DS_ENV_FILE"
    done
    on_hosts() { PDSH_RCMD_TYPE=ssh pdsh -w "$hosts" "$1" </dev/null; }
    ask_ranks() {
        on_hosts "mkdir -p '$SCRATCH' && touch '$SCRATCH/stop'"
        trap 'on_hosts "rm -rf '"'$SCRATCH'"'"' EXIT
    }
    touch "$SCRATCH/done" # ssh says by itself when it is lost
fi
say "$count hosts, meeting at $master:$port"
run_ranks deepspeed "${launcher[@]}" --module deepspeed_nmt train "$@"
