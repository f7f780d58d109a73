// The flight record of Comm: each rank writes its last calls, and all ranks can read them.
#include <algorithm>
#include <cinttypes>

#include "core/signature.h"
#include "shm/comm.h"

namespace ringcomm {

// A reader that sees any field of the new call sees the zeroed number as well, because each is a release store after
// it; and one that sees the new number sees all fields, because it is stored last. So it drops an entry whose number,
// which it loads after the fields, is another than expected.
uint64_t Comm::flight_start(uint64_t signature, uint64_t count, uint64_t epoch, uint64_t start) {
    constexpr auto relaxed = std::memory_order_relaxed, release = std::memory_order_release;
    const uint64_t number = mine().flights.fetch_add(1, relaxed) + 1;
    FlightEntry& entry = mine().flight[number % FLIGHT_CALLS];
    entry.number.store(0, relaxed);
    entry.signature.store(signature, release);
    entry.count.store(count, release);
    entry.epoch.store(epoch, release);
    entry.start.store(start, release);
    entry.end.store(0, release);
    entry.number.store(number, release);
    return number;
}

void Comm::flight_end(uint64_t number, int status) {
    FlightEntry& entry = mine().flight[number % FLIGHT_CALLS];
    if (entry.number.load(std::memory_order_relaxed) != number) return;  // FLIGHT_CALLS calls ago: overwritten
    entry.status.store(status, std::memory_order_relaxed);
    entry.end.store(tick_ns(), std::memory_order_release);
}

std::string Comm::with_report(const std::string& message, const std::vector<int>& first) const {
    MessageLines lines(message);
    for (int r : first) lines.add(report(r, 1));
    for (int r = 0; r < size; ++r) {
        if (std::find(first.begin(), first.end(), r) == first.end()) lines.add(report(r, 1));
    }
    return lines.text();
}

std::string Comm::report(int r, int calls) const {
    static const char* const outcomes[] = {"done",    "refused",     "mismatch",  "timed out", "peer lost",
                                           "aborted", "interrupted", "no memory", "closed",    "failed"};
    RankHeader& theirs = header(r);
    const uint64_t now = now_ns();
    std::string state, running, finished;
    const char process = world->liveness.process_state(group_.members[r]);
    if (closed(r)) {
        state = " closed;";
    } else if (world->liveness.dead(group_.members[r])) {
        state = " dead;";
    } else if (process == 'T' || process == 't') {
        state = format(" process %" PRId64 " is stopped;", world->liveness.pid(group_.members[r]));
    }
    const int64_t last = theirs.flights.load();
    if (last == 0) state += " no call yet;";
    // Running calls come first, however old.
    int finished_left = calls, running_left = std::max(calls, 4);
    for (int64_t number = last; number > 0 && number > last - FLIGHT_CALLS; --number) {
        const FlightEntry& entry = theirs.flight[number % FLIGHT_CALLS];
        const uint64_t signature = entry.signature.load(), count = entry.count.load(), epoch = entry.epoch.load();
        const uint64_t start = entry.start.load(), end = entry.end.load();
        const uint32_t status = entry.status.load();
        if (entry.number.load(std::memory_order_acquire) != uint64_t(number)) continue;
        if ((end ? finished_left : running_left)-- <= 0) continue;
        const std::string call = describe(signature, count) + (epoch ? format(" epoch %" PRIu64, epoch) : "");
        if (end) {
            finished += format(" %s, %s after %.2f s, %.3f s ago;", call.c_str(),
                               status < std::size(outcomes) ? outcomes[status] : "failed", double(end - start) * 1e-9,
                               now > end ? double(now - end) * 1e-9 : 0.0);
        } else {
            running += format(" %s, running for %.3f s;", call.c_str(), now > start ? double(now - start) * 1e-9 : 0.0);
        }
    }
    const int waits_for = theirs.waits_for.load();
    if (waits_for > 0 && !running.empty()) {
        running.pop_back();
        running += format(", waits for rank %d;", waits_for - 1);
    }
    const std::string text = format("rank %d:", r) + state + running + finished;
    return text.substr(0, text.size() - 1);  // without the last semicolon
}

}  // namespace ringcomm
