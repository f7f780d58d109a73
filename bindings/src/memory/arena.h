// Shared memory: one anonymous file per world, ranges of which each process maps.
#pragma once

#include <memory>

#include "memory/layout.h"

namespace ringcomm {

// A mapped range. Threads of one process that map the same range get the same mapping.
class Mapping {
public:
    Mapping(int fd, uint64_t offset, size_t bytes);
    ~Mapping();
    Mapping(const Mapping&) = delete;

    std::byte* base() const { return base_; }

private:
    std::byte* base_;
    size_t bytes_;
};

class File {
public:
    explicit File(int fd);  // duplicates fd
    ~File();
    File(const File&) = delete;

    std::shared_ptr<Mapping> map(uint64_t offset, size_t bytes);
    // Allocates the memory of a range, so that no later access fails; throws RC_MEMORY.
    void allocate(uint64_t offset, size_t bytes);
    void extend_to(uint64_t end);
    uint64_t bytes() const;
    void discard(uint64_t offset, size_t bytes);

private:
    int fd_;
    uint64_t device_, inode_;
};

int create_file();

// The offsets in one rank's part. They follow from the group's size and the budget alone, so all ranks agree.
struct PartLayout {
    size_t counts, packet_rings, byte_rings, staging, between_hosts;  // offsets in a part
    size_t ring_bytes, staging_bytes;                                 // of one ring, buffer
    size_t part_bytes;

    PartLayout(int size, size_t budget);
    size_t arena_bytes(int size) const { return sizeof(GroupHeader) + size * part_bytes; }
};

class Arena {
public:
    Arena(std::shared_ptr<File> file, uint64_t offset, int size, size_t budget);

    GroupHeader& group() const { return *reinterpret_cast<GroupHeader*>(mapping_->base()); }
    RankHeader& rank(int r) const { return *reinterpret_cast<RankHeader*>(part(r)); }
    uint64_t* counts(int r, uint64_t epoch) const {
        return reinterpret_cast<uint64_t*>(part(r) + layout.counts) + (epoch & 1) * 2 * size;
    }
    std::byte* staging(int r, uint64_t buffer) const {
        return part(r) + layout.staging + buffer * layout.staging_bytes;
    }
    PacketRing& packet_ring(int writer, int reader) const {
        return reinterpret_cast<PacketRing*>(part(writer) + layout.packet_rings)[peer(writer, reader)];
    }
    std::byte* byte_ring(int writer, int reader) const {
        return part(writer) + layout.byte_rings + peer(writer, reader) * layout.ring_bytes;
    }

    FlightBetweenHosts& between_hosts(int r) const {
        return *reinterpret_cast<FlightBetweenHosts*>(part(r) + layout.between_hosts);
    }

    void allocate(int r);  // the part of rank r; rank 0's includes the group header
    void allocate_between_hosts(int r);
    void discard();  // when all ranks have closed

    const int size;
    const uint64_t offset;  // in the file
    const PartLayout layout;

private:
    static int peer(int writer, int reader) { return reader < writer ? reader : reader - 1; }  // none for itself
    std::byte* part(int r) const { return mapping_->base() + sizeof(GroupHeader) + r * layout.part_bytes; }

    std::shared_ptr<File> file_;
    std::shared_ptr<Mapping> mapping_;
};

}  // namespace ringcomm
