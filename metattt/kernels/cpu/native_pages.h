// Large pages for the results of a kernel: handing out the memory of a long sequence in small ones takes a fifth of a forward pass.

#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

// Asks for large pages for memory that has not been touched yet. It is only advice.
extern "C" void use_large_pages(char* data, int64_t size) {
#if defined(MADV_HUGEPAGE)
    constexpr int64_t page = int64_t(1) << 21;
    const int64_t start = reinterpret_cast<int64_t>(data), first = (start + page - 1) / page * page, last = (start + size) / page * page;
    if (last > first) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
    (void)data, (void)size;
#endif
}
