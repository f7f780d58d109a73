#include "channel.h"

#include <cstring>

#include "kernels.h"

namespace ringcomm {

namespace {

constexpr size_t UNIT = 64;  // payloads start at multiples of it

}  // namespace

Outbox::Outbox(Arena& arena, int writer, int reader, uint64_t stream_bytes)
    : channel_(arena.channel(writer, reader)),
      ring_(arena.ring(writer, reader)),
      capacity_(arena.layout.ring_bytes),
      stream_bytes_(stream_bytes) {}

bool Outbox::write(Heading heading, const std::byte* payload) {
    const size_t bytes = payload ? heading.bytes : 0;
    uint64_t end = end_;
    const bool apart = bytes > sizeof Letter::payload;
    if (apart) {
        const size_t to_end = capacity_ - end_ % capacity_;
        heading.place = bytes > to_end ? end_ + to_end : end_;  // in one piece
        end = heading.place + round_up(bytes, UNIT);
    }
    if (!has_room(end)) {
        taken_ = observe(channel_.taken);
        if (taken_) free_from_ = ends_[(taken_ - 1) % LETTERS];
        if (!has_room(end)) return false;
    }
    Letter& letter = channel_.letters[written_ % LETTERS];
    std::byte* place = apart ? ring_ + heading.place % capacity_ : letter.payload;
    if (bytes >= stream_bytes_) {
        kernels().copy_stream(place, payload, bytes);
    } else if (bytes) {
        memcpy(place, payload, bytes);
    }
    letter.heading = heading;
    end_ = ends_[written_ % LETTERS] = end;
    publish<SITE_LETTER>(letter.stamp, ++written_);
    return true;
}

Inbox::Inbox(Arena& arena, int writer, int reader)
    : channel_(arena.channel(writer, reader)), ring_(arena.ring(writer, reader)), capacity_(arena.layout.ring_bytes) {}

bool Inbox::take() {
    const bool apart = lies_apart(channel_.letters[taken_ % LETTERS].heading);
    ++taken_;
    if (!apart && taken_ - told_ < LETTERS / 4) return false;
    publish<SITE_TAKEN>(channel_.taken, told_ = taken_);
    return true;
}

}  // namespace ringcomm
