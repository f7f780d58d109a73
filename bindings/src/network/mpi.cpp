// MpiLink: messages of MPI, tested until they are done.
#include "network/mpi.h"

#include <time.h>

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include "core/errors.h"
#include "core/waiting.h"

namespace ringcomm {

namespace {

constexpr int PACKETS = 0;                                            // the MPI tag of packets
constexpr uint64_t CANCEL_NS = 1'000'000'000;                         // how long cancel() waits
constexpr uint64_t DROP_NS = 10'000'000'000;                          // the peers have failed long before
constexpr uint64_t SHORTEST_PAUSE = 10'000, LONGEST_PAUSE = 200'000;  // MPI has nothing to sleep on

// Larger than that of any MPI, whose fields lie in different places.
struct alignas(16) MpiStatus {
    std::byte opaque[128];
};

void pause_for(uint64_t ns) {
    const timespec pause{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
    nanosleep(&pause, nullptr);
}

}  // namespace

// The calls of MPI that a link makes. Each returns MPI's status, 0 for success; a request is kept as 64 bits.
class MpiLink::Functions {
public:
    virtual ~Functions() = default;
    virtual int send(const std::byte* data, size_t bytes, int peer, int tag, uint64_t& request) const = 0;
    virtual int receive(std::byte* data, size_t bytes, int peer, int tag, uint64_t& request) const = 0;
    virtual int test(uint64_t& request, bool& done) const = 0;
    virtual int cancel(uint64_t request) const = 0;
    // A message of this tag from any peer that no receive has matched. Takes it out of the queue.
    virtual int probe(int tag, bool& found, uint64_t& message, size_t& bytes) const = 0;
    virtual int receive_probed(std::byte* data, size_t bytes, uint64_t message, uint64_t& request) const = 0;
    virtual std::string describe(int status) const = 0;
};

template <class Handle>
class MpiLink::FunctionsOf final : public Functions {
public:
    explicit FunctionsOf(const rc_mpi& mpi) : mpi_(mpi), comm_(Handle(mpi.comm)), byte_(Handle(mpi.byte)) {}

    int send(const std::byte* data, size_t bytes, int peer, int tag, uint64_t& request) const override {
        using Isend = int(const void*, int, Handle, int, int, Handle, Handle*);
        return started(request, [&](Handle* handle) {
            return call<Isend>(mpi_.isend)(data, int(bytes), byte_, peer, tag, comm_, handle);
        });
    }
    int receive(std::byte* data, size_t bytes, int peer, int tag, uint64_t& request) const override {
        using Irecv = int(void*, int, Handle, int, int, Handle, Handle*);
        return started(request, [&](Handle* handle) {
            return call<Irecv>(mpi_.irecv)(data, int(bytes), byte_, peer, tag, comm_, handle);
        });
    }
    int test(uint64_t& request, bool& done) const override {
        Handle handle = Handle(request);
        int flag = 0;
        MpiStatus status;
        const int result = call<int(Handle*, int*, MpiStatus*)>(mpi_.test)(&handle, &flag, &status);
        request = uint64_t(handle);
        done = flag;
        return result;
    }
    int cancel(uint64_t request) const override {
        Handle handle = Handle(request);
        return call<int(Handle*)>(mpi_.cancel)(&handle);
    }
    int probe(int tag, bool& found, uint64_t& message, size_t& bytes) const override {
        Handle handle{};
        int flag = 0, count = 0;
        MpiStatus status;
        using Improbe = int(int, int, Handle, int*, Handle*, MpiStatus*);
        using GetCount = int(const MpiStatus*, Handle, int*);
        int result = call<Improbe>(mpi_.improbe)(mpi_.any_source, tag, comm_, &flag, &handle, &status);
        if (result == 0 && flag) result = call<GetCount>(mpi_.get_count)(&status, byte_, &count);
        found = flag;
        message = uint64_t(handle);
        bytes = size_t(count);
        return result;
    }
    int receive_probed(std::byte* data, size_t bytes, uint64_t message, uint64_t& request) const override {
        Handle probed = Handle(message);
        using Imrecv = int(void*, int, Handle, Handle*, Handle*);
        return started(request, [&](Handle* handle) {
            return call<Imrecv>(mpi_.imrecv)(data, int(bytes), byte_, &probed, handle);
        });
    }
    std::string describe(int status) const override {
        char text[4096] = "";
        int length = 0;
        call<int(int, char*, int*)>(mpi_.error_string)(status, text, &length);
        return std::string("MPI: ") + text;
    }

private:
    template <class Function>
    static Function* call(void* address) {
        return reinterpret_cast<Function*>(address);
    }
    template <class Start>
    static int started(uint64_t& request, Start start) {
        Handle handle{};
        const int status = start(&handle);
        request = uint64_t(handle);
        return status;
    }

    const rc_mpi mpi_;
    const Handle comm_, byte_;
};

// A message in flight.
struct MpiLink::Operation {
    LinkTransfer* transfer;  // nullptr: nobody waits for it
    int peer;                // -1: any
    bool sends;
    std::unique_ptr<std::byte[]> memory;  // nullptr: the caller's
    size_t queued = 0;                    // bytes of a packet
    uint64_t request = 0;
    bool canceled = false;

    void finish(LinkTransfer::State state) {
        if (!transfer) return;
        transfer->handle = nullptr;
        std::exchange(transfer, nullptr)->state = state;
    }
};

// Before each packet. Without one, the peer has left.
struct MpiLink::PacketPrefix {
    uint32_t source, bytes;
};

MpiLink::MpiLink(int rank, int size, const rc_mpi& mpi)
    : Link(rank, size),
      mpi_(mpi.handle_bytes == sizeof(int) ? std::unique_ptr<Functions>(new FunctionsOf<int>(mpi))
                                           : std::unique_ptr<Functions>(new FunctionsOf<uintptr_t>(mpi))),
      most_tag_(mpi.most_tag),
      peers_(size),
      pause_(SHORTEST_PAUSE) {}

MpiLink::~MpiLink() {  // MPI may still use what is in flight
    for (Arriving& packet : arriving_) (void)packet.memory.release();
    for (auto& operation : operations_) (void)operation.release();
}

// --- Messages --------------------------------------------------------------------------------------------------------

MpiLink::Operation* MpiLink::begin(Operation operation, const std::byte* data, size_t bytes, int tag) {
    const int peer = operation.peer;
    if (peers_[peer].lost) {
        operation.finish(LinkTransfer::FAILED);
        return nullptr;
    }
    auto begun = std::make_unique<Operation>(std::move(operation));
    const int status = begun->sends ? mpi_->send(data, bytes, peer, tag, begun->request)
                                    : mpi_->receive(const_cast<std::byte*>(data), bytes, peer, tag, begun->request);
    if (status) {
        begun->finish(LinkTransfer::FAILED);
        lose(peer, status);
        return nullptr;
    }
    if (begun->transfer) begun->transfer->handle = begun.get();
    return operations_.emplace_back(std::move(begun)).get();
}

void MpiLink::send(int peer, uint64_t tag, const std::byte* data, size_t bytes, LinkTransfer& transfer) {
    assert(tag != 0 && peer != rank && bytes <= MAX_TRANSFER);
    transfer.state = LinkTransfer::ACTIVE;
    begin({&transfer, peer, true, nullptr}, data, bytes, mpi_tag(tag));
}

void MpiLink::receive(int peer, uint64_t tag, std::byte* data, size_t bytes, LinkTransfer& transfer) {
    assert(tag != 0 && peer != rank && bytes <= MAX_TRANSFER);
    transfer.state = LinkTransfer::ACTIVE;
    begin({&transfer, peer, false, nullptr}, data, bytes, mpi_tag(tag));
}

void MpiLink::send_packet(int peer, std::span<const std::byte> packet) {
    assert(packet.size() <= MAX_PACKET && peer != rank);
    const PacketPrefix prefix{uint32_t(rank), uint32_t(packet.size())};
    auto message = std::make_unique_for_overwrite<std::byte[]>(sizeof prefix + packet.size());
    std::memcpy(message.get(), &prefix, sizeof prefix);
    std::copy(packet.begin(), packet.end(), message.get() + sizeof prefix);
    const std::byte* const data = message.get();
    const size_t bytes = sizeof prefix + packet.size();
    Operation* const sent = begin({nullptr, peer, true, std::move(message), bytes}, data, bytes, PACKETS);
    if (!sent) return;
    peers_[peer].queued += bytes;
    if (test(*sent)) operations_.pop_back();  // MPI has copied it
}

void MpiLink::leave() {
    if (std::exchange(left_, true)) return;
    for (int peer = 0; peer < size; ++peer) {
        if (peer != rank) send_packet(peer, {});
    }
}

rc_leaving MpiLink::leaving() const {
    rc_leaving now{0, int(!dropped_.empty()), stuck(), failed_};
    for (int peer = 0; peer < size; ++peer) now.staying += peer != rank && !peers_[peer].left;
    for (const auto& each : operations_) {
        if (!each->sends || each->canceled) continue;
        ++(peers_[each->peer].left ? now.staying : now.unsent);  // who has left does not need it
    }
    return now;
}

// --- Canceling -------------------------------------------------------------------------------------------------------

void MpiLink::cancel(LinkTransfer& transfer) {
    if (transfer.ended()) return;
    Operation& operation = *static_cast<Operation*>(transfer.handle);
    operation.finish(LinkTransfer::FAILED);
    operation.canceled = true;
    if (!operation.sends) mpi_->cancel(operation.request);
    // One second for all transfers that a failed call cancels in a row.
    if (now_ns() >= patience_ends_ + CANCEL_NS) patience_ends_ = now_ns() + CANCEL_NS;
    while (!test(operation)) {
        receive_dropped();
        if (now_ns() >= patience_ends_) return;  // it stays among the operations
        yield_core();
    }
    std::erase_if(operations_, [&](const auto& each) { return each.get() == &operation; });
}

bool MpiLink::stuck() const {
    return std::any_of(operations_.begin(), operations_.end(), [](const auto& each) { return each->canceled; });
}

void MpiLink::drop(uint64_t tag) {
    failed_ = true;
    dropped_.push_back({mpi_tag(tag), now_ns() + DROP_NS});
}

// Receives what peers still send with a dropped tag: their sends end, and MPI does not keep them for ever.
bool MpiLink::receive_dropped() {
    if (dropped_.empty()) return false;
    bool moved = false;
    for (const Dropped& each : dropped_) {
        bool found = true;
        for (;;) {
            uint64_t message = 0;
            size_t bytes = 0;
            if (mpi_->probe(each.tag, found, message, bytes) || !found) break;
            auto operation = std::make_unique<Operation>(Operation{nullptr, -1, false, nullptr});
            operation->memory = std::make_unique_for_overwrite<std::byte[]>(std::max<size_t>(bytes, 1));
            moved = true;
            if (mpi_->receive_probed(operation->memory.get(), bytes, message, operation->request)) break;
            operations_.push_back(std::move(operation));
        }
    }
    const uint64_t now = now_ns();
    std::erase_if(dropped_, [&](const Dropped& each) { return now >= each.until; });
    return moved;
}

// --- Progress --------------------------------------------------------------------------------------------------------

bool MpiLink::progress(LinkEvents& events) {
    bool moved = receive_packets(events);
    moved |= test_operations();
    moved |= receive_dropped();
    for (const int peer : std::exchange(lost_, {})) {
        moved = true;
        const auto fails = [&](const auto& each) { return each->peer == peer && each->transfer; };
        for (auto at = operations_.begin();
             (at = std::find_if(operations_.begin(), operations_.end(), fails)) != operations_.end();) {
            cancel(*(*at)->transfer);
        }
        events.peer_lost(peer, peers_[peer].failure);
    }
    if (moved) pause_ = SHORTEST_PAUSE;
    return moved;
}

// Receives from any source, posted before, would save the search; a job of MPICH on two hosts has stalled with them.
bool MpiLink::receive_packets(LinkEvents& events) {
    bool moved = false;
    for (bool found = true; found;) {
        uint64_t message = 0;
        size_t bytes = 0;
        int status = mpi_->probe(PACKETS, found, message, bytes);
        if (status == 0 && found) {
            Arriving& packet = arriving_.emplace_back();
            packet.memory = std::make_unique_for_overwrite<std::byte[]>(bytes);
            status = mpi_->receive_probed(packet.memory.get(), bytes, message, packet.request);
            if (status) arriving_.pop_back();
        }
        if (status) {
            lose(-1, status);
            return true;
        }
    }
    while (!arriving_.empty()) {
        bool done = false;
        if (const int status = mpi_->test(arriving_.front().request, done)) {
            lose(-1, status);
            done = false;
        }
        if (!done) break;
        const Arriving packet = std::move(arriving_.front());
        arriving_.pop_front();
        moved = true;
        PacketPrefix prefix;
        std::memcpy(&prefix, packet.memory.get(), sizeof prefix);
        if (prefix.bytes == 0) {
            peers_[prefix.source].left = true;
        } else {
            events.packet_arrived(int(prefix.source), {packet.memory.get() + sizeof prefix, prefix.bytes});
        }
    }
    return moved;
}

bool MpiLink::test_operations() {
    bool moved = false;
    for (size_t i = 0; i < operations_.size();) {
        if (!test(*operations_[i])) {
            ++i;
            continue;
        }
        moved = true;
        operations_[i] = std::move(operations_.back());
        operations_.pop_back();
    }
    return moved;
}

// Returns whether the operation has ended.
bool MpiLink::test(Operation& operation) {
    bool done = false;
    const int status = mpi_->test(operation.request, done);
    if (!done && status == 0) return false;
    if (operation.queued) peers_[operation.peer].queued -= operation.queued;
    operation.finish(status ? LinkTransfer::FAILED : LinkTransfer::DONE);
    if (status && !operation.canceled) lose(operation.peer, status);
    return true;
}

// MPI does not say what still works after an error. -1: of any peer.
void MpiLink::lose(int peer, int status) {
    for (int p = 0; p < size; ++p) {
        if (p == rank || peers_[p].lost || (peer >= 0 && p != peer)) continue;
        peers_[p].lost = peers_[p].left = true;
        peers_[p].failure = mpi_->describe(status);
        lost_.push_back(p);
    }
}

void MpiLink::sleep(uint64_t ns) {
    if (woken_.exchange(false)) return;
    const uint64_t pause = pause_;
    pause_ = std::min(LONGEST_PAUSE, pause + pause / 2);
    pause_for(std::min(ns, pause));
}

}  // namespace ringcomm
