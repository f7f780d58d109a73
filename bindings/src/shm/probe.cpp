// Measures which stores hand a block of memory over faster.
#include "shm/probe.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>

#include "core/waiting.h"
#include "core/work.h"
#include "kernels/cpu/kernels.h"
#include "kernels/memory_order.h"
#include "shm/layout.h"

namespace ringcomm {

namespace {

void await(const Flag& flag, uint64_t value) {
    for (int i = 0; observe(flag) < value; ++i) {
        cpu_relax();
        if (i % 1000 == 999) yield_core();  // there may be a single core
    }
}

// Moves the calling thread to a core, where permitted.
void move_to(int core) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    sched_setaffinity(0, sizeof set, &set);
}

}  // namespace

double probe_handover(size_t bytes, bool nontemporal, int writer, int reader) {
    constexpr uint64_t ROUNDS = 32;
    struct alignas(LINE) Padded {
        Flag value{0};
    };
    Padded written, read;
    const auto memory = std::make_unique<std::byte[]>(3 * bytes);
    std::byte *shared = memory.get(), *source = shared + bytes, *target = source + bytes;
    memset(shared, 1, 3 * bytes);
    // Threads of their own: the caller may be bound to one core, and stays where it is.
    std::thread reading = named_thread("ringcomm-probe", [&] {
        move_to(reader);
        for (uint64_t round = 1; round <= ROUNDS; ++round) {
            await(written.value, round);
            memcpy(target, shared, bytes);
            read.value.store(round, std::memory_order_release);
        }
    });
    uint64_t best = UINT64_MAX;
    const auto write = [&] {
        move_to(writer);
        // The best round: other programs disturb the rest.
        for (uint64_t round = 1; round <= ROUNDS; ++round) {
            const uint64_t start = now_ns();
            if (nontemporal) {
                kernels().copy_nontemporal(shared, source, bytes);
            } else {
                memcpy(shared, source, bytes);
            }
            written.value.store(round, std::memory_order_release);
            await(read.value, round);
            best = std::min(best, now_ns() - start);
        }
    };
    std::thread writing;
    try {
        writing = named_thread("ringcomm-probe", write);
    } catch (...) {
        written.value.store(ROUNDS, std::memory_order_release);  // let the reader end
        reading.join();
        throw;
    }
    writing.join();
    reading.join();
    return double(bytes) / (double(best) * 1e-9);
}

}  // namespace ringcomm
