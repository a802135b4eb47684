// jacobi::redraft on CPU: argument checks, then csrc/common/redraft.h per sequence.
#include "common/redraft.h"

#include "common/redraft_check.h"
#include "ops/checks.h"
#include "ops/decode_state.h"

namespace jacobi::ops {
namespace {

constexpr const char* kOp = "redraft";

void redraft(const Tensor& predictions, const Tensor& accepted_rows, const Tensor& num_accepted,
             const Tensor& fixed_point, const Tensor& tokens, const Tensor& segments, const Tensor& cu_seqlens_q,
             const Tensor& cu_segments, const Tensor& cache_seqlens, const Tensor& text, const Tensor& pool,
             const Tensor& state, const Tensor& stop_tokens, int64_t block_size, int64_t blocks, int64_t candidates,
             double spawn_ratio) {
  check_int32(tokens, kOp, "tokens", "[T]", {kAny});
  const int64_t rows = tokens.numel();
  check_int32(predictions, kOp, "predictions", "[T]", {rows});
  check_int32(accepted_rows, kOp, "accepted_rows", "[T]", {rows});
  const Layout layout = checked_layout(kOp, cu_seqlens_q, segments, cu_segments, rows);
  const int64_t batch = layout.batch;
  check_int32(num_accepted, kOp, "num_accepted", "[B]", {batch});
  check_dense(fixed_point, kOp, "fixed_point", ScalarType::Bool, "[B]", {batch});
  check_int32(cache_seqlens, kOp, "cache_seqlens", "[B]", {batch});
  const DecodeStateView view = checked_decode_state(kOp, batch, text, pool, state, stop_tokens);
  check_draft_options(kOp, block_size, blocks, candidates, spawn_ratio);

  RedraftArgs args{};
  args.predictions = int32_data(predictions);
  args.accepted_rows = int32_data(accepted_rows);
  args.block_size = static_cast<int32_t>(block_size);
  args.blocks = static_cast<int32_t>(blocks);
  args.candidates = static_cast<int32_t>(candidates);
  args.spawn_ratio = spawn_ratio;
  const auto select = [&](int32_t b) {
    args.sequence = sequence_state(view, layout, b, mutable_int32_data(tokens), mutable_int32_data(cache_seqlens));
    args.num_accepted = int32_data(num_accepted)[b];
    args.fixed_point = static_cast<const bool*>(fixed_point.const_data_ptr())[b];
  };
  for (int32_t b = 0; b < batch; ++b) {
    if (layout.cu_segments[b + 1] - layout.cu_segments[b] != 1 + candidates)
      fail(kOp, "cu_segments must give sequence ", b, " 1 + candidates = ", 1 + candidates, " segments, got ",
           layout.cu_segments[b + 1] - layout.cu_segments[b]);
    select(b);
    const RedraftCheck check = check_redraft(args);
    if (check.error != RedraftError::kNone) fail_redraft(kOp, b, args, check);
  }
  for (int32_t b = 0; b < batch; ++b) {
    select(b);
    redraft_sequence(args);
  }
}

}  // namespace
}  // namespace jacobi::ops

STABLE_TORCH_LIBRARY_IMPL(jacobi, CPU, m) { m.impl("redraft", TORCH_BOX(&jacobi::ops::redraft)); }
