// A world of threads for the native tests: every rank runs the same function over the real shared-memory code. The
// ranks share one mapping of the file, so that the sanitizers see each word at one address.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "ringcomm.h"

inline std::atomic<int> failures{0};

#define CHECK(condition)                                                    \
    do {                                                                    \
        if (!(condition)) {                                                 \
            if (++failures > 20) _exit(1); /* the rest would repeat it */   \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
        }                                                                   \
    } while (0)

// A status other than RC_OK ends the program: the other ranks would only time out.
#define DO(call)                                                                                                   \
    do {                                                                                                           \
        if (const int status = (call)) {                                                                           \
            fprintf(stderr, "%s:%d: %s is %d: %s\n", __FILE__, __LINE__, #call, status, rc_last_error()->message); \
            _exit(1);                                                                                              \
        }                                                                                                          \
    } while (0)

constexpr rc_domain NOWHERE{-1, -1};

// How ranks access each other's private memory. As threads of one process they could always do so directly.
enum Access { STAGED, DIRECT, CMA };

// Small buffers, so that little data takes the paths of large messages.
inline rc_tuning small_tuning(Access access = STAGED) {
    const uint64_t never = UINT64_MAX, cma_bytes = access == CMA ? 64 : never;
    return {.arena_bytes = 256 << 10,
            .sub_arena_bytes = 192 << 10,
            .segment_bytes = 1024,
            .one_shot_bytes = 512,
            .heap_bytes = 0,
            .nontemporal_bytes = 256,
            .direct_bytes = access == DIRECT ? 64 : never,
            .cma_bytes = cma_bytes,
            .cma_huge_bytes = cma_bytes,
            .copy_engine_bytes = 0,
            .timeout = 60.0,
            .wake_ns = 0,
            .tree_wait_ns = 0,
            .cores = 2,
            .oversubscribed = 1};
}

inline rc_tuning impatient() {
    rc_tuning tuning = small_tuning();
    tuning.timeout = 0.3;
    return tuning;
}

// `domains`: where each rank runs; empty: that is not known.
inline void in_world(int size, const rc_tuning& tuning, const std::function<void(rc_comm*, int)>& body,
                     const std::vector<rc_domain>& domains = {}) {
    int fd;
    DO(rc_file_create(&fd));
    const std::vector<int64_t> pids(size, getpid());
    const std::vector<int> pidfds(size, -1);
    std::vector<rc_comm*> comms(size);
    for (int r = 0; r < size; ++r) {
        const rc_domain* domain = domains.empty() ? &NOWHERE : &domains[r];
        DO(rc_world_open(fd, r, size, pids.data(), pidfds.data(), 4711, domain, &tuning, &comms[r]));
    }
    close(fd);
    std::vector<std::thread> ranks;
    for (int r = 0; r < size; ++r) {
        ranks.emplace_back([&, r] {
            body(comms[r], r);
            DO(rc_close(comms[r]));
        });
    }
    for (auto& rank : ranks) rank.join();
    for (rc_comm* comm : comms) rc_free(comm);
}

inline int run(rc_comm* comm, int collective, const void* source, void* target, uint64_t count, int dtype = RC_INT32,
               int op = RC_SUM, int root = 0, const uint64_t* counts = nullptr, rc_work** work = nullptr) {
    const rc_call call{source, target, count, dtype, op, 1.0, root, counts, nullptr};
    return rc_collective(comm, collective, &call, -1, work);
}

inline rc_transfer transfer_of(int kind, const void* data, uint64_t count, int dtype, int peer, int64_t tag,
                               double timeout = -1) {
    return {kind, const_cast<void*>(data), count, dtype, peer, tag, timeout, 0, 0, 0, nullptr};
}

inline int run(rc_comm* comm, const rc_transfer& transfer, int* source = nullptr) {
    rc_message message{};
    const int status = rc_transfer_run(comm, &transfer, &message);
    if (source) *source = message.source;
    return status;
}

inline int start(rc_comm* comm, const rc_transfer& transfer, rc_work** work) {
    return rc_transfer_start(comm, &transfer, work);
}

inline int exchange(rc_comm* comm, const rc_transfer& sent, const rc_transfer& received, int* source = nullptr) {
    rc_message message{};
    const int status = rc_exchange(comm, &sent, &received, &message);
    if (source) *source = message.source;
    return status;
}

// A symmetric buffer of `count` integers; a collective call.
class SymmetricBuffer {
public:
    SymmetricBuffer(rc_comm* comm, int rank, int size, uint64_t count) {
        const uint64_t bytes = count * sizeof(int);
        uint64_t offset = 0;
        if (rank == 0) DO(rc_reserve(comm, size * rc_symmetric_buffer_bytes(bytes), &offset));
        DO(run(comm, RC_BROADCAST, &offset, &offset, 1, RC_UINT64));
        DO(rc_symmetric_buffer_open(comm, offset, bytes, &buffer_));
        DO(run(comm, RC_BARRIER, nullptr, nullptr, 0));  // from now on the peers can resolve it
        data = static_cast<int*>(rc_symmetric_buffer_data(buffer_));
    }
    ~SymmetricBuffer() { rc_symmetric_buffer_free(buffer_); }
    SymmetricBuffer(const SymmetricBuffer&) = delete;

    int* data;

private:
    rc_symmetric_buffer* buffer_;
};

inline int finish(rc_work* work, double timeout = -1) {
    const int status = rc_work_wait(work, timeout, nullptr);
    rc_work_free(work);
    return status;
}
