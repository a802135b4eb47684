// Thread-local scratch of an op call that does not get a workspace: it only grows, so that a loop of calls allocates
// once.
#pragma once

#include <cstdint>
#include <memory>

namespace jacobi::ops {

// A 64-byte aligned block of at least `bytes`, valid until the next call on this thread.
inline void* scratch(size_t bytes) {
  thread_local std::unique_ptr<char[]> block;
  thread_local size_t size = 0;
  if (bytes > size) {
    block.reset();
    block.reset(new char[bytes + 64]);
    size = bytes;
  }
  return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(block.get()) + 63) / 64 * 64);
}

}  // namespace jacobi::ops
