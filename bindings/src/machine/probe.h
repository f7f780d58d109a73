// What the core measures once, at the start, because machines differ.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

// The nanoseconds that a cache line takes from one core to the other and back: the least that an exchange takes.
double probe_line(int first, int second);

// The nanoseconds from a wake-up by a thread on the core `waker` until the thread that slept on the core `sleeper`
// runs.
uint64_t probe_wake(int waker, int sleeper);

}  // namespace ringcomm
