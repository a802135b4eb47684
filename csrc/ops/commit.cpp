// jacobi::commit on CPU: argument checks, then csrc/cpu/commit.h per sequence.
#include "cpu/commit.h"

#include <optional>

#include "ops/checks.h"

namespace jacobi::ops {
namespace {

constexpr const char* kOp = "commit";

cpu::CacheView cache_view(const Tensor& cache) {
  const auto bytes = static_cast<int64_t>(cache.element_size());
  return {static_cast<char*>(cache.mutable_data_ptr()), cache.stride(0) * bytes, cache.stride(1) * bytes,
          cache.stride(2) * bytes};
}

// Accepted rows ascend inside the sequence, so source and destination rows lie below L + (row + 1 - row_begin).
void check_rows(const cpu::CommitArgs& args, int32_t row_end, int64_t capacity, int64_t num_pages) {
  const int32_t b = args.sequence;
  int32_t previous = args.row_begin - 1;
  for (int32_t i = 0; i < args.num_accepted; ++i) {
    const int32_t row = args.accepted_rows[i];
    if (row <= previous || row >= row_end)
      fail(kOp, "accepted_rows[", args.row_begin + i, "] must ascend within the query rows ", args.row_begin, "..",
           row_end - 1, " of sequence ", b, ", got ", row);
    previous = row;
  }
  const int64_t rows_needed = args.num_accepted ? int64_t{args.cache_seqlen} + previous + 1 - args.row_begin : 0;
  if (rows_needed > capacity)
    fail(kOp, "k_cache must hold cache_seqlens[", b, "] + query rows = ", rows_needed, " rows, got ", capacity);
  if (args.page_table == nullptr || args.num_accepted == 0) return;
  for (int64_t page = args.cache_seqlen / args.page_size; page * args.page_size < rows_needed; ++page)
    if (args.page_table[page] < 0 || args.page_table[page] >= num_pages)
      fail(kOp, "page_table[", b, ", ", page, "] must be a page of k_cache (0..", num_pages - 1, "), got ",
           args.page_table[page]);
}

void commit(const Tensor& k_cache, const Tensor& v_cache, const Tensor& cache_seqlens, const Tensor& accepted_rows,
            const Tensor& num_accepted, const Tensor& cu_seqlens_q, const std::optional<Tensor>& page_table) {
  check_int32(cu_seqlens_q, kOp, "cu_seqlens_q", "[B + 1]", {kAny});
  if (cu_seqlens_q.numel() < 1) fail(kOp, "cu_seqlens_q must have shape [B + 1], got [0]");
  const int64_t batch = cu_seqlens_q.numel() - 1;
  check_int32(cache_seqlens, kOp, "cache_seqlens", "[B]", {batch});
  check_int32(num_accepted, kOp, "num_accepted", "[B]", {batch});
  check_int32(accepted_rows, kOp, "accepted_rows", "[T]", {kAny});
  check_cpu(k_cache, kOp, "k_cache");
  check_cpu(v_cache, kOp, "v_cache");
  check_floating(k_cache, kOp, "k_cache");
  check_dtype(v_cache, kOp, "v_cache", k_cache.scalar_type());
  if (page_table) {
    check_shape(k_cache, kOp, "k_cache", "[layers, num_pages, page_size, num_kv_heads, head_dim]",
                {kAny, kAny, kAny, kAny, kAny});
    check_int32(*page_table, kOp, "page_table", "[B, max_pages]", {batch, kAny});
    if (k_cache.size(2) < 1) fail(kOp, "k_cache must have a page_size of at least 1, got ", shape_string(k_cache));
  } else {
    check_shape(k_cache, kOp, "k_cache", "[layers, B, capacity, num_kv_heads, head_dim]",
                {kAny, batch, kAny, kAny, kAny});
  }
  check_shape(v_cache, kOp, "v_cache", "k_cache's shape",
              {k_cache.size(0), k_cache.size(1), k_cache.size(2), k_cache.size(3), k_cache.size(4)});
  check_dense_rows(k_cache, kOp, "k_cache");
  check_dense_rows(v_cache, kOp, "v_cache");
  check_separate_rows(k_cache, v_cache, kOp);

  const int64_t rows = accepted_rows.numel();
  const int32_t* offsets = int32_data(cu_seqlens_q);
  int32_t bad = 0;
  if (!partitions(offsets, static_cast<int32_t>(batch), narrow_size(rows, kOp, "number of query rows"), &bad))
    fail(kOp, "cu_seqlens_q[", bad, "] = ", offsets[bad], ": ", layout_rule(LayoutError::kSequenceRows), " (", rows,
         ")");

  const int64_t max_pages = page_table ? page_table->size(1) : 0;
  const int64_t capacity = page_table ? max_pages * k_cache.size(2) : k_cache.size(2);
  const int32_t* pages = page_table ? int32_data(*page_table) : nullptr;
  const int32_t* counts = int32_data(num_accepted);
  int32_t* lengths = mutable_int32_data(cache_seqlens);
  cpu::CommitArgs args{};
  args.k_cache = cache_view(k_cache);
  args.v_cache = cache_view(v_cache);
  args.layers = narrow_size(k_cache.size(0), kOp, "layers");
  args.row_bytes = k_cache.size(3) * k_cache.size(4) * static_cast<int64_t>(k_cache.element_size());
  args.page_size = page_table ? narrow_size(k_cache.size(2), kOp, "page_size") : 0;
  const auto select = [&](int32_t b) {
    args.sequence = b;
    args.page_table = pages ? pages + b * max_pages : nullptr;
    args.cache_seqlen = lengths[b];
    args.row_begin = offsets[b];
    args.accepted_rows = int32_data(accepted_rows) + offsets[b];
    args.num_accepted = counts[b];
  };
  WrittenPages written(pages ? k_cache.size(1) : 0);
  for (int32_t b = 0; b < batch; ++b) {
    if (lengths[b] < 0 || lengths[b] > capacity)
      fail(kOp, "cache_seqlens[", b, "] must be within 0..", capacity, ", got ", lengths[b]);
    if (counts[b] < 0 || counts[b] > offsets[b + 1] - offsets[b])
      fail(kOp, "num_accepted[", b, "] must be within 0..", offsets[b + 1] - offsets[b],
           " (the query rows of its sequence), got ", counts[b]);
    select(b);
    check_rows(args, offsets[b + 1], capacity, k_cache.size(1));
    if (pages) written.claim(kOp, b, args.page_table, lengths[b], int64_t{lengths[b]} + counts[b], args.page_size);
  }
  for (int32_t b = 0; b < batch; ++b) {
    select(b);
    cpu::commit_sequence(args);
    lengths[b] += counts[b];
  }
}

}  // namespace
}  // namespace jacobi::ops

STABLE_TORCH_LIBRARY_IMPL(jacobi, CPU, m) { m.impl("commit", TORCH_BOX(&jacobi::ops::commit)); }
