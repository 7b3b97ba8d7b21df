// Memory for a parallel region, allocated before it, since an exception that leaves the region ends the process.
#pragma once

#include <c10/util/Exception.h>

#include <cstdint>
#include <cstdlib>
#include <memory>

namespace gsd {

// Returns at least `bytes` for the calling thread and its workers, valid until the thread's next call. The memory is
// kept between calls, since fresh memory costs page faults. A page is local to the thread that first writes to it.
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
