// Point-to-point messages: matched by source and tag, ordered per pair and tag, any number pending.
//
// Everything that passes between two ranks is a letter (shared.h). A small message travels in one. A larger one is
// offered; once the reader has a matching receive, it reads the payload from the sender's memory if it can and that is
// faster, else it asks for it in pieces.
//
// Every thread that waits drives all transfers of the rank, under one lock; while nobody waits, a worker does.
#pragma once

#include <deque>
#include <list>
#include <thread>

#include "channel.h"
#include "work.h"

namespace ringcomm {

// What a send or a receive asks for. A send never writes through `data`.
struct Message {
    std::byte* data;
    uint64_t count;
    int dtype;
    int peer;  // of a receive: -1 for any
    int64_t tag;
    double timeout;
};

class Letters {
public:
    explicit Letters(Comm& comm);
    ~Letters() { stop(); }

    void send(const Message& message);
    int receive(const Message& message);  // returns the source, as does exchange
    int exchange(const Message& sent, const Message& received);
    // In the background: the worker sees to it while no thread of the user waits.
    std::shared_ptr<Work> start_send(const Message& message) { return start(true, message); }
    std::shared_ptr<Work> start_receive(const Message& message) { return start(false, message); }
    void stop();  // after comm.start_closing()

private:
    struct Parcel;  // a send or a receive that is not done; whoever called for it keeps it
    class Posted;   // … in the background: it keeps itself
    class Waiter;

    struct Unexpected {
        int source;
        Heading heading;
        std::vector<std::byte> payload;
    };
    // A letter to be written.
    struct Outgoing {
        LetterKind kind;
        Parcel* parcel;
        uint64_t number;  // of the offer that it answers
    };
    struct Pair {
        int peer;
        Outbox out;
        Inbox in;
        std::deque<Outgoing> queue{};     // letters that had no room yet, in order
        std::vector<Parcel*> offered{};   // sends: offered, and not known to have arrived
        std::vector<Parcel*> incoming{};  // receives that have been offered their message
        uint64_t offers = 0;
    };

    std::shared_ptr<Work> start(bool sends, const Message& message);
    void post(std::initializer_list<Parcel*> parcels, const std::shared_ptr<Posted>& posted = nullptr);
    void offer(Parcel& parcel);
    void progress();
    void put(Pair& pair, Outgoing letter);
    bool write(Pair& pair, Outgoing letter);
    bool flush(Pair& pair);
    bool drain(Pair& pair);
    bool fetch(Pair& pair);
    void arrive(Pair& pair, const Heading& heading, const std::byte* payload);
    void match(int source, const Heading& heading, const std::byte* payload);
    void deliver(Parcel& parcel, int source, const Heading& heading, const std::byte* payload);
    bool readable(int peer, const Parcel& parcel) const;
    bool keeps(int peer) const;
    void complete(Parcel& parcel);
    void fail(Parcel& parcel, const Failure& failure);
    void drop_all(const Failure& failure, const Parcel* spared = nullptr);
    void wait(Parcel& parcel, uint64_t deadline = UINT64_MAX);
    void work();
    template <class Visit>
    void each_open(Visit visit);
    std::optional<Failure> hopeless();
    std::optional<Failure> hopeless(const Parcel& parcel, uint64_t now) const;
    double timeout(const Parcel& parcel) const;
    Pair& with(int peer) { return pairs_[peer < comm_.rank ? peer : peer - 1]; }

    Comm& comm_;
    std::mutex mutex_;
    std::vector<Pair> pairs_;           // with every other rank
    std::vector<Parcel*> receives_;     // not matched yet, in order
    std::list<Unexpected> unexpected_;  // arrived, not matched yet, in order
    bool completed_ = false;            // something that another thread may wait for

    std::condition_variable worker_wakes_;
    int background_ = 0;           // open parcels that nobody need wait for
    std::atomic<int> waiters_{0};  // threads of the user in wait(): they drive, the worker keeps out of their way
    bool stopping_ = false;
    std::thread worker_;
};

}  // namespace ringcomm
