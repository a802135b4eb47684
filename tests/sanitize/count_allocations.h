// Counts heap allocations of all threads, through a hook of the sanitizers' own malloc.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>

// As in LLVM's sanitizer/allocator_interface.h, which GCC does not install.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*malloc_hook)(const volatile void*, size_t),
                                                         void (*free_hook)(const volatile void*));

inline std::atomic<int64_t> allocations{0};

inline bool count_allocations() {
  return __sanitizer_install_malloc_and_free_hooks([](const volatile void*, size_t) { ++allocations; },
                                                   [](const volatile void*) {}) != 0;
}
