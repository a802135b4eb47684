// The model of common/step_model.h with what the CPU step asks of it: its head and its embedding.
#pragma once

#include "common/step_model.h"
#include "cpu/predict.h"

namespace jacobi::cpu {

class StepModel : public jacobi::StepModel {
 public:
  DType weight_type() const { return wide() ? DType::f32 : DType::bf16; }

  Head head() const {
    return {lm_head(), weight_type(), lm_head_bias(), DType::f32, vocab(), hidden(), logit_scale(), logit_softcap()};
  }

  // One row of the embedding as floats. Tied: gathered from the head's panels, column by column.
  void embed(int32_t token, float* y) const {
    if (embedding() != nullptr) {
      kernels().widen(static_cast<const char*>(embedding()) + token * hidden() * size_of(weight_type()), weight_type(),
                      y, hidden());
      return;
    }
    const int64_t first = (token / 16) * hidden() * 16 + token % 16;
    for (int64_t i = 0; i < hidden(); ++i) {
      const int64_t at_index = first + 16 * i;
      if (weight_type() == DType::f32) {
        y[i] = static_cast<const float*>(lm_head())[at_index];
      } else {
        const uint32_t bits = uint32_t{static_cast<const uint16_t*>(lm_head())[at_index]} << 16;
        memcpy(&y[i], &bits, sizeof bits);
      }
    }
  }
};

}  // namespace jacobi::cpu
