// The few AVX-512 intrinsics of vec_avx512.h that some SIMDe releases lack, lane by lane. Only for the SIMDe build.
#pragma once
#include <simde/x86/avx512.h>
#include <stdint.h>
#include <string.h>

template <class To, class From>
inline To reinterpret_lanes(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

template <class T, int N>
struct Lanes {
  T v[N];
};

#ifndef _mm512_cmplt_epi32_mask
#define _mm512_cmplt_epi32_mask(a, b) simde_mm512_cmpgt_epi32_mask(b, a)
#endif

#ifndef _mm512_maskz_loadu_ps
#define _mm512_maskz_loadu_ps gap_mm512_maskz_loadu_ps
inline simde__m512 gap_mm512_maskz_loadu_ps(simde__mmask16 mask, const float* p) {
  Lanes<float, 16> r;
  for (int i = 0; i < 16; ++i) r.v[i] = (mask >> i & 1) ? p[i] : 0.0f;
  return simde_mm512_loadu_ps(r.v);
}
#endif

#ifndef _mm512_mask_storeu_ps
#define _mm512_mask_storeu_ps gap_mm512_mask_storeu_ps
inline void gap_mm512_mask_storeu_ps(float* p, simde__mmask16 mask, simde__m512 x) {
  const auto lanes = reinterpret_lanes<Lanes<float, 16>>(x);
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) p[i] = lanes.v[i];
}
#endif

#ifndef _mm512_cvtepi32_ps
#define _mm512_cvtepi32_ps gap_mm512_cvtepi32_ps
inline simde__m512 gap_mm512_cvtepi32_ps(simde__m512i x) {
  const auto lanes = reinterpret_lanes<Lanes<int32_t, 16>>(x);
  Lanes<float, 16> r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<float>(lanes.v[i]);
  return reinterpret_lanes<simde__m512>(r);
}
#endif

#ifndef _mm512_cvtepu16_epi32
#define _mm512_cvtepu16_epi32 gap_mm512_cvtepu16_epi32
inline simde__m512i gap_mm512_cvtepu16_epi32(simde__m256i x) {
  const auto lanes = reinterpret_lanes<Lanes<uint16_t, 16>>(x);
  Lanes<int32_t, 16> r;
  for (int i = 0; i < 16; ++i) r.v[i] = lanes.v[i];
  return reinterpret_lanes<simde__m512i>(r);
}
#endif

#ifndef _mm512_cvtepi32_epi16
#define _mm512_cvtepi32_epi16 gap_mm512_cvtepi32_epi16
inline simde__m256i gap_mm512_cvtepi32_epi16(simde__m512i x) {
  const auto lanes = reinterpret_lanes<Lanes<int32_t, 16>>(x);
  Lanes<int16_t, 16> r;
  for (int i = 0; i < 16; ++i) r.v[i] = static_cast<int16_t>(lanes.v[i]);
  return reinterpret_lanes<simde__m256i>(r);
}
#endif

#ifndef _mm512_cvtepu8_epi32
#define _mm512_cvtepu8_epi32 gap_mm512_cvtepu8_epi32
inline simde__m512i gap_mm512_cvtepu8_epi32(simde__m128i x) {
  const auto lanes = reinterpret_lanes<Lanes<uint8_t, 16>>(x);
  Lanes<int32_t, 16> r;
  for (int i = 0; i < 16; ++i) r.v[i] = lanes.v[i];
  return reinterpret_lanes<simde__m512i>(r);
}
#endif

#ifndef _mm512_cvtepi8_epi32
#define _mm512_cvtepi8_epi32 gap_mm512_cvtepi8_epi32
inline simde__m512i gap_mm512_cvtepi8_epi32(simde__m128i x) {
  const auto lanes = reinterpret_lanes<Lanes<int8_t, 16>>(x);
  Lanes<int32_t, 16> r;
  for (int i = 0; i < 16; ++i) r.v[i] = lanes.v[i];
  return reinterpret_lanes<simde__m512i>(r);
}
#endif
