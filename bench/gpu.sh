#!/usr/bin/env bash
# Everything of this runtime that needs a GPU, measured by one command:
#
#   bash bench/gpu.sh [OUT] [PART]
#
# OUT gets a JSON document, a figure (where matplotlib is there) and a log of every part; bench/results/gpu
# when not given. Without PART all parts run, one after another. Each has nine minutes. A failed one does
# not stop the others; the exit status shows whether any failed. Nothing needs a network.
#
#   tests              pytest -m gpu
#   kernels            the Triton kernels against what the memory allows
#   prepare            inflates the bundled pair to the sizes of Llama-2-7B and of a draft of 68 M (bf16;
#                      added weights change nothing) and compiles it
#   single             plain, plain without CUDA graphs, transformers plain and assisted, the best chain,
#                      the tree; memory rate; the host's share of a step
#   breakdown          the optimisations one after another
#   serving            the batch under rising load and on a trace
#   elastic            draft weights and KV in one memory
#   prepare-inexact    compiles the pair with cuBLAS's linear layers
#   exact              what exact linear layers cost
#   prepare-twin       compiles the small pair, on which structures are counted, and calibrates both on
#                      another kind of text
#   structures         trees of other systems by Eq. 3 under this device's profile
#
# What is prepared is kept under YGG_HOME, and goes on where it stopped when its time was up: run such a
# part again until it ends well.
#
# YGG_GPU_FLAGS takes the place of the flags that choose device and sizes. A rehearsal that writes no
# result, on the small pair and a processor:
#   YGG_GPU_FLAGS="--device cpu --target-parameters 0 --quick" bash bench/gpu.sh /tmp/rehearsal single
set -uo pipefail
cd "$(dirname "$0")/.."

ALL=(tests kernels prepare single breakdown serving elastic prepare-inexact exact prepare-twin structures)
OUT="$(realpath -m "${1:-bench/results/gpu}")"
PARTS=("${2:-}")
[ -z "${PARTS[0]}" ] && PARTS=("${ALL[@]}")
read -r -a FLAGS <<<"${YGG_GPU_FLAGS---device cuda --llama-7b}"
QUICK=()
case " ${FLAGS[*]} " in *" --quick "*) QUICK=(--quick) ;; esac
mkdir -p "$OUT"
export YGG_HOME="${YGG_HOME:-$PWD/compile_cache/gpu}" YGG_BENCH_RESULTS="$OUT"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

run() { timeout 540 python3 -m "$@"; }
claim() { run "bench.$1" --json "${@:2}" >/dev/null; } # the document is in OUT, progress on standard error

part() {
  case $1 in
  tests)
    grep -rlZ --include='test_*.py' 'mark\.gpu' tests |
      xargs -0 timeout 540 python3 -m pytest -m gpu -p no:cacheprovider
    ;;
  kernels) claim claim_kernels "${QUICK[@]}" ;; # of one device, whatever the models
  prepare) run bench.prepare pair "${FLAGS[@]}" ;;
  single) claim claim_single_stream --prompts 10 --tokens 96 --peer-prompts 3 "${FLAGS[@]}" ;;
  breakdown) claim claim_breakdown --prompts 8 "${FLAGS[@]}" ;;
  serving) claim claim_serving --rounds 1 --seconds 6 --trace-seconds 12 "${FLAGS[@]}" ;;
  elastic) claim claim_elastic "${FLAGS[@]}" ;;
  prepare-inexact) run bench.prepare inexact "${FLAGS[@]}" ;;
  exact) claim claim_exact_cost --prompts 8 "${FLAGS[@]}" ;;
  prepare-twin) run bench.prepare twin "${FLAGS[@]}" ;;
  structures) claim claim_structures --prompts 6 "${FLAGS[@]}" ;;
  *)
    echo "no part is named $1; there are: ${ALL[*]}"
    return 2
    ;;
  esac
}

failed=0
for name in "${PARTS[@]}"; do
  start=$SECONDS
  part "$name" 2>&1 | tee "$OUT/$name.log"
  status=${PIPESTATUS[0]}
  if [ "$status" -eq 0 ]; then
    echo "== $name: done in $((SECONDS - start)) s"
  else
    failed=1
    took="$((SECONDS - start)) s (124: its time was up)"
    echo "== $name: FAILED with status $status after $took; its log is $OUT/$name.log"
  fi
done
exit "$failed"
