#include "cpu/predict.h"
#include "ops/checks.h"
#include "ops/dtype.h"
#include "ops/sampling_checks.h"
#include "ops/scratch.h"

namespace jacobi::ops {
namespace {

constexpr const char* kOp = "argmax_verify";

std::tuple<Tensor, Tensor, Tensor, Tensor> argmax_verify(
    const Tensor& hidden, const Tensor& lm_head, std::optional<Tensor> bias, int64_t vocab_size, const Tensor& tokens,
    std::optional<Tensor> num_final, const Tensor& cache_seqlens, const Tensor& cu_seqlens_q, const Tensor& segments,
    const Tensor& cu_segments, double logit_scale, double softcap, std::optional<Tensor> temperature,
    std::optional<Tensor> top_k, std::optional<Tensor> top_p, std::optional<Tensor> seeds,
    std::optional<Tensor> logits_scratch) {
  check_cpu(hidden, kOp, "hidden");
  check_floating(hidden, kOp, "hidden");
  check_shape(hidden, kOp, "hidden", "[T, hidden]", {kAny, kAny});
  check_contiguous(hidden, kOp, "hidden");
  const int64_t rows = hidden.size(0), width = hidden.size(1);
  check_value(vocab_size >= 1 && vocab_size <= INT32_MAX - 16, kOp, "vocab_size", vocab_size,
              "at least 1 and below 2^31");
  check_packed(lm_head, kOp, "lm_head", vocab_size, width, "[ceil(vocab_size / 16), hidden, 16]",
               "[ceil(vocab_size / 16), ceil(hidden / 32), record]");
  if (bias.has_value()) {
    check_cpu(*bias, kOp, "bias");
    check_floating(*bias, kOp, "bias");
    check_shape(*bias, kOp, "bias", "[vocab_size]", {vocab_size});
    check_contiguous(*bias, kOp, "bias");
  }
  const Layout layout = checked_layout(kOp, cu_seqlens_q, segments, cu_segments, rows);
  check_int32(tokens, kOp, "tokens", "[T]", {rows});
  if (num_final.has_value()) {
    check_int32(*num_final, kOp, "num_final", "[batch]", {layout.batch});
    check_range(int32_data(*num_final), layout.batch, 0, INT32_MAX, kOp, "num_final", "at least 0");
  }
  check_int32(cache_seqlens, kOp, "cache_seqlens", "[batch]", {layout.batch});
  check_range(int32_data(cache_seqlens), layout.batch, 0, INT32_MAX - layout.rows - 1, kOp, "cache_seqlens",
              "a number of committed tokens");
  if (!(logit_scale > 0)) fail(kOp, "logit_scale must be positive, got ", logit_scale);
  if (!(softcap >= 0)) fail(kOp, "softcap must be at least 0 (0: off), got ", softcap);
  const cpu::Sampling sampling =
      checked_sampling(kOp, temperature, top_k, top_p, seeds, logits_scratch, layout.batch, vocab_size);

  Tensor predictions = torch::stable::new_empty(tokens, {rows});
  Tensor accepted_rows = torch::stable::new_empty(tokens, {rows});
  Tensor num_accepted = torch::stable::new_empty(tokens, {layout.batch});
  Tensor fixed_point = torch::stable::new_empty(tokens, {layout.batch}, ScalarType::Bool);
  const cpu::Head head{lm_head.const_data_ptr(),
                       weight_type(lm_head),
                       bias.has_value() ? bias->const_data_ptr() : nullptr,
                       bias.has_value() ? kernel_dtype(*bias) : cpu::DType::f32,
                       vocab_size,
                       width,
                       static_cast<float>(logit_scale),
                       static_cast<float>(softcap)};
  const auto run = [&](cpu::Arena& arena, cpu::Team& team) {
    cpu::VerifyArgs args{};
    args.hidden = hidden.const_data_ptr();
    args.hidden_type = kernel_dtype(hidden);
    args.layout = layout;
    args.tokens = int32_data(tokens);
    args.num_final = num_final.has_value() ? int32_data(*num_final) : nullptr;
    args.num_final_stride = 1;
    args.cache_seqlens = int32_data(cache_seqlens);
    args.sampling = sampling;
    args.logits_scratch =
        logits_scratch.has_value() ? static_cast<float*>(logits_scratch->mutable_data_ptr()) : nullptr;
    args.scratch_rows = logits_scratch.has_value() ? logits_scratch->size(0) : 0;
    args.predictions = mutable_int32_data(predictions);
    args.accepted_rows = mutable_int32_data(accepted_rows);
    args.num_accepted = mutable_int32_data(num_accepted);
    args.winner = arena.take<int32_t>(layout.batch);
    args.fixed_point = static_cast<bool*>(fixed_point.mutable_data_ptr());
    cpu::verify(head, args, arena, team);
  };
  cpu::Arena counter(nullptr, 0);
  cpu::Team alone;
  run(counter, alone);
  void* block = scratch(counter.used() + 64);
  cpu::run_team([&](cpu::Team& team) {
    cpu::Arena arena(block, counter.used() + 64);
    run(arena, team);
  });
  return {predictions, accepted_rows, num_accepted, fixed_point};
}

STABLE_TORCH_LIBRARY_IMPL(jacobi, CPU, m) { m.impl("argmax_verify", TORCH_BOX(&argmax_verify)); }

}  // namespace
}  // namespace jacobi::ops
