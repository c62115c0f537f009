// How often a thread looks that waits by spinning: prints the number for one that waits in vain while nobody computes,
// for one where as many threads compute as there are cores, and whether one sees what happens at last.
#include "spin.h"

#include <stdio.h>

int main() {
    long looks = 0;
    const auto in_vain = [&] {
        looks++;
        return false;
    };
    floe::spin_until(std::chrono::microseconds(50), in_vain);
    const long alone = looks;
    looks = 0;
    floe::computing = floe::core_count();
    floe::spin_until(std::chrono::hours(1), in_vain);
    const long busy = looks;
    looks = 0;
    const bool seen = floe::spin_until(std::chrono::hours(1), [&] { return ++looks == 2; });
    printf("%d %ld %ld %d\n", floe::core_count(), alone, busy, seen);
    return 0;
}
