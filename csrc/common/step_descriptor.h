// The descriptor of packed step weights: int64 words that say what the blob holds and where; the same fields, in the
// same order, as jacobi_kernels.step_weights. Floats are stored as the bits of a float32. Offsets are bytes into the
// blob, multiples of 64, or -1 for what a model lacks.
#pragma once

#include <cstdint>

namespace jacobi {

constexpr int64_t kStepMagic = 0x4A41434F42490001;  // "JACOBI", format 1

enum DescriptorField : int32_t {
  kMagic = 0,
  kWeightType,    // 0 float32, 1 bfloat16: the matrices; norms and biases are float32
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
  kEmbedding,     // [vocab, hidden] rows, or -1: tied to the head
  kFinalNorm,     // float32 [hidden]
  kLmHead,        // packed [ceil(vocab / 16), hidden, 16]
  kLmHeadBias,    // float32 [vocab] or -1
  kBlobBytes,     // size of the blob
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
  kLayerFields,
};

}  // namespace jacobi
