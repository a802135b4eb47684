// Sixteen float lanes in one zmm register. See vec_scalar.h for what each operation means.
// Compiled natively, and once more through SIMDe so that this file's logic runs on any x86-64 CPU.
#pragma once
#ifdef JACOBI_SIMDE
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <simde/x86/avx512.h>
#include <simde/x86/fma.h>

#include "cpu/simde_gaps.h"
#else
#include <immintrin.h>
#endif
#include <stdint.h>

namespace JACOBI_ISA {

constexpr int kRegisters = 32;  // vec registers that a micro-kernel may count on

struct vec {
  __m512 v;
};
struct ivec {
  __m512i v;
};
struct mask {
  __mmask16 m;
};

inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline vec set1(float x) { return {_mm512_set1_ps(x)}; }
inline vec zero() { return {_mm512_setzero_ps()}; }
inline vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline vec load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
inline void store(float* p, vec x) { _mm512_storeu_ps(p, x.v); }
inline void store(float* p, vec x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }

inline vec add(vec a, vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline vec sub(vec a, vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline vec mul(vec a, vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline vec div(vec a, vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline vec fma(vec a, vec b, vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline vec max(vec a, vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline vec min(vec a, vec b) { return {_mm512_min_ps(a.v, b.v)}; }

inline mask gt(vec a, vec b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
inline mask is_nan(vec a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
inline mask and_not(mask a, mask b) { return {static_cast<__mmask16>(a.m & ~b.m)}; }
inline mask either(mask a, mask b) { return {static_cast<__mmask16>(a.m | b.m)}; }
inline bool any(mask m) { return m.m != 0; }
inline vec select(mask m, vec yes, vec no) { return {_mm512_mask_blend_ps(m.m, no.v, yes.v)}; }
inline ivec select(mask m, ivec yes, ivec no) { return {_mm512_mask_blend_epi32(m.m, no.v, yes.v)}; }

inline ivec iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline ivec iota() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
inline ivec iload(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline ivec iload(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline ivec iload(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline ivec iload(const uint16_t* p) {
  return {_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void istore(int32_t* p, ivec x) { _mm512_storeu_si512(p, x.v); }
inline ivec add(ivec a, ivec b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline ivec mul(ivec a, ivec b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
inline ivec bit_xor(ivec a, ivec b) { return {_mm512_xor_si512(a.v, b.v)}; }
inline ivec bit_or(ivec a, ivec b) { return {_mm512_or_si512(a.v, b.v)}; }
inline ivec bit_and(ivec a, ivec b) { return {_mm512_and_si512(a.v, b.v)}; }
template <int N>
inline ivec shift_left(ivec a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
inline ivec shift_right(ivec a) {
  return {_mm512_srli_epi32(a.v, N)};
}
inline mask negative(ivec a) { return {_mm512_cmplt_epi32_mask(a.v, _mm512_setzero_si512())}; }
inline vec to_float(ivec a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline vec as_float(ivec a) { return {_mm512_castsi512_ps(a.v)}; }
inline ivec as_int(vec a) { return {_mm512_castps_si512(a.v)}; }

inline vec widen_bf16(__m256i h) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))}; }
inline vec load(const uint16_t* p) { return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
// bits must already be rounded to bf16, in the high half of each lane
inline void store_high_halves(uint16_t* p, ivec bits) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits.v, 16)));
}

// lane l += lane l + 8, then 4, 2, 1
inline float reduce_add(vec x) {
  __m256 y =
      _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(x.v), 1)));
  __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
  z = _mm_add_ps(z, _mm_movehl_ps(z, z));
  return _mm_cvtss_f32(_mm_add_ss(z, _mm_shuffle_ps(z, z, 1)));
}

template <int Pick>
inline __m512 quarters(__m512 a, __m512 b) {  // two quarters of a, then two of b
  return _mm512_castsi512_ps(_mm512_shuffle_i32x4(_mm512_castps_si512(a), _mm512_castps_si512(b), Pick));
}
// x[i] lane j <-> x[j] lane i
inline void transpose(vec (&x)[16]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(x[i].v, x[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(x[i].v, x[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      const __m512d p = _mm512_castps_pd(a[i + j]), q = _mm512_castps_pd(a[i + j + 2]);
      b[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(p, q));
      b[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(p, q));
    }
  // b[4 g + c]: rows 4 g .. 4 g + 3 of columns c, c + 4, c + 8, c + 12 in its quarters
  for (int c = 0; c < 4; ++c) {
    const __m512 even = quarters<0x88>(b[c], b[4 + c]), odd = quarters<0xDD>(b[c], b[4 + c]);
    const __m512 even2 = quarters<0x88>(b[8 + c], b[12 + c]), odd2 = quarters<0xDD>(b[8 + c], b[12 + c]);
    x[c].v = quarters<0x88>(even, even2);
    x[c + 4].v = quarters<0x88>(odd, odd2);
    x[c + 8].v = quarters<0xDD>(even, even2);
    x[c + 12].v = quarters<0xDD>(odd, odd2);
  }
}

}  // namespace JACOBI_ISA
