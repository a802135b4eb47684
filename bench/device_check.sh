#!/usr/bin/env bash
# Everything that needs a GPU, in one run with a time limit: build, tests, benchmarks, memory checker.
#
#   bash bench/device_check.sh [--dry-run] [--limit SECONDS] [--only PART,...] [--out DIR]
#
#   --dry-run        say what each part would do, and run none of it (needs no GPU)
#   --limit SECONDS  end before that (default 480)
#   --only PART,...  some of: build build-cuda tests ops steps sanitizer
#   --out DIR        logs, state and results (default build/device_check); parts that passed are not repeated, and a
#                    part that was cut off goes on where it can. Remove DIR to begin anew.
#
# PYTHON=... picks the interpreter (default: .venv/bin/python, else python3). It needs a CUDA torch, triton, pybind11,
# ninja, rich and nvcc. Parts whose tools are missing are skipped with a line. Nothing is downloaded.
# At the end a table of all parts and results goes to stdout and DIR/device_check.json, also when parts failed.
# Exit code: 0 all passed or skipped, 1 not, 2 wrong usage.
set -uo pipefail
cd "$(dirname "$0")/.."

limit=480 out=build/device_check dry=0
parts=(build build-cuda tests ops steps sanitizer)
only=("${parts[@]}")

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "$0"; }
wrong() { echo "device_check: $1 (--help shows the options)" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) dry=1 ;;
    --limit) [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || wrong '--limit needs seconds'; limit=$2; shift ;;
    --only) IFS=, read -ra only <<<"${2:-}"; shift ;;
    --out) [ -n "${2:-}" ] || wrong '--out needs a folder'; out=$2; shift ;;
    -h | --help) usage; exit 0 ;;
    *) wrong "unknown option $1" ;;
  esac
  shift
done
[ "${#only[@]}" -gt 0 ] || wrong '--only needs parts'
for part in "${only[@]}"; do
  [[ " ${parts[*]} " == *" $part "* ]] || wrong "unknown part '$part'"
done

if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ -x .venv/bin/python ] && PYTHON=.venv/bin/python
fi
export PYTHONPATH=.:python:training${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
jobs=$(nproc)
workers=$((jobs < 8 ? jobs : 8)) # processes that share the GPU
results=$out

has() { "$PYTHON" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>/dev/null; }
capability() { # "9.0a" on an H200
  "$PYTHON" -c 'import torch; c = torch.cuda.get_device_capability(); print(f"{c[0]}.{c[1]}" + "a" * (c[0] >= 9))' \
    2>/dev/null || echo 9.0a
}

# Sets for part $1: command, expected seconds, the most it may take, what it shows, and why it cannot run ('': it can).
describe() {
  missing=''
  local build="MAX_JOBS=$jobs JACOBI_SIMDE=0 $PYTHON setup.py build_ext --inplace"
  case $1 in
    build)
      expected=60 most=150 what='CPU kernels and host module, in place'
      command="USE_CUDA=0 $build"
      for module in torch pybind11 ninja; do has $module || missing="python module $module"; done ;;
    build-cuda)
      expected=60 most=180 what='_C_cuda, the step as one cooperative launch'
      command="USE_CUDA=1 TORCH_CUDA_ARCH_LIST=$(capability) $build"
      command -v nvcc >/dev/null || [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ] || missing=nvcc ;;
    tests)
      expected=120 most=200 what='tests/triton and tests/gpu on the GPU'
      local spread=''
      has xdist && spread=" -n $workers"
      command="$PYTHON -m pytest tests/triton tests/gpu -q -p no:cacheprovider$spread --junitxml=$results/tests.xml"
      for module in pytest hypothesis; do has $module || missing="python module $module"; done ;;
    ops)
      expected=90 most=180 what='latency, GB/s and share of copy bandwidth of every op, beside torch'
      command="$PYTHON -m bench.gpu.ops --warm $workers --json $results/ops.json" ;;
    steps)
      expected=120 most=240 what='whole steps of three models by launches, graph, one cooperative launch; transformers'
      command="$PYTHON -m bench.gpu.steps --warm $workers --json $results/steps.json" ;;
    sanitizer)
      expected=60 most=120 what='memcheck on one small case of every kernel'
      local check='compute-sanitizer --tool memcheck --error-exitcode 9'
      command="export PYTORCH_NO_CUDA_MEMORY_CACHING=1; $check $PYTHON -m bench.gpu.ops --selftest"
      command+=" && $check $PYTHON -m bench.gpu.steps --selftest"
      command -v compute-sanitizer >/dev/null || missing=compute-sanitizer ;;
  esac
}

if [ "$dry" = 1 ]; then
  echo "limit $limit s, results in $out, interpreter $PYTHON"
  for part in "${only[@]}"; do
    describe "$part"
    printf '\n%s: %s\n  about %d s, at most %d s\n  %s\n' "$part" "$what" "$expected" "$most" "$command"
    [ -z "$missing" ] || echo "  here it would be skipped: $missing is missing"
    case $part in
      ops | steps)
        cases=$("$PYTHON" -m "bench.gpu.$part" --dry-run) || exit 1
        echo "    $(wc -l <<<"$cases") cases, from '$(head -n 1 <<<"$cases")' to '$(tail -n 1 <<<"$cases")'" ;;
      tests) find tests/triton tests/gpu -name 'test_*.py' | sort | sed 's/^/    /' ;;
    esac
  done
  printf '\nat the end: a table of parts and results, %s/device_check.json\n' "$out"
  exit 0
fi

"$PYTHON" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null || {
  echo "device_check: $PYTHON sees no CUDA GPU: --dry-run shows what would be done" >&2
  exit 1
}
mkdir -p "$out/parts" || exit 1

# The state of a part is the file parts/PART: status, seconds, note, separated by tabs.
record() { printf '%s\t%s\t%s\n' "$2" "$3" "$4" >"$out/parts/$1"; echo "$1: $2 ($3 s) $4"; }
child=''
finish() {
  local status=$?
  trap - EXIT INT TERM
  [ -z "$child" ] || kill -- "-$child" 2>/dev/null
  "$PYTHON" -m bench.gpu.report "$out" || status=1
  exit "$status"
}
trap finish EXIT
trap 'exit 130' INT TERM

set -m # each part is a process group of its own
for part in "${only[@]}"; do
  if [ -f "$out/parts/$part" ] && [[ $(cut -f1 "$out/parts/$part") == passed ]]; then
    echo "$part: passed before"
    continue
  fi
  describe "$part"
  if [ -n "$missing" ]; then
    record "$part" skipped 0 "$missing is missing"
    continue
  fi
  left=$((limit - SECONDS - 10)) # ten seconds for the end of a part and the tables
  if [ "$left" -lt 10 ]; then
    record "$part" 'not run' 0 'no time left'
    continue
  fi
  echo "$part: $what, at most $((left < most ? left : most)) s"
  begin=$SECONDS
  timeout --kill-after=3 "$((left < most ? left : most))" bash -c "$command" >"$out/$part.log" 2>&1 &
  child=$!
  wait "$child"
  code=$? child=''
  last=$(grep -v '^[[:space:]]*$' "$out/$part.log" | tail -n 1 | tr '\t' ' ' | cut -c1-160)
  case $code in
    0) record "$part" passed $((SECONDS - begin)) '' ;;
    124 | 137) record "$part" 'cut off' $((SECONDS - begin)) "$last" ;;
    *)
      if [ "$part" = sanitizer ] && grep -q 'Device not supported' "$out/$part.log"; then
        record "$part" skipped $((SECONDS - begin)) 'compute-sanitizer does not support this machine'
      else
        record "$part" failed $((SECONDS - begin)) "$last"
      fi ;;
  esac
done
