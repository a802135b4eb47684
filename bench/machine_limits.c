// Loops that show what the machine can do; compiled for it and called by bench/floor.py, one call per thread.
//
// read_floats: reads n floats, in windows of 8 runs that are read side by side: a core follows several runs through
// memory faster than one (measured: 23 against 17 GB/s on one core). The sum keeps the loads from being optimised away.
// fma_loop: 12 independent chains of fused multiply-adds, all in registers (latency 4, two units: 8 would do).
#include <stddef.h>

#if defined(__AVX512F__)
#define VECTOR 64
#elif defined(__AVX__)
#define VECTOR 32
#else
#define VECTOR 16
#endif
enum { kLanes = VECTOR / 4, kRuns = 8, kRun = 9216, kChains = 12 };

typedef float vec __attribute__((vector_size(VECTOR), aligned(4), may_alias));

static float sum_of(vec a) {
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += a[i];
  return sum;
}

long read_window_floats(void) { return (long)kRuns * kRun; }

// n: whole windows.
float read_floats(const float* data, size_t n) {
  vec a[kRuns] = {{0}};
  for (size_t window = 0; window < n; window += kRuns * kRun)
    for (size_t i = window; i < window + kRun; i += kLanes)
#pragma GCC unroll 8
      for (int j = 0; j < kRuns; ++j) a[j] += *(const vec*)(data + i + j * kRun);
  float sum = 0;
  for (int j = 0; j < kRuns; ++j) sum += sum_of(a[j]);
  return sum;
}

float fma_loop(long steps) {
  vec a[kChains], b = {0}, c = {0};
  b += 0.999f, c += 1e-4f;
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) a[j] = c * (float)j;
  for (long i = 0; i < steps; ++i)
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) a[j] = a[j] * b + c;
  float sum = 0;
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) sum += sum_of(a[j]);
  return sum;
}

long fma_operations_per_step(void) { return 2L * kChains * kLanes; }
