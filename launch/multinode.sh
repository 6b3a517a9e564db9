#!/usr/bin/env bash
# Train on several hosts with DeepSpeed's launcher: started on one host by ssh, or by hand on each host.
#
#   launch/multinode.sh --hostfile FILE [options] -- <arguments of `deepspeed-nmt train`>
#
#   --hostfile FILE   lines "host slots=N": each host and its number of ranks
#   --master ADDRESS  address of the first host for the other hosts [its name in the hostfile]
#   --port P          port of the first host, free, the same in the command of every host [29500]
#   --node-rank I     do not use ssh: this is host number I of the hostfile, from 0; start the script on every host
#   --interface IF    network interface for the traffic between ranks (NCCL and Gloo) [chosen by NCCL and Gloo]
#
# Without --node-rank, start it on one host. It needs pdsh and a key without a passphrase, and the repository, the
# data and the run must have the same paths on all hosts.
#
# Ranks wait for each other for engine.timeout_s seconds and name the rank that they wait for. Ctrl-C on one host
# saves and stops on all hosts; a second Ctrl-C stops at once. The exit status is that of `train`.
#
# Settings from the environment: VENV as in launch/local.sh; OMP_NUM_THREADS [cores of this host / its ranks, or the
# most of a host], DEEPSPEED_NMT_KERNELS, DEEPSPEED_NMT_PLUGINS and NCCL's variables are passed to all hosts.

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
    *) die "unknown option $1; arguments of \`deepspeed-nmt train\` come after --" ;;
    esac
    shift
done
[ -n "$hostfile" ] || die "no --hostfile; see --help"
[ -f "$hostfile" ] || die "no file $hostfile; check --hostfile"
[ $# -gt 0 ] || die "no arguments of \`deepspeed-nmt train\` after --; see --help"
wrong="$(grep -vnE '^[[:space:]]*(#|$)|^[^[:space:]#]+[[:space:]]+slots=[1-9][0-9]*[[:space:]]*(#.*)?$' "$hostfile" | head -n 1 || true)"
[ -z "$wrong" ] || die "$hostfile has the line $wrong; write lines such as 'host1 slots=8'"
hosts="$(awk '!/^[ \t]*(#|$)/ { print $1 }' "$hostfile" | paste -sd, -)"
[ -n "$hosts" ] || die "$hostfile names no host; add lines such as 'host1 slots=8'"
count="$(tr ',' '\n' <<<"$hosts" | wc -l | tr -d ' ')"
case "$node_rank" in *[!0-9]*) die "--node-rank is '$node_rank'; give a number from 0 to $((count - 1))" ;; esac
[ -z "$node_rank" ] || [ "$node_rank" -lt "$count" ] ||
    die "--node-rank is $node_rank, but $hostfile names $count hosts; give at most $((count - 1))"
master="${master:-${hosts%%,*}}"

# remote WORD: print WORD such that the remote shells read it as it is. pdsh replaces %n, %h and %u, and DeepSpeed puts
# words with spaces in double quotes, and others in none.
remote() {
    case "$1" in
    *" "*) sed 's/[\\$`]/\\&/g; s/%/%%/g' <<<"$1" ;;
    *) printf '%q\n' "$1" | sed 's/%/%%/g' ;;
    esac
}

use_venv
make_scratch
if [ -n "$interface" ]; then
    export GLOO_SOCKET_IFNAME="$interface" NCCL_SOCKET_IFNAME="$interface"
fi
slots="$(awk '!/^[ \t]*(#|$)/ { sub(/.*slots=/, ""); print $1 + 0 }' "$hostfile")"
slots="$(if [ -n "$node_rank" ]; then sed -n "$((node_rank + 1))p"; else sort -n | tail -n 1; fi <<<"$slots")"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$(threads_for "$slots")}"
launcher=(--hostfile "$hostfile" --master_addr "$master" --master_port "$port")
if [ -n "$node_rank" ]; then
    launcher+=(--no_ssh --node_rank "$node_rank")
else
    command -v pdsh >/dev/null || die "no pdsh, which starts ranks by ssh; install it, or use --node-rank on each host"
    [ "$PWD" = "$(printf %q "$PWD")" ] ||
        die "remote shells would not read the path of the working directory as it is: $PWD;" \
            "start in another, or use --node-rank on each host"
    for host in $(tr ',' ' ' <<<"$hosts"); do
        ssh -o BatchMode=yes -o ConnectTimeout=10 "$host" true </dev/null 2>"$SCRATCH/ssh" ||
            die "ssh does not reach $host without a password: $(tail -n 1 "$SCRATCH/ssh");" \
                "set up a key, or use --node-rank on each host"
    done
    launcher+=(--launcher pdsh --force_multi)
    words=()
    for word in "$@"; do words+=("$(remote "$word")"); done
    set -- "${words[@]}"
    # The launcher passes only variables to the hosts that this file has, and NCCL's if this host has GPUs.
    export DS_ENV_FILE="$SCRATCH/environment"
    for name in GLOO_SOCKET_IFNAME OMP_NUM_THREADS DEEPSPEED_NMT_KERNELS DEEPSPEED_NMT_PLUGINS \
        DEEPSPEED_NMT_STOP DEEPSPEED_NMT_STATUS PATH $(compgen -e NCCL_ || true); do
        [ -z "${!name:-}" ] || printf '%s=%s\n' "$name" "${!name}" >>"$DS_ENV_FILE"
    done
    pdsh="$(command -v pdsh)"
    on_hosts() { PDSH_RCMD_TYPE=ssh "$pdsh" -w "$hosts" "$1" </dev/null; }
    request_stop() {
        on_hosts "mkdir -p '$SCRATCH' && touch '$SCRATCH/stop'"
        echo 75 >"$SCRATCH/status"
        trap 'on_hosts "rm -rf '"'$SCRATCH'"'"' EXIT
    }
    # Ranks of other hosts end with 0 or a status of their own, as does a lost ssh; that pdsh itself is killed DeepSpeed
    # reports as 0.
    mkdir "$SCRATCH/bin"
    printf '#!/bin/sh\n%q "$@" && { [ -s %q ] || echo 0 >%q; }\n' "$pdsh" "$SCRATCH/status" "$SCRATCH/status" \
        >"$SCRATCH/bin/pdsh"
    chmod +x "$SCRATCH/bin/pdsh"
    export PATH="$SCRATCH/bin:$PATH"
fi
say "$count hosts, meeting at $master:$port"
run_ranks deepspeed "${launcher[@]}" --module deepspeed_nmt train "$@"
