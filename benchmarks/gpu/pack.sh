#!/usr/bin/env bash
# Collect the wheels that a GPU machine without a network lacks, so that they can travel with the checkout.
#
#   benchmarks/gpu/pack.sh [DIR]
#
# DIR defaults to .gpu, which git ignores and where run.sh looks. The machine has Python $PYTHON_VERSION (3.12), torch,
# transformers and the packages in `provided`, in any version. All else that requirements/common.txt pins is collected,
# and what the tests on a GPU need of requirements/test.txt: pytest, in the version that is pinned. $PYTHON names the Python whose pip downloads (python3).
set -euo pipefail
case " $* " in *" --help "* | *" -h "*) sed -n '2,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}" && exit ;; esac
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/../.."
directory="${1:-.gpu}" python="${PYTHON:-python3}" version="${PYTHON_VERSION:-3.12}"
locks=(requirements/common.txt requirements/test.txt)
provided=(absl-py click colorama contourpy cycler einops filelock fonttools fsspec grpcio jinja2 kiwisolver lxml
    markdown markupsafe matplotlib mpmath networkx ninja numpy packaging pillow portalocker protobuf psutil pyparsing
    python-dateutil pyyaml regex sacrebleu safetensors sentencepiece setuptools six sympy tabulate
    tensorboard-data-server tensorboard tqdm werkzeug)
tests=(pytest iniconfig pluggy pygments pytest-timeout)

pin() { # pin NAME: its line in the locks, without markers
    grep -hE "^$1==" "${locks[@]}" | sed 's/ *[;#].*//' | head -n 1
}
for name in "${provided[@]}" "${tests[@]}" deepspeed; do
    [ -n "$(pin "$name")" ] || { echo "requirements/ must pin $name, but does not" >&2 && exit 1; }
done
wanted=()
for name in $(sed -n 's/^\([A-Za-z0-9._-]*\)==.*/\1/p' requirements/common.txt) "${tests[@]}"; do
    case " ${provided[*]} deepspeed " in
    *" $name "*) ;;
    *) wanted+=("$(pin "$name")") ;;
    esac
done

mkdir -p "$directory"
rm -f "$directory"/*.whl # of other versions: two of a package cannot be installed
platforms=(--platform any)
for tag in manylinux1 manylinux2014 manylinux_2_17 manylinux_2_27 manylinux_2_28 manylinux_2_34; do
    platforms+=(--platform "${tag}_x86_64")
done
"$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$directory" --implementation cp \
    --python-version "$version" --abi "cp${version/./}" --abi abi3 --abi none "${platforms[@]}" "${wanted[@]}"
# Published as source only; without its compiled operations the wheel is pure Python.
DS_BUILD_OPS=0 "$python" -m pip wheel --quiet --no-deps --wheel-dir "$directory" "$(pin deepspeed)"
# The folder may travel without its repository; results name the commit nevertheless.
git describe --always --dirty --abbrev=10 >"$directory/commit" 2>/dev/null || rm -f "$directory/commit"
du -ch "$directory"/*.whl
