// Cross-memory attach (CMA): the kernel copies once from a peer's private memory (process_vm_readv), where the ranks
// would copy twice. A kernel, sandbox or pid namespace may forbid it, so each rank tries: every rank publishes the
// address of a secret, and a peer that reads the right secret there has access.
#pragma once

#include <memory>
#include <vector>

#include "memory/arena.h"

namespace ringcomm {

class Cma {
public:
    Cma(std::shared_ptr<Arena> arena, const int64_t* pids);  // of the world; pids[r] belongs to rank r
    ~Cma();
    Cma(const Cma&) = delete;

    void publish_secret(RankHeader& own);  // before a peer probes
    // Whether this rank can read the memory of rank r, not the reverse.
    bool available(int r) { return error(r) == 0; }
    int error(int r);  // an errno, or 0; probed once
    // Whether rank r is a thread of this process, proved by the same probe: its addresses are valid here.
    bool same_process(int r) { return available(r) && pids_[r] == own_pid_; }
    // Whether the kernel copies from this address of this process; it refuses some device memory.
    bool readable(const void* address) const;
    // Whether it lies in a huge page, which the kernel copies at the speed of memcpy; small pages have a cost per page
    // (measured: 16 GB/s against 55). False where the kernel cannot tell (before Linux 6.7).
    bool in_huge_page(const void* address) const;
    // Returns false and sets errno if the process of rank r has ended or the memory is not mapped.
    bool read(int r, void* target, const void* address, size_t bytes) const;

private:
    int probe(int r) const;

    const std::shared_ptr<Arena> arena_;
    const std::vector<int64_t> pids_;
    const int64_t own_pid_;
    const int pagemap_;
    uint64_t secret_;
    std::unique_ptr<std::atomic<int>[]> errors_;
};

}  // namespace ringcomm
