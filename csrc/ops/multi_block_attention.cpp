#include "cpu/attention_run.h"
#include "ops/attention_checks.h"
#include "ops/scratch.h"

namespace jacobi::ops {
namespace {

constexpr const char* kOp = "multi_block_attention";

std::tuple<Tensor, Tensor> multi_block_attention(const Tensor& q, const Tensor& k_in, const Tensor& v_in,
                                                 const Tensor& cu_seqlens_q, const Tensor& segments,
                                                 const Tensor& cu_segments, std::optional<double> softmax_scale,
                                                 int64_t window_size, double softcap) {
  cpu::AttentionArgs args =
      checked_attention(kOp, q, k_in, v_in, cu_seqlens_q, segments, cu_segments, {softmax_scale, window_size, softcap});
  const bool alike = k_in.stride(0) == v_in.stride(0);  // the kernel takes one row stride for both
  const Tensor k = alike ? k_in : torch::stable::contiguous(k_in);
  const Tensor v = alike ? v_in : torch::stable::contiguous(v_in);
  Tensor out = torch::stable::new_empty(q, {args.rows, args.heads, args.head_dim});
  Tensor lse = torch::stable::new_empty(q, {args.heads, args.rows}, ScalarType::Float);
  args.k = k.const_data_ptr();
  args.v = v.const_data_ptr();
  args.kv_row_stride = k.stride(0);
  args.out = out.mutable_data_ptr();
  args.lse = static_cast<float*>(lse.mutable_data_ptr());
  cpu::run_attention(args, scratch(cpu::attention_workspace(args, cpu::thread_count())));
  return {out, lse};
}

STABLE_TORCH_LIBRARY_IMPL(jacobi, CPU, m) { m.impl("multi_block_attention", TORCH_BOX(&multi_block_attention)); }

}  // namespace
}  // namespace jacobi::ops
