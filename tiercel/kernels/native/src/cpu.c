/* What the processor and the operating system offer, and the version of the interface. */
#include "native.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <stddef.h>
#include <sys/sysctl.h>
#endif

TC_EXPORT int tc_abi_version(void) { return TC_ABI_VERSION; }

#if defined(__x86_64__)

/* State components that the system saves: XMM and YMM; with opmasks and both halves of ZMM. */
enum { STATE_AVX = 0x06, STATE_AVX512 = 0xe6 };

static uint32_t saved_state(void) {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static int has_all(uint32_t found, uint32_t wanted) { return (found & wanted) == wanted; }

TC_EXPORT int tc_cpu_features(void) {
    uint32_t a, b, c, d, b7, c7;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
    if (!has_all(c, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C)) return 0;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d)) return 0;
    uint32_t state = saved_state();
    if (!has_all(b7, bit_AVX2 | bit_BMI2) || !has_all(state, STATE_AVX)) return 0;
    int has_512 = has_all(b7, bit_AVX512F | bit_AVX512VL | bit_AVX512BW | bit_AVX512DQ) &&
                  has_all(c7, bit_AVX512VNNI) && has_all(state, STATE_AVX512);
    return TC_CPU_AVX2 | (has_512 ? TC_CPU_AVX512 : 0);
}

#elif defined(__aarch64__) && defined(__linux__)

/* Bits of AT_HWCAP and AT_HWCAP2: the kernel's "ARM64 ELF hwcaps". */
#define HWCAP_FPHP_BIT (1ul << 9)
#define HWCAP_ASIMDHP_BIT (1ul << 10)
#define HWCAP_ASIMDDP_BIT (1ul << 20)
#define HWCAP2_I8MM_BIT (1ul << 13)

TC_EXPORT int tc_cpu_features(void) {
    unsigned long wanted = HWCAP_FPHP_BIT | HWCAP_ASIMDHP_BIT | HWCAP_ASIMDDP_BIT;
    if ((getauxval(AT_HWCAP) & wanted) != wanted) return 0;
    return TC_CPU_NEON | (getauxval(AT_HWCAP2) & HWCAP2_I8MM_BIT ? TC_CPU_I8MM : 0);
}

#elif defined(__aarch64__) && defined(__APPLE__)

static int has(const char *name) {
    int value = 0;
    size_t bytes = sizeof value;
    return sysctlbyname(name, &value, &bytes, NULL, 0) == 0 && value != 0;
}

TC_EXPORT int tc_cpu_features(void) {
    if (!has("hw.optional.arm.FEAT_DotProd") || !has("hw.optional.arm.FEAT_FP16")) return 0;
    return TC_CPU_NEON | (has("hw.optional.arm.FEAT_I8MM") ? TC_CPU_I8MM : 0);
}

#else

TC_EXPORT int tc_cpu_features(void) { return 0; }

#endif
