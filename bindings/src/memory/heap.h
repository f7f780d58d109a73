// The heap of a rank: its range of the world's file, from which it allocates the memory of shared arrays by itself.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "core/errors.h"
#include "core/peer_group.h"
#include "memory/arena.h"

namespace ringcomm {

// Free ranges of addresses. Neighbors are one range.
class FreeRanges {
public:
    struct Range {
        std::byte* begin;
        size_t bytes;
    };

    void add(Range range);
    // The first `bytes` of the smallest range that has them; nullptr: none has.
    std::byte* take(size_t bytes);
    Range take_largest(size_t most);  // its last bytes, or all of it
    size_t bytes() const { return bytes_; }

private:
    using ByAddress = std::map<std::byte*, size_t>;
    void insert(Range range);
    void erase(ByAddress::iterator range);

    ByAddress by_address_;
    std::set<std::pair<size_t, std::byte*>> by_size_;
    size_t bytes_ = 0;
};

// Blocks are whole pages. What describes them lies in private memory, where no peer can damage it.
//
// A freed block keeps its pages, which all ranks have mapped by then, for the next one: up to KEPT beyond what is in
// use. The pages of other free blocks are the machine's again.
class Heap {
public:
    static constexpr size_t LEAST = 64 << 10;  // smaller arrays are private: a block is whole pages
    static constexpr size_t STEP = 32 << 20;   // memory is asked for in steps
    static constexpr size_t KEPT = 64 << 20;

    Heap(std::shared_ptr<File> file, uint64_t offset, size_t bytes);
    ~Heap();
    Heap(const Heap&) = delete;

    // `granted`: how much more memory it may take from the machine from now on. nullptr: that, or the machine, has too
    // little.
    std::byte* allocate(size_t bytes, bool zeroed, size_t granted = 0);
    // Makes a block shorter, or as long as its last page allows. False: it must move.
    bool resize(std::byte* block, size_t bytes);
    void free(std::byte* block);
    size_t bytes(const std::byte* block);  // 0 if unknown, in the child of a fork
    // The pages of all free blocks, for a machine that is short of memory.
    void give_back();
    // The block of `address`, if it is in one, is never used again: a peer may write to it whenever it goes on.
    void retire(const std::byte* address);

    bool contains(const void* address) const {
        return size_t(static_cast<const std::byte*>(address) - mapping_->base()) < bytes_;
    }
    // The offset in the file of memory in the heap.
    uint64_t offset(const std::byte* address) const { return offset_ + (address - mapping_->base()); }
    // In the child of a fork the blocks are the parent's: the child sees them, and neither frees nor allocates any. A
    // thread of the parent may have held the mutex.
    bool forked() const { return generation_ != fork_generation.load(std::memory_order_relaxed); }

private:
    struct Block {
        size_t bytes;
        bool retired;
    };

    std::byte* take_pages(size_t bytes);
    void discard(FreeRanges::Range range);
    void trim();

    const std::shared_ptr<File> file_;
    const uint64_t offset_;
    const size_t bytes_;
    const std::shared_ptr<Mapping> mapping_;
    const uint64_t generation_ = fork_generation.load();

    std::mutex mutex_;
    std::map<const std::byte*, Block> blocks_;
    size_t used_ = 0, granted_ = 0;
    FreeRanges kept_, empty_;  // with their pages, and without
};

// The heaps of the ranks of a world, one behind the other, as `rank` uses them.
class Heaps {
public:
    Heaps(std::shared_ptr<File> file, uint64_t begin, size_t each, int rank, int size);

    std::shared_ptr<Heap> open();  // that of this rank; nullptr: there are none
    // Where bytes of this rank's heap lie in the file; 0: not there.
    uint64_t locate(const std::byte* address, size_t bytes) const;
    // The address here of what a peer has located; nullptr: in no heap.
    std::shared_ptr<std::byte> resolve(uint64_t location);
    void retire(const std::byte* address);  // see Heap; it may be in no heap

private:
    const std::shared_ptr<File> file_;
    const uint64_t begin_;
    const size_t each_;
    const int rank_;
    std::mutex mutex_;
    std::shared_ptr<Heap> own_;
    std::atomic<Heap*> opened_{nullptr};
    std::vector<std::shared_ptr<Mapping>> mapped_;  // of each rank, once this one has needed it
};

}  // namespace ringcomm
