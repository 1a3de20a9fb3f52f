#!/usr/bin/env bash
# Runs the GPU tests on an emulated GPU (tests/emulator/emulator.h), and the tests of the emulator: each in a process of its
# own, JOBS at a time, the longest first. --quick leaves out those that take longer than 10 s.
# Tests of the kernels that other generations run are repeated as on these (8.0, and 12.0 with its little shared memory).
#   scripts/test_emulated.sh [--quick] BINARY [JOBS]
set -euo pipefail

quick=
[ "${1:-}" != --quick ] || { quick=1; shift; }
binary=${1:?furious_emulated_tests} jobs=${2:-$(nproc)}

# Patterns of tests that are never run.
left_out=(
  'SizesCuda.*'                    # tensors of gigabytes
  'DataParallelCuda.*'             # NCCL
  'MatmulCuda.TuningKeepsTheBits'  # there is one algorithm
  'MatmulCuda.Rate'                # a speed
  # Thousands of steps of a kernel that needs a block on each of many multiprocessors: longer than 10 minutes.
  'TokenProgramCuda.LongWindows'
  'DecoderCuda.PersistentKernelMatchesSeparateKernels'
)

# Those that need many multiprocessors; others run with the default, which is faster.
wide='^(TokenProgramCuda\..*|WalkCuda\.SameBitsWithoutKeptStates)$' wide_multiprocessors=48

# Run on devices of each of these capabilities too, unless they belong to the list below.
capabilities=(8.0 12.0)
repeated='^(TokenLinearCuda|ParallelCuda|TilesCuda|ChunkStatesCuda|WalkCuda|MixerCuda|MixerFirstQueryCuda|MixerWindowCuda|ZeroKeysCuda)\.'

# Longer than 10 s, the longest first. Each run names tests that belong here and are missing.
long=(
  TrainingCuda.Fp8LearnsWhatBf16Learns
  TrainingCuda.EveryPresetLearnsWhatTheCpuLearns
  RecurrentCuda.ContentsMoveBetweenDevicesBitForBit
  ParallelCuda.ManyBlocksOfKeysInAFixedOrder
  TokenProgramCuda.EveryBlockReadsAsAFullPass
  DecayGradientCuda.KeepsItsPrecisionOverManyTokens
  RecurrentCuda.TokenByTokenEqualsTheCpu
  DecoderCuda.RoundedWeightsAndActivations
  ProfilerCuda.CountsTheTimeOfTheDevice
  DecoderCuda.PromptsInChunksAndTogether
  TokenProgramCuda.SwitchesBesideTheBlocks
  ChunkStatesCuda.WideHeads
  PublicMixerCuda.CostNamesTheFormThatRuns
  ZeroKeysCuda.EverySetOfKernels
  MixerCuda.LongChunks
  TokenProgramCuda.EqualRowsGiveTheSameBits
  Session/SessionsInThreadsCuda.ConcurrentSessionsAreIndependent/softmax_bf16
  ChunkStatesCuda.ManyHeads
  SharedStateCuda.CachesEqualTheCpu
  MixerCuda.EverySetOfKernelsAgreesWithTheOracle
  DecoderCuda.StepsBetweenTheLayersOfAPass
  PublicMixerCuda.WritesMemoryOfTheCallerWhateverItsAlignment
  SamplerCuda.DrawsWhatTheCpuDraws
  TrainingCuda.MemoryEstimateAndNoNewMemory
  TrainingCuda.OutOfMemoryInAStepSaysWhatWouldFit
  MixerCuda.InputsWithinRows
  MixerCuda.HeadsOf64And128WithStates
  ZeroKeysCuda.Recurrent
  LanguageModelCuda.EveryModelAgreesWithTheCpu
  Session/SessionsInThreadsCuda.ConcurrentSessionsAreIndependent/squared_bf16
  ChunkStatesCuda.EveryDimension
  DecoderCuda.MatchesTheCpuAndRestoresItsSlots
  MixerFirstQueryCuda.EverySetOfKernelsHasTheRowsOfTheOracle
  MixerCuda.LongSequence
  MixerCuda.FurtherScores
  Session/SessionsInThreadsCuda.ConcurrentSessionsAreIndependent/squared_f32
  MixerCuda.AnyShapeInF32
  LaunchCuda.OverlappingKernelsGiveTheSameBits
  MixerCuda.LongerThanManyTiles
  SharedStateCuda.LargeHeadsAgreeWithTheCpu
  ChunkStatesCuda.SameBitsEveryTime
  MixerCuda.TensorCores
  MixerCuda.AnyShapeInBf16
  RecurrentCuda.LargeHeadsAgreeWithTheCpu
  MixerCuda.LongChunksWithStates
  ChunkStatesCuda.LongChunks
  MixerCuda.LongChunksSameBitsEveryTime
  MixerCuda.SameBitsEveryTime
  DecoderCuda.CapturedStepsGiveTheSameBits
  ParallelCuda.SameBitsEveryTime
  MixerCuda.LongChunksWithAndWithoutHopper
  ChunkStatesCuda.LengthsAroundAChunk
  StatesCuda.ManyHeadsHaveTheBitsOfFew
  RecurrentCuda.SlotsOfDifferentLengthsEqualTheCpu
  TilesCuda.EverySpec
  MixerFirstQueryCuda.LongPast
  TrainingCuda.ACapturedStepHasTheBitsOfOneLaunchedKernelByKernel
  CrossEntropyCuda.SeveralChunksOfLogits
  Gate/RmsNormCuda.ManyRows/1
  TilesCuda.SameBitsEveryTime
  TrainingCuda.ResumesAnywhereBitForBit
  MixerWindowCuda.CachesEqualTheCpu
  RecurrentCuda.ContinuesAfterPrefill
  RecurrentCuda.SameBitsEveryTime
  DecoderCuda.AlternatesBetweenDecoders
)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$binary" --gtest_list_tests --gtest_filter='*Cuda.*:Emulator.*' |
  awk '/^[^ ].*\.( |$)/ { suite = $1 } /^  / { print suite $1 }' >"$work/all"
printf '%s\n' "${long[@]}" >"$work/long"
grep -xFf "$work/all" "$work/long" >"$work/known" || true
for pattern in "${left_out[@]}"; do
  regex=${pattern//./\\.}
  echo "^${regex//\*/.*}$"
done >"$work/left_out"
{
  [ -n "$quick" ] || cat "$work/known"
  grep -vxFf "$work/known" "$work/all" || true
} | grep -vEf "$work/left_out" >"$work/selected" || true
sed 's/^/9.0 /' "$work/selected" >"$work/run"
for capability in "${capabilities[@]}"; do
  { grep -E "$repeated" "$work/selected" | grep -vxFf "$work/known" | sed "s/^/$capability /" >>"$work/run"; } || true
done

# Appends "passed|skipped|failed SECONDS TEST" to the results. The argument: the capability of the device, and the test.
run_test() {
  local capability=${1%% *} test=${1#* } log=$work/${1//[\/ ]/_}.log begin=$SECONDS outcome=failed
  export FURIOUS_EMULATED_CAPABILITY=$capability
  [[ ! $test =~ $wide ]] || export FURIOUS_EMULATED_MULTIPROCESSORS=$wide_multiprocessors
  if timeout 1800 "$binary" --gtest_filter="$test" >"$log" 2>&1; then
    if grep -q '^\[       OK \]' "$log"; then outcome=passed; else outcome=skipped; fi
  else
    { echo "--- $test on $capability"; tail -n 40 "$log" | cut -c 1-1000; } >&2
  fi
  [ "$capability" = 9.0 ] || test+=" on $capability"
  echo "$outcome $((SECONDS - begin)) $test" >>"$work/results"
}
export -f run_test
export binary work wide wide_multiprocessors
touch "$work/results"
xargs -r -P "$jobs" -I TEST bash -c 'run_test "$1"' run_test TEST <"$work/run"

count() { grep -c "^$1 " "$work/results" || true; }
passed=$(count passed) failed=$(count failed) skipped=$(count skipped)
awk '$2 > 20 && NF == 3 { print $3, $2 }' "$work/results" | grep -vFf "$work/known" | sort >"$work/slow" || true
[ ! -s "$work/slow" ] || { echo "longer than 20 s here, and not in the list of this script:"; cat "$work/slow"; }
echo "test-emulated: $passed passed, $failed failed, $skipped skipped, $(($(wc -l <"$work/all") - $(wc -l <"$work/selected"))) left out, in $SECONDS s"
sed -n 's/^failed [0-9]* /failed: /p' "$work/results"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
