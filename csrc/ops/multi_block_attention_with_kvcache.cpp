#include "cpu/append.h"
#include "cpu/attention_run.h"
#include "ops/attention_checks.h"
#include "ops/scratch.h"

namespace jacobi::ops {
namespace {

constexpr const char* kOp = "multi_block_attention_with_kvcache";

// Rows that sequence b may write or read, relative to its first query row: behind its last live row.
int64_t live_end(const cpu::AttentionArgs& a, int64_t b) {
  int64_t end = 0;
  for (int32_t s = a.cu_segments[b]; s < a.cu_segments[b + 1]; ++s)
    if (a.segments[s].length > 0) end = a.segments[s].start + a.segments[s].length - a.cu_seqlens_q[b];
  return end;
}

// Every sequence's committed and new rows must lie inside its cache; page ids are checked as far as they are used.
void check_capacity(const cpu::AttentionArgs& a, int64_t capacity, int64_t pages) {
  WrittenPages written(pages);
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t length = a.cache_seqlens[b];
    if (length < 0) fail(kOp, "cache_seqlens[", b, "] must be at least 0, got ", length);
    const int64_t used = length + live_end(a, b);
    if (used > capacity)
      fail(kOp, "k_cache must have room for cache_seqlens[", b, "] + query rows = ", length, " + ", used - length,
           " rows of sequence ", b, ", got ", capacity);
    if (a.page_table == nullptr) continue;
    for (int64_t i = 0; i * a.page_size < used; ++i) {
      const int32_t page = a.page_table[b * a.max_pages + i];
      if (page < 0 || page >= pages)
        fail(kOp, "page_table[", b, ", ", i, "] must be within 0..", pages - 1, " (num_pages - 1), got ", page);
    }
    written.claim(kOp, b, a.page_table + b * a.max_pages, length, used, a.page_size);
  }
}

Tensor multi_block_attention_with_kvcache(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_cache,
                                          const Tensor& v_cache, const Tensor& cache_seqlens,
                                          const Tensor& cu_seqlens_q, const Tensor& segments, const Tensor& cu_segments,
                                          std::optional<Tensor> page_table, std::optional<double> softmax_scale,
                                          int64_t window_size, double softcap) {
  cpu::AttentionArgs args =
      checked_attention(kOp, q, k, v, cu_seqlens_q, segments, cu_segments, {softmax_scale, window_size, softcap});
  const bool paged = page_table.has_value();
  const char* words =
      paged ? "[num_pages, page_size, num_kv_heads, head_dim]" : "[B, capacity, num_kv_heads, head_dim]";
  const int64_t outer = paged ? kAny : args.batch;
  check_like_query(k_cache, q, kOp, "k_cache", words, {outer, kAny, args.kv_heads, args.head_dim});
  check_like_query(v_cache, q, kOp, "v_cache", words, {k_cache.size(0), k_cache.size(1), args.kv_heads, args.head_dim});
  for (int64_t dim : {0, 1}) {
    if (k_cache.size(dim) > 1 && k_cache.stride(dim) != v_cache.stride(dim))
      fail(kOp, "v_cache must have k_cache's strides ", shape_string(k_cache.strides()), ", got ",
           shape_string(v_cache.strides()));
  }
  check_separate_rows(k_cache, v_cache, kOp);
  check_int32(cache_seqlens, kOp, "cache_seqlens", "[B]", {args.batch});
  args.cache_seqlens = int32_data(cache_seqlens);
  args.kv_row_stride = k_cache.stride(1);
  int64_t capacity = k_cache.size(1), pages = 0;
  if (paged) {
    check_int32(*page_table, kOp, "page_table", "[B, max_pages]", {args.batch, kAny});
    check_value(k_cache.size(1) >= 1, kOp, "page_size", k_cache.size(1), "at least 1");
    args.page_table = int32_data(*page_table);
    args.max_pages = page_table->size(1);
    args.page_size = k_cache.size(1);
    args.kv_page_stride = k_cache.stride(0);
    capacity = args.max_pages * args.page_size;
    pages = k_cache.size(0);
  } else {
    args.kv_batch_stride = k_cache.stride(0);
  }
  narrow_size(capacity, kOp, "capacity");
  check_capacity(args, capacity, pages);

  Tensor out = torch::stable::new_empty(q, {args.rows, args.heads, args.head_dim});
  args.out = out.mutable_data_ptr();
  args.k = k_cache.const_data_ptr();
  args.v = v_cache.const_data_ptr();
  cpu::append_kv(args, {k.const_data_ptr(), v.const_data_ptr(), args.q_type, k.stride(0), v.stride(0)},
                 k_cache.mutable_data_ptr(), v_cache.mutable_data_ptr(), 0, args.rows);
  cpu::run_attention(args, scratch(cpu::attention_workspace(args, cpu::thread_count())));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(jacobi, CPU, m) {
  m.impl("multi_block_attention_with_kvcache", TORCH_BOX(&multi_block_attention_with_kvcache));
}

}  // namespace
}  // namespace jacobi::ops
