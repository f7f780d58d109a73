/* The C ABI of ringcomm: the one declaration of what Python may call. bindings/build.py hands this text to cffi, so it
 * holds plain C declarations only. Conventions:
 *   - every function that can fail returns an rc_status; the facts of the failure are in rc_last_error() of this thread;
 *   - timeouts are seconds; a negative timeout means the communicator's own;
 *   - counts are elements, sizes are bytes;
 *   - handles are opaque; what `open` made, `close` ends (idempotent) and `free` releases.
 */
#ifndef RINGCOMM_H
#define RINGCOMM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum rc_status {
    RC_OK = 0,
    RC_ARGUMENT,    /* the caller's mistake; nothing was sent, or all ranks refuse alike */
    RC_MISMATCH,    /* the ranks called different things; consumed everywhere, outputs untouched */
    RC_TIMEOUT,     /* a deadline passed; the communicator is broken */
    RC_PEER_LOST,   /* a rank died or closed while it was still needed; the communicator is broken */
    RC_ABORTED,     /* abort() on some rank; the communicator is broken */
    RC_INTERRUPTED, /* the interrupt function asked to stop (a Python signal); the communicator is broken */
    RC_MEMORY,      /* shared memory could not be had */
    RC_CLOSED,      /* this communicator was closed here, or belongs to the process before a fork */
    RC_SYSTEM       /* an unexpected failure of the operating system */
};

enum rc_dtype {
    RC_BOOL, RC_INT8, RC_UINT8, RC_INT16, RC_UINT16, RC_INT32, RC_UINT32, RC_INT64, RC_UINT64,
    RC_FLOAT16, RC_BFLOAT16, RC_FLOAT32, RC_FLOAT64, RC_COMPLEX64, RC_COMPLEX128,
    RC_FLOAT8_E4M3, RC_FLOAT8_E5M2,
    RC_DTYPES
};

enum rc_op { RC_SUM, RC_PROD, RC_MIN, RC_MAX, RC_AVG, RC_BAND, RC_BOR, RC_BXOR, RC_PREMUL_SUM, RC_OPS };

/* How a collective is done. */
enum rc_way { RC_ALONE, RC_EXCHANGE, RC_ONE_SHOT, RC_TWO_STAGES, RC_SYMMETRIC, RC_THREADS, RC_REACHED, RC_WAYS };

enum rc_collective {
    RC_BARRIER, RC_BROADCAST, RC_REDUCE, RC_ALL_REDUCE, RC_GATHER, RC_SCATTER, RC_ALL_GATHER, RC_REDUCE_SCATTER,
    RC_ALL_TO_ALL,
    RC_SPLIT, RC_EMPTY, /* all_gather under the name of the call that needs it, so that a mismatch is told in its words */
    RC_COLLECTIVES
};

typedef struct rc_comm rc_comm;
typedef struct rc_work rc_work;
typedef struct rc_region rc_region;

/* What the ranks of a world agree on at connect: rank 0's values hold for all. */
typedef struct {
    uint64_t arena_bytes;     /* shared memory of one rank of the world, at most */
    uint64_t sub_arena_bytes; /* the same for a communicator made by split */
    uint64_t segment_bytes;   /* one block of a chunk in a staged collective, at most; all its blocks: two of it */
    uint64_t small_bytes;     /* all_reduce up to this size: every rank reduces everything, one synchronisation */
    uint64_t stream_bytes;    /* blocks of at least this size are staged with non-temporal stores */
    uint64_t direct_bytes;    /* symmetric buffers, or the ranks are threads: accessed directly from this size on */
    uint64_t reach_bytes;     /* blocks of at least this size the kernel copies out of another process */
    uint64_t reach_huge_bytes; /* the same for blocks in huge pages */
    double timeout;           /* seconds a call may take, unless the call says otherwise */
    int32_t oversubscribed;   /* more ranks than cores: waiting ranks give the core away early */
} rc_tuning;

typedef struct {
    int32_t code;       /* rc_status */
    int32_t rank;       /* the rank that failed, in the numbering of the communicator; -1: none */
    int32_t peer;       /* the other side of a point-to-point call; -1: none */
    int32_t collective; /* rc_collective; -1: not a collective */
    uint64_t epoch;
    char expected[192];
    char got[192];
    char message[3584];
} rc_error;

const rc_error* rc_last_error(void);

/* Called now and then while a call waits on the main thread; non-zero stops the wait with RC_INTERRUPTED. */
void rc_set_interrupt(int (*interrupt)(void));
/* In the child of a fork: every communicator and region made before is dead here, and freeing one does nothing. */
void rc_after_fork(void);

/* Kernels. `level`: "portable", "avx2", "avx512", or "" for the best of this CPU. */
int rc_kernels_select(const char* level);
const char* rc_kernels_name(void);
int rc_dtype_bytes(int dtype);
int rc_reducible(int dtype, int op);
/* dst[i] = srcs[0][i] op srcs[1][i] op …, in that order, rounded once; dst may be one of srcs. avg divides by n * factor. */
int rc_reduce(void* dst, const void* const* srcs, int n, uint64_t count, int dtype, int op, double factor);
/* Bytes per second with which a block goes over from the core `writer` to the core `reader`: ordinary and non-temporal
   stores. */
int rc_probe_handover(uint64_t bytes, int writer, int reader, double* ordinary, double* streamed);

/* CUDA kernels (kernels/cuda/), on a GPU or on the emulated device. Addresses are the device's. */
typedef struct {
    int32_t ranks, channels;
    uint32_t slots, slot_bytes, stage_bytes, line_bytes;
} rc_cuda_shape;

typedef struct {
    uint64_t bases; /* in device memory: where the buffer of each rank is mapped here; 0: in none */
    uint64_t buffer, offset;
} rc_cuda_place; /* where an array lies in a symmetric buffer */

typedef struct {
    void* arena;
    void* control; /* an rc_cuda_control in host memory that the device reaches */
    const void* input;
    void* output;
    rc_cuda_place input_place, output_place;
    const uint64_t* send_offsets; /* elements, one more than ranks; NULL: equal blocks */
    const uint64_t* recv_offsets;
    uint64_t number; /* told again when it fails */
    uint64_t count;  /* elements of the array, or of a block */
    double timeout, factor;
    int32_t rank, kernel, dtype, op, root;
} rc_cuda_call;

typedef struct {
    uint64_t abort;  /* not 0: kernels give up */
    uint64_t failed; /* not 0: a kernel has given up, for this reason: */
    uint64_t number, epoch, expected, got;
    int32_t peer, channel;
    uint64_t reason;
} rc_cuda_control;

/* The size of an arena, and where in it the addresses of all arenas are to be written. */
int rc_cuda_layout(const rc_cuda_shape* shape, uint64_t* bytes, uint64_t* peers_at);
uint64_t rc_cuda_args_bytes(void);
/* What the kernel of entry.cu takes by value. */
int rc_cuda_args(const rc_cuda_shape* shape, const rc_cuda_call* call, void* args);
/* Does on the CPU what a launch with so many blocks of so many threads does on a GPU, and returns when it is done. */
int rc_emulated_launch(const void* args, int blocks, int threads, uint64_t seed);
/* The same for a launch of several ranks in one grid, each with so many blocks; `args` lie side by side. */
int rc_emulated_virtual(const void* args, int ranks, int blocks, int threads, uint64_t seed);

/* The world: one anonymous file holds the arenas of all ranks, and grows for sub-groups and symmetric buffers. */
uint64_t rc_world_bytes(int size, const rc_tuning* tuning);
uint64_t rc_sub_bytes(int size, const rc_tuning* tuning);
int rc_file_create(int* fd);
/* Maps the arenas in `fd` (which stays the caller's), as `rank`. pids[i] and pidfds[i] (-1: none) belong to rank i.
 * Rank 0 must have opened before the others: it writes `nonce`, the others prove by reading it that they share memory. */
int rc_world_open(int fd, int rank, int size, const int64_t* pids, const int* pidfds, uint64_t nonce,
                  const rc_tuning* tuning, rc_comm** comm);
/* A new range of the file, to be told to the members; one rank of a group reserves for all. */
int rc_reserve(rc_comm* comm, uint64_t bytes, uint64_t* offset);
/* A communicator of `size` ranks whose arena starts at `offset`; members[i] is the rank in `parent` of rank i. */
int rc_sub_open(rc_comm* parent, uint64_t offset, int rank, int size, const int* members, rc_comm** comm);
/* Breaks the communicator; `rank` is the one that failed. */
int rc_abort(rc_comm* comm, int status, int rank, const char* reason);
/* Whether a rank has died or closed: 0 or 1. */
int rc_gone(rc_comm* comm, int rank, int* gone);
/* RC_INTERRUPTED: from a signal handler inside a call of this communicator; that call ends now, then close again. */
int rc_close(rc_comm* comm);
void rc_free(rc_comm* comm);
/* RC_OK while the communicator is usable, else the first failure. */
int rc_check(rc_comm* comm);
/* How the last collective of this rank was done, and in how many chunks. */
int rc_last_way(rc_comm* comm, int* way, uint64_t* chunks);
/* The last `calls` calls of every rank, a line each; writes at most `bytes`, NUL-terminated. */
int rc_report(rc_comm* comm, int calls, char* text, uint64_t bytes);

/* A collective. `count`: elements of the array (broadcast, reduce, all_reduce), or of this rank's block (all others).
 * `counts`: NULL for equal blocks, else `size` block lengths; for all_to_all, `size` to send, then `size` to receive.
 * With `work`, the call is queued and the handle stored there; the buffers must live until it is done. */
int rc_collective(rc_comm* comm, int collective, const void* source, void* target, uint64_t count, int dtype, int op,
                  double factor, int root, const uint64_t* counts, double timeout, rc_work** work);

/* How the errors and the flight record say that call; `with_counts`: 1 where blocks differ, then `count` is their sum.
 * Writes at most `bytes`, NUL-terminated. */
int rc_describe(int collective, uint64_t count, int dtype, int op, double factor, int root, int with_counts, char* text,
                uint64_t bytes);

/* Whether that call makes sense on `rank` of `size`, for a transport that does it in another way. */
int rc_check_collective(int rank, int size, int collective, const void* source, void* target, uint64_t count, int dtype,
                        int op, double factor, int root, const uint64_t* counts);

/* Point to point; peer -1 receives from any rank. `source` (may be NULL) gets the rank that sent. */
int rc_send(rc_comm* comm, const void* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout,
            rc_work** work);
int rc_recv(rc_comm* comm, void* data, uint64_t count, int dtype, int peer, int64_t tag, double timeout, int* source,
            rc_work** work);
int rc_sendrecv(rc_comm* comm, const void* data, uint64_t count, int dtype, int dest, void* target,
                uint64_t target_count, int target_dtype, int source, int64_t tag, double timeout, int* from);

/* The status of the finished call. If it is not done after `timeout` the communicator is broken with RC_TIMEOUT: no
 * wait returns while the library can still touch the buffers. */
int rc_work_wait(rc_work* work, double timeout, int* source);
int rc_work_done(rc_work* work);
/* Once the work is done, well or badly, `token` (not 0) comes out of rc_next_done; it does so at once if it is. */
int rc_work_notify(rc_work* work, uint64_t token);
/* Waits for the next token of this process, in the order in which works are done; 0 after `timeout` without one. */
uint64_t rc_next_done(double timeout);
void rc_work_free(rc_work* work);

/* A symmetric buffer: `bytes` for each rank at `offset` (from rc_reserve of size × rc_region_bytes(bytes)). */
uint64_t rc_region_bytes(uint64_t bytes);
int rc_region_open(rc_comm* comm, uint64_t offset, uint64_t bytes, rc_region** region);
void* rc_region_data(rc_region* region);
void rc_region_free(rc_region* region);

#ifdef __cplusplus
}
#endif

#endif
