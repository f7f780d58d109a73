// Symmetric buffers: ranges of the file in which every rank owns a part and maps all parts.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "memory/arena.h"

namespace ringcomm {

size_t region_part_bytes(size_t bytes);

class Region {
public:
    Region(std::shared_ptr<File> file, uint64_t offset, size_t bytes, int rank, int size);
    ~Region();
    Region(const Region&) = delete;

    std::byte* data() const { return part(rank_); }
    // Where bytes of this rank's part lie in the file; 0: not there.
    uint64_t locate(const std::byte* address, size_t bytes) const;
    // The address of a location here; nullptr: it is not in this region.
    std::byte* resolve(uint64_t location) const;

    // This rank's owner releases its part. Peers may still read it, so the mapping stays until all have released.
    void release();
    bool released_by_all() const { return counters().released.load() == uint32_t(size_); }

private:
    // At the end of rank 0's part: how many ranks have released the region, and how many have destroyed it.
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

// The regions of a communicator that some rank still holds.
class RegionTable {
public:
    void add(std::shared_ptr<Region> region);
    uint64_t locate(const std::byte* address, size_t bytes);  // 0: in no region
    std::shared_ptr<std::byte> resolve(uint64_t location);    // nullptr: in no region
    void release(Region& region);

private:
    void sweep();

    std::mutex mutex_;
    std::vector<std::shared_ptr<Region>> regions_;
};

}  // namespace ringcomm
