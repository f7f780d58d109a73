// How sends and receives wait, and how they end when they cannot go on.
#include <algorithm>

#include "parcel.h"

namespace ringcomm {

template <class Visit>
void Letters::each_open(Visit visit) {
    for (Parcel* parcel : receives_) visit(*parcel);
    for (Pair& pair : pairs_) {
        for (const Outgoing& letter : pair.queue) {
            if (letter.kind == LETTER_MESSAGE || letter.kind == LETTER_OFFER) visit(*letter.parcel);
        }
        for (Parcel* parcel : pair.offered) visit(*parcel);
        for (Parcel* parcel : pair.incoming) visit(*parcel);
    }
}

// The failure of something that can no longer be done, or no longer in time.
std::optional<Failure> Letters::hopeless() {
    std::optional<Failure> failure;
    const uint64_t now = now_ns();
    each_open([&](const Parcel& parcel) {
        if (!failure) failure = hopeless(parcel, now);
    });
    return failure;
}

std::optional<Failure> Letters::hopeless(const Parcel& parcel, uint64_t now) const {
    const int peer = parcel.message.peer >= 0 ? parcel.message.peer : parcel.source;  // -1: any rank, not matched yet
    if (peer >= 0 && peer != comm_.rank) {
        if (auto failure = comm_.gone(peer, parcel.words())) return failure;
    }
    bool anybody = peer >= 0 || comm_.size == 1;
    for (int p = 0; p < comm_.size && peer < 0; ++p) {
        if (p == comm_.rank || comm_.closed(p)) continue;  // it can do without those that closed; a death is a failure
        if (auto failure = comm_.gone(p, parcel.words())) return failure;
        anybody = true;
    }
    if (!anybody) return Failure(RC_PEER_LOST, "all other ranks closed the communicator during " + parcel.words());
    const double seconds = timeout(parcel);
    if (now < deadline_of(parcel.start, seconds)) return {};
    const std::string message = format("rank %d waited %.3g s for ", comm_.rank, seconds) + parcel.words();
    const std::vector<int> first = peer >= 0 ? std::vector{peer} : std::vector<int>{};
    return Failure(RC_TIMEOUT, comm_.with_report(message, first), peer >= 0 ? peer : comm_.rank);
}

// One thread's wait: for a parcel, or, on the worker, while there is something to do in the background.
class Letters::Waiter final : public Watch {
public:
    Waiter(Letters& letters, Parcel* parcel, uint64_t deadline)
        : letters_(letters), comm_(letters.comm_), parcel_(parcel), deadline_(deadline) {}

    // Watches over everything that is open: nobody else may be looking.
    std::optional<Failure> look() override {
        const char* what = !parcel_ ? "point-to-point" : parcel_->sends ? "send" : "recv";
        if (auto failure = comm_.look(what)) return failure;
        const std::lock_guard lock(letters_.mutex_);
        if (letters_.hopeless()) {
            // It may have come just before its sender went; after so many steps all that was there has been read.
            for (uint64_t letter = 0; letter < LETTERS; ++letter) letters_.progress();
            if (auto failure = letters_.hopeless()) return failure;
        }
        if (now_ns() < deadline_) return {};
        const std::string message =
            format("rank %d: ", comm_.rank) + parcel_->words() + " was not done when the time to wait was over";
        return Failure(RC_TIMEOUT, comm_.with_report(message, {}), comm_.rank);
    }
    [[noreturn]] void fail(const Failure& failure) override { comm_.fail(failure); }
    void late() override {
        if (parcel_) comm_.mine().waits_for.store(parcel_->message.peer + 1, std::memory_order_relaxed);
    }
    uint64_t deadline() const override { return deadline_; }

    bool ready() {
        if (parcel_ && parcel_->is_done()) return true;
        const std::lock_guard lock(letters_.mutex_);
        if (!parcel_ && (letters_.background_ == 0 || letters_.waiters_.load() > 0)) return true;
        letters_.progress();
        return parcel_ && parcel_->is_done();
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
        Failure told = failure;
        try {
            comm_.check_failure();
        } catch (const Failure& first) {
            told = first;  // a signal ends the wait of one thread; the others learn what it did
        }
        letters_.drop_all(told, parcel_);
        if (parcel_ && !parcel_->is_done()) letters_.fail(*parcel_, failure);
    }

    Letters& letters_;
    Comm& comm_;
    Parcel* const parcel_;
    const uint64_t deadline_;
};

// After the failure was stored, or this rank said that it closes.
void Letters::drop_all(const Failure& failure, const Parcel* spared) {
    std::vector<Parcel*> open;
    each_open([&](Parcel& parcel) {
        if (&parcel != spared) open.push_back(&parcel);
    });
    receives_.clear();
    for (Pair& pair : pairs_) {
        while (!pair.offered.empty() && pair.out.is_read_from()) give_core_away();
        pair.queue.clear();
        pair.offered.clear();
        pair.incoming.clear();
    }
    for (Parcel* parcel : open) fail(*parcel, failure);
    ring_any(comm_.mine().letter_bell);
}

void Letters::wait(Parcel& parcel, uint64_t deadline) {
    if (parcel.is_done()) return;
    waiters_.fetch_add(1);
    Waiter(*this, &parcel, std::min(deadline, deadline_of(parcel.start, timeout(parcel)))).wait(comm_.patience);
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

double Letters::timeout(const Parcel& parcel) const {
    return parcel.message.timeout < 0 ? comm_.tuning().timeout : parcel.message.timeout;
}

}  // namespace ringcomm
