// The step's arena with a poisoned gap behind every block, so that AddressSanitizer sees an overrun from one array of
// the workspace into the next. To be included before any header that uses the arena.
#pragma once

#include <sanitizer/asan_interface.h>
#include <stddef.h>
#include <stdint.h>

#include <mutex>

#include "cpu/arena.h"

namespace jacobi::cpu {

class GuardedArena : public Arena {
 public:
  using Arena::Arena;

  template <class T>
  T* take(int64_t count) {
    T* block = Arena::take<T>(count);
    const size_t begin = reinterpret_cast<uintptr_t>(block), bytes = static_cast<size_t>(count) * sizeof(T);
    const char* gap = Arena::take<char>(64);
    if (block == nullptr || gap == nullptr) return nullptr;
    static std::mutex one_by_one;  // every thread of a team takes the same pieces
    const std::lock_guard lock(one_by_one);
    ASAN_UNPOISON_MEMORY_REGION(block, bytes);
    ASAN_POISON_MEMORY_REGION(reinterpret_cast<char*>(block) + bytes,
                              reinterpret_cast<uintptr_t>(gap) + 64 - begin - bytes);
    return block;
  }
};

}  // namespace jacobi::cpu

#define Arena GuardedArena
