// Packed weight matrices: panels of 16 output columns, in four formats. The products' sums are float32 in all of them.
//
//   f32, bf16   panel[k][16] values
//   int8        panel[ceil(k / 32)] groups: w = scale * q               (the values of GGUF's Q8_0)
//   int4        panel[ceil(k / 32)] groups: w = scale * q + min, rounded once   (Q4_1; Q4_0 with min = -8 scale)
//
// scale * q is exact in float32: a float16 has 11 bits, q at most 8. Columns past n and q past k are zero.
#pragma once

#include <stdint.h>

namespace jacobi {

enum class WeightType : int32_t { f32 = 0, bf16 = 1, int8 = 2, int4 = 3 };

constexpr int64_t kPanel = 16;  // columns
constexpr int64_t kGroup = 32;  // values of k that share a scale

struct Int8Group {
  uint16_t scale[kPanel];  // float16
  int8_t q[kGroup][kPanel];
};
struct Int4Group {
  uint16_t scale[kPanel], min[kPanel];  // float16
  uint8_t q[kGroup / 2][kPanel];        // low four bits: k = 2 j, high: k = 2 j + 1
};
static_assert(sizeof(Int8Group) == 544 && sizeof(Int4Group) == 320);

inline bool is_grouped(WeightType type) { return type == WeightType::int8 || type == WeightType::int4; }

// Bytes of one panel, and of the whole matrix [n, k].
inline int64_t panel_bytes(WeightType type, int64_t k) {
  const int64_t groups = (k + kGroup - 1) / kGroup;
  switch (type) {
    case WeightType::f32:
      return kPanel * k * 4;
    case WeightType::bf16:
      return kPanel * k * 2;
    case WeightType::int8:
      return groups * int64_t{sizeof(Int8Group)};
    case WeightType::int4:
      return groups * int64_t{sizeof(Int4Group)};
  }
  return 0;
}
inline int64_t packed_bytes(WeightType type, int64_t n, int64_t k) {
  return (n + kPanel - 1) / kPanel * panel_bytes(type, k);
}

}  // namespace jacobi
