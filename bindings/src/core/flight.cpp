// How a flight record is written and read.
#include "core/flight.h"

#include <algorithm>
#include <cinttypes>
#include <iterator>

#include "core/errors.h"
#include "core/signature.h"
#include "core/waiting.h"

namespace ringcomm {

namespace {

constexpr int LEAST_RUNNING = 4;  // calls in a report

const char* outcome(uint32_t status) {
    static const char* const names[] = {"done",    "refused",     "mismatch",  "timed out", "peer lost",
                                        "aborted", "interrupted", "no memory", "closed",    "failed"};
    return status < std::size(names) ? names[status] : "failed";
}

}  // namespace

// A seqlock (Boehm, "Can seqlocks get along with programming language memory models?", MSPC 2012). A reader that finds
// the expected number before it loads the fields sees none of an earlier call, because the number is stored last; and
// one that sees any field of a later call sees afterwards that the number has changed, because each field is a release
// store after the zeroed number. So both looks must find the number that is expected.
uint64_t FlightRecord::start(uint64_t signature, uint64_t count, uint64_t epoch, uint64_t start) {
    constexpr auto relaxed = std::memory_order_relaxed, release = std::memory_order_release;
    const uint64_t number = flights.fetch_add(1, relaxed) + 1;
    FlightEntry& entry = entries[number % FLIGHT_CALLS];
    if (epoch && !is_message(call_of(signature))) this->epoch.store(epoch, relaxed);
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
    entry.status.store(status, std::memory_order_release);
    if (status) {
        const bool waited = status != RC_MISMATCH && waited_at.load() >= number;
        entry.waited_for.store(waited ? waited_for.load() : 0, std::memory_order_release);
    }
    entry.end.store(tick_ns(), std::memory_order_release);
}

void FlightRecord::resume(uint64_t number) {
    FlightEntry& entry = entries[number % FLIGHT_CALLS];
    if (entry.number.load(std::memory_order_relaxed) == number) entry.end.store(0, std::memory_order_release);
}

// See start() for the order.
std::optional<FlightCall> FlightRecord::read(uint64_t number) const {
    const FlightEntry& entry = entries[number % FLIGHT_CALLS];
    if (entry.number.load(std::memory_order_acquire) != number) return {};
    const FlightCall call{entry.signature.load(), entry.count.load(),  entry.epoch.load(),     entry.start.load(),
                          entry.end.load(),       entry.status.load(), entry.waited_for.load()};
    if (entry.number.load(std::memory_order_acquire) != number) return {};
    return call;
}

std::string FlightCall::describe() const {
    if (is_message(call_of(signature))) return describe_message(signature, count, int64_t(epoch));
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

std::vector<ReportedCall> FlightRecord::last(int most) const {
    const uint64_t now = now_ns();
    const auto since = [&](uint64_t then) { return now > then ? now - then : 0; };
    const int64_t last = flights.load();
    std::vector<ReportedCall> running, ended;
    for (int64_t number = last; number > 0 && number > last - FLIGHT_CALLS; --number) {
        const auto call = read(number);
        if (!call) continue;
        if (call->end && int(ended.size()) < most) {
            ended.push_back({*call, call->end - call->start, since(call->end)});
        } else if (!call->end && int(running.size()) < std::max(most, LEAST_RUNNING)) {
            running.push_back({*call, since(call->start), 0});
        }
    }
    running.insert(running.end(), ended.begin(), ended.end());
    return running;
}

std::string ReportedCall::text() const {
    if (running()) return format("%s, running for %.3f s", call.describe().c_str(), double(took_ns) * 1e-9);
    return format("%s, %s after %.2f s, %.3f s ago", call.describe().c_str(), outcome(call.status),
                  double(took_ns) * 1e-9, double(ago_ns) * 1e-9);
}

// No text in a report has a character that JSON would escape.
std::string ReportedCall::json(int waits_for) const {
    if (!running()) waits_for = call.status ? call.waited_for - 1 : -1;
    const std::string ago = running() ? "null" : format("%.6f", double(ago_ns) * 1e-9);
    return format(R"({"call": "%s", "outcome": "%s", "seconds": %.6f, "ago": %s, "waits_for": %s})",
                  call.describe().c_str(), running() ? "running" : outcome(call.status), double(took_ns) * 1e-9,
                  ago.c_str(), waits_for < 0 ? "null" : format("%d", waits_for).c_str());
}

std::string RankReport::text() const {
    std::string text = state;
    const auto add = [&](const std::string& part) { text += (text.empty() ? "" : "; ") + part; };
    for (size_t i = 0; i < calls.size(); ++i) {
        add(calls[i].text());
        const bool last_running = calls[i].running() && (i + 1 == calls.size() || !calls[i + 1].running());
        if (last_running && waits_for >= 0) text += format(", waits for rank %d", waits_for);
    }
    if (answered && calls.empty()) add("no call yet");  // a first one may be half written
    return format("rank %d: ", rank) + text;
}

std::string RankReport::json() const {
    std::string list;
    for (const ReportedCall& call : calls) list += (list.empty() ? "" : ", ") + call.json(waits_for);
    return format(R"({"rank": %d, "answered": %s, "state": "%s", "calls": [)", rank, answered ? "true" : "false",
                  state.c_str()) +
           list + "]}";
}

}  // namespace ringcomm
