// The model of common/step_model.h with what the CPU step asks of it: its head and its embedding.
#pragma once

#include "common/step_model.h"
#include "cpu/predict.h"

namespace jacobi::cpu {

class StepModel : public jacobi::StepModel {
 public:
  Head head() const {
    const Matrix lm_head = this->lm_head();
    return {lm_head.data, lm_head.type, lm_head_bias(), DType::f32, vocab(), hidden(), logit_scale(), logit_softcap()};
  }

  // One row of the embedding as floats.
  void embed(int32_t token, float* y) const {
    const Matrix rows = embedding();
    if (rows.data == nullptr) {
      kernels().column(lm_head().data, lm_head().type, hidden(), token, y);
    } else if (is_grouped(rows.type)) {
      kernels().column(rows.data, rows.type, hidden(), token, y);
    } else {
      const DType type = rows.type == WeightType::f32 ? DType::f32 : DType::bf16;
      kernels().widen(static_cast<const char*>(rows.data) + token * hidden() * size_of(type), type, y, hidden());
    }
  }
};

}  // namespace jacobi::cpu
