#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "ops/checks.h"
#include "ops/dtype.h"
#include "ops/scratch.h"

namespace jacobi::ops {
namespace {

constexpr const char* kOp = "packed_linear";

Tensor packed_linear(const Tensor& x_in, const Tensor& weight, std::optional<Tensor> bias, int64_t out_features) {
  check_cpu(x_in, kOp, "x");
  check_floating(x_in, kOp, "x");
  if (x_in.dim() < 1) fail(kOp, "x must have shape [..., in_features], got ", shape_string(x_in));
  check_value(out_features >= 0, kOp, "out_features", out_features, "at least 0");
  const int64_t k = x_in.size(x_in.dim() - 1);
  check_packed(weight, kOp, "weight", out_features, k, "[ceil(out_features / 16), in_features, 16]",
               "[ceil(out_features / 16), ceil(in_features / 32), record]");
  if (bias.has_value()) {
    check_cpu(*bias, kOp, "bias");
    check_floating(*bias, kOp, "bias");
    check_shape(*bias, kOp, "bias", "[out_features]", {out_features});
    check_contiguous(*bias, kOp, "bias");
  }
  const Tensor x = x_in.is_contiguous() ? x_in : torch::stable::contiguous(x_in);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = out_features;
  Tensor y = torch::stable::new_empty(x, sizes);
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < sizes.size(); ++i) rows *= sizes[i];
  if (rows == 0 || out_features == 0) return y;

  const float* input = static_cast<const float*>(x.const_data_ptr());
  if (kernel_dtype(x) == cpu::DType::bf16) {
    float* wide = static_cast<float*>(scratch(rows * k * sizeof(float)));
    cpu::kernels().widen(x.const_data_ptr(), cpu::DType::bf16, wide, rows * k);
    input = wide;
  }
  const cpu::LinearArgs args{input,
                             k,
                             rows,
                             k,
                             out_features,
                             weight.const_data_ptr(),
                             weight_type(weight),
                             bias.has_value() ? bias->const_data_ptr() : nullptr,
                             bias.has_value() ? kernel_dtype(*bias) : cpu::DType::f32,
                             y.mutable_data_ptr(),
                             kernel_dtype(y),
                             out_features,
                             false};
  const int64_t grain = 1 + 32768 / (16 * k + 1);
  cpu::parallel_for((out_features + 15) / 16, grain,
                    [&](int64_t begin, int64_t end) { cpu::kernels().linear(args, begin, end); });
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(jacobi, CPU, m) { m.impl("packed_linear", TORCH_BOX(&packed_linear)); }

}  // namespace
}  // namespace jacobi::ops
