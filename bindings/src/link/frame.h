// What travels over a Connection: a header, and mostly a payload.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

// The longest payload that one system call moves. Sends and receives alternate in such pieces: with larger ones the
// data leaves the caches in between, and an exchange of 16 MiB falls from 1.9 to 0.7 GB/s.
constexpr size_t PIECE = 32 << 10;

struct FrameHeader {
    // A payload follows; it comes over a flow; the one with the number `tag` has come; that one follows after all.
    enum Kind : uint64_t { PAYLOAD, ON_FLOW, ARRIVED, ORPHAN };

    static constexpr uint64_t PACKET = 0;  // the tag of packets

    FrameHeader() = default;
    FrameHeader(Kind kind, uint64_t tag, uint64_t bytes) : tag(tag), kind_and_bytes(kind << 62 | bytes) {}
    uint64_t kind() const { return kind_and_bytes >> 62; }
    uint64_t bytes() const { return kind_and_bytes & ~(uint64_t{3} << 62); }

    uint64_t tag, kind_and_bytes;
};

}  // namespace ringcomm
