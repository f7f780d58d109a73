// PeerGroup: one rank's view of a group of ranks, whatever connects them. ShmGroup is a group in shared memory.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/call_record.h"
#include "core/errors.h"
#include "core/flight.h"
#include "core/trace.h"
#include "core/waiting.h"

namespace ringcomm {

class PacketChannel;  // p2p/channel.h

extern std::atomic<uint64_t> fork_generation;
extern std::atomic<int (*)()> interrupt_function;

// Every long wait calls these functions, one per communicator: they receive the messages that have come, so that no
// sender waits for a rank that waits for something else.
class Drains {
public:
    void add(const void* owner, std::function<void()> drain);
    void remove(const void* owner);  // its function does not run afterwards
    void run(const void* except);    // all functions but that of this owner

private:
    std::mutex mutex_;
    std::map<const void*, std::function<void()>> functions_;
};

// -1: not there.
int index_of(int member, const std::vector<int>& members);

// The first failure that no call has thrown yet, of a group that stays usable.
class KeptFailure {
public:
    void keep(const Failure& failure);
    bool exists() const { return exists_.load(std::memory_order_relaxed); }
    std::optional<Failure> take();
    void check() {
        if (!exists()) return;
        if (const auto kept = take()) throw *kept;
    }

private:
    std::mutex mutex_;
    std::optional<Failure> failure_;
    std::atomic<bool> exists_{false};
};

class PeerGroup {
public:
    // `flight`: this rank's. `drains`: of all groups of this rank.
    PeerGroup(int rank, int size, const rc_tuning& tuning, FlightRecord& flight, std::shared_ptr<Drains> drains);
    virtual ~PeerGroup() = default;
    PeerGroup(const PeerGroup&) = delete;

    const int rank, size;
    const SpinPolicy spin_policy;
    FlightRecord& flight;
    const std::shared_ptr<Drains> drains;
    std::atomic<uint64_t> last_path{0};  // of the last collective: chunks × RC_PATHS + rc_path
    Waits* waits = nullptr;              // of the collective that runs, if it is traced

    // The trace of this rank, nullptr while there is none. What it returns lives as long as the group.
    Trace* trace() const { return trace_.load(std::memory_order_acquire); }
    void start_trace(int fd);
    void stop_trace();  // that was started last; the one before goes on

    const rc_tuning& tuning() const { return tuning_; }

    // Throws if the communicator is closed or broken. Every call begins with this.
    virtual void ensure_ready();
    // Throws the first failure of this communicator or an ancestor.
    virtual void check_failure() const = 0;
    // Whether a failure is stored, or being stored, for this communicator or an ancestor.
    virtual bool has_failed() const = 0;
    // Stores the first failure for all ranks and wakes them; fail() then throws the stored failure.
    virtual void store_failure(const Failure& failure) = 0;
    [[noreturn]] void fail(const Failure& failure);
    virtual bool closed(int r) const = 0;
    // From now on this rank hears how rank `r` ends, also where that takes a connection.
    virtual void hear_from(int /*r*/) {}
    // How a rank that cannot answer ended, as in "died"; empty while it runs.
    virtual std::string how_it_ended(int r) = 0;
    // The failure if rank `r` has died or closed; `what` describes the call that needs it.
    std::optional<Failure> peer_failure(int r, const std::string& what);
    Failure peer_lost(int r, const std::string& how, const std::string& what) const;
    // Runs Python's signal handlers (main thread only); throws if one raised.
    void check_interrupt(const char* what);
    // What the other ranks are told of a wait of this rank that a signal has ended.
    Failure interrupted(const char* what) const;
    // Whether this thread runs a signal handler inside a wait of this communicator: it must not wait for the
    // interrupted call, which is further up its own stack.
    bool interrupted_here() const;
    // While this thread waits in another group for a call of this one. What ends the call ends such a wait.
    class EnclosedWait {
    public:
        EnclosedWait(PeerGroup& group, const char* what, WaitChecks& checks);
        ~EnclosedWait();
        EnclosedWait(const EnclosedWait&) = delete;

    private:
        friend PeerGroup;
        PeerGroup& group_;
        const char* const what_;
        WaitChecks& checks_;
        const EnclosedWait* const outer_;
    };
    // The spin of a rank has expired: see machine/placement.h.
    virtual void on_spin_expired() {}
    // As WaitChecks::yield().
    virtual bool yield() {
        yield_core();
        return true;
    }
    // What ends any wait: a failure on some rank, close() or a signal. `drained`: the owner of a drain that the wait
    // itself does.
    std::optional<Failure> stop_reason(const char* what, const void* drained = nullptr);

    // Before a call is queued or run: what it needs that is made once for all calls like it.
    virtual void prepare(const CallRecord&) {}
    // One thread at a time. A call that throws RC_MISMATCH or RC_ARGUMENT is over on all ranks.
    virtual void run_collective(const CallRecord& call) = 0;
    // The mismatch of a call that had returned: the next call throws it, once that has ended.
    KeptFailure returned_failure;
    // The failure of a call whose work was dropped. No later call throws it: other ranks may have seen it in their
    // waits, and would go on with further parts of that call without this one.
    KeptFailure dropped_failure;
    // Whether the call can be started without waiting: then start_collective() gives its peers all that they need of
    // this rank, and once has_arrived() is true, run_collective() does the rest without waiting for long.
    virtual bool can_start(const CallRecord&) const { return false; }
    virtual void start_collective(const CallRecord&) {}
    virtual bool has_arrived(const CallRecord&) const { return false; }
    // Waits until all ranks have started call `epoch`, the last one here; throws RC_MISMATCH if they have called
    // different things. Groups that know it before a call ends need not do anything.
    virtual void confirm(uint64_t /*epoch*/, double /*timeout*/) {}

    // Its rank in the world: of all that share memory, or that a link connects.
    virtual int member(int r) const = 0;
    void set_waits_for(int r) { flight.set_waits_for(r, r < 0 ? -1 : member(r)); }  // r: -1: any
    // Of the flight record, before a call that does not begin with ensure_ready().
    virtual void allocate() {}
    virtual bool used() const { return true; }  // by this rank; if not, a call would allocate memory

    // For point-to-point messages with another rank; nullptr if there is none.
    virtual std::unique_ptr<PacketChannel> open_channel(int peer) = 0;
    // Brings packets and failures from the peers, where that needs a thread.
    virtual void progress() {}
    // Of the threads that wait for messages: its events are packets, room for packets, reads that can go on,
    // failures and closed ranks.
    virtual Sleeper& sleeper() = 0;

    virtual uint64_t id() const = 0;                        // the same on all ranks, and of no other group
    virtual RankReport report(int r, int calls) const = 0;  // the last calls of rank r
    // `message` with a line per rank, the ranks in `first` before the others.
    std::string with_report(const std::string& message, const std::vector<int>& first) const;

    bool closing() const { return closing_.load(std::memory_order_relaxed); }
    virtual void start_closing() { closing_.store(true); }  // wakes the waiters of this rank, and notifies the peers
    virtual void finish_closing() = 0;                      // no thread of this rank may use the group afterwards

private:
    const rc_tuning tuning_;
    std::atomic<bool> closing_{false};
    std::atomic<Trace*> trace_{nullptr};
    std::mutex traces_mutex_;
    std::vector<std::unique_ptr<Trace>> traces_;  // another thread may still add to an earlier one
};

}  // namespace ringcomm
