// Sixteen float lanes in two ymm registers. See vec_scalar.h for what each operation means.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace JACOBI_ISA {

constexpr int kRegisters = 8;  // vec registers that a micro-kernel may count on (pairs of the 16 ymm)

struct vec {
  __m256 lo, hi;
};
struct ivec {
  __m256i lo, hi;
};
struct mask {
  __m256 lo, hi;
};

inline __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

inline vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline vec load(const float* p, int n) {
  return {_mm256_maskload_ps(p, first_lanes(n)), _mm256_maskload_ps(p + 8, first_lanes(n - 8))};
}
inline void store(float* p, vec x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
inline void store(float* p, vec x, int n) {
  _mm256_maskstore_ps(p, first_lanes(n), x.lo);
  _mm256_maskstore_ps(p + 8, first_lanes(n - 8), x.hi);
}

inline vec add(vec a, vec b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline vec sub(vec a, vec b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline vec mul(vec a, vec b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline vec div(vec a, vec b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline vec fma(vec a, vec b, vec c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline vec max(vec a, vec b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline vec min(vec a, vec b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

inline mask gt(vec a, vec b) { return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ)}; }
inline mask is_nan(vec a) { return {_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)}; }
inline mask and_not(mask a, mask b) { return {_mm256_andnot_ps(b.lo, a.lo), _mm256_andnot_ps(b.hi, a.hi)}; }
inline mask either(mask a, mask b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
inline bool any(mask m) { return _mm256_movemask_ps(_mm256_or_ps(m.lo, m.hi)) != 0; }
inline vec select(mask m, vec yes, vec no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}
inline ivec select(mask m, ivec yes, ivec no) {
  return {_mm256_blendv_epi8(no.lo, yes.lo, _mm256_castps_si256(m.lo)),
          _mm256_blendv_epi8(no.hi, yes.hi, _mm256_castps_si256(m.hi))};
}

inline ivec iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline ivec iota() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
inline ivec iload(const int32_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
          _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
inline ivec iload(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline ivec iload(const int8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline ivec iload(const uint16_t* p) {
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void istore(int32_t* p, ivec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.hi);
}
inline ivec add(ivec a, ivec b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline ivec mul(ivec a, ivec b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
inline ivec bit_xor(ivec a, ivec b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
inline ivec bit_or(ivec a, ivec b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
inline ivec bit_and(ivec a, ivec b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
template <int N>
inline ivec shift_left(ivec a) {
  return {_mm256_slli_epi32(a.lo, N), _mm256_slli_epi32(a.hi, N)};
}
template <int N>
inline ivec shift_right(ivec a) {
  return {_mm256_srli_epi32(a.lo, N), _mm256_srli_epi32(a.hi, N)};
}
inline vec to_float(ivec a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline vec as_float(ivec a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
inline ivec as_int(vec a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
inline mask negative(ivec a) {
  const __m256i none = _mm256_setzero_si256();
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(none, a.lo)), _mm256_castsi256_ps(_mm256_cmpgt_epi32(none, a.hi))};
}

inline __m256 widen_bf16(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
inline vec load(const uint16_t* p) {
  return {widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// bits must already be rounded to bf16, in the high half of each lane
inline void store_high_halves(uint16_t* p, ivec bits) {
  const __m256i packed = _mm256_packus_epi32(_mm256_srli_epi32(bits.lo, 16), _mm256_srli_epi32(bits.hi, 16));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xD8));
}

// lane l += lane l + 8, then 4, 2, 1
inline float reduce_add(vec x) {
  const __m256 y = _mm256_add_ps(x.lo, x.hi);
  __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_shuffle_ps(z, z, 1)));
}

inline void transpose8(__m256 (&x)[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0x44);
      b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + j + 2], 0xEE);
    }
  for (int c = 0; c < 4; ++c) {
    x[c] = _mm256_permute2f128_ps(b[c], b[c + 4], 0x20);
    x[c + 4] = _mm256_permute2f128_ps(b[c], b[c + 4], 0x31);
  }
}
// x[i] lane j <-> x[j] lane i
inline void transpose(vec (&x)[16]) {
  __m256 t[8], u[8];
  for (int i = 0; i < 8; ++i) t[i] = x[i].lo;
  transpose8(t);
  for (int i = 0; i < 8; ++i) x[i].lo = t[i];
  for (int i = 0; i < 8; ++i) t[i] = x[i + 8].hi;
  transpose8(t);
  for (int i = 0; i < 8; ++i) x[i + 8].hi = t[i];
  for (int i = 0; i < 8; ++i) t[i] = x[i].hi, u[i] = x[i + 8].lo;
  transpose8(t);
  transpose8(u);
  for (int i = 0; i < 8; ++i) x[i + 8].lo = t[i], x[i].hi = u[i];
}

}  // namespace JACOBI_ISA
