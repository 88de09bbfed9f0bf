#!/usr/bin/env bash
# Measures on a machine with an NVIDIA GPU; writes JSON documents and logs into one folder.
#
#   tools/gpu_bench.sh OUTPUT_FOLDER [PRESET] [RANKS]
#
# PRESET: tiny, 0.6b, 8b or 4b (default), made with random weights on first use.
# RANKS: 1 (default) or the number of GPUs that share the model (backend nccl).
# `python3` must find MLX with CUDA and Lockstep's other dependencies.
# Variables: REPEATS (5), CLIENTS (1,4,8,16), PROMPT_TOKENS (64,1024), NEW_TOKENS (64),
# BENCHES ("overhead steps gateway"; also peers, structured, step, accuracy, prefill, start),
# PYTHON (python3).
# For step and accuracy: BATCHES (1,16,64), COMPARE (settings of a second contender).
# For step: CONTEXT (1024).
set -euo pipefail

output=${1:?usage: tools/gpu_bench.sh OUTPUT_FOLDER [PRESET] [RANKS]}
preset=${2:-4b}
ranks=${3:-1}
python=${PYTHON:-python3}
cd "$(dirname "$0")/.."
mkdir -p "$output"
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
# The CUDA backend compiles kernels at run time and needs CUDA's headers for that.
if [ -z "${CUDA_HOME:-}" ] && [ -d /usr/local/cuda/include ]; then
  export CUDA_HOME=/usr/local/cuda
fi

"$python" - <<'CHECK'
import mlx.core as mx

assert mx.cuda.is_available(), "MLX finds no CUDA device: is mlx-cuda-13 (or -12) installed?"
one = mx.random.normal((1024, 1024)).astype(mx.bfloat16)
mx.eval(one @ one)
print("device:", mx.device_info())
CHECK

overhead_flags=(
  --preset "$preset" --ranks "$ranks" --repeats "${REPEATS:-5}"
  --clients "${CLIENTS:-1,4,8,16}" --prompt-tokens "${PROMPT_TOKENS:-64,1024}"
  --new-tokens "${NEW_TOKENS:-64}"
)
if [ "$ranks" -gt 1 ]; then
  overhead_flags+=(--set world.backend=nccl)
fi

step_flags=(--preset "$preset" --repeats "${REPEATS:-5}" --batches "${BATCHES:-1,16,64}")
if [ -n "${COMPARE:-}" ]; then
  step_flags+=(--compare "$COMPARE")
fi

run() { # name, arguments...
  local name=$1 begin=$SECONDS
  shift
  echo "== lockstep bench $*"
  if ! "$python" -m services.commands.main bench "$@" --json --logs "$output" >"$output/$name.json"; then
    echo "$name failed; the logs:"
    tail -n 20 "$output"/*.log
  fi
  # One that fails after a while has a report of what came before.
  if [ -s "$output/$name.json" ]; then
    "$python" -m services.commands.bench.measuring.report "$output/$name.json"
  fi
  echo "== $name took $((SECONDS - begin)) s"
}

for bench in ${BENCHES:-overhead steps gateway}; do
  case $bench in
    overhead | peers) run "$bench-$preset-x$ranks" "$bench" "${overhead_flags[@]}" ;;
    structured) run "structured-$preset" structured --preset "$preset" --repeats "${REPEATS:-5}" ;;
    step) run "step-$preset" step "${step_flags[@]}" --context "${CONTEXT:-1024}" ;;
    accuracy) run "accuracy-$preset" accuracy "${step_flags[@]}" ;;
    prefill | start) run "$bench-$preset" "$bench" --preset "$preset" --repeats "${REPEATS:-5}" ;;
    steps) run steps steps --repeats "${REPEATS:-5}" ;;
    gateway) run gateway gateway --repeats "${REPEATS:-5}" ;;
    *) echo "no benchmark named $bench" >&2; exit 64 ;;
  esac
done
