// The descriptor of packed step weights: int64 words that say what the blob holds and where; the same fields, in the
// same order, as jacobi_kernels.step_weights. Floats are stored as the bits of a float32. Offsets are bytes into the
// blob, multiples of 64, or -1 for what a model lacks. Norms, biases and frequencies are float32, matrices are packed
// (packed.h).
#pragma once

#include <cstdint>

namespace jacobi {

constexpr int64_t kStepMagic = 0x4A41434F42490002;  // "JACOBI", format 2

enum DescriptorField : int32_t {
  kMagic = 0,
  kWeightType,    // WeightType that was asked for. f32, bf16: of every matrix; int8, int4: matrices may differ
  kLayers,        // number of layers
  kHidden,        // hidden size
  kHeads,         // query heads
  kKvHeads,       // key/value heads
  kHeadDim,       // per head
  kFfn,           // intermediate size
  kVocab,         // vocabulary size
  kNormEps,       // float bits
  kSoftmaxScale,  // float bits
  kRopeDim,       // rotated dimensions per head, even
  kRopeScale,     // float bits: attention scaling of the rotary embedding
  kLogitScale,    // float bits
  kLogitSoftcap,  // float bits, 0: off
  kInvFreq,       // float32 [kRopeDim / 2]
  kEmbedding,     // [vocab, hidden], rows of f32 or bf16, or packed; -1: tied to the head
  kFinalNorm,     // float32 [hidden]
  kLmHead,        // packed [vocab, hidden]
  kLmHeadBias,    // float32 [vocab] or -1
  kBlobBytes,     // size of the blob
  kLmHeadType,    // WeightType
  kEmbeddingType,
  kHeaderFields,
};

enum LayerField : int32_t {
  kAttentionNorm = 0,  // float32 [hidden]
  kQkv,                // packed [(heads + 2 kv_heads) * head_dim, hidden]: q, k, v
  kQkvBias,            // float32 or -1
  kQNorm,              // float32 [head_dim] or -1
  kKNorm,              // float32 [head_dim] or -1
  kAttentionOut,       // packed [hidden, heads * head_dim]
  kAttentionOutBias,   // float32 [hidden] or -1
  kFfnNorm,            // float32 [hidden]
  kGateUp,             // packed [2 ffn, hidden]: gate, up
  kGateUpBias,         // float32 [2 ffn] or -1
  kDown,               // packed [hidden, ffn]
  kDownBias,           // float32 [hidden] or -1
  kWindow,             // earlier keys seen, -1: all (not an offset)
  kUseRope,            // 1 or 0 (not an offset)
  kQkvType,            // WeightType of the matrices
  kAttentionOutType,
  kGateUpType,
  kDownType,
  kLayerFields,
};

}  // namespace jacobi
