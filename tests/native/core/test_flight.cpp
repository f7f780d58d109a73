// A rank makes calls while a peer reads its flight record: the peer finds whole calls only.
#include <algorithm>
#include <atomic>
#include <memory>
#include <thread>

#include "core/flight.h"
#include "world.h"

using ringcomm::FlightRecord;

namespace {

constexpr uint64_t CALLS = 200'000;
// Each field tells of which call it is.
uint64_t field(uint64_t number, uint64_t which) { return number * 8 + which; }

void make_calls(FlightRecord& record) {
    for (uint64_t i = 1; i <= CALLS; ++i) record.start(field(i, 1), field(i, 2), field(i, 3), field(i, 4));
}

// Calls that are being written, and those that the next ones overwrite.
uint64_t read_calls(const FlightRecord& record) {
    uint64_t found = 0;
    for (uint64_t last = 0; last < CALLS;) {
        last = record.flights.load();
        for (const uint64_t number : {last, last + 1 - std::min<uint64_t>(last, ringcomm::FLIGHT_CALLS)}) {
            const auto call = number ? record.read(number) : std::nullopt;
            if (!call) continue;
            ++found;
            CHECK(call->signature == field(number, 1) && call->count == field(number, 2));
            CHECK(call->epoch == field(number, 3) && call->start == field(number, 4) && call->end == 0);
        }
    }
    return found;
}

}  // namespace

int main() {
    const auto record = std::make_unique<FlightRecord>();
    std::atomic<bool> reading{false};
    std::thread writer([&] {
        while (!reading.load()) std::this_thread::yield();
        make_calls(*record);
    });
    reading.store(true);
    CHECK(read_calls(*record) > 0);
    writer.join();
    return failures;
}
