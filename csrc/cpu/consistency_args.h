// What one call of consistency_loss or its backward works on; consistency_run.h plans it, consistency_loss.h computes.
#pragma once

#include "cpu/kernels.h"

namespace jacobi::cpu {

constexpr int64_t kLossTile = 256;               // vocabulary columns whose logits exist at a time
constexpr int64_t kLossStride = kLossTile + 16;  // floats between rows of logits: not a power of two
constexpr int64_t kLossRowGrain = 48;            // rows that stay on one thread: whole tiles of every micro-kernel
constexpr int64_t kLossRowBlock = 96;            // rows whose logits stay in cache between product and softmax
constexpr int64_t kLossReduction = 512;          // rows that one chain of a weight's gradient adds up

// Rows are counted by their place in `rows`: those with a loss first, then those that are only somebody's teacher.
struct ConsistencyArgs {
  const void* hidden;  // [R, width]
  DType hidden_type;
  const void* lm_head;  // [vocab, width]
  DType head_type;
  const void* bias;  // [vocab] or null
  DType bias_type;
  int64_t width, vocab;
  float inverse_temperature, scale, softcap;

  int64_t live, losses;     // rows in the plan, and how many of them have a loss
  const int32_t* rows;      // [live] row of hidden
  const int32_t* targets;   // [live] token or -1
  const int32_t* teachers;  // [live] place of the teacher or -1
  const uint8_t* teaches;   // [live]

  // Scratch. width_up is width rounded up to 16.
  int64_t width_up, x_stride;
  float* x;          // [live, x_stride] hidden, as float
  float* w_columns;  // [kLossTile / 16, width, 16] the tile of lm_head in panels of tokens
  float* logits;     // [live, kLossStride]; in the backward then the gradient of the product
  float* weights;    // [live, kLossTile] exp of the tempered logits: unnormalised for teachers, softmax in the backward

  // Forward: running state of each row (the lanes of its sums in 16 floats), then results.
  float* top;                 // [live] largest logit so far
  float* decay;               // [live] what the tile's new largest logit multiplies earlier tempered sums by
  float* target_logit;        // [live]
  float* plain;               // [live, 16] sum of exp(logit - top)
  float* tempered;            // [live, 16] sum of exp((logit - top) / temperature)
  float* soft;                // [live, 16] sum of the teacher's weight times this row's logit
  float *nll, *consistency;   // [R] out
  float *lse, *tempered_lse;  // [R] out, and what the backward reads

  // Backward.
  const float *grad_nll, *grad_consistency;  // [R]
  float* w_rows;      // [width_up / 16, columns of the tile, 16] the tile in panels of the width, or null
  float* x_panels;    // per kLossReduction rows: [width_up / 16, rows, 16], or null
  float* transposed;  // [kLossTile, transposed_stride] the gradient of the product, transposed
  int64_t transposed_stride;
  float* dx;        // [losses, width_up]
  float* dw;        // [kLossTile, width_up]
  void* d_hidden;   // [R, width] of hidden_type, or null; rows without a loss are not written
  void* d_lm_head;  // [vocab, width] of head_type, or null
  void* d_bias;     // [vocab] of bias_type, or null

  bool unit_temperature() const { return inverse_temperature == 1.0f; }
  bool needs_plain(int64_t i) const { return targets[i] >= 0 && !unit_temperature(); }
  bool needs_tempered(int64_t i) const { return unit_temperature() || teachers[i] >= 0 || teaches[i] != 0; }
  int64_t columns(int64_t column) const { return vocab - column < kLossTile ? vocab - column : kLossTile; }
};

}  // namespace jacobi::cpu
