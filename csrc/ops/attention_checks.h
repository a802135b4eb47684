// Checks shared by the two attention ops, and the part of AttentionArgs that they have in common.
#pragma once

#include <cmath>
#include <optional>

#include "cpu/kernels.h"
#include "ops/checks.h"
#include "ops/dtype.h"

namespace jacobi::ops {

constexpr int64_t kMaxHeadDim = 256;

struct AttentionOptions {
  std::optional<double> softmax_scale;
  int64_t window_size;
  double softcap;
};

// A CPU tensor of q's dtype and the given shape, its last two dimensions dense.
inline void check_like_query(const Tensor& t, const Tensor& q, const char* op, const char* name, const char* words,
                             std::initializer_list<int64_t> expected) {
  check_cpu(t, op, name);
  check_dtype(t, op, name, q.scalar_type());
  check_shape(t, op, name, words, expected);
  check_dense_rows(t, op, name);
}

// Checks q, k, v, the layout and the options; fills everything but out, lse, keys, values and lengths.
inline cpu::AttentionArgs checked_attention(const char* op, const Tensor& q, const Tensor& k, const Tensor& v,
                                            const Tensor& cu_seqlens_q, const Tensor& segments,
                                            const Tensor& cu_segments, const AttentionOptions& options) {
  check_cpu(q, op, "q");
  check_floating(q, op, "q");
  check_shape(q, op, "q", "[T, num_heads, head_dim]", {kAny, kAny, kAny});
  check_dense_rows(q, op, "q");
  const int64_t rows = q.size(0), heads = q.size(1), head_dim = q.size(2);
  check_value(head_dim >= 1 && head_dim <= kMaxHeadDim, op, "head_dim", head_dim, "within 1..256");
  check_like_query(k, q, op, "k", "[T, num_kv_heads, head_dim]", {rows, kAny, head_dim});
  const int64_t kv_heads = k.size(1);
  check_like_query(v, q, op, "v", "[T, num_kv_heads, head_dim]", {rows, kv_heads, head_dim});
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0)
    fail(op, "q's num_heads must be a positive multiple of k's num_kv_heads, got ", heads, " and ", kv_heads);
  const double scale = options.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(head_dim)));
  if (!std::isfinite(scale)) fail(op, "softmax_scale must be finite, got ", scale);
  check_value(options.window_size >= -1, op, "window_size", options.window_size, "-1 (all) or at least 0");
  if (!(options.softcap >= 0) || !std::isfinite(options.softcap))
    fail(op, "softcap must be at least 0 (0: off) and finite, got ", options.softcap);
  const Layout layout = checked_layout(op, cu_seqlens_q, segments, cu_segments, rows);

  cpu::AttentionArgs args{};
  args.q = q.const_data_ptr();
  args.q_type = args.out_type = args.kv_type = kernel_dtype(q);
  args.q_stride = q.stride(0);
  args.out_stride = heads * head_dim;
  args.kv_head_stride = head_dim;
  args.cu_seqlens_q = layout.cu_seqlens_q;
  args.segments = layout.segments;
  args.cu_segments = layout.cu_segments;
  args.batch = layout.batch;
  args.heads = heads;
  args.kv_heads = kv_heads;
  args.head_dim = head_dim;
  args.rows = rows;
  args.scale = static_cast<float>(scale);
  args.softcap = static_cast<float>(options.softcap);
  args.window = options.window_size > INT32_MAX ? -1 : options.window_size;  // slots are int32: no key is farther off
  return args;
}

}  // namespace jacobi::ops
