// A model as multi_block_step sees it: the descriptor (step_descriptor.h) read into sizes and pointers, checked. The
// blob itself is not touched: it may lie on a device.
#pragma once

#include <stdint.h>
#include <string.h>

#include "common/packed.h"
#include "common/step_descriptor.h"

namespace jacobi {

// A packed matrix.
struct Matrix {
  const void* data;
  WeightType type;
};

struct StepLayer {
  const float *attention_norm, *qkv_bias, *q_norm, *k_norm, *attention_out_bias, *ffn_norm, *gate_up_bias, *down_bias;
  Matrix qkv, attention_out, gate_up, down;
  int64_t window;
  bool use_rope;
};

class StepModel {
 public:
  // Null when the descriptor is sound, else what is wrong with it. `words` int64 values; the blob has `blob_bytes`.
  const char* read(const int64_t* descriptor, int64_t words, const void* blob, int64_t blob_bytes) {
    if (words < kHeaderFields || descriptor[kMagic] != kStepMagic)
      return "is not the descriptor of packed step weights";
    d_ = descriptor;
    blob_ = static_cast<const char*>(blob);
    blob_bytes_ = blob_bytes;
    if (!is_type(d_[kWeightType])) return "has an unknown weight type";
    for (int field = kLayers; field <= kVocab; ++field)
      if (d_[field] < 1 || d_[field] > INT32_MAX) return "has a size out of range";
    if (words != kHeaderFields + d_[kLayers] * kLayerFields) return "has the wrong number of words for its layers";
    if (heads() % kv_heads() != 0 || head_dim() > 256) return "has unsupported head sizes";
    if (d_[kRopeDim] < 0 || d_[kRopeDim] > head_dim() || d_[kRopeDim] % 2 != 0) return "has an unsupported rotary size";
    if (d_[kBlobBytes] != blob_bytes) return "does not belong to this blob: their sizes differ";
    for (int64_t i = 0; i < layers(); ++i)
      if (layer_words(i)[kWindow] < -1 || layer_words(i)[kWindow] > INT32_MAX) return "has a window out of range";
    bool known = allowed(d_[kLmHeadType]) && allowed(d_[kEmbeddingType]);
    for (int64_t i = 0; i < layers() && known; ++i)
      for (int field = kQkvType; field <= kDownType; ++field) known = known && allowed(layer_words(i)[field]);
    if (!known) return "has a matrix of a type that does not go with its weight type";
    bool inside = holds(d_[kInvFreq], 4 * d_[kRopeDim] / 2) && holds(d_[kFinalNorm], 4 * hidden()) &&
                  holds_matrix(d_[kLmHead], d_[kLmHeadType], vocab(), hidden()) &&
                  optional(d_[kLmHeadBias], 4 * vocab()) && optional(d_[kEmbedding], embedding_bytes());
    for (int64_t i = 0; i < layers() && inside; ++i) {
      const int64_t* l = layer_words(i);
      inside = holds(l[kAttentionNorm], 4 * hidden()) && holds_matrix(l[kQkv], l[kQkvType], qkv_size(), hidden()) &&
               optional(l[kQkvBias], 4 * qkv_size()) && optional(l[kQNorm], 4 * head_dim()) &&
               optional(l[kKNorm], 4 * head_dim()) &&
               holds_matrix(l[kAttentionOut], l[kAttentionOutType], hidden(), q_size()) &&
               optional(l[kAttentionOutBias], 4 * hidden()) && holds(l[kFfnNorm], 4 * hidden()) &&
               holds_matrix(l[kGateUp], l[kGateUpType], 2 * ffn(), hidden()) && optional(l[kGateUpBias], 8 * ffn()) &&
               holds_matrix(l[kDown], l[kDownType], hidden(), ffn()) && optional(l[kDownBias], 4 * hidden());
    }
    return inside ? nullptr : "points outside the blob";
  }

  WeightType weight_type() const { return static_cast<WeightType>(d_[kWeightType]); }
  bool wide() const { return weight_type() == WeightType::f32; }
  int64_t layers() const { return d_[kLayers]; }
  int64_t hidden() const { return d_[kHidden]; }
  int64_t heads() const { return d_[kHeads]; }
  int64_t kv_heads() const { return d_[kKvHeads]; }
  int64_t head_dim() const { return d_[kHeadDim]; }
  int64_t ffn() const { return d_[kFfn]; }
  int64_t vocab() const { return d_[kVocab]; }
  int64_t rope_dim() const { return d_[kRopeDim]; }
  int64_t q_size() const { return heads() * head_dim(); }
  int64_t kv_size() const { return kv_heads() * head_dim(); }
  int64_t qkv_size() const { return q_size() + 2 * kv_size(); }
  float norm_eps() const { return number(kNormEps); }
  float softmax_scale() const { return number(kSoftmaxScale); }
  float rope_scale() const { return number(kRopeScale); }
  const float* inv_freq() const { return floats(d_[kInvFreq]); }
  const float* final_norm() const { return floats(d_[kFinalNorm]); }
  float logit_scale() const { return number(kLogitScale); }
  float logit_softcap() const { return number(kLogitSoftcap); }
  Matrix embedding() const { return matrix(d_[kEmbedding], d_[kEmbeddingType]); }  // null: tied to the head
  Matrix lm_head() const { return matrix(d_[kLmHead], d_[kLmHeadType]); }
  const float* lm_head_bias() const { return floats(d_[kLmHeadBias]); }

  StepLayer layer(int64_t i) const {
    const int64_t* l = layer_words(i);
    return {floats(l[kAttentionNorm]),
            floats(l[kQkvBias]),
            floats(l[kQNorm]),
            floats(l[kKNorm]),
            floats(l[kAttentionOutBias]),
            floats(l[kFfnNorm]),
            floats(l[kGateUpBias]),
            floats(l[kDownBias]),
            matrix(l[kQkv], l[kQkvType]),
            matrix(l[kAttentionOut], l[kAttentionOutType]),
            matrix(l[kGateUp], l[kGateUpType]),
            matrix(l[kDown], l[kDownType]),
            l[kWindow],
            l[kUseRope] != 0};
  }

 private:
  static bool is_type(int64_t type) { return type >= 0 && type <= static_cast<int64_t>(WeightType::int4); }
  // A model of float weights has no other matrices.
  bool allowed(int64_t type) const {
    return is_grouped(weight_type()) ? is_type(type) : type == static_cast<int64_t>(weight_type());
  }
  int64_t embedding_bytes() const {
    const WeightType type = static_cast<WeightType>(d_[kEmbeddingType]);
    return is_grouped(type) ? packed_bytes(type, vocab(), hidden()) : vocab() * panel_bytes(type, hidden()) / kPanel;
  }
  bool holds(int64_t offset, int64_t bytes) const {
    return offset >= 0 && offset % 64 == 0 && bytes <= blob_bytes_ && offset <= blob_bytes_ - bytes;
  }
  bool holds_matrix(int64_t offset, int64_t type, int64_t n, int64_t k) const {
    return holds(offset, packed_bytes(static_cast<WeightType>(type), n, k));
  }
  bool optional(int64_t offset, int64_t bytes) const { return offset == -1 || holds(offset, bytes); }
  const int64_t* layer_words(int64_t i) const { return d_ + kHeaderFields + i * kLayerFields; }
  const char* at(int64_t offset) const { return offset < 0 ? nullptr : blob_ + offset; }
  Matrix matrix(int64_t offset, int64_t type) const { return {at(offset), static_cast<WeightType>(type)}; }
  const float* floats(int64_t offset) const { return reinterpret_cast<const float*>(at(offset)); }
  float number(DescriptorField field) const {
    const int32_t bits = static_cast<int32_t>(d_[field]);
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }

  const int64_t* d_ = nullptr;
  const char* blob_ = nullptr;
  int64_t blob_bytes_ = 0;
};

}  // namespace jacobi
