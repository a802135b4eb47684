// Appends the keys and values of live query rows to a cache: row r of sequence b goes to cache row L + (r -
// cu_seqlens_q[b]), L its committed length. Holes are not written. Bytes: each live row read and written once.
#pragma once
#include <string.h>

#include "cpu/kernels.h"

namespace jacobi::cpu {

// Rows before they are appended: [rows, kv_heads, head_dim], heads dense.
struct NewRows {
  const void* k;
  const void* v;
  DType type;
  int64_t k_stride, v_stride;  // elements between rows
};

inline void append_values(const void* from, DType from_type, void* to, DType to_type, int64_t n) {
  if (from_type == to_type)
    memcpy(to, from, static_cast<size_t>(n * size_of(to_type)));
  else if (to_type == DType::f32)
    kernels().widen(from, from_type, static_cast<float*>(to), n);
  else
    kernels().narrow(static_cast<const float*>(from), to, to_type, n);
}

// Rows [begin, end). k_cache and v_cache: the memory that a.k and a.v name; layout, strides and lengths as in `a`.
inline void append_kv(const AttentionArgs& a, const NewRows& rows, void* k_cache, void* v_cache, int64_t begin,
                      int64_t end) {
  const int64_t from_size = size_of(rows.type), to_size = size_of(a.kv_type);
  for (int64_t b = 0; b < a.batch; ++b)
    for (int32_t s = a.cu_segments[b]; s < a.cu_segments[b + 1]; ++s) {
      const int64_t first = a.segments[s].start, behind = first + a.segments[s].length;
      for (int64_t row = first > begin ? first : begin; row < behind && row < end; ++row) {
        const int64_t slot = a.cache_seqlens[b] + row - a.cu_seqlens_q[b];
        const int64_t base = a.page_table == nullptr
                                 ? b * a.kv_batch_stride + slot * a.kv_row_stride
                                 : a.page_table[b * a.max_pages + slot / a.page_size] * a.kv_page_stride +
                                       slot % a.page_size * a.kv_row_stride;
        for (int64_t head = 0; head < a.kv_heads; ++head) {
          const int64_t at = (base + head * a.kv_head_stride) * to_size, from = head * a.head_dim;
          append_values(static_cast<const char*>(rows.k) + (row * rows.k_stride + from) * from_size, rows.type,
                        static_cast<char*>(k_cache) + at, a.kv_type, a.head_dim);
          append_values(static_cast<const char*>(rows.v) + (row * rows.v_stride + from) * from_size, rows.type,
                        static_cast<char*>(v_cache) + at, a.kv_type, a.head_dim);
        }
      }
    }
}

}  // namespace jacobi::cpu
