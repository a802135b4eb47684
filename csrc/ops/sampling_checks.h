// Checks of the sampling arguments that argmax_verify and multi_block_step share.
#pragma once

#include <optional>

#include "cpu/predict.h"
#include "ops/checks.h"

namespace jacobi::ops {

// temperature [B] float32, top_k [B] int32, top_p [B] float32, seeds [B] int64, logits_scratch [2..16, vocab] float32
inline cpu::Sampling checked_sampling(const char* op, const std::optional<Tensor>& temperature,
                                      const std::optional<Tensor>& top_k, const std::optional<Tensor>& top_p,
                                      const std::optional<Tensor>& seeds, const std::optional<Tensor>& logits_scratch,
                                      int64_t batch, int64_t vocab) {
  cpu::Sampling s{};
  if (temperature.has_value()) {
    check_dense(*temperature, op, "temperature", ScalarType::Float, "[batch]", {batch});
    s.temperature = static_cast<const float*>(temperature->const_data_ptr());
  }
  if (top_k.has_value()) {
    check_int32(*top_k, op, "top_k", "[batch]", {batch});
    s.top_k = int32_data(*top_k);
  }
  if (top_p.has_value()) {
    check_dense(*top_p, op, "top_p", ScalarType::Float, "[batch]", {batch});
    s.top_p = static_cast<const float*>(top_p->const_data_ptr());
  }
  if (seeds.has_value()) {
    check_dense(*seeds, op, "seeds", ScalarType::Long, "[batch]", {batch});
    s.seeds = static_cast<const int64_t*>(seeds->const_data_ptr());
  }
  bool filtered = false;
  for (int64_t b = 0; b < batch; ++b) {
    const cpu::Sampler sampler = s.of(b, 0);
    if (!(sampler.temperature >= 0.0f && sampler.temperature <= 1e30f))
      fail(op, "temperature[", b, "] must be finite and at least 0 (0: greedy), got ", sampler.temperature);
    if (sampler.top_k < 0) fail(op, "top_k[", b, "] must be at least 0 (0: off), got ", sampler.top_k);
    if (!(sampler.top_p > 0.0f && sampler.top_p <= 1.0f))
      fail(op, "top_p[", b, "] must be above 0 and at most 1 (1: off), got ", sampler.top_p);
    if (sampler.temperature > 0.0f && s.seeds == nullptr) fail(op, "seeds must be given when temperature is above 0");
    filtered = filtered || sampler.filtered();
  }
  if (logits_scratch.has_value()) {
    check_dense(*logits_scratch, op, "logits_scratch", ScalarType::Float, "[2..16, vocab_size]", {kAny, vocab});
    const int64_t rows = logits_scratch->size(0);
    check_value(rows >= 2 && rows <= 16, op, "logits_scratch.size(0)", rows, "2 to 16");
  } else if (filtered) {
    fail(op, "logits_scratch must be given with top_k or top_p: float32 [2..16, vocab_size] = [2..16, ", vocab, "]");
  }
  return s;
}

}  // namespace jacobi::ops
