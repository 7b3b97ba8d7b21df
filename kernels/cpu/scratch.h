// Memory for a parallel region, allocated before it: an exception that leaves one ends the process.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace gsd {

// At least `bytes`, of the calling thread and for those that work for it, until its next call. Kept between calls:
// fresh memory would cost page faults every time. Whoever writes to a page first has it near.
inline void* scratch_of(int64_t bytes) {
  struct Buffer {
    std::unique_ptr<void, decltype(&std::free)> data{nullptr, &std::free};
    int64_t size = 0;
  };
  thread_local Buffer buffer;
  if (buffer.size < bytes) {
    bytes = (bytes + 63) / 64 * 64;
    buffer.size = 0;
    buffer.data.reset(std::aligned_alloc(64, bytes));
    TORCH_CHECK_WITH(OutOfMemoryError, buffer.data != nullptr, "out of memory: ", bytes, " bytes of scratch");
    buffer.size = bytes;
  }
  return buffer.data.get();
}

}  // namespace gsd
