// Reading the private memory of a peer: one copy by the kernel (process_vm_readv) in place of two by the ranks. A
// kernel, a sandbox or a pid namespace may forbid it, so a rank believes only what it has tried: every rank shows where
// in its memory a secret lies, and who reads the right one there can reach it.
#pragma once

#include <memory>
#include <vector>

#include "arena.h"

namespace ringcomm {

class Reach {
public:
    Reach(std::shared_ptr<Arena> arena, const int64_t* pids);  // of the world; pids[r] belongs to rank r
    ~Reach();
    Reach(const Reach&) = delete;

    void show_secret(RankHeader& own);  // before anybody asks
    // Whether this rank can read the memory of rank r; it says nothing of the other direction.
    bool works(int r) { return obstacle(r) == 0; }
    int obstacle(int r);  // an errno, 0 if there is none; tried once
    // Rank r is a thread of this process, proved likewise: its addresses are good here.
    bool same_process(int r) { return works(r) && pids_[r] == own_pid_; }
    // Whether the kernel copies from this address of the own process: it does not from that of some device.
    bool copies(const void* address) const;
    // Whether it lies in a huge page, from which the kernel copies at the speed of memcpy. Elsewhere it takes its time
    // for each page (measured: 16 GB/s against 55). False where it does not say (before Linux 6.7).
    bool huge(const void* address) const;
    // False, with errno, if not all of it could be read: the process of rank r ends, or the memory is not mapped there.
    bool read(int r, void* target, const void* address, size_t bytes) const;

private:
    int attempt(int r) const;

    const std::shared_ptr<Arena> arena_;
    const std::vector<int64_t> pids_;
    const int64_t own_pid_;
    const int pagemap_;
    uint64_t secret_;
    std::unique_ptr<std::atomic<int>[]> obstacles_;
};

}  // namespace ringcomm
