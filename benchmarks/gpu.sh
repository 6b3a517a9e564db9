#!/usr/bin/env bash
# Run all tests and measurements that need a GPU, in under 10 minutes. Prints loss and tokens/s of a short run of each
# engine.
#
#   benchmarks/gpu.sh [OUT]
#
# Needs an environment with deepspeed_nmt importable and a GPU; writes to OUT (default: a temporary folder).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out="${1:-$(mktemp -d)}"
python="${PYTHON:-python3}"

echo "== environment"
"$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0))'

echo "== tests that need a GPU"
"$python" -m pytest -q tests/gpu tests/kernels

echo "== fused operations"
"$python" benchmarks/kernels.py --json "$out/kernels.json"

text="$out/text" data="$out/data"
[ -f "$data/meta.json" ] || {
    "$python" -m deepspeed_nmt sample-data --out "$text" --train 20000 --valid 200 --test 200
    "$python" -m deepspeed_nmt prepare --train-source "$text/train.en" --train-target "$text/train.de" \
        --valid-source "$text/valid.en" --valid-target "$text/valid.de" --out "$data" --vocab-size 2000
}

echo "== selftest: engines compared"
"$python" -m deepspeed_nmt selftest --quick

echo "== planned and measured memory, on 16 and 32 GiB"
for gib in 16 32; do
    "$python" benchmarks/planned.py --data "$data" --out "$out/planned" --gib "$gib" --updates 60 batch.update_tokens=8192
done

echo "== cost of regularizers and exits"
"$python" benchmarks/objectives.py --dim 512 --layers 15 --tokens 4096 --rounds 3
"$python" benchmarks/exits.py --dim 512 --layers 6 --tokens 4096 --rounds 3

train() { # train NAME SETTING...
    local name=$1
    shift
    echo "== $name"
    "$python" -m deepspeed_nmt train --recipe transformer_base --data "$data" --run "$out/$name" \
        batch.update_tokens=16384 batch.micro_tokens=8192 training.max_updates=100 training.log_every=50 \
        training.validate_every=100 schedule.warmup_updates=50 optimizer.clip_norm=1 validation.max_sentences=100 "$@" 2>&1 | grep -E "update|error"
}

train plain_bf16 engine.name=plain engine.precision=bf16
train plain_fp16 engine.name=plain engine.precision=fp16
train zero1_bf16 engine.name=deepspeed engine.ds_config=zero1 engine.precision=bf16
train zero2_fp16 engine.name=deepspeed engine.ds_config=zero2 engine.precision=fp16
train deep_decoder_zero2_bf16 --recipe deep_decoder_base_30_stabilised engine.name=deepspeed engine.ds_config=zero2 engine.precision=bf16 \
    batch.micro_tokens=4096 training.max_updates=50 training.validate_every=50 collapse.every=25 "validation.metrics=[]"
train deep_decoder_zero3_fp16 --recipe deep_decoder_base_30_stabilised engine.name=deepspeed engine.ds_config=zero3 engine.precision=fp16 \
    batch.micro_tokens=4096 training.max_updates=50 training.validate_every=50 "validation.metrics=[]"
train zero3_bf16 engine.name=deepspeed engine.ds_config=zero3 engine.precision=bf16
