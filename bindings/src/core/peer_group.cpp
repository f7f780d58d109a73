// What all kinds of groups have in common: waits, signals and reports.
#include "core/peer_group.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace ringcomm {

void KeptFailure::keep(const Failure& failure) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = failure;
    exists_.store(true);
}

std::optional<Failure> KeptFailure::take() {
    const std::lock_guard lock(mutex_);
    exists_.store(false);
    return std::exchange(failure_, std::nullopt);
}

std::atomic<uint64_t> fork_generation{0};
std::atomic<int (*)()> interrupt_function{nullptr};

namespace {

// The waits of this thread in which a signal handler is running, innermost first.
struct HandlerFrame {
    const PeerGroup* group;
    const PeerGroup* enclosing;  // whose call waits in `group`
    const HandlerFrame* outer;
};
thread_local const HandlerFrame* handler_frames = nullptr;
thread_local const PeerGroup::EnclosedWait* enclosed = nullptr;

}  // namespace

void Drains::add(const void* owner, std::function<void()> drain) {
    const std::lock_guard lock(mutex_);
    functions_[owner] = std::move(drain);
}

void Drains::remove(const void* owner) {
    const std::lock_guard lock(mutex_);
    functions_.erase(owner);
}

void Drains::run(const void* except) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return;  // another wait is at it
    for (const auto& [owner, drain] : functions_) {
        if (owner != except) drain();
    }
}

int index_of(int member, const std::vector<int>& members) {
    const auto found = std::find(members.begin(), members.end(), member);
    return found == members.end() ? -1 : int(found - members.begin());
}

PeerGroup::PeerGroup(int rank, int size, const rc_tuning& tuning, FlightRecord& flight, std::shared_ptr<Drains> drains)
    : rank(rank),
      size(size),
      spin_policy(spin_policy_of(tuning.wake_ns, tuning.oversubscribed)),
      flight(flight),
      drains(std::move(drains)),
      tuning_(tuning) {}

void PeerGroup::start_trace(int fd) {
    const std::lock_guard lock(traces_mutex_);
    traces_.push_back(std::make_unique<Trace>(fd, trace_.load()));
    trace_.store(traces_.back().get());
}

void PeerGroup::stop_trace() {
    const std::lock_guard lock(traces_mutex_);
    Trace* const trace = trace_.load();
    if (!trace) return;
    trace_.store(trace->outer);
    trace->end();
}

void PeerGroup::ensure_ready() {
    if (closing()) throw Failure(RC_CLOSED, "this communicator is closed", rank);
    check_failure();
}

void PeerGroup::fail(const Failure& failure) {
    if (failure.error.code == RC_CLOSED) throw failure;  // this rank only
    store_failure(failure);
    check_failure();
    throw failure;
}

std::optional<Failure> PeerGroup::peer_failure(int r, const std::string& what) {
    const std::string how = closed(r) ? "closed the communicator" : how_it_ended(r);
    if (how.empty()) return {};
    return peer_lost(r, how, what);
}

Failure PeerGroup::peer_lost(int r, const std::string& how, const std::string& what) const {
    return Failure(RC_PEER_LOST, format("rank %d ", r) + how + format(" while rank %d needed it for ", rank) + what, r);
}

void PeerGroup::check_interrupt(const char* what) {
    const auto interrupt = interrupt_function.load();
    if (!interrupt || syscall(SYS_gettid) != getpid()) return;
    const HandlerFrame here{this, enclosed ? &enclosed->group_ : nullptr, handler_frames};
    handler_frames = &here;
    const EnclosedWait* const outer = std::exchange(enclosed, nullptr);  // a handler may wait in other communicators
    about_to_wait();
    const int raised = interrupt();
    enclosed = outer;
    handler_frames = here.outer;
    if (!raised) return;
    PeerGroup& whole = outer ? outer->group_ : *this;  // whose ranks and calls the user knows
    whole.store_failure(whole.interrupted(outer ? outer->what_ : what));
    throw Failure(RC_INTERRUPTED, format("%s was interrupted by a signal", what), rank);
}

Failure PeerGroup::interrupted(const char* what) const {
    return Failure(RC_ABORTED, format("rank %d was interrupted by a signal during %s", rank, what), rank);
}

PeerGroup::EnclosedWait::EnclosedWait(PeerGroup& group, const char* what, WaitChecks& checks)
    : group_(group), what_(what), checks_(checks), outer_(std::exchange(enclosed, this)) {}

PeerGroup::EnclosedWait::~EnclosedWait() { enclosed = outer_; }

bool PeerGroup::interrupted_here() const {
    for (const HandlerFrame* wait = handler_frames; wait; wait = wait->outer) {
        if (wait->group == this || wait->enclosing == this) return true;
    }
    return false;
}

std::optional<Failure> PeerGroup::stop_reason(const char* what, const void* drained) {
    check_failure();
    check_interrupt(what);
    drains->run(drained);
    if (enclosed && &enclosed->group_ != this) {
        if (const auto failure = enclosed->checks_.stop_reason()) enclosed->checks_.fail(*failure);
    }
    if (closing()) return Failure(RC_CLOSED, format("this communicator was closed during %s", what), rank);
    return {};
}

std::string PeerGroup::with_report(const std::string& message, const std::vector<int>& first) const {
    MessageLines lines(message);
    for (int r : first) lines.add(report(r, 1).text());
    for (int r = 0; r < size; ++r) {
        if (index_of(r, first) < 0) lines.add(report(r, 1).text());
    }
    return lines.text();
}

}  // namespace ringcomm
