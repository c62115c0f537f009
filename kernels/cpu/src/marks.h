// Which slots a transfer has named, kept at zero between calls.
#pragma once

#include "floe.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <vector>

namespace floe {

class Marks {
    static constexpr int64_t MOST = 1 << 26; // marks kept, a byte each; slots beyond are sorted instead

  public:
    // FLOE_OK if these slots, all from 0 to capacity - 1, are named once each.
    template <class Slot> int once(const Slot *slots, int64_t count, int64_t capacity) {
        try {
            if (capacity > MOST) {
                std::vector<Slot> sorted(slots, slots + count);
                std::sort(sorted.begin(), sorted.end());
                const bool once = std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end();
                return once ? FLOE_OK : FLOE_REPEATED;
            }
            if ((int64_t)of_.size() < capacity) of_.resize((size_t)capacity);
        } catch (const std::bad_alloc &) {
            return FLOE_NO_MEMORY;
        } catch (const std::length_error &) {
            return FLOE_NO_MEMORY;
        }
        int64_t named = 0;
        while (named < count && !of_[(size_t)slots[named]]) of_[(size_t)slots[named++]] = 1;
        for (int64_t i = 0; i < named; i++) of_[(size_t)slots[i]] = 0;
        return named == count ? FLOE_OK : FLOE_REPEATED;
    }

  private:
    std::vector<uint8_t> of_;
};

} // namespace floe
