// Symmetric buffers: ranges of the file in which every rank owns a part and maps all parts.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "memory/arena.h"

namespace ringcomm {

size_t symmetric_part_bytes(size_t bytes);

class SymmetricBuffer {
public:
    SymmetricBuffer(std::shared_ptr<File> file, uint64_t offset, size_t bytes, int rank, int size);
    ~SymmetricBuffer();
    SymmetricBuffer(const SymmetricBuffer&) = delete;

    std::byte* data() const { return part(rank_); }
    // Where bytes of this rank's part lie in the file; 0: not there.
    uint64_t locate(const std::byte* address, size_t bytes) const;
    // The address of a location here; nullptr: it is not in this buffer.
    std::byte* resolve(uint64_t location) const;

    // This rank's owner releases its part. Peers may still read it, so the mapping stays until all have released.
    void release();
    bool released_by_all() const { return counters().released.load() == uint32_t(size_); }

private:
    // At the end of rank 0's part: how many ranks have released the buffer, and how many have destroyed it.
    struct Counters {
        std::atomic<uint32_t> released, destroyed;
    };

    void count_destroyed();
    std::byte* part(int r) const { return mapping_->base() + r * part_bytes_; }
    Counters& counters() const { return *reinterpret_cast<Counters*>(part(0) + part_bytes_ - LINE); }

    std::shared_ptr<File> file_;
    uint64_t offset_;
    size_t part_bytes_;
    int rank_, size_;
    std::shared_ptr<Mapping> mapping_;
};

// The buffers of a communicator that some rank still holds.
class SymmetricBufferTable {
public:
    void add(std::shared_ptr<SymmetricBuffer> buffer);
    uint64_t locate(const std::byte* address, size_t bytes);  // 0: in none
    std::shared_ptr<std::byte> resolve(uint64_t location);    // nullptr: in none
    void release(SymmetricBuffer& buffer);

private:
    void sweep();

    std::mutex mutex_;
    std::vector<std::shared_ptr<SymmetricBuffer>> buffers_;
};

}  // namespace ringcomm
