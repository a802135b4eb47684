// What the grid program works on: the model's sizes and pointers, the caller's tensors, the workspace. Filled on the
// host (step_args.h), handed to the kernel by value.
#pragma once

#include "common/step_model.h"
#include "cuda/grid.h"
#include "cuda/step.h"

namespace jacobi::cuda {

constexpr int kMostLayers = 128;
constexpr int kMostBatch = 64;
constexpr int kTile = 64;        // slots of an attention tile
constexpr int kSpan = 256;       // slots that reduce by themselves before they are merged
constexpr int kMostWave = 16;    // spans that are evaluated between two barriers, at most
constexpr int kTileRows = 64;    // (query, head) rows of one attention unit
constexpr int kPassRows = 64;    // rows that a product takes at once
constexpr int kUnitPanels = 8;   // weight panels of 16 columns that a product takes at once
constexpr int kStepBytes = 128;  // of k that one stage of a product's pipeline takes, per row

template <class T>
constexpr int kStep = kStepBytes / static_cast<int>(sizeof(T));

constexpr int32_t round_up(int32_t n, int32_t to) { return (n + to - 1) / to * to; }

// Memory that lives for one step. T is the number of query slots, holes included; S that of segments.
struct Workspace {
  uint32_t* counter;  // [64] of the grid barrier, then per attention unit: spans that have arrived, 0 between uses
  uint32_t* pending;
  uint64_t* best;                                         // [T] best token of each wanted row, see head.h
  int32_t* header;                                        // [kHeaderWords]
  int32_t *live_begin, *first_unit;                       // [batch + 1] of each sequence: live rows, attention units
  int32_t *length, *spans, *error;                        // [batch] committed tokens, attention spans, StepError
  Segment* segments;                                      // [S] in live rows
  int32_t *want_begin, *want_from;                        // [S] wanted rows before it, its first row that is wanted
  int32_t *slot, *token, *position, *segment, *sequence;  // [T] of each live row
  int32_t *live_of_slot, *want_of_slot;                   // [T] live row and wanted row of a slot, or -1
  int32_t* wanted;                                        // [T] live rows that need a prediction
  int32_t *predictions, *accepted_rows;                   // [T] in slots
  int32_t* accepted_of_segment;                           // [S]
  int32_t *num_accepted, *fixed_point;                    // [batch]
  float *cosine, *sine;                                   // [T, rope_dim / 2]
  float* x;                                               // [T, hidden] residual stream
  void* operand;                                          // [T, hidden_pitch] or [T, q_pitch] rows of a product
  void* product;                                          // [T, ffn_pitch] silu(gate) * up
  void* q;                                                // [T, heads, dim_pitch] rotated and scaled queries
  float* partial;                                         // [splits, T, columns] of the last product
  float *span_out, *span_sum, *span_best;                 // [wave, T * heads (, dim_pitch)] of the spans of a wave
  float *total, *total_sum, *total_best;                  // [T * heads (, dim_pitch)] of the spans merged so far
};

struct Program {
  StepArgs args;
  int32_t layers, hidden, heads, kv_heads, group, head_dim, ffn, vocab, rope_dim;
  int32_t q_size, kv_size, qkv_size;
  int32_t dim_pitch;                            // head_dim rounded up to 16
  int32_t hidden_pitch, q_pitch, ffn_pitch;     // operand rows, multiples of a product's step, zero padded
  int32_t qkv_splits, out_splits, down_splits;  // of k, see product.h
  int32_t wave;                                 // spans between two barriers
  int32_t span_rows;                            // T * heads
  bool chunked_cache;                           // cache rows of a head are whole, aligned 16-byte chunks
  float norm_eps, softmax_scale, rope_scale, logit_scale, logit_softcap;
  const float *inv_freq, *final_norm, *lm_head_bias;
  const void *embedding, *lm_head;
  Workspace work;
  StepLayer layer[kMostLayers];
};

// kSpans: of the sequence that has most
enum Header : int32_t { kLiveRows = 0, kWantedRows, kUnits, kSpans, kHeaderWords };

// Error of a sequence that takes no part because an earlier step found one.
constexpr int32_t kDoneBefore = -1;

}  // namespace jacobi::cuda
