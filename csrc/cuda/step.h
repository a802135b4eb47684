// multi_block_step on a GPU as one cooperative launch: arguments and launcher. step_program.h holds the computation.
// No torch and no CUDA header here: plain pointers, sizes, and the stream as a void pointer.
#pragma once

#include <cstdint>

#include "common/layout.h"

namespace jacobi::cuda {

enum class DType : int32_t { f32 = 0, bf16 = 1 };

// Everything but the descriptor lies on the device. Tensors are dense unless strides are given; as in the op.
struct StepArgs {
  const int64_t* descriptor;  // [descriptor_words], on the host; read during the call only
  int64_t descriptor_words;
  const void* weights;  // [weight_bytes], the blob; starts at a multiple of 16 bytes
  int64_t weight_bytes;

  void *k_cache, *v_cache;                        // [layers, slabs, slab_rows, kv_heads, head_dim], same strides
  DType cache_type;                               // must be the weights' type
  int64_t layer_stride, slab_stride, row_stride;  // in elements; the last two dimensions are dense
  int64_t slabs, slab_rows;                       // sequences and capacity, or pages and page size
  const int32_t* page_table;                      // [batch, max_pages] or null: contiguous
  int64_t max_pages;                              // 0 without a page table
  int32_t* cache_seqlens;                         // [batch]

  int32_t* tokens;              // [rows]
  Segment* segments;            // [num_segments]
  const int32_t* cu_seqlens_q;  // [batch + 1]
  const int32_t* cu_segments;   // [batch + 1]
  int32_t rows, batch, num_segments;

  int32_t* text;  // [batch, text_capacity]
  int32_t text_capacity;
  int32_t* pool;  // [batch, pool_rows, 1 + pool_width]
  int32_t pool_rows, pool_width;
  int32_t* state;              // [batch, kStateColumns]
  const int32_t* stop_tokens;  // [batch, num_stop_tokens]
  int32_t num_stop_tokens;
  int32_t block_size, blocks, candidates;
  double spawn_ratio;

  // [batch] each, or null. top_k and top_p must be null: see supported().
  const float* temperature;
  const int32_t* top_k;
  const float* top_p;
  const int64_t* seeds;

  void* workspace;  // any contents; starts at a multiple of 256 bytes
  int64_t workspace_bytes;
};

// Bytes of workspace for these sizes; -1 when the descriptor or a size is not supported (supported() says why).
int64_t workspace_bytes(const int64_t* descriptor, int64_t descriptor_words, int64_t rows, int64_t batch,
                        int64_t num_segments);

// Null when launch can run these arguments, else why not, in words that go behind "multi_block_step: ".
// Looks at sizes, types and addresses only: nothing is read from the device.
const char* supported(const StepArgs& args);

// Enqueues the step on `stream` (a cudaStream_t) of the current device: one memset of a few counters and one
// cooperative launch. Reads nothing back; can be captured into a CUDA graph. Returns null, or what CUDA says is wrong.
const char* launch(const StepArgs& args, void* stream);

}  // namespace jacobi::cuda
