// NetworkCall: its stages, waiting and failing.
#include "network/call.h"

#include <algorithm>
#include <limits>

#include "kernels/cpu/kernels.h"

namespace ringcomm {

namespace {

constexpr uint64_t SPIN_NS = 200'000, SPIN_OVERSUBSCRIBED_NS = 20'000;  // a sleeping rank takes some 50 us to wake
constexpr uint64_t SOON_NS = 10'000;       // a message over TCP takes some 5 us; then others may need the core
constexpr uint64_t SLICE_NS = 50'000'000;  // between checks of failures, signals and the deadline

// Afterwards the flight record names nobody any more.
class LongWait {
public:
    explicit LongWait(NetworkGroup& group) : group_(group) {}
    ~LongWait() {
        if (group_.flight.waits_for.load(std::memory_order_relaxed)) group_.flight.clear_waits_for();
    }
    LongWait(const LongWait&) = delete;

private:
    NetworkGroup& group_;
};

}  // namespace

NetworkCall::NetworkCall(NetworkGroup& group, const CallRecord& call)
    : RunningCollective(group, call),
      group_(group),
      row_(movement_of(call.collective)),
      blocks_(call),
      one_shot_(!call.agrees_only && fits_one_shot()) {}

void NetworkCall::prepare() const {
    if (one_shot_) return;
    require_program(call);
    if (!row_.exchanges() || !call.counts) return;
    uint64_t nowhere = 0;  // the program does not depend on the address
    const CallRecord counts = gathering_counts(&nowhere);
    if (!NetworkCall(group_, counts).one_shot_) require_program(counts);
}

void NetworkCall::require_program(const CallRecord& call) const {
    if (group_.programs.find(key_of(call, size))) return;
    if (!group_.record_program) throw Failure(RC_ARGUMENT, "the call needs a program, and no recorder is set", -1);
    about_to_wait();  // Python records it, and may make other calls
    if (group_.record_program(call)) throw Failure(RC_ARGUMENT, "the program of the call was not recorded", -1);
}

void NetworkCall::run() {
    agree();
    if (call.agrees_only) return;
    if (row_.exchanges() && call.counts) gather_counts();
    if (one_shot_) {
        finish_one_shot();
    } else {
        run_program();
    }
}

// Spins as long as data moves, then sleeps on the link. wait_until() counts the time that this thread has the core, so
// that ranks that share cores yield for longer: an all_reduce of 8 MiB on 2 x 2 ranks of 2 cores takes 5.8 ms in place
// of 4.6, where its waits begin anew whenever data has moved.
void NetworkCall::wait(const std::function<bool()>& ready, const int& peer, int awaited) {
    const LongWait long_wait(group_);
    NetworkWorld& world = *group_.world;
    const uint64_t spin_ns = group_.tuning().oversubscribed ? SPIN_OVERSUBSCRIBED_NS : SPIN_NS;
    const auto ready_now = [&](bool& moved) {
        const auto lock = lock_or_wait(world.mutex);
        if (ready()) return true;
        moved = world.progress();
        return ready();
    };
    uint64_t idle_since = now_ns(), checked = idle_since;
    for (;;) {
        bool moved = false;
        if (ready_now(moved)) return;
        about_to_wait();
        const uint64_t now = now_ns();
        if (moved) idle_since = now;
        const bool sleeps = now - idle_since >= spin_ns;
        if (sleeps) {
            const uint32_t ticket = world.announce();
            const bool already = ready_now(moved);
            if (!already) group_.set_waits_for(peer);
            if (!already) world.sleep(ticket, slice_ns(deadline()));
            world.retract();
            if (already || ready_now(moved)) return;
        } else if (group_.tuning().oversubscribed || now - idle_since > SOON_NS) {
            yield_core();
        }
        if (!sleeps && now - checked < SLICE_NS) continue;
        checked = now;
        group_.hear_from(awaited);
        awaited_ = awaited;
        const auto failure = stop_reason();
        awaited_ = -1;
        if (!failure) continue;
        if (ready_now(moved)) return;
        fail(*failure);
    }
}

// A collective of the ranks of this host. Its failure is one of the group, and so is its deadline.
void NetworkCall::run_local(int collective, const void* source, void* target, uint64_t count, int dtype, int op,
                            int root, const uint64_t* counts) {
    CallRecord part{collective,
                    static_cast<const std::byte*>(source),
                    static_cast<std::byte*>(target),
                    count,
                    dtype,
                    op,
                    1.0,
                    root,
                    counts,
                    std::numeric_limits<double>::infinity(),
                    nullptr,
                    dtype_bytes(dtype)};
    inside_host_ = true;
    try {
        const PeerGroup::EnclosedWait enclosed(group_, call_name(call.collective), *this);
        group_.local.collectives->run(part);
    } catch (const Failure& failure) {
        if (failure.error.code == RC_INTERRUPTED) throw failure;
        group_.check_failure();
        if (failure.error.code == RC_CLOSED) fail(Failure(RC_CLOSED, failure.error.message, rank));
        fail(group_.from_host(failure, describe_call()));
    }
    inside_host_ = false;
}

// A rank of this host may have heard first.
std::optional<Failure> NetworkCall::host_failure() {
    if (!group_.local.group) return {};
    try {
        group_.local.group->check_failure();
    } catch (const Failure& failure) {
        return group_.from_host(failure, describe_call());
    }
    return {};
}

Failure NetworkCall::timed_out() {
    const auto statuses = group_.query(1);
    const bool agreed = !records_.empty();  // then all ranks have begun
    std::vector<int> missing;
    for (int r = 0; r < size; ++r) {
        const auto& status = statuses[r];
        if (r == rank || (status && status->runs && (agreed || status->begun >= call.epoch))) continue;
        missing.push_back(r);
    }
    const std::string why = missing.empty() ? "no rank made progress"
                            : agreed        ? "no answer from " + name_ranks(missing)
                                            : "it was not called by " + name_ranks(missing);
    return timeout(why, missing, rank);
}

void NetworkCall::combine(std::byte* target, const std::vector<const void*>& sources, uint64_t count) const {
    if (count) kernels().reduce[call.dtype][partial_op()](target, sources.data(), int(sources.size()), count, 1.0);
}

// The sum of all ranks becomes their average.
void NetworkCall::divide(std::byte* target, uint64_t count) const {
    const void* sum = target;
    if (count) kernels().reduce[call.dtype][RC_AVG](target, &sum, 1, count, size);
}

}  // namespace ringcomm
