#include "letters.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <utility>

namespace ringcomm {

namespace {

constexpr size_t UNIT = sizeof(Letter);  // entries of a ring start at multiples of it
constexpr uint64_t BULK_SLOTS = 2;

size_t entry_bytes(size_t payload) { return UNIT + (payload + UNIT - 1) / UNIT * UNIT; }

}  // namespace

Letters::Letters(Comm& comm) : comm_(comm), pairs_(comm.size) {}

Letters::Handle Letters::send(const std::byte* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout,
                              bool background) {
    // A send never writes through the pointer.
    return post(std::make_shared<Parcel>(*this, true, const_cast<std::byte*>(data), count, dtype, peer, tag,
                                         timeout < 0 ? comm_.tuning().timeout : timeout, background));
}

Letters::Handle Letters::receive(std::byte* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout,
                                 bool background) {
    return post(std::make_shared<Parcel>(*this, false, data, count, dtype, peer, tag,
                                         timeout < 0 ? comm_.tuning().timeout : timeout, background));
}

Letters::Handle Letters::post(Handle parcel) {
    comm_.ready();
    if (parcel->sends && comm_.closed(parcel->peer)) comm_.fail(*comm_.gone(parcel->peer, words(*parcel)));
    const std::lock_guard lock(mutex_);
    if (stopping_) throw Failure(RC_CLOSED, "this communicator is closed", comm_.rank);
    // First of all, for it may fail.
    if (parcel->background && !worker_.joinable()) worker_ = named_thread("ringcomm-p2p", [this] { work(); });
    parcel->start = now_ns();
    const uint64_t signature = pack(parcel->sends ? CALL_SEND : CALL_RECV, parcel->dtype, 0, parcel->peer, false);
    parcel->flight = comm_.flight_start(signature, parcel->count, 0, parcel->start);
    parcel->place = open_.insert(open_.end(), parcel);
    background_ += parcel->background;
    try {
        offer(parcel);
        progress();
    } catch (const std::exception& error) {  // out of memory: what was half done cannot be undone
        const Failure failure(RC_SYSTEM, error.what(), comm_.rank);
        drop_all(failure);
        comm_.fail(failure);
    }
    if (background_) worker_wakes_.notify_one();
    return parcel;
}

void Letters::offer(const Handle& parcel) {
    if (parcel->sends && parcel->peer == comm_.rank) {
        const Letter letter{parcel->bytes, parcel->tag, 0, uint32_t(parcel->dtype), 0};
        arrive(comm_.rank, letter, parcel->data);
        complete(*parcel);
        return;
    }
    if (parcel->sends) {
        pairs_[parcel->peer].unsent.push_back(parcel);
        return;
    }
    const auto found = std::find_if(unexpected_.begin(), unexpected_.end(), [&](const Unexpected& message) {
        return message.letter.tag == parcel->tag && (parcel->peer < 0 || parcel->peer == message.source);
    });
    if (found == unexpected_.end()) {
        receives_.push_back(parcel);
        return;
    }
    const Unexpected message = std::move(*found);
    unexpected_.erase(found);
    const bool accepted = deliver(*parcel, message.source, message.letter, message.payload.data());
    if (message.letter.number) grant(message.source, message.letter.number, accepted ? parcel : nullptr);
}

// Moves what can move now, at most two slots per peer, for the lock is held.
void Letters::progress() {
    for (int p = 0; p < comm_.size; ++p) {
        if (p == comm_.rank) continue;
        bool moved = push_letters(p);
        moved |= stream_out(p);
        moved |= drain(p);
        moved |= stream_in(p);
        if (moved) ring_any(comm_.header(p).letter_bell);
    }
    if (std::exchange(completed_, false)) ring_any(comm_.mine().letter_bell);
}

bool Letters::push_letters(int p) {
    Pair& pair = pairs_[p];
    if (pair.unsent.empty()) return false;
    Channel& channel = comm_.arena().channel(comm_.rank, p);
    std::byte* ring = comm_.arena().ring(comm_.rank, p);
    const size_t capacity = comm_.arena().layout.ring_bytes;
    uint64_t head = channel.ring_head.load(std::memory_order_relaxed);
    const uint64_t begin = head, tail = observe(channel.ring_tail);
    while (!pair.unsent.empty()) {
        Parcel& parcel = *pair.unsent.front();
        const bool eager = parcel.bytes <= capacity / 4;
        const size_t needed = entry_bytes(eager ? parcel.bytes : 0), to_end = capacity - head % capacity;
        const size_t skipped = needed > to_end ? to_end : 0;
        if (head + skipped + needed - tail > capacity) break;
        if (skipped) {
            reinterpret_cast<Letter*>(ring + head % capacity)->skip = 1;
            head += skipped;
        }
        auto* letter = reinterpret_cast<Letter*>(ring + head % capacity);
        *letter = {parcel.bytes, parcel.tag, 0, uint32_t(parcel.dtype), 0};
        head += needed;
        if (eager) {
            if (parcel.bytes) memcpy(letter + 1, parcel.data, parcel.bytes);
            complete(parcel);
        } else {
            letter->number = parcel.number = ++pair.announcements;
            pair.announced.push_back(pair.unsent.front());
        }
        pair.unsent.pop_front();
    }
    if (head == begin) return false;
    publish<SITE_RING_HEAD>(channel.ring_head, head);
    return true;
}

bool Letters::stream_out(int p) {
    Pair& pair = pairs_[p];
    if (pair.announced.empty()) return false;
    Channel& channel = comm_.arena().channel(comm_.rank, p);
    const uint64_t grant = channel.grant.load(std::memory_order_acquire), number = grant >> 1;
    if (number == 0 || number == pair.granted) return false;
    const auto found = std::find_if(pair.announced.begin(), pair.announced.end(),
                                    [&](const Handle& parcel) { return parcel->number == number; });
    if (found == pair.announced.end()) return false;
    Parcel& parcel = **found;
    const bool refused = grant & 1;
    const size_t slot_bytes = comm_.arena().layout.bulk_bytes;
    uint64_t staged = channel.bulk_staged.load(std::memory_order_relaxed);
    bool moved = false;
    for (uint64_t k = 0; k < BULK_SLOTS && staged - observe(channel.bulk_taken) < BULK_SLOTS; ++k) {
        const size_t length = refused ? 0 : std::min(slot_bytes, parcel.bytes - parcel.moved);
        std::byte* slot = comm_.arena().bulk(comm_.rank, p, staged);
        if (length >= comm_.tuning().stream_bytes) {
            kernels().copy_stream(slot, parcel.data + parcel.moved, length);
        } else {
            memcpy(slot, parcel.data + parcel.moved, length);
        }
        parcel.moved += length;
        publish<SITE_BULK_STAGED>(channel.bulk_staged, ++staged);
        moved = true;
        ring_any(comm_.header(p).letter_bell);  // the reader can copy this piece while the next one is written
        if (!refused && parcel.moved < parcel.bytes) continue;
        pair.granted = number;
        if (refused) {
            Failure mismatch(RC_MISMATCH, format("rank %d expects another size or dtype than ", p) + words(parcel), p);
            mismatch.error.peer = p;
            copy_text(mismatch.error.got, sizeof mismatch.error.got, words(parcel));
            complete(parcel, mismatch);
        } else {
            complete(parcel);
        }
        pair.announced.erase(found);
        break;
    }
    return moved;
}

bool Letters::drain(int p) {
    Channel& channel = comm_.arena().channel(p, comm_.rank);
    const std::byte* ring = comm_.arena().ring(p, comm_.rank);
    const size_t capacity = comm_.arena().layout.ring_bytes;
    uint64_t tail = channel.ring_tail.load(std::memory_order_relaxed);
    const uint64_t begin = tail, head = observe(channel.ring_head);
    while (tail < head) {
        const auto* letter = reinterpret_cast<const Letter*>(ring + tail % capacity);
        if (letter->skip) {
            tail += capacity - tail % capacity;
            continue;
        }
        arrive(p, *letter, reinterpret_cast<const std::byte*>(letter + 1));
        tail += entry_bytes(letter->number ? 0 : letter->bytes);
    }
    if (tail == begin) return false;
    publish<SITE_RING_TAIL>(channel.ring_tail, tail);
    return true;
}

void Letters::arrive(int source, const Letter& letter, const std::byte* payload) {
    const auto found = std::find_if(receives_.begin(), receives_.end(), [&](const Handle& parcel) {
        return parcel->tag == letter.tag && (parcel->peer < 0 || parcel->peer == source);
    });
    if (found == receives_.end()) {
        // The sender's buffer is free already, so an eager payload must be kept here until somebody asks for it.
        unexpected_.push_back({source, letter, {payload, payload + (letter.number ? 0 : letter.bytes)}});
        return;
    }
    const Handle parcel = *found;
    receives_.erase(found);
    const bool accepted = deliver(*parcel, source, letter, payload);
    if (letter.number) grant(source, letter.number, accepted ? parcel : nullptr);
}

// True if the message fits the receive. An eager one is then complete, an announced one waits for its stream.
bool Letters::deliver(Parcel& parcel, int source, const Letter& letter, const std::byte* payload) {
    parcel.source = source;
    if (letter.bytes != parcel.bytes || letter.dtype != uint32_t(parcel.dtype)) {
        const std::string sent = format("%s x %zu", dtype_name(letter.dtype), letter.bytes / dtype_bytes(letter.dtype));
        Failure mismatch(RC_MISMATCH, format("rank %d sent %s, but ", source, sent.c_str()) + words(parcel), source);
        mismatch.error.peer = source;
        copy_text(mismatch.error.expected, sizeof mismatch.error.expected,
                  format("%s x %" PRIu64, dtype_name(parcel.dtype), parcel.count));
        copy_text(mismatch.error.got, sizeof mismatch.error.got, sent);
        complete(parcel, mismatch);
        return false;
    }
    if (letter.number) return true;
    if (letter.bytes) memcpy(parcel.data, payload, letter.bytes);
    complete(parcel);
    return true;
}

void Letters::grant(int source, uint64_t number, Handle parcel) {
    pairs_[source].grants.push_back({number, std::move(parcel)});
    if (pairs_[source].grants.size() == 1) issue_grant(source);
}

void Letters::issue_grant(int p) {
    const Grant& next = pairs_[p].grants.front();
    comm_.arena().channel(p, comm_.rank).grant.store(next.number << 1 | (next.parcel ? 0 : 1));
    ring_any(comm_.header(p).letter_bell);
}

bool Letters::stream_in(int p) {
    Pair& pair = pairs_[p];
    if (pair.grants.empty()) return false;
    Channel& channel = comm_.arena().channel(p, comm_.rank);
    const size_t slot_bytes = comm_.arena().layout.bulk_bytes;
    uint64_t taken = channel.bulk_taken.load(std::memory_order_relaxed);
    bool moved = false;
    for (uint64_t k = 0; k < BULK_SLOTS && !pair.grants.empty() && observe(channel.bulk_staged) > taken; ++k) {
        const Handle parcel = pair.grants.front().parcel;
        if (parcel) {
            const size_t length = std::min(slot_bytes, parcel->bytes - parcel->moved);
            memcpy(parcel->data + parcel->moved, comm_.arena().bulk(p, comm_.rank, taken), length);
            parcel->moved += length;
        }
        publish<SITE_BULK_TAKEN>(channel.bulk_taken, ++taken);
        moved = true;
        ring_any(comm_.header(p).letter_bell);
        if (parcel && parcel->moved < parcel->bytes) continue;
        if (parcel) complete(*parcel);
        pair.grants.pop_front();
        if (!pair.grants.empty()) issue_grant(p);
    }
    return moved;
}

void Letters::complete(Parcel& parcel, std::optional<Failure> failure) {
    comm_.flight_end(parcel.flight, failure ? failure->error.code : RC_OK);
    completed_ = true;
    background_ -= parcel.background;
    const Handle kept = *parcel.place;  // whoever waits may let go of it at once
    open_.erase(parcel.place);
    parcel.finish(std::move(failure));
}

std::string Letters::words(const Parcel& parcel) const {
    return describe(pack(parcel.sends ? CALL_SEND : CALL_RECV, parcel.dtype, 0, parcel.peer, false), parcel.count) +
           format(" with tag %" PRId64, parcel.tag);
}

// The failure of a parcel that can no longer be completed, or no longer in time.
std::optional<Failure> Letters::hopeless(const Parcel& parcel, uint64_t now) {
    const int from = parcel.peer >= 0 ? parcel.peer : parcel.source;  // -1: a receive from any rank, not matched yet
    if (from >= 0 && from != comm_.rank) {
        if (auto failure = comm_.gone(from, words(parcel))) return failure;
    }
    bool anybody = from >= 0 || comm_.size == 1;
    for (int p = 0; p < comm_.size && from < 0; ++p) {
        if (p == comm_.rank || comm_.closed(p)) continue;  // it can do without those that closed; a death is a failure
        if (auto failure = comm_.gone(p, words(parcel))) return failure;
        anybody = true;
    }
    if (!anybody) return Failure(RC_PEER_LOST, "all other ranks closed the communicator during " + words(parcel));
    if (now < deadline_of(parcel.start, parcel.timeout)) return {};
    const std::string message = format("rank %d waited %.3g s for ", comm_.rank, parcel.timeout) + words(parcel);
    const std::vector<int> first = from >= 0 ? std::vector{from} : std::vector<int>{};
    return Failure(RC_TIMEOUT, comm_.with_report(message, first), from >= 0 ? from : comm_.rank);
}

// One thread's wait: for a parcel, or, on the worker, while there is something to do in the background.
class Letters::Waiter final : public Watch {
public:
    Waiter(Letters& letters, Parcel* parcel, uint64_t deadline)
        : letters_(letters),
          comm_(letters.comm_),
          parcel_(parcel),
          deadline_(parcel ? std::min(deadline, deadline_of(parcel->start, parcel->timeout)) : deadline) {}

    // Watches over all open parcels: nobody else may be looking.
    std::optional<Failure> look() override {
        if (auto failure = comm_.look(!parcel_ ? "point-to-point" : parcel_->sends ? "send" : "recv")) return failure;
        const std::lock_guard lock(letters_.mutex_);
        const uint64_t now = now_ns();
        for (const Handle& parcel : std::vector<Handle>(letters_.open_.begin(), letters_.open_.end())) {
            auto failure = parcel->done() ? std::nullopt : letters_.hopeless(*parcel, now);
            if (!failure) continue;
            letters_.progress();  // it may have come just before its sender went
            if (!parcel->done()) return failure;
        }
        if (now < deadline_) return {};
        const std::string message =
            format("rank %d: ", comm_.rank) + letters_.words(*parcel_) + " was not done when the time to wait was over";
        return Failure(RC_TIMEOUT, comm_.with_report(message, {}), comm_.rank);
    }
    [[noreturn]] void fail(const Failure& failure) override { comm_.fail(failure); }
    void late() override {
        if (parcel_) comm_.mine().waits_for.store(parcel_->peer + 1, std::memory_order_relaxed);
    }
    uint64_t deadline() const override { return deadline_; }

    bool ready() {
        if (parcel_ && parcel_->done()) return true;
        const std::lock_guard lock(letters_.mutex_);
        if (!parcel_ && (letters_.background_ == 0 || letters_.waiters_.load() > 0)) return true;
        letters_.progress();
        return parcel_ && parcel_->done();
    }

    void wait(const Patience& patience) {
        try {
            wait_until([this] { return ready(); }, comm_.mine().letter_bell, AnySleeper{}, patience, *this);
        } catch (const Failure& failure) {
            end(failure);
        } catch (const std::exception& other) {
            const Failure failure(RC_SYSTEM, other.what(), comm_.rank);
            comm_.store_failure(failure);
            end(failure);
        }
    }

private:
    // The communicator is broken or closed: after this nothing touches a buffer any more.
    void end(const Failure& failure) {
        const std::lock_guard lock(letters_.mutex_);
        if (parcel_ && !parcel_->done()) letters_.complete(*parcel_, failure);
        try {
            comm_.check_failure();
            letters_.drop_all(failure);
        } catch (const Failure& first) {
            letters_.drop_all(first);  // a signal ends the wait of one thread; the others learn what it did
        }
    }

    Letters& letters_;
    Comm& comm_;
    Parcel* const parcel_;
    const uint64_t deadline_;
};

void Letters::drop_all(const Failure& failure) {
    for (Pair& pair : pairs_) {
        pair.unsent.clear();
        pair.announced.clear();
        pair.grants.clear();
    }
    receives_.clear();
    while (!open_.empty()) complete(*Handle(open_.front()), failure);
    ring_any(comm_.mine().letter_bell);
}

void Letters::wait(Parcel& parcel, uint64_t deadline) {
    if (parcel.done()) return;
    waiters_.fetch_add(1);
    Waiter(*this, &parcel, deadline).wait(comm_.patience);
    comm_.mine().waits_for.store(0, std::memory_order_relaxed);
    const std::lock_guard lock(mutex_);
    if (waiters_.fetch_sub(1) == 1 && background_) worker_wakes_.notify_one();
}

void Letters::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        worker_wakes_.wait(lock, [this] { return stopping_ || (background_ && waiters_.load() == 0); });
        if (stopping_) return;
        lock.unlock();
        Waiter(*this, nullptr, UINT64_MAX).wait(IDLE);
        lock.lock();
    }
}

void Letters::stop() {
    {
        const std::lock_guard lock(mutex_);
        if (stopping_) return;
        stopping_ = true;
        worker_wakes_.notify_one();
    }
    if (worker_.joinable()) worker_.join();
    const std::lock_guard lock(mutex_);
    drop_all(Failure(RC_CLOSED, "this communicator was closed", comm_.rank));
}

}  // namespace ringcomm
