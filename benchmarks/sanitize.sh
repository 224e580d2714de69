#!/usr/bin/env bash
# compute-sanitizer over the kernels' tests on a GPU: memcheck, and racecheck where shared memory is written by hand.
#
#     benchmarks/sanitize.sh [GROUP]…     (make sanitize; without names all of them, beside one another)
#
# Each group gets SECONDS_EACH (240) and is a process of its own, whose output goes to OUT (a temporary folder) /GROUP.log.
# The tests are few, as the tools make kernels ten to a hundred times slower. Torch's allocator is off, so that every tensor is
# an allocation of its own and reading past its end shows.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
SANITIZER=${SANITIZER:-compute-sanitizer}
SECONDS_EACH=${SECONDS_EACH:-240}
OUT=${OUT:-$(mktemp -d)}
command -v "$SANITIZER" >/dev/null || { echo "sanitize: there is no $SANITIZER on this machine" >&2; exit 3; }
export PYTORCH_NO_CUDA_MEMORY_CACHING=1

declare -A tool=([races]=racecheck)
declare -A tests=(
  [attention]="test_attention.py::test_features_equal_the_reference
    test_attention.py::test_padding_is_skipped_and_finite test_attention.py::test_blocks_may_lie_apart_in_memory
    test_attention.py::test_decodes_in_another_order
    test_attention.py::test_only_long_rows_are_split_where_splits_have_a_least_length
    test_attention.py::test_deterministic_bits_depend_on_the_row_alone"
  [prefill]="test_prefill_attention.py::test_padding_is_skipped_and_finite
    test_prefill_attention.py::test_features_equal_the_reference[mixed-all-128-plain]"
  [experts]="test_expert_kernels.py::test_many_rows_on_hopper test_expert_kernels.py::test_tokens_with_a_stride
    test_expert_kernels.py::test_rows_are_spread_to_where_their_pairs_are_and_combined_from_there"
  [steps]="test_step_kernels.py test_layer_kernels.py"
  [rows]="test_linear_rows.py::test_products_equal_the_reference"
  [sampling]="test_sampling_kernels.py test_sampling_filter_kernels.py test_sampling_logits_kernels.py"
  [races]="test_attention.py::test_features_equal_the_reference
    test_attention.py::test_decode_counts_begin_anew_with_every_launch test_sampling_kernels.py"
)

check() {
  local paths=()
  for one in ${tests[$1]}; do paths+=("tests/gpu/$one"); done
  timeout "$SECONDS_EACH" "$SANITIZER" --tool "${tool[$1]:-memcheck}" --error-exitcode 9 --print-limit 20 \
    "$PYTHON" -m pytest -q -x -m gpu -p no:cacheprovider "${paths[@]}" >"$OUT/$1.log" 2>&1
  local found=$?
  echo "sanitize: $1, ${tool[$1]:-memcheck}: ended with $found; $(grep -E ' (passed|failed)' "$OUT/$1.log" | tail -1)"
  [ "$found" = 124 ] && echo "sanitize: $1 did not end in time; what it had reached is in $OUT/$1.log"
  return "$found"
}

status=0
declare -A running
for group in "${@:-${!tests[@]}}"; do
  for one in $group; do
    [ -n "${tests[$one]:-}" ] || { echo "sanitize: no group '$one'; there are: ${!tests[*]}" >&2; exit 2; }
    check "$one" &
    running[$one]=$!
  done
done
for one in "${!running[@]}"; do wait "${running[$one]}" || status=$?; done
[ "$status" = 0 ] && echo "sanitize: clean"
exit "$status"
