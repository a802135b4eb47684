#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "ops/checks.h"
#include "ops/dtype.h"

namespace jacobi::ops {
namespace {

constexpr const char* kOp = "activation";

// In the order of cpu::Activation.
constexpr const char* kKinds[] = {"silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "sigmoid", "tanh"};

cpu::Activation kind_of(const std::string& kind) {
  for (int i = 0; i < 8; ++i)
    if (kind == kKinds[i]) return static_cast<cpu::Activation>(i);
  std::string known;
  for (const char* name : kKinds) known += std::string(known.empty() ? "" : ", ") + name;
  fail(kOp, "kind must be one of ", known, ", got '", kind, "'");
}

Tensor activation(const Tensor& x_in, std::string kind) {
  check_cpu(x_in, kOp, "x");
  check_floating(x_in, kOp, "x");
  const cpu::Activation which = kind_of(kind);
  const Tensor x = x_in.is_contiguous() ? x_in : torch::stable::contiguous(x_in);
  Tensor y = torch::stable::empty_like(x);
  const cpu::DType type = kernel_dtype(x);
  const int64_t width = cpu::size_of(type);
  const char* from = static_cast<const char*>(x.const_data_ptr());
  char* to = static_cast<char*>(y.mutable_data_ptr());
  cpu::parallel_for(x.numel(), 4096, [&](int64_t begin, int64_t end) {
    cpu::kernels().activation(which, from + begin * width, to + begin * width, type, end - begin);
  });
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(jacobi, CPU, m) { m.impl("activation", TORCH_BOX(&activation)); }

}  // namespace
}  // namespace jacobi::ops
