#!/usr/bin/env bash
# Run Python in a container. With CONTAINER or CONTAINER_RUN, the scripts launch/*.sbatch do so in all tasks.
#
#   CONTAINER=image.sif launch/container.sh -m deepspeed_nmt plan --recipe transformer_big
#   CONTAINER=image.sif sbatch [options of sbatch] launch/train.sbatch --recipe transformer_big --data DATA --run RUN
#
# Settings from the environment:
#
#   CONTAINER           image of Apptainer or Singularity, as containers/deepspeed_nmt.def makes it
#   CONTAINER_OPTIONS   more options of `apptainer exec`, such as "--bind /scratch"
#   CONTAINER_RUN       in place of CONTAINER: words before `python3` that run it in another kind of container
#
# Apptainer's container has the GPUs of the host, the network, the home directory, the working directory, this
# repository and TMPDIR. Other directories need --bind, or APPTAINER_BIND. The package is that of the image, and PYTHON
# and PYTHONPATH of the host are not used.

set -euo pipefail
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
case "${1:-}" in -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;; esac

unset PYTHONPATH PYTHONHOME # of Python on the host
set -f # words are split at spaces only
if [ -n "${CONTAINER_RUN:-}" ]; then
    # shellcheck disable=SC2086 # several words
    exec $CONTAINER_RUN python3 "$@"
fi
[ -n "${CONTAINER:-}" ] || die "CONTAINER is not set; see --help"
[ -e "$CONTAINER" ] || die "no image $CONTAINER on $(uname -n); check CONTAINER"
program=apptainer
command -v "$program" >/dev/null || program=singularity
command -v "$program" >/dev/null ||
    die "no apptainer on PATH on $(uname -n); load its module, or set CONTAINER_RUN (see --help)"
options=(--pwd "$PWD")
for directory in "$PWD" "$ROOT" "${TMPDIR:-}" "${SLURM_TMPDIR:-}"; do
    [ ! -d "$directory" ] || options+=(--bind "$directory")
done
[ ! -e /dev/nvidiactl ] || options+=(--nv)
# shellcheck disable=SC2086 # several words
exec "$program" exec "${options[@]}" ${CONTAINER_OPTIONS:-} "$CONTAINER" python3 "$@"
