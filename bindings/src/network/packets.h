// The packets of a link: which group they are for, and what they carry.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace ringcomm {

enum class PacketType : uint32_t {
    RECORDS,  // what hosts contribute to the agreement on a call: see agreement.cpp
    MESSAGE,  // of the point-to-point engine: see channel.h
    PULL,     // asks for the payload of a large message
    FAILURE,  // the first failure of the group
    CLOSED,   // the sender has left the group after this epoch
    QUERY,    // asks for a STATUS of each rank of the receiver's host
    STATUS,   // the epoch that a rank has begun, and its last calls in words
};

struct PacketHead {
    uint64_t group;
    PacketType type;
    uint32_t source;  // a rank of the group
};

using Bytes = std::span<const std::byte>;

template <class Value>
Bytes bytes_of(const Value& value) {
    static_assert(std::is_trivially_copyable_v<Value>);
    return std::as_bytes(std::span(&value, 1));
}

// Reads a packet from its beginning. What is missing reads as zeros, and complete() is false.
class PacketReader {
public:
    explicit PacketReader(Bytes rest) : rest_(rest) {}

    template <class Value>
    Value next() {
        static_assert(std::is_trivially_copyable_v<Value>);
        Value value{};
        const Bytes bytes = take(sizeof value);
        if (!bytes.empty()) memcpy(&value, bytes.data(), sizeof value);
        return value;
    }
    Bytes take(size_t bytes) {
        if (bytes > rest_.size()) {
            complete_ = false;
            rest_ = {};
            return {};
        }
        const Bytes taken = rest_.first(bytes);
        rest_ = rest_.subspan(bytes);
        return taken;
    }
    Bytes rest() const { return rest_; }
    bool complete() const { return complete_; }

private:
    Bytes rest_;
    bool complete_ = true;
};

class PacketWriter {
public:
    explicit PacketWriter(const PacketHead& head) { add(bytes_of(head)); }

    void add(Bytes bytes) { packet_.insert(packet_.end(), bytes.begin(), bytes.end()); }
    template <class Value>
    void add(const Value& value) {
        add(bytes_of(value));
    }
    Bytes packet() const { return packet_; }

private:
    std::vector<std::byte> packet_;
};

}  // namespace ringcomm
