// Sixteen float lanes as an array: the definition of every vector operation, and the fallback for CPUs without AVX2.
// The other vec_*.h files give the same bits: each lane does the same IEEE operations, in the same order.
// Vectors must live in one namespace per instruction set (JACOBI_ISA), since the same names are compiled several times.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace JACOBI_ISA {

constexpr int kRegisters = 8;  // vec registers that a micro-kernel may count on

struct vec {
  float v[16];
};
struct ivec {
  int32_t v[16];
};
struct mask {
  bool m[16];
};

#define JACOBI_LANES(type, expression)       \
  type r;                                    \
  for (int i = 0; i < 16; ++i) r expression; \
  return r

inline vec set1(float x) { JACOBI_LANES(vec, .v[i] = x); }
inline vec zero() { return set1(0.0f); }
inline vec load(const float* p) { JACOBI_LANES(vec, .v[i] = p[i]); }
// the first n lanes (n <= 0: none, n >= 16: all), zeros behind
inline vec load(const float* p, int n) { JACOBI_LANES(vec, .v[i] = i < n ? p[i] : 0.0f); }
inline void store(float* p, vec x) { memcpy(p, x.v, sizeof x.v); }
inline void store(float* p, vec x, int n) {
  for (int i = 0; i < n; ++i) p[i] = x.v[i];
}

inline vec add(vec a, vec b) { JACOBI_LANES(vec, .v[i] = a.v[i] + b.v[i]); }
inline vec sub(vec a, vec b) { JACOBI_LANES(vec, .v[i] = a.v[i] - b.v[i]); }
inline vec mul(vec a, vec b) { JACOBI_LANES(vec, .v[i] = a.v[i] * b.v[i]); }
inline vec div(vec a, vec b) { JACOBI_LANES(vec, .v[i] = a.v[i] / b.v[i]); }
inline vec fma(vec a, vec b, vec c) { JACOBI_LANES(vec, .v[i] = fmaf(a.v[i], b.v[i], c.v[i])); }
// b when either is NaN, as x86 does
inline vec max(vec a, vec b) { JACOBI_LANES(vec, .v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
inline vec min(vec a, vec b) { JACOBI_LANES(vec, .v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }

// false when either is NaN
inline mask gt(vec a, vec b) { JACOBI_LANES(mask, .m[i] = a.v[i] > b.v[i]); }
inline mask is_nan(vec a) { JACOBI_LANES(mask, .m[i] = a.v[i] != a.v[i]); }
inline mask and_not(mask a, mask b) { JACOBI_LANES(mask, .m[i] = a.m[i] && !b.m[i]); }
inline mask either(mask a, mask b) { JACOBI_LANES(mask, .m[i] = a.m[i] || b.m[i]); }
inline bool any(mask m) {
  bool found = false;
  for (int i = 0; i < 16; ++i) found |= m.m[i];
  return found;
}
inline vec select(mask m, vec yes, vec no) { JACOBI_LANES(vec, .v[i] = m.m[i] ? yes.v[i] : no.v[i]); }
inline ivec select(mask m, ivec yes, ivec no) { JACOBI_LANES(ivec, .v[i] = m.m[i] ? yes.v[i] : no.v[i]); }

// integer lanes wrap around
inline int32_t wrap(uint32_t x) { return static_cast<int32_t>(x); }
inline uint32_t bits(int32_t x) { return static_cast<uint32_t>(x); }
inline ivec iset1(int32_t x) { JACOBI_LANES(ivec, .v[i] = x); }
inline ivec iota() { JACOBI_LANES(ivec, .v[i] = i); }
inline ivec iload(const int32_t* p) { JACOBI_LANES(ivec, .v[i] = p[i]); }
// widened integers
inline ivec iload(const uint8_t* p) { JACOBI_LANES(ivec, .v[i] = p[i]); }
inline ivec iload(const int8_t* p) { JACOBI_LANES(ivec, .v[i] = p[i]); }
inline ivec iload(const uint16_t* p) { JACOBI_LANES(ivec, .v[i] = p[i]); }
inline void istore(int32_t* p, ivec x) { memcpy(p, x.v, sizeof x.v); }
inline ivec add(ivec a, ivec b) { JACOBI_LANES(ivec, .v[i] = wrap(bits(a.v[i]) + bits(b.v[i]))); }
inline ivec mul(ivec a, ivec b) { JACOBI_LANES(ivec, .v[i] = wrap(bits(a.v[i]) * bits(b.v[i]))); }
inline ivec bit_xor(ivec a, ivec b) { JACOBI_LANES(ivec, .v[i] = a.v[i] ^ b.v[i]); }
inline ivec bit_or(ivec a, ivec b) { JACOBI_LANES(ivec, .v[i] = a.v[i] | b.v[i]); }
inline ivec bit_and(ivec a, ivec b) { JACOBI_LANES(ivec, .v[i] = a.v[i] & b.v[i]); }
template <int N>
inline ivec shift_left(ivec a) {
  JACOBI_LANES(ivec, .v[i] = wrap(bits(a.v[i]) << N));
}
template <int N>
inline ivec shift_right(ivec a) {
  JACOBI_LANES(ivec, .v[i] = wrap(bits(a.v[i]) >> N));
}
inline mask negative(ivec a) { JACOBI_LANES(mask, .m[i] = a.v[i] < 0); }
inline vec to_float(ivec a) { JACOBI_LANES(vec, .v[i] = static_cast<float>(a.v[i])); }
inline vec as_float(ivec a) {
  vec r;
  memcpy(r.v, a.v, sizeof r.v);
  return r;
}
inline ivec as_int(vec a) {
  ivec r;
  memcpy(r.v, a.v, sizeof r.v);
  return r;
}

// sixteen bf16 values widened to float
inline vec load(const uint16_t* p) {
  ivec r;
  for (int i = 0; i < 16; ++i) r.v[i] = wrap(static_cast<uint32_t>(p[i]) << 16);
  return as_float(r);
}
// bits must already be rounded to bf16, in the high half of each lane
inline void store_high_halves(uint16_t* p, ivec x) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<uint16_t>(bits(x.v[i]) >> 16);
}

// the reduction order of this library: lane l += lane l + 8, then 4, 2, 1
inline float reduce_add(vec x) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
  return x.v[0];
}

#undef JACOBI_LANES

// x[i] lane j <-> x[j] lane i
inline void transpose(vec (&x)[16]) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < i; ++j) {
      const float t = x[i].v[j];
      x[i].v[j] = x[j].v[i];
      x[j].v[i] = t;
    }
}

}  // namespace JACOBI_ISA
