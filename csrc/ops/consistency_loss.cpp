#include <cmath>

#include "cpu/consistency_run.h"
#include "ops/checks.h"
#include "ops/dtype.h"

namespace jacobi::ops {
namespace {

// The arguments that the op and its backward share, checked; and the tensors that `args` points into.
struct Problem {
  Tensor hidden;
  int64_t rows;
  cpu::ConsistencyArgs args{};
  cpu::ConsistencyPlan plan;
};

void check_index(const Tensor& tensor, const char* op, const char* name, int64_t rows, int64_t end,
                 const char* expected) {
  check_dense(tensor, op, name, ScalarType::Long, "[R]", {rows});
  const auto* values = static_cast<const int64_t*>(tensor.const_data_ptr());
  for (int64_t i = 0; i < rows; ++i)
    if (values[i] < -1 || values[i] >= end)
      fail(op, name, "[", i, "] must be ", expected, " (-1..", end - 1, "), got ", values[i]);
}

Problem checked(const char* op, const Tensor& hidden, const Tensor& lm_head, const std::optional<Tensor>& bias,
                const Tensor& targets, const Tensor& teachers, double temperature, double logit_scale, double softcap) {
  check_cpu(hidden, op, "hidden");
  check_floating(hidden, op, "hidden");
  check_shape(hidden, op, "hidden", "[R, E]", {kAny, kAny});
  check_cpu(lm_head, op, "lm_head");
  check_floating(lm_head, op, "lm_head");
  check_shape(lm_head, op, "lm_head", "[V, E]", {kAny, hidden.size(1)});
  check_contiguous(lm_head, op, "lm_head");
  const int64_t rows = narrow_size(hidden.size(0), op, "number of rows");
  const int64_t vocab = narrow_size(lm_head.size(0), op, "vocabulary");
  check_value(vocab >= 1, op, "number of rows of lm_head", vocab, "at least 1");
  if (bias.has_value()) {
    check_cpu(*bias, op, "bias");
    check_floating(*bias, op, "bias");
    check_shape(*bias, op, "bias", "[V]", {vocab});
    check_contiguous(*bias, op, "bias");
  }
  check_index(targets, op, "targets", rows, vocab, "a token id or -1");
  check_index(teachers, op, "teachers", rows, rows, "a row of hidden or -1");
  if (!(temperature > 0 && std::isfinite(temperature))) fail(op, "temperature must be above 0, got ", temperature);
  if (!(logit_scale > 0 && std::isfinite(logit_scale))) fail(op, "logit_scale must be positive, got ", logit_scale);
  if (!(softcap >= 0 && std::isfinite(softcap))) fail(op, "softcap must be at least 0 (0: off), got ", softcap);

  Problem problem{hidden.is_contiguous() ? hidden : torch::stable::contiguous(hidden), rows};
  cpu::ConsistencyArgs& a = problem.args;
  a.hidden = problem.hidden.const_data_ptr();
  a.hidden_type = kernel_dtype(hidden);
  a.lm_head = lm_head.const_data_ptr();
  a.head_type = kernel_dtype(lm_head);
  a.bias = bias.has_value() ? bias->const_data_ptr() : nullptr;
  a.bias_type = bias.has_value() ? kernel_dtype(*bias) : cpu::DType::f32;
  a.width = hidden.size(1);
  a.vocab = vocab;
  a.inverse_temperature = static_cast<float>(1.0 / temperature);
  a.scale = static_cast<float>(logit_scale);
  a.softcap = static_cast<float>(softcap);
  problem.plan = cpu::plan_consistency(a, static_cast<const int64_t*>(targets.const_data_ptr()),
                                       static_cast<const int64_t*>(teachers.const_data_ptr()), rows);
  return problem;
}

// Freed with the call: it may be as large as a few times the hidden states, too much to keep per thread.
Tensor with_scratch(cpu::ConsistencyArgs& a, const Tensor& like) {
  cpu::Arena counter(nullptr, 0);
  cpu::take_consistency_scratch(a, counter);
  const int64_t bytes = static_cast<int64_t>(counter.used()) + 64;
  Tensor block = torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
  const auto address = reinterpret_cast<uintptr_t>(block.mutable_data_ptr());
  cpu::Arena arena(reinterpret_cast<void*>((address + 63) / 64 * 64), counter.used());
  cpu::take_consistency_scratch(a, arena);
  return block;
}

float* floats(const Tensor& tensor) { return static_cast<float*>(tensor.mutable_data_ptr()); }

std::tuple<Tensor, Tensor, Tensor> consistency_loss(const Tensor& hidden, const Tensor& lm_head,
                                                    std::optional<Tensor> bias, const Tensor& targets,
                                                    const Tensor& teachers, double temperature, double logit_scale,
                                                    double softcap) {
  Problem problem =
      checked("consistency_loss", hidden, lm_head, bias, targets, teachers, temperature, logit_scale, softcap);
  const int64_t rows = problem.rows;
  Tensor nll = torch::stable::new_zeros(hidden, {rows}, ScalarType::Float);
  Tensor consistency = torch::stable::new_zeros(hidden, {rows}, ScalarType::Float);
  Tensor lse = torch::stable::new_zeros(hidden, {2, rows}, ScalarType::Float);
  cpu::ConsistencyArgs& a = problem.args;
  if (a.live == 0) return {nll, consistency, lse};
  a.nll = floats(nll);
  a.consistency = floats(consistency);
  a.lse = floats(lse);
  a.tempered_lse = a.lse + rows;
  const Tensor scratch = with_scratch(a, hidden);
  cpu::run_consistency(a);
  return {nll, consistency, lse};
}

std::tuple<Tensor, Tensor, Tensor> consistency_loss_backward(const Tensor& grad_nll, const Tensor& grad_consistency,
                                                             const Tensor& hidden, const Tensor& lm_head,
                                                             std::optional<Tensor> bias, const Tensor& targets,
                                                             const Tensor& teachers, const Tensor& lse,
                                                             double temperature, double logit_scale, double softcap,
                                                             bool hidden_grad, bool lm_head_grad) {
  constexpr const char* op = "consistency_loss_backward";
  Problem problem = checked(op, hidden, lm_head, bias, targets, teachers, temperature, logit_scale, softcap);
  const int64_t rows = problem.rows, width = hidden.size(1), vocab = lm_head.size(0);
  check_dense(grad_nll, op, "grad_nll", ScalarType::Float, "[R]", {rows});
  check_dense(grad_consistency, op, "grad_consistency", ScalarType::Float, "[R]", {rows});
  check_dense(lse, op, "lse", ScalarType::Float, "[2, R]", {2, rows});
  cpu::ConsistencyArgs& a = problem.args;
  Tensor d_hidden =
      hidden_grad ? torch::stable::new_zeros(hidden, {rows, width}) : torch::stable::new_empty(hidden, {0});
  const auto written = [&](const Tensor& like, std::initializer_list<int64_t> sizes) {
    return a.losses == 0 ? torch::stable::new_zeros(like, sizes) : torch::stable::new_empty(like, sizes);
  };
  Tensor d_lm_head = lm_head_grad ? written(lm_head, {vocab, width}) : torch::stable::new_empty(lm_head, {0});
  Tensor d_bias = bias.has_value() ? written(*bias, {vocab}) : torch::stable::new_empty(hidden, {0});
  if (a.losses == 0) return {d_hidden, d_lm_head, d_bias};
  a.d_hidden = hidden_grad ? d_hidden.mutable_data_ptr() : nullptr;
  a.d_lm_head = lm_head_grad ? d_lm_head.mutable_data_ptr() : nullptr;
  a.d_bias = bias.has_value() ? d_bias.mutable_data_ptr() : nullptr;
  a.grad_nll = static_cast<const float*>(grad_nll.const_data_ptr());
  a.grad_consistency = static_cast<const float*>(grad_consistency.const_data_ptr());
  a.lse = static_cast<float*>(const_cast<void*>(lse.const_data_ptr()));
  a.tempered_lse = a.lse + rows;
  const Tensor scratch = with_scratch(a, hidden);
  cpu::run_consistency_backward(a);
  return {d_hidden, d_lm_head, d_bias};
}

STABLE_TORCH_LIBRARY_IMPL(jacobi, CPU, m) {
  m.impl("consistency_loss", TORCH_BOX(&consistency_loss));
  m.impl("consistency_loss_backward", TORCH_BOX(&consistency_loss_backward));
}

}  // namespace
}  // namespace jacobi::ops
