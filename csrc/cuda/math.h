// exp, log, tanh, sigmoid and the noise of a token, operation by operation as in csrc/cpu/vec_math.h and head.h: the
// same bits on CPU and GPU.
#pragma once

#include <math.h>

#include "common/sampling.h"
#include "cuda/grid.h"

namespace jacobi::cuda {

constexpr float kInfinity = __builtin_inff();
constexpr float kLargestGumbel = 23.0f;  // -log(2^-33) = 22.87

JACOBI_GRID float larger(float a, float b) { return a > b ? a : b; }

// 2^n exp(r), |r| <= log(2)/2. 0 below -87.33, inf above 88.37, NaN stays NaN.
JACOBI_GRID float exp_of(float x) {
  constexpr float high = 88.37f, low = -87.33f, magic = 12582912.0f;
  float y = x < high ? x : high;
  y = y > low ? y : low;
  const float t = fmaf(y, 1.44269504f, magic);
  const float n = t - magic;
  float r = fmaf(n, -0.693145752f, y);
  r = fmaf(n, -1.42860677e-6f, r);
  float p = fmaf(1.989098091e-04f, r, 1.393364160e-03f);
  p = fmaf(p, r, 8.333310485e-03f);
  p = fmaf(p, r, 4.166646674e-02f);
  p = fmaf(p, r, 1.666666716e-01f);
  p = fmaf(p, r, 5.000000000e-01f);
  p = fmaf(p, r * r, r) + 1.0f;
  const float result = float_of(bits_of(p) + (bits_of(t) << 23));
  if (x != x) return x;
  return low > x ? 0.0f : x > high ? kInfinity : result;
}

// log(x) for positive normal x. x = 2^n m, m in [sqrt(1/2), sqrt(2)).
JACOBI_GRID float log_of(float x) {
  const uint32_t offset = bits_of(x) - 0x3F3504F3u;
  const float n = static_cast<float>(static_cast<int32_t>((offset + 0x40000000u) >> 23)) - 128.0f;
  const float m = float_of((offset & 0x007FFFFFu) + 0x3F3504F3u);
  const float r = m - 1.0f;
  const float square = r * r;
  float p = fmaf(6.971611083e-02f, r, -1.147973388e-01f);
  p = fmaf(p, r, 1.168541983e-01f);
  p = fmaf(p, r, -1.242568716e-01f);
  p = fmaf(p, r, 1.424905807e-01f);
  p = fmaf(p, r, -1.666780263e-01f);
  p = fmaf(p, r, 2.000071555e-01f);
  p = fmaf(p, r, -2.499999702e-01f);
  p = fmaf(p, r, 3.333333135e-01f);
  p = p * r * square;
  p = fmaf(n, -2.12194440e-4f, p);
  p = fmaf(square, -0.5f, p);
  return fmaf(n, 0.693359375f, r + p);
}

// log(1 - v) for 0 < v <= 0.5, accurate for small v
JACOBI_GRID float log_one_minus(float v) {
  const float u = 1.0f - v;
  const float lost = (1.0f - u) - v;
  return log_of(u) + lost / u;
}

JACOBI_GRID float tanh_of(float x) {
  const float a = fabsf(x), z = x * x;
  float p = fmaf(-6.100170780e-03f, z, 2.099955268e-02f);
  p = fmaf(p, z, -5.385141075e-02f);
  p = fmaf(p, z, 1.333277375e-01f);
  p = fmaf(p, z, -3.333332837e-01f);
  const float near = fmaf(p * z, x, x);
  const float far = 1.0f - 2.0f / (exp_of(a + a) + 1.0f);
  return a > 0.6245f ? (x < 0.0f ? 0.0f - far : far) : near;
}

JACOBI_GRID float silu(float x) { return x * (1.0f / (1.0f + exp_of(0.0f - x))); }

JACOBI_GRID float gumbel(NoiseKey key, uint32_t id) {
  const uint32_t h = noise_hash(key, id);
  const bool upper = h >> 31 != 0;  // v >= 1/2: use 1 - v, whose low bits are exact
  const float v = (static_cast<float>(upper ? ~h : h) + 0.5f) * 0x1p-32f;
  const float exponential = 0.0f - (upper ? log_of(v) : log_one_minus(v));
  return 0.0f - log_of(exponential);
}

// The sum of sixteen lanes in the library's order: lane l += lane l + 8, then 4, 2, 1.
JACOBI_GRID float reduce_lanes(const float* lane) {
  float sum[16];
  for (int i = 0; i < 16; ++i) sum[i] = lane[i];
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) sum[i] += sum[i + half];
  return sum[0];
}

}  // namespace jacobi::cuda
