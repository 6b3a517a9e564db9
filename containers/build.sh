#!/usr/bin/env bash
# Install the requirements of a lock and this package into a Debian without Python: the steps of containers/Dockerfile
# and containers/deepspeed_nmt.def.
#
#   containers/build.sh cpu|cuda|v100
#
# The locks pin all Python packages, and torch brings the CUDA libraries that it needs, so an image has no CUDA toolkit:
# none of DeepSpeed's own extensions is used or built.

set -euo pipefail
export VENV=/opt/deepspeed_nmt SYSTEM="" WHEELHOUSE="" PYTHON=python3 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# shellcheck source=launch/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../launch/lib.sh"
case "${1:-}" in -h | --help) print_help "${BASH_SOURCE[0]}" && exit ;; esac
lock="$(lock_named LOCK "$@")"

packages=(ca-certificates python3 python3-venv)
# Triton compiles a stub in C, which includes Python.h, when it loads its first kernel. NCCL finds InfiniBand by libibverbs.
[ "$lock" = cpu ] || packages+=(gcc libc6-dev python3-dev libibverbs1 ibverbs-providers)
apt_install "${packages[@]}"
rm -rf /var/lib/apt/lists/*

# pip compiles the bytecode of what it installs, which a start from a read-only image could not keep.
make_venv
install_lock "$lock"
say "installing this package"
pip_install --no-deps --no-build-isolation "$ROOT"
rm -rf "$VENV"/lib/python3*/site-packages/torch/test # programs that test torch, 83 MB
cp "$ROOT/containers/environment.sh" "$VENV/environment.sh"
printf '%s\n' "$lock" >"$VENV/lock"
chmod -R a+rX "$VENV" # whatever the umask is
say "installed $VENV, $(du -sm "$VENV" | cut -f 1) MB"
