// How a flight record is written and read.
#include "core/flight.h"

#include <algorithm>
#include <cinttypes>
#include <iterator>

#include "core/errors.h"
#include "core/signature.h"
#include "core/waiting.h"

namespace ringcomm {

// A seqlock (Boehm, "Can seqlocks get along with programming language memory models?", MSPC 2012). A reader that finds
// the expected number before it loads the fields sees none of an earlier call, because the number is stored last; and
// one that sees any field of a later call sees afterwards that the number has changed, because each field is a release
// store after the zeroed number. So both looks must find the number that is expected.
uint64_t FlightRecord::start(uint64_t signature, uint64_t count, uint64_t epoch, uint64_t start) {
    constexpr auto relaxed = std::memory_order_relaxed, release = std::memory_order_release;
    const uint64_t number = flights.fetch_add(1, relaxed) + 1;
    FlightEntry& entry = entries[number % FLIGHT_CALLS];
    if (epoch) this->epoch.store(epoch, relaxed);
    entry.number.store(0, relaxed);
    entry.signature.store(signature, release);
    entry.count.store(count, release);
    entry.epoch.store(epoch, release);
    entry.start.store(start, release);
    entry.end.store(0, release);
    entry.number.store(number, release);
    return number;
}

void FlightRecord::end(uint64_t number, int status) {
    FlightEntry& entry = entries[number % FLIGHT_CALLS];
    if (entry.number.load(std::memory_order_relaxed) != number) return;  // FLIGHT_CALLS calls ago: overwritten
    entry.status.store(status, std::memory_order_relaxed);
    entry.end.store(tick_ns(), std::memory_order_release);
}

// See start() for the order.
std::optional<FlightCall> FlightRecord::read(uint64_t number) const {
    const FlightEntry& entry = entries[number % FLIGHT_CALLS];
    if (entry.number.load(std::memory_order_acquire) != number) return {};
    const FlightCall call{entry.signature.load(), entry.count.load(), entry.epoch.load(),
                          entry.start.load(),     entry.end.load(),   entry.status.load()};
    if (entry.number.load(std::memory_order_acquire) != number) return {};
    return call;
}

std::string FlightCall::describe() const {
    return ringcomm::describe(signature, count) + (epoch ? format(" epoch %" PRIu64, epoch) : "");
}

std::optional<FlightCall> FlightRecord::running() const {
    const int64_t last = flights.load();
    for (int64_t number = std::max<int64_t>(1, last - FLIGHT_CALLS + 1); number <= last; ++number) {
        const auto call = read(number);
        if (call && !call->end) return call;
    }
    return {};
}

std::string FlightRecord::describe(int calls) const { return describe(calls, waits_for.load() - 1); }

std::string FlightRecord::describe(int calls, int peer) const {
    static const char* const outcomes[] = {"done",    "refused",     "mismatch",  "timed out", "peer lost",
                                           "aborted", "interrupted", "no memory", "closed",    "failed"};
    const uint64_t now = now_ns();
    const int64_t last = flights.load();
    std::string running, finished;
    // Running calls come first, however old.
    int finished_left = calls, running_left = std::max(calls, 4);
    for (int64_t number = last; number > 0 && number > last - FLIGHT_CALLS; --number) {
        const auto call = read(number);
        if (!call || (call->end ? finished_left : running_left)-- <= 0) continue;
        const auto [signature, count, epoch, start, end, status] = *call;
        if (end) {
            finished += format(" %s, %s after %.2f s, %.3f s ago;", call->describe().c_str(),
                               status < std::size(outcomes) ? outcomes[status] : "failed", double(end - start) * 1e-9,
                               now > end ? double(now - end) * 1e-9 : 0.0);
        } else {
            running += format(" %s, running for %.3f s;", call->describe().c_str(),
                              now > start ? double(now - start) * 1e-9 : 0.0);
        }
    }
    if (peer >= 0 && !running.empty()) {
        running.pop_back();
        running += format(", waits for rank %d;", peer);
    }
    std::string all = running + finished;
    if (all.empty()) return calls > 0 ? " no call yet" : " in no call";  // a first call may be half written
    all.pop_back();                                                      // the last semicolon
    return all;
}

}  // namespace ringcomm
