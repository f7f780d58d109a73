// The way from one rank to another: letters in a ring, and beside it a ring of bytes for what does not fit into them.
//
// A letter carries its own stamp, so the reader waits on the very line that it then reads. How many letters it has
// taken is told to the writer only now and then, when that may need the room.
#pragma once

#include <array>

#include "arena.h"

namespace ringcomm {

class Outbox {
public:
    Outbox(Arena& arena, int writer, int reader, uint64_t stream_bytes);

    // A message of at most half the ring, for which there is always room sooner or later, is sent before anybody wants
    // it: to be asked for it, this rank would have to wake up, which takes long on a core that somebody computes on.
    size_t message_bytes() const { return capacity_ / 2; }
    // Of a larger one, once it is wanted, an eighth of the ring at once: while one piece is written, another is read.
    size_t piece_bytes() const { return capacity_ / 8; }
    // False if there is no room for it yet. `payload`: heading.bytes bytes, or nullptr.
    bool write(Heading heading, const std::byte* payload);
    // Whether the reader, a thread of this process, copies from the writer's own memory right now.
    bool is_read_from() const { return channel_.reading.load(); }

private:
    bool has_room(uint64_t end) const { return written_ - taken_ < LETTERS && end - free_from_ <= capacity_; }

    Channel& channel_;
    std::byte* const ring_;
    const size_t capacity_;
    const uint64_t stream_bytes_;
    uint64_t written_ = 0, taken_ = 0;      // letters; the latter as last seen
    uint64_t end_ = 0, free_from_ = 0;      // positions in the ring of bytes, which count on across its end
    std::array<uint64_t, LETTERS> ends_{};  // end_ after each letter
};

class Inbox {
public:
    Inbox(Arena& arena, int writer, int reader);

    // The next letter, nullptr if there is none.
    const Letter* next() const {
        const Letter& letter = channel_.letters[taken_ % LETTERS];
        return observe(letter.stamp) == taken_ + 1 ? &letter : nullptr;
    }
    const std::byte* payload(const Letter& letter) const {
        const Heading& heading = letter.heading;
        return lies_apart(heading) ? ring_ + heading.place % capacity_ : letter.payload;
    }
    // The next letter has been read. True if the writer was told.
    bool take();
    void reading(bool now) { channel_.reading.exchange(now); }

private:
    static bool lies_apart(const Heading& heading) {
        const bool brings = heading.kind == LETTER_MESSAGE || heading.kind == LETTER_PIECE;
        return brings && heading.bytes > sizeof Letter::payload;
    }

    Channel& channel_;
    const std::byte* const ring_;
    const size_t capacity_;
    uint64_t taken_ = 0, told_ = 0;
};

}  // namespace ringcomm
