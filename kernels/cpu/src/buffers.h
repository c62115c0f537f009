// Memory that a thread keeps between calls: fresh pages cost more than the kernels that use them.
#pragma once

#include <stdint.h>
#include <stdlib.h>

namespace floe {

// Grows, never shrinks; 64-byte aligned; contents undefined after `take`.
class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;
    ~Buffer() { free(raw_); }

    // nullptr when there is no memory.
    uint8_t *take(int64_t bytes) {
        if (bytes > size_ || raw_ == nullptr) {
            free(raw_);
            size_ = 0;
            raw_ = malloc((size_t)bytes + 64);
            if (raw_ == nullptr) return nullptr;
            size_ = bytes;
        }
        return (uint8_t *)(((uintptr_t)raw_ + 63) & ~(uintptr_t)63);
    }

  private:
    void *raw_ = nullptr;
    int64_t size_ = 0;
};

// Cuts one buffer into aligned parts: first add up the sizes, then hand out the places.
inline int64_t aligned(int64_t bytes) { return (bytes + 63) & ~(int64_t)63; }

template <class T> T *carve(uint8_t *&from, int64_t count) {
    T *part = (T *)from;
    from += aligned(count * (int64_t)sizeof(T));
    return part;
}

} // namespace floe
