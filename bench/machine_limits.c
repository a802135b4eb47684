// Loops that show what the machine can do; compiled for it and called by bench/floor.py, one call per thread.
//
// read_floats: reads n floats, in windows of 8 runs that are read side by side: a core follows several runs through
// memory faster than one (measured: 23 against 17 GB/s on one core). The sum keeps the loads from being optimised away.
// fma_loop: 12 independent chains of fused multiply-adds, all in registers (latency 4, two units: 8 would do).
// int8_loop: as many chains of products of bytes, summed in 32 bits: vpdpbusd where there is one, else AVX2's
// maddubs, madd and add, else 32-bit integers.
#include <stddef.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

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

#if defined(__AVX512VNNI__)
typedef __m512i ints;
static ints multiply_add(ints a, ints b) { return _mm512_dpbusd_epi32(a, b, b); }
enum { kProducts = 64 };
#elif defined(__AVXVNNI__)
typedef __m256i ints;
static ints multiply_add(ints a, ints b) { return _mm256_dpbusd_avx_epi32(a, b, b); }
enum { kProducts = 32 };
#elif defined(__AVX2__)
typedef __m256i ints;
// Of a and b, not of b alone: the compiler would take that out of the loop.
static ints multiply_add(ints a, ints b) {
  return _mm256_add_epi32(a, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), b));
}
enum { kProducts = 32 };
#else
typedef int ints __attribute__((vector_size(VECTOR)));
static ints multiply_add(ints a, ints b) { return a * b + b; }
enum { kProducts = kLanes };
#endif

int int8_loop(long steps) {
  ints a[kChains], b;
  for (size_t i = 0; i < sizeof b; ++i) ((char*)&b)[i] = (char)(steps | 1);  // not known when compiled
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) a[j] = b + j;  // different, or one chain would do for all
  for (long i = 0; i < steps; ++i)
#pragma GCC unroll 12
    for (int j = 0; j < kChains; ++j) a[j] = multiply_add(a[j], b);
  int sum = 0;
#pragma GCC unroll 12
  for (int j = 0; j < kChains; ++j) sum += (int)a[j][0];
  return sum;
}

long int8_operations_per_step(void) { return 2L * kChains * kProducts; }
