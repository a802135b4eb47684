#include <atomic>

#include "cpu/parallel.h"
#include "ops/attention_checks.h"
#include "ops/scratch.h"

namespace jacobi::ops {
namespace {

constexpr const char* kOp = "multi_block_attention_backward";

// Most panels and segments of a sequence.
void measure_sequences(cpu::AttentionBackwardArgs& g) {
  const cpu::AttentionArgs& a = g.forward;
  for (int64_t b = 0; b < a.batch; ++b) {
    int64_t panels = 0;
    for (int32_t s = a.cu_segments[b]; s < a.cu_segments[b + 1]; ++s) panels += (a.segments[s].length + 15) / 16;
    g.max_panels = std::max(g.max_panels, panels);
    g.max_segments = std::max<int64_t>(g.max_segments, a.cu_segments[b + 1] - a.cu_segments[b]);
  }
}

// Threads take units one by one.
void run(const cpu::AttentionBackwardArgs& g) {
  const int64_t units = g.forward.batch * g.forward.kv_heads, threads = std::min(cpu::thread_count(), units);
  const int64_t bytes = cpu::kernels().attention_backward_scratch(g);
  char* memory = static_cast<char*>(scratch(static_cast<size_t>(threads * bytes)));
  std::atomic<int64_t> next{0};
  cpu::parallel_for(threads, 1, [&](int64_t begin, int64_t) {
    for (int64_t unit = next++; unit < units; unit = next++)
      cpu::kernels().attention_backward(g, memory + begin * bytes, unit, unit + 1);
  });
}

std::tuple<Tensor, Tensor, Tensor> multi_block_attention_backward(
    const Tensor& grad_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
    const Tensor& softmax_lse, const Tensor& cu_seqlens_q, const Tensor& segments, const Tensor& cu_segments,
    std::optional<Tensor> grad_softmax_lse, std::optional<double> softmax_scale, int64_t window_size, double softcap) {
  cpu::AttentionBackwardArgs g{};
  g.forward =
      checked_attention(kOp, q, k, v, cu_seqlens_q, segments, cu_segments, {softmax_scale, window_size, softcap});
  cpu::AttentionArgs& a = g.forward;
  const char* words = "[T, num_heads, head_dim]";
  check_like_query(grad_out, q, kOp, "grad_out", words, {a.rows, a.heads, a.head_dim});
  check_like_query(out, q, kOp, "out", words, {a.rows, a.heads, a.head_dim});
  check_dense(softmax_lse, kOp, "softmax_lse", ScalarType::Float, "[num_heads, T]", {a.heads, a.rows});
  if (grad_softmax_lse.has_value()) {
    check_dense(*grad_softmax_lse, kOp, "grad_softmax_lse", ScalarType::Float, "[num_heads, T]", {a.heads, a.rows});
    g.grad_lse = static_cast<const float*>(grad_softmax_lse->const_data_ptr());
  }

  Tensor dq = torch::stable::new_empty(q, {a.rows, a.heads, a.head_dim});
  Tensor dk = torch::stable::new_empty(k, {a.rows, a.kv_heads, a.head_dim});
  Tensor dv = torch::stable::new_empty(v, {a.rows, a.kv_heads, a.head_dim});
  a.out = const_cast<void*>(out.const_data_ptr());  // read only
  a.out_stride = out.stride(0);
  a.lse = const_cast<float*>(static_cast<const float*>(softmax_lse.const_data_ptr()));  // read only
  a.k = k.const_data_ptr(), g.k_stride = k.stride(0);
  a.v = v.const_data_ptr(), g.v_stride = v.stride(0);
  g.grad_out = grad_out.const_data_ptr(), g.grad_out_stride = grad_out.stride(0);
  g.dq = dq.mutable_data_ptr(), g.dk = dk.mutable_data_ptr(), g.dv = dv.mutable_data_ptr();
  measure_sequences(g);
  run(g);
  return {dq, dk, dv};
}

STABLE_TORCH_LIBRARY_IMPL(jacobi, CPU, m) {
  m.impl("multi_block_attention_backward", TORCH_BOX(&multi_block_attention_backward));
}

}  // namespace
}  // namespace jacobi::ops
