// Columns of the per-sequence decode state, int32 [B, 16]; the same as jacobi_kernels.state.StateColumn.
#pragma once

#include <cstdint>

namespace jacobi {

enum StateColumn : int32_t {
  kTextLen = 0,      // final tokens in text: prompt, then emitted
  kPromptLen = 1,    // tokens of the prompt
  kMaxLen = 2,       // text length at which generation ends
  kNumFinal = 3,     // leading chain tokens that are final in the current layout
  kActive = 4,       // active blocks
  kBlockFill = 5,    // tokens committed in the open block
  kPoolNext = 6,     // ring index of the next pool entry
  kPoolStart = 7,    // first text index that the pool may use: 0, or the prompt's length
  kDone = 8,         // DoneReason
  kAccepted = 9,     // tokens accepted by the last step
  kWinner = 10,      // winning segment of the last step, counted from the main chain = 0
  kEmitted = 11,     // tokens emitted by the last step
  kFixedPoint = 12,  // 1: the last step accepted the whole main chain
  kError = 13,       // StepError: why a GPU step stopped the sequence
};

constexpr int32_t kStateColumns = 16;

enum DoneReason : int32_t { kRunning = 0, kStopToken = 1, kLength = 2 };

// What a GPU step found wrong, since it cannot raise: it leaves such a sequence unchanged, which counts as done from
// then on. CPU ops raise, and never set it.
enum StepError : int32_t {
  kNoError = 0,
  kLayoutError = 1,       // segments or their bounds break a rule of the block layout
  kTokenError = 2,        // a token outside the vocabulary
  kCacheLengthError = 3,  // a cache length below 0, or without room for the step's rows
  kPageTableError = 4,    // a page outside the cache
  kStateError = 5,        // a column of the state is out of range
};

}  // namespace jacobi
