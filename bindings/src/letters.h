// Point-to-point messages: matched by source and tag, ordered per pair and tag, any number pending.
//
// Every thread that waits drives all transfers of the rank, under one lock; while nobody waits, a worker does. A
// message of at most a quarter of the ring travels in it. A larger one is announced there; once the reader has a
// matching receive it grants the announcement, and the payload streams through the two bulk slots of the pair.
#pragma once

#include <deque>
#include <list>
#include <thread>

#include "work.h"

namespace ringcomm {

class Letters {
public:
    explicit Letters(Comm& comm);
    ~Letters() { stop(); }

    struct Parcel;  // a send or a receive
    using Handle = std::shared_ptr<Parcel>;

    // In the background: the worker sees to it while no thread of the user waits.
    Handle send(const std::byte* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout,
                bool background);
    Handle receive(std::byte* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout, bool background);
    void wait(Parcel& parcel, uint64_t deadline = UINT64_MAX);
    void stop();  // after comm.start_closing()

private:
    struct Unexpected {
        int source;
        Letter letter;
        std::vector<std::byte> payload;
    };
    struct Grant {
        uint64_t number;
        Handle parcel;  // nullptr: refused
    };
    // What passes between this rank and one peer.
    struct Pair {
        std::deque<Handle> unsent;    // in order; their letters do not fit into the ring yet
        std::list<Handle> announced;  // sent large messages that wait for their grant, or stream
        uint64_t announcements = 0;
        uint64_t granted = 0;      // the last grant of the peer that was acted upon
        std::deque<Grant> grants;  // ours to the peer; the first one is streaming
    };

    Handle post(Handle parcel);
    void offer(const Handle& parcel);
    void progress();
    bool push_letters(int p);
    bool stream_out(int p);
    bool drain(int p);
    bool stream_in(int p);
    void arrive(int source, const Letter& letter, const std::byte* payload);
    bool deliver(Parcel& parcel, int source, const Letter& letter, const std::byte* payload);
    void grant(int source, uint64_t number, Handle parcel);
    void issue_grant(int p);
    void complete(Parcel& parcel, std::optional<Failure> failure = {});
    void drop_all(const Failure& failure);
    void work();
    std::string words(const Parcel& parcel) const;
    std::optional<Failure> hopeless(const Parcel& parcel, uint64_t now);

    class Waiter;

    Comm& comm_;
    std::mutex mutex_;
    std::vector<Pair> pairs_;
    std::list<Handle> receives_;        // posted, not matched yet, in order
    std::list<Unexpected> unexpected_;  // arrived, not matched yet, in order
    std::list<Handle> open_;            // everything not completed
    bool completed_ = false;            // something that another thread may wait for

    std::condition_variable worker_wakes_;
    int background_ = 0;           // open parcels that nobody need wait for
    std::atomic<int> waiters_{0};  // threads of the user in wait(): they drive, the worker keeps out of their way
    bool stopping_ = false;
    std::thread worker_;
};

struct Letters::Parcel : Work {
    Parcel(Letters& letters, bool sends, std::byte* data, uint64_t count, int dtype, int peer, int64_t tag,
           double timeout, bool background)
        : letters(letters),
          sends(sends),
          data(data),
          count(count),
          bytes(count * dtype_bytes(dtype)),
          dtype(dtype),
          peer(peer),
          tag(tag),
          timeout(timeout),
          background(background) {}
    void wait(Comm&, uint64_t deadline) override { letters.wait(*this, deadline); }

    Letters& letters;
    const bool sends;
    std::byte* const data;
    const uint64_t count;
    const size_t bytes;
    const int dtype, peer;
    const int64_t tag;
    const double timeout;
    const bool background;
    uint64_t start = 0, flight = 0;
    uint64_t number = 0;  // of the announcement
    size_t moved = 0;
    std::list<Handle>::iterator place;  // in open_
};

}  // namespace ringcomm
