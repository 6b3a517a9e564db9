# shellcheck shell=sh
# Environment of a program in an image. Sourced at each start, by any user, in an image that may be read-only.

export PATH="/opt/deepspeed_nmt/bin:$PATH"
export LC_ALL="${LC_ALL:-C.UTF-8}"
# The home directory of the host is mounted by Apptainer, and its ~/.local may have packages of another Python. With
# PYTHONSAFEPATH a copy of this repository as the working directory does not replace the package of the image.
export PYTHONNOUSERSITE=1 PYTHONSAFEPATH=1
# Caches of Triton, matplotlib and sacreBLEU are in the home directory. A user without one gets a temporary directory.
if [ ! -d "${HOME:-}" ] || [ ! -w "$HOME" ]; then
    HOME="$(mktemp -d)"
    export HOME
fi
# A user id that the image does not know has no name, which torch asks for.
USER="${USER:-uid$(id -u)}"
export USER
