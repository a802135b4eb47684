// A model as multi_block_step sees it: the descriptor (step_descriptor.h) read into sizes and pointers, checked. The
// blob itself is not touched: it may lie on a device.
#pragma once

#include <stdint.h>
#include <string.h>

#include "common/step_descriptor.h"

namespace jacobi {

struct StepLayer {
  const float *attention_norm, *qkv_bias, *q_norm, *k_norm, *attention_out_bias, *ffn_norm, *gate_up_bias, *down_bias;
  const void *qkv, *attention_out, *gate_up, *down;
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
    if (d_[kWeightType] != 0 && d_[kWeightType] != 1) return "has an unknown weight type";
    for (int field = kLayers; field <= kVocab; ++field)
      if (d_[field] < 1 || d_[field] > INT32_MAX) return "has a size out of range";
    if (words != kHeaderFields + d_[kLayers] * kLayerFields) return "has the wrong number of words for its layers";
    if (heads() % kv_heads() != 0 || head_dim() > 256) return "has unsupported head sizes";
    if (d_[kRopeDim] < 0 || d_[kRopeDim] > head_dim() || d_[kRopeDim] % 2 != 0) return "has an unsupported rotary size";
    if (d_[kBlobBytes] != blob_bytes) return "does not belong to this blob: their sizes differ";
    const int64_t width = wide() ? 4 : 2, embedding = vocab() * hidden() * width;
    for (int64_t i = 0; i < layers(); ++i)
      if (layer_words(i)[kWindow] < -1 || layer_words(i)[kWindow] > INT32_MAX) return "has a window out of range";
    bool inside = holds(d_[kInvFreq], 4 * d_[kRopeDim] / 2) && holds(d_[kFinalNorm], 4 * hidden()) &&
                  holds(d_[kLmHead], panels(vocab()) * hidden() * width) && optional(d_[kLmHeadBias], 4 * vocab()) &&
                  optional(d_[kEmbedding], embedding);
    for (int64_t i = 0; i < layers() && inside; ++i) {
      const int64_t* l = layer_words(i);
      inside = holds(l[kAttentionNorm], 4 * hidden()) && holds(l[kQkv], panels(qkv_size()) * hidden() * width) &&
               optional(l[kQkvBias], 4 * qkv_size()) && optional(l[kQNorm], 4 * head_dim()) &&
               optional(l[kKNorm], 4 * head_dim()) && holds(l[kAttentionOut], panels(hidden()) * q_size() * width) &&
               optional(l[kAttentionOutBias], 4 * hidden()) && holds(l[kFfnNorm], 4 * hidden()) &&
               holds(l[kGateUp], panels(2 * ffn()) * hidden() * width) && optional(l[kGateUpBias], 8 * ffn()) &&
               holds(l[kDown], panels(hidden()) * ffn() * width) && optional(l[kDownBias], 4 * hidden());
    }
    return inside ? nullptr : "points outside the blob";
  }

  bool wide() const { return d_[kWeightType] == 0; }  // float32 weights, else bfloat16
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
  const void* embedding() const { return at(d_[kEmbedding]); }  // null: tied to the head
  const void* lm_head() const { return at(d_[kLmHead]); }
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
            at(l[kQkv]),
            at(l[kAttentionOut]),
            at(l[kGateUp]),
            at(l[kDown]),
            l[kWindow],
            l[kUseRope] != 0};
  }

 private:
  static int64_t panels(int64_t columns) { return (columns + 15) / 16 * 16; }
  bool holds(int64_t offset, int64_t bytes) const {
    return offset >= 0 && offset % 64 == 0 && bytes <= blob_bytes_ && offset <= blob_bytes_ - bytes;
  }
  bool optional(int64_t offset, int64_t bytes) const { return offset == -1 || holds(offset, bytes); }
  const int64_t* layer_words(int64_t i) const { return d_ + kHeaderFields + i * kLayerFields; }
  const char* at(int64_t offset) const { return offset < 0 ? nullptr : blob_ + offset; }
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
