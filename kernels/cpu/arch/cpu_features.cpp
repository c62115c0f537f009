#include "cpu_features.h"

#include <string.h>

#if defined(__x86_64__) || defined(_M_X64)
#define FLOE_X86 1
#if defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#else
#include <cpuid.h>
#endif
#endif

namespace floe {
namespace {

struct Features {
    bool avx2 = false;
    bool avx512 = false;
    bool bfloat16 = false;
};

#if defined(FLOE_X86)

struct Registers {
    uint32_t a, b, c, d;
};

Registers cpuid(uint32_t leaf, uint32_t sub) {
    Registers r = {0, 0, 0, 0};
#if defined(_MSC_VER)
    int out[4];
    __cpuidex(out, (int)leaf, (int)sub);
    r = {(uint32_t)out[0], (uint32_t)out[1], (uint32_t)out[2], (uint32_t)out[3]};
#else
    __get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d);
#endif
    return r;
}

// Which registers the operating system saves for us.
uint64_t saved_state() {
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
#endif
}

bool bit(uint32_t word, int index) { return (word >> index & 1) != 0; }

Features detect() {
    Features found;
    const Registers basic = cpuid(1, 0);
    const bool xsave = bit(basic.c, 27), avx = bit(basic.c, 28), fma = bit(basic.c, 12), f16c = bit(basic.c, 29);
    const bool popcnt = bit(basic.c, 23);
    if (!xsave || !avx) return found;
    const uint64_t state = saved_state();
    const Registers extended = cpuid(7, 0);
    found.avx2 = (state & 0x6) == 0x6 && fma && f16c && popcnt && bit(extended.b, 5);
    const bool f = bit(extended.b, 16), dq = bit(extended.b, 17), bw = bit(extended.b, 30), vl = bit(extended.b, 31);
    found.avx512 = found.avx2 && (state & 0xe6) == 0xe6 && f && dq && bw && vl && bit(extended.c, 11);
    found.bfloat16 = found.avx512 && extended.a >= 1 && bit(cpuid(7, 1).a, 5);
    return found;
}

#else

Features detect() { return {}; }

#endif

const Features &features() {
    static const Features found = detect();
    return found;
}

} // namespace

bool has_bfloat16() { return features().bfloat16; }

Choice choose_ops(const char *name) {
    const Features &cpu = features();
    if (name == nullptr) {
        if (cpu.avx512 && avx512_ops()) return {avx512_ops(), "this CPU has AVX-512 with VNNI"};
        if (cpu.avx2 && avx2_ops()) return {avx2_ops(), "this CPU has AVX2, not AVX-512 with VNNI"};
#if defined(FLOE_X86)
        return {portable_ops(), "this CPU has no AVX2"};
#else
        return {portable_ops(), "this is not an x86 CPU"};
#endif
    }
    static const char asked[] = "it was asked for";
    if (!strcmp(name, "portable")) return {portable_ops(), asked};
    if (!strcmp(name, "avx2") && cpu.avx2) return {avx2_ops(), asked};
    if (!strcmp(name, "avx512") && cpu.avx512) return {avx512_ops(), asked};
    return {nullptr, ""};
}

} // namespace floe
