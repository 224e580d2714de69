#!/usr/bin/env bash
# compute-sanitizer over the kernels' tests on a GPU: memcheck, then racecheck where shared memory is written by hand.
#
#     benchmarks/sanitize.sh [memcheck|racecheck|initcheck]…     (make sanitize)
#
# Each tool gets SECONDS_EACH (150) and the tests below, which are few: the tools make kernels ten to a hundred times slower.
# Torch's allocator is off, so that every tensor is an allocation of its own and reading past its end shows.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
SANITIZER=${SANITIZER:-compute-sanitizer}
SECONDS_EACH=${SECONDS_EACH:-150}
command -v "$SANITIZER" >/dev/null || { echo "sanitize: there is no $SANITIZER on this machine" >&2; exit 3; }
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

memory=(
  "tests/gpu/test_attention.py::test_features_equal_the_reference"
  "tests/gpu/test_attention.py::test_padding_is_skipped_and_finite"
  "tests/gpu/test_attention.py::test_blocks_may_lie_apart_in_memory"
  "tests/gpu/test_prefill_attention.py::test_padding_is_skipped_and_finite"
  "tests/gpu/test_prefill_attention.py::test_features_equal_the_reference[mixed-all-128-plain]"
  "tests/gpu/test_step_kernels.py"
  "tests/gpu/test_layer_kernels.py"
  "tests/gpu/test_sampling_kernels.py"
  "tests/gpu/test_sampling_logits_kernels.py"
)
races=(
  "tests/gpu/test_attention.py::test_features_equal_the_reference"
  "tests/gpu/test_attention.py::test_decode_counts_begin_anew_with_every_launch"
  "tests/gpu/test_sampling_kernels.py"
)

status=0
for tool in "${@:-memcheck racecheck}"; do
  for one in $tool; do
    tests=("${memory[@]}")
    [ "$one" = racecheck ] && tests=("${races[@]}")
    echo "sanitize: $one, ${#tests[@]} files or tests, at most ${SECONDS_EACH} s"
    timeout "$SECONDS_EACH" "$SANITIZER" --tool "$one" --error-exitcode 9 --print-limit 20 \
      "$PYTHON" -m pytest -q -x -m gpu -p no:cacheprovider "${tests[@]}"
    found=$?
    [ "$found" = 124 ] && echo "sanitize: $one did not end in time; what it had reached was clean unless said above"
    [ "$found" = 0 ] || { echo "sanitize: $one ended with $found"; status=$found; }
  done
done
exit "$status"
