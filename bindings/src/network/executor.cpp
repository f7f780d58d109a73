// The steps of a program.
#include "network/call.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "kernels/cpu/kernels.h"

namespace ringcomm {

namespace {

// Transfers in one direction, in pieces. Ended or canceled before the memory that they use goes out of reach.
class Pieces {
public:
    Pieces(Link& link, size_t window, std::byte* data, size_t bytes)
        : link_(link),
          window_(window),
          data_(data),
          bytes_(bytes),
          piece_(link.piece_bytes()),
          number_(divide_up(bytes, piece_)) {}

    std::byte* data(size_t i) const { return data_ + i * piece_; }
    size_t length(size_t i) const { return std::min(piece_, bytes_ - i * piece_); }
    bool done() const { return ended_ == number_; }
    size_t next() const { return begun_; }
    bool may_begin() const { return begun_ < number_ && begun_ - ended_ < window_; }
    LinkTransfer& begin() { return transfers_[begun_++ % window_]; }
    bool front_ended() const { return begun_ > ended_ && transfers_[ended_ % window_].ended(); }
    bool front_failed() const { return transfers_[ended_ % window_].state.load() == LinkTransfer::FAILED; }
    size_t take() { return ended_++; }
    void cancel() {
        for (; ended_ < begun_; ++ended_) link_.cancel(transfers_[ended_ % window_]);
    }

private:
    Link& link_;
    const size_t window_;
    std::byte* const data_;
    const size_t bytes_, piece_, number_;
    size_t begun_ = 0, ended_ = 0;
    std::array<LinkTransfer, Link::MOST_WINDOW> transfers_;
};

}  // namespace

void NetworkCall::run_program() {
    const auto program = group_.programs.find(key_of(call, size));
    if (!program) fail(Failure(RC_SYSTEM, "there is no program for " + describe_call(), rank));
    memories_[RC_MEMORY_IN] = const_cast<std::byte*>(call.source);
    memories_[RC_MEMORY_OUT] = call.target;
    const bool scales = row_.reduces && call.op == RC_PREMUL_SUM;
    const size_t scaled = scales ? given_bytes(rank) : 0, scratch = program->scratch * call.item;
    {
        const std::lock_guard lock(group_.world->mutex);
        window_ = group_.world->link->window();
    }
    const size_t landing = window_ * group_.world->link->piece_bytes();
    landing_ = group_.scratch(landing + scaled + scratch);
    memories_[RC_MEMORY_SCRATCH] = landing_ + landing + scaled;
    if (scales && call.source == call.target && scaled == result_count() * call.item) {
        give(call.target);  // programs in place read it there
    } else if (scales) {
        memories_[RC_MEMORY_IN] = landing_ + landing;
        give(memories_[RC_MEMORY_IN]);
    }
    const std::span steps(program->steps);
    for (size_t i = 0; i < steps.size(); ++i) {
        const ProgramStep& step = steps[i];
        const size_t next = i + 1;
        switch (step.kind) {
            case RC_STEP_COPY:
                if (step.outgoing.length)
                    memmove(at(step.incoming), at(step.outgoing), step.outgoing.length * call.item);
                break;
            case RC_STEP_EXCHANGE:
                while (i + 1 < steps.size() && steps[i + 1].overlaps) ++i;
                exchange(step, steps.subspan(next, i + 1 - next));
                break;
            case RC_STEP_LOCAL: local_collective(step); break;
        }
    }
    if (call.op == RC_AVG && row_.reduces) divide(call.target, result_count());
    set_path(RC_PATH_PROGRAM, program->number);
}

// Sends and receives at once. With an operand, each piece is combined with it as it arrives, the lower rank's first.
// During the steps `meanwhile`, inside the host, the system sends and receives what its buffers hold.
void NetworkCall::exchange(const ProgramStep& step, std::span<const ProgramStep> meanwhile) {
    NetworkWorld& world = *group_.world;
    const bool combines = step.operand.length > 0;
    const size_t piece = world.link->piece_bytes();
    std::byte* const target = step.source >= 0 ? at(step.incoming) : nullptr;
    Pieces out(*world.link, window_, step.dest >= 0 ? at(step.outgoing) : nullptr,
               step.dest >= 0 ? step.outgoing.length * call.item : 0);
    Pieces in(*world.link, window_, target, step.source >= 0 ? step.incoming.length * call.item : 0);
    const auto place = [&](size_t i) { return combines ? landing_ + i % window_ * piece : in.data(i); };
    const auto begin = [&] {
        const std::lock_guard lock(world.mutex);
        while (in.may_begin()) {
            const size_t i = in.next();
            world.link->receive(group_.members()[step.source], group_.tag(), place(i), in.length(i), in.begin());
        }
        while (out.may_begin()) {
            const size_t i = out.next();
            world.link->send(group_.members()[step.dest], group_.tag(), out.data(i), out.length(i), out.begin());
        }
    };
    try {
        if (!meanwhile.empty()) {
            begin();
            fill_buffers();
        }
        for (const ProgramStep& local : meanwhile) local_collective(local);
        while (!out.done() || !in.done()) {
            begin();
            const int& awaited = in.done() ? step.dest : step.source;
            wait([&] { return out.front_ended() || in.front_ended(); }, awaited, awaited);
            for (Pieces* pieces : {&out, &in}) {
                if (!pieces->front_ended() || !pieces->front_failed()) continue;
                const int peer = pieces == &out ? step.dest : step.source;
                // The link says why next.
                wait([&] { return world.lost(group_.members()[peer]) != nullptr; }, peer, peer);
                fail(*group_.peer_failure(peer, describe_call()));
            }
            while (out.front_ended() && !out.front_failed()) out.take();
            while (in.front_ended() && !in.front_failed()) {
                const size_t i = in.take();
                if (!combines) continue;
                const std::byte* const own = at(step.operand) + i * piece;
                const std::byte *lower = own, *higher = place(i);
                if (step.source < rank) std::swap(lower, higher);
                combine(in.data(i), {lower, higher}, in.length(i) / call.item);
            }
        }
    } catch (...) {
        const std::lock_guard lock(world.mutex);
        out.cancel();
        in.cancel();
        throw;
    }
}

// Moves what can move, a while at most: messages that arrive move as well.
void NetworkCall::fill_buffers() {
    constexpr int MOST = 100;
    for (int i = 0; i < MOST; ++i) {
        const std::lock_guard lock(group_.world->mutex);
        if (!group_.world->progress()) return;
    }
}

void NetworkCall::local_collective(const ProgramStep& step) {
    run_local(step.collective, at(step.outgoing), at(step.incoming), step.count, call.dtype, partial_op(), step.root,
              step.counts);
}

}  // namespace ringcomm
