// The latency of a cache line between two cores, and of a wake-up: measured at the start, because machines differ.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

// The nanoseconds that a cache line takes from one core to the other and back: the least that an exchange takes.
double line_latency(int first, int second);

// The nanoseconds from a wake-up by a thread on the core `waker` until the thread that slept on the core `sleeper`
// runs.
uint64_t wake_latency(int waker, int sleeper);

}  // namespace ringcomm
