/* The C ABI of ringcomm. bindings/build.py passes this text to cffi, so it holds plain C declarations only.
 * Conventions:
 *   - a function that can fail returns an rc_status; rc_last_error() of the same thread holds the facts;
 *   - timeouts are seconds; a negative timeout means the communicator's default;
 *   - counts are elements, sizes are bytes;
 *   - handles are opaque; `close` ends what `open` made (idempotent), and `free` releases it.
 */
#ifndef RINGCOMM_H
#define RINGCOMM_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum rc_status {
    RC_OK = 0,
    RC_ARGUMENT,    /* an invalid argument; nothing was sent, or all ranks raise alike */
    RC_MISMATCH,    /* the ranks' calls differ; the call is over on all ranks, outputs are untouched */
    RC_TIMEOUT,     /* a deadline passed; the communicator is broken */
    RC_PEER_LOST,   /* a rank died or closed while it was still needed; the communicator is broken */
    RC_ABORTED,     /* abort() on some rank; the communicator is broken */
    RC_INTERRUPTED, /* the interrupt function asked to stop (a Python signal); the communicator is broken */
    RC_MEMORY,      /* out of shared memory */
    RC_CLOSED,      /* this communicator was closed by this rank, or belongs to the parent of a fork */
    RC_SYSTEM,      /* an unexpected failure of the operating system */
    RC_UNPREPARED   /* Python has to do something before a call on GPUs; nothing was launched: see rc_gpus_call */
};

/* The rows of types.def. */
enum rc_dtype {
#define DTYPE_ROW(name, NAME, ...) RC_##NAME,
#include "ringcomm/types.def"
    RC_DTYPES
};

enum rc_op {
#define OP_ROW(name, NAME, ...) RC_##NAME,
#include "ringcomm/types.def"
    RC_OPS
};

enum rc_collective {
#define COLLECTIVE_ROW(name, NAME, ...) RC_##NAME,
#include "ringcomm/types.def"
    RC_COLLECTIVES
};

enum rc_path {
#define PATH_ROW(name, NAME) RC_PATH_##NAME,
#include "ringcomm/types.def"
    RC_PATHS
};

typedef struct rc_comm rc_comm;
typedef struct rc_work rc_work;
typedef struct rc_symmetric_buffer rc_symmetric_buffer;

/* The settings of a world: rank 0's values hold for all ranks. */
typedef struct {
    uint64_t arena_bytes;       /* shared memory of one rank of the world, at most */
    uint64_t sub_arena_bytes;   /* the same for a communicator from split */
    uint64_t segment_bytes;     /* largest block of a chunk in a staged collective; see exchange.h for all its blocks */
    uint64_t one_shot_bytes;    /* all_reduce up to this size: every rank reduces everything, one synchronization */
    uint64_t heap_bytes;        /* addresses for the shared arrays of one rank; 0: there are none */
    uint64_t nontemporal_bytes; /* blocks staged with non-temporal stores from this size on; 0: measured */
    uint64_t direct_bytes;      /* symmetric buffers, or the ranks are threads: accessed directly from this size on */
    uint64_t cma_bytes;         /* blocks of at least this size are copied by CMA */
    uint64_t cma_huge_bytes;    /* the same for blocks in huge pages */
    uint64_t copy_engine_bytes; /* on GPUs copy engines move arrays of at least this size; 0: never; cuda/copies.cpp */
    double timeout;             /* seconds a call may take, unless the call says otherwise */
    uint64_t wake_ns;           /* what a sleeping rank takes to wake up; 0: unknown */
    uint64_t tree_wait_ns;      /* how long a rank waits for its turn in the tree of small calls; 0: there is none */
    int32_t cores;              /* that the ranks of this machine may use, all together */
    int32_t oversubscribed;     /* more ranks than cores: waiting ranks give the core away early */
} rc_tuning;

typedef struct {
    int32_t code;        /* rc_status */
    int32_t rank;        /* the rank that failed, in the numbering of the communicator that failed; -1: none */
    int32_t peer;        /* the other side of a point-to-point call; -1: none */
    int32_t collective;  /* rc_collective; -1: not a collective */
    int32_t group_size;  /* ranks of the communicator that failed, if this one was split from it; 0: this one failed */
    int32_t mismatch_at; /* of an abort by a rank whose last call was a mismatch: where that begins in the message */
    uint64_t epoch;
    char expected[192];
    char got[192];
    char message[3584];
} rc_error;

const rc_error* rc_last_error(void);

/* Called periodically while a call waits on the main thread; non-zero ends the wait with RC_INTERRUPTED. */
void rc_set_interrupt(int (*interrupt)(void));
/* Call in the child of a fork: the parent's communicators, buffers and TLS are unusable there; freeing one does
 * nothing. */
void rc_after_fork(void);

/* Kernels. `level`: "portable", "avx2", "avx512", "neon", or "" for the best of this CPU. */
int rc_kernels_select(const char* level);
const char* rc_kernels_name(void);
int rc_dtype_bytes(int dtype);
/* dst[i] = srcs[0][i] op srcs[1][i] op …, in that order, rounded once; avg divides by n * factor, integers by
 * its whole part, from 1 to the most that 64 bits hold, and truncates. dst may be one of srcs. */
int rc_reduce(void* dst, const void* const* srcs, int n, uint64_t count, int dtype, int op, double factor);
/* What a cache line takes from one core to the other and back. */
int rc_line_latency(int first, int second, double* ns);
/* What a thread that sleeps on the core `sleeper` takes to wake up when one on the core `waker` wakes it. */
int rc_wake_latency(int waker, int sleeper, uint64_t* ns);

/* CUDA kernels (kernels/cuda/), on a GPU or on the emulated device. Addresses are in device memory. */
typedef struct {
    int32_t ranks, channels;
    uint32_t slots, slot_bytes, stage_bytes, line_bytes;
} rc_cuda_shape;

typedef struct {
    uint64_t bases; /* a table: the address at which each rank's buffer is mapped here; 0: in no symmetric buffer */
    uint64_t buffer, offset;
    uint64_t multicast; /* the address of the buffers of all ranks at once; 0: none */
} rc_cuda_location;     /* of an array in a symmetric buffer */

typedef struct {
    void* arena;
    void* control; /* an rc_cuda_control in host memory that the device accesses */
    const void* input;
    void* output;
    rc_cuda_location input_location, output_location;
    const uint64_t* send_offsets; /* elements, one more than ranks; NULL: equal blocks */
    const uint64_t* recv_offsets;
    uint64_t number; /* repeated in rc_cuda_control if the call fails */
    uint64_t count;  /* elements of the array, or of a block */
    double timeout, factor;
    int32_t rank, kernel, dtype, op, root;
} rc_cuda_call;

typedef struct {
    uint64_t abort;  /* not 0: kernels stop waiting */
    uint64_t failed; /* not 0: a kernel has failed; the rest says why */
    uint64_t number, epoch, expected, got;
    int32_t peer, channel;
    uint64_t reason;
    uint64_t completed;                    /* the number of the last call that has ended, also by a failure */
    uint64_t replay_started, replay_ended; /* the same for calls in graphs, whose numbers have bit 63: their epochs */
} rc_cuda_control;

/* The most bytes of an array, or of a block, that these kernels take; what is larger goes along the ring. */
typedef struct {
    uint64_t ll, one_shot, two_shot; /* of all_reduce: the first one that takes it */
    uint64_t one_shot_reduce, one_shot_reduce_scatter, all_gather, broadcast;
} rc_cuda_limits;

/* How a collective is launched; `kernel` -1: the one for its size. */
typedef struct {
    int32_t kernel, dtype, op; /* the variant to compile */
    int32_t blocks;
    int32_t with_tables; /* 1: blocks of unequal lengths, whose offsets the arguments point to */
    uint64_t count;      /* elements of the array, or of a block */
} rc_cuda_plan;

/* The size of an arena, and the offset in it at which the host writes the addresses of all arenas. */
int rc_cuda_layout(const rc_cuda_shape* shape, uint64_t* bytes, uint64_t* peers_at);
uint64_t rc_cuda_args_bytes(void);
/* The most ranks of which one launch takes the arguments, one after the other. */
enum { RC_VIRTUAL_RANKS = 8 };
/* Writes the argument that the kernel of entry.cu takes by value. */
int rc_cuda_args(const rc_cuda_shape* shape, const rc_cuda_call* call, void* args);

/* The world: one anonymous file holds the arenas of all ranks, and grows for sub-groups and symmetric buffers. */
uint64_t rc_world_bytes(int size, const rc_tuning* tuning);
uint64_t rc_sub_bytes(int size, const rc_tuning* tuning);
int rc_file_create(int* fd);
/* Where a rank runs: ranks of one number share a NUMA node, a last-level cache; -1: unknown, or several. */
typedef struct {
    int32_t node, cache;
} rc_domain;
/* How many cache lines arrive one after another in a small all_reduce of ranks at these places, each with a core of its
 * own: through the tree, or by one-shot where the tree saves none. */
int rc_small_call_lines(int size, const rc_domain* domains, int* lines);
/* Maps the arenas in `fd` (which stays the caller's), as `rank`. pids[i] and pidfds[i] (-1: none) belong to rank i.
 * Rank 0 must open before the others: it writes `nonce`, and the others read it to prove that they share memory. */
int rc_world_open(int fd, int rank, int size, const int64_t* pids, const int* pidfds, uint64_t nonce,
                  const rc_domain* domain, const rc_tuning* tuning, rc_comm** comm);
/* What another process of this user does: the ranks of the group whose arena lies at `offset` in its file; at most
 * `most`. `size` is 0 if none lies there. In a group of several hosts these are the ranks of this one. */
typedef struct {
    int64_t pid;               /* 0: it has not come yet */
    int32_t member;            /* its rank among all that share memory */
    int32_t closed;            /* 1: it has left */
    int32_t of_ranks;          /* the size of its group, on all hosts */
    int32_t process;           /* in a group of several hosts: its rank among the `processes` that the link connects; */
    int32_t processes;         /* 0: the group is of one host */
    int32_t waits_for;         /* in the call, for this rank among all that share memory; -1: none is known */
    int32_t waits_for_process; /* ... among those that the link connects */
    uint64_t calls, bytes;
    double seconds; /* that it has been in the call */
    char call[256]; /* "": none */
} rc_rank_view;
int rc_inspect(int fd, uint64_t offset, int most, rc_rank_view* ranks, int* size);
/* Reserves a range of the file; one rank reserves for its group and sends the offset to the others. */
int rc_reserve(rc_comm* comm, uint64_t bytes, uint64_t* offset);
/* A communicator of `size` ranks whose arena starts at `offset`; members[i] is the rank in `parent` of rank i. */
int rc_sub_open(rc_comm* parent, uint64_t offset, int rank, int size, const int* members, rc_comm** comm);
/* The same with an arena of rc_world_bytes and its own settings: no failure of one concerns the other. */
int rc_group_open(rc_comm* other, uint64_t offset, int rank, int size, const int* members, const rc_tuning* tuning,
                  rc_comm** comm);
/* A communicator of the ranks that call this too, in their old order; it waits until `timeout` for ranks that run but
 * do not call it. `members`, which has room for all ranks, are their ranks here, `size` of them. RC_ABORTED: the others
 * have continued without this rank. */
int rc_shrink(rc_comm* comm, double timeout, int* members, int* size, rc_comm** next);
/* Enters into the flight record a call that the program carries out, with others on the communicator or without. */
enum rc_regrouping { RC_REGROUPING_SHRINK, RC_REGROUPING_GROW };
int rc_regrouping_begin(rc_comm* comm, int call, uint64_t* number);
int rc_regrouping_end(rc_comm* comm, uint64_t number, int status);
/* Breaks the communicator; `rank` is the failed rank. */
int rc_abort(rc_comm* comm, int status, int rank, const char* reason);
/* Whether a rank has died or closed: 0 or 1. */
int rc_peer_lost(rc_comm* comm, int rank, int* lost);
/* RC_INTERRUPTED: called by a signal handler inside a call of this communicator. That call ends; then close again. */
int rc_close(rc_comm* comm);
void rc_free(rc_comm* comm);
/* RC_OK while the communicator is usable, else the first failure. */
int rc_check(rc_comm* comm);
/* RC_OK, or a mismatch of an earlier call that this rank has found and not returned yet. This and the next one are
 * RC_OK once the communicator is broken. */
int rc_check_calls(rc_comm* comm);
/* RC_OK, or the failure of a call whose work was dropped: see rc_work_drop. */
int rc_check_dropped(rc_comm* comm);
/* The path of this rank's last collective, and its number of chunks. */
int rc_last_path(rc_comm* comm, int* path, uint64_t* chunks);
/* Adds an entry for each later call of this rank to a file, from byte 4096 on: see core/trace.h. `fd` stays the
 * caller's; -1 ends the trace, and one that it has interrupted goes on. */
int rc_trace(rc_comm* comm, int fd);
int rc_trace_mark(rc_comm* comm, const char* name); /* nothing without a trace */
int rc_traced(rc_comm* comm, int* traced);
/* The collectives of this rank until a call with 0 are parts of one, and not entered. */
int rc_trace_parts(rc_comm* comm, int parts);
/* A collective on a GPU, which has begun and ended at these ns of CLOCK_MONOTONIC. `elements`: of its larger array. */
int rc_trace_launch(rc_comm* comm, int collective, int dtype, int root, uint64_t elements, uint64_t begin, uint64_t end,
                    int failed);
/* A number that the ranks of this communicator share, and no other one has. */
int rc_group_id(rc_comm* comm, uint64_t* id);
/* The last `calls` calls of every rank, one line per rank; writes at most `bytes`, NUL-terminated. */
int rc_report(rc_comm* comm, int calls, char* text, uint64_t bytes);
/* The same for programs: a JSON object per rank. */
int rc_report_json(rc_comm* comm, int calls, char* text, uint64_t bytes);

/* The arguments of a collective. `count`: elements of an ARRAY, or of this rank's BLOCK (types.def). `counts`: NULL for
 * equal blocks, else `size` block lengths; for all_to_all, `size` to send, then `size` to receive. `deferred_mismatch`:
 * not NULL if another part of the same call may follow, with which other ranks would go on: then a mismatch of an
 * earlier call is left to the next one, or to rc_check_calls, and it becomes 1, else 0. A queued call takes NULL. */
typedef struct {
    const void* source;
    void* target;
    uint64_t count;
    int32_t dtype, op;
    double factor;
    int32_t root;
    const uint64_t* counts;
    int32_t* deferred_mismatch;
} rc_call;

/* With `work`, the call is queued and the handle stored there; the buffers must live until it is done. */
int rc_collective(rc_comm* comm, int collective, const rc_call* call, double timeout, rc_work** work);
/* Before this rank goes on with a further part of a call: waits until all ranks have made the part before, its last
 * collective. RC_MISMATCH: they have called different things, and that call is over on all ranks. */
int rc_confirm(rc_comm* comm, double timeout);

/* Describes a call as errors and the flight record do; `with_counts`: 1 if blocks differ, then `count` is their sum.
 * Writes at most `bytes`, NUL-terminated. */
int rc_describe(int collective, uint64_t count, int dtype, int op, double factor, int root, int with_counts, char* text,
                uint64_t bytes);

/* Checks the arguments of a collective on `rank` of `size`, for other transports; `on_gpu`: 1 if GPUs reduce. */
int rc_check_collective(int rank, int size, int collective, const rc_call* call, int on_gpu);

/* Point to point. Messages are matched by source and tag, in order for each source and tag. */
enum rc_transfer_kind {
    RC_SEND,
    RC_SEND_SYNCHRONOUS, /* is done only once a receive has matched the message */
    RC_RECV,             /* a message of exactly this count and dtype */
    RC_RECV_AT_MOST,     /* of this dtype, and at most so many elements: those that arrive come first */
    /* As MPI matches messages: of any dtype and at most so many bytes, and from RC_ANY_TAG of any tag. A longer one is
     * lost: the receive returns RC_MISMATCH, its sender RC_OK. */
    RC_RECV_MESSAGE,
    RC_RECV_OR_TAKE, /* the same, unless the message is longer: then it is taken */
    RC_PROBE,        /* finds the message that such a receive would get */
    RC_TAKE,         /* the same; only the RC_RECV_MESSAGE with its number gets the message then */
    RC_TRANSFER_KINDS
};
#define RC_ANY_TAG INT64_MIN
enum { RC_OBJECT_TAG = -2147483648 }; /* of messages inside a collective, which RC_ANY_TAG does not match */
typedef struct {
    int32_t kind;
    void* data; /* only read by a send; a probe has none */
    uint64_t count;
    int32_t dtype;
    int32_t peer; /* -1: a receive or probe takes any */
    int64_t tag;
    double timeout;
    uint64_t taken; /* RC_RECV_MESSAGE: the number of a taken message, whose source and tag the others are; else 0 */
    int32_t on_gpu; /* 1: `data` is on the GPU; the message moves after what has been queued on `stream`; */
    int32_t async;  /* 1: what is queued there next does not wait for it */
    void* stream;
} rc_transfer;
typedef struct {
    int32_t source;    /* -1: none, as for a send, or after rc_cancel */
    int32_t cancelled; /* 1: rc_cancel has withdrawn the receive */
    int64_t tag;
    uint64_t bytes; /* that arrived */
    uint64_t taken; /* the number of the message if it was taken, else 0 */
} rc_message;
/* `message`, which may be NULL, is what a receive or probe has found. */
int rc_transfer_run(rc_comm* comm, const rc_transfer* transfer, rc_message* message);
int rc_transfer_start(rc_comm* comm, const rc_transfer* transfer, rc_work** work);
/* A transfer that rc_start_all() starts again and again. While it is not started the work is done. */
int rc_transfer_prepare(rc_comm* comm, const rc_transfer* transfer, rc_work** work);
/* Starts prepared transfers, in this order; each must be done, or none starts. `started`: how many, also after a
 * failure. */
int rc_start_all(rc_work* const* works, int count, int* started);
/* A send and a receive at once. */
int rc_exchange(rc_comm* comm, const rc_transfer* sent, const rc_transfer* received, rc_message* message);
/* A probe that does not wait: `found` is 0 or 1. */
int rc_poll(rc_comm* comm, const rc_transfer* probe, int* found, rc_message* message);
/* Withdraws a receive that no message has matched: then it is done, and `cancelled` is 1. Has no effect on others. */
int rc_cancel(rc_work* work, int* cancelled);
/* This rank sends no more messages: a peer that waits for one fails as if this rank had closed. It does not if this
 * rank has never used the communicator, or exchanges messages of arrays on a GPU. */
int rc_announce_close(rc_comm* comm);
/* What a receive that is done has received. */
int rc_work_message(rc_work* work, rc_message* message);

/* Messages of arrays on a GPU. The rank's arena of them is made and freed in Python, which compiles the kernel. */
typedef struct {
    int32_t ranks, channels;
    uint32_t piece_bytes, slots, slot_bytes;
} rc_gpu_messages_shape;
typedef struct {
    rc_gpu_messages_shape shape;
    void* arena;         /* rc_gpu_messages_bytes of zeroed device memory */
    void* control;       /* an rc_cuda_control */
    uint64_t* completed; /* RC_MAX_LAUNCHES words in host memory that the device accesses */
    void* function;      /* ringcomm_messages, a CUfunction */
    void* context;       /* the CUcontext of the device, whose primary one it is */
    uint64_t process;    /* the same for the ranks of one process only */
    const char* driver;  /* the library: libcuda.so.1, or another one with its functions */
    const char* device;  /* its name in errors */
    int32_t ordinal, threads;
} rc_gpu_messages_setup;
enum rc_gpu_limit { RC_MAX_LAUNCHES = 256 }; /* in flight */
int rc_gpu_messages_bytes(const rc_gpu_messages_shape* shape, uint64_t* bytes);
int rc_gpu_messages_open(rc_comm* comm, const rc_gpu_messages_setup* setup);
/* Waits until a message is launched, with its errors up to then, and lets a stream wait for its end. */
int rc_work_wait_launched(rc_work* work, double timeout, void* stream, int* source);
int rc_work_launched(rc_work* work, int* launched);
/* 1: what can be launched together is launched by 0, or by a wait. */
int rc_gpu_messages_coalesce(rc_comm* comm, int begins);
/* Waits until the messages that have been launched have moved. */
int rc_gpu_messages_wait(rc_comm* comm);
/* Whether the peers have read all that was sent: the arena can be freed once `comm` is closed. */
int rc_gpu_messages_read(rc_comm* comm, int* all);

/* The status of the finished call. If it is not done after `timeout` the communicator is broken with RC_TIMEOUT: no
 * wait returns while the library can still touch the buffers. */
int rc_work_wait(rc_work* work, double timeout, int* source);
/* Whether it is done; rc_work_done makes progress before, so that a program may poll. */
int rc_work_ended(const rc_work* work);
int rc_work_done(rc_work* work);
/* When the work is done, successfully or not, rc_next_done returns `token` (not 0). */
int rc_work_notify(rc_work* work, uint64_t token);
/* Waits for the next token of this process, in order of completion; 0 after `timeout`. */
uint64_t rc_next_done(double timeout);
/* The program will neither wait nor poll: the call goes on by itself, unless the system refuses a thread. A failure
 * that no wait has returned, and that leaves the communicator usable, is returned by rc_check_dropped or rc_close. */
int rc_work_drop(rc_work* work);
void rc_work_free(rc_work* work); /* drops it */

/* TLS 1.3 between hosts, by the OpenSSL of the system. An identity is a certificate with its key, and the authority of
 * the certificates of all peers: paths of PEM files. RC_ARGUMENT names a file that cannot be used, or says that
 * there is no OpenSSL. */
typedef struct rc_tls_identity rc_tls_identity;
int rc_tls_load(const char* certificate, const char* key, const char* authority, rc_tls_identity** identity);
void rc_tls_unload(rc_tls_identity* identity);
/* On a connected socket, which the caller keeps; one of its ends `accepts`. rc_tls_receive and rc_tls_send do not wait,
 * and give in `moved` what recv and send return, and in place of -1 and errno the negative errno. The handshake is a
 * part of them: before its end rc_tls_send gives -EINPROGRESS, and the socket has to be readable. After -EPROTO
 * rc_tls_failure says what is wrong. `holds`: whether more can be received although the socket need not be readable. */
typedef struct rc_tls rc_tls;
int rc_tls_open(const rc_tls_identity* identity, int socket, int accepts, rc_tls** tls);
int rc_tls_receive(rc_tls* tls, void* data, uint64_t bytes, int64_t* moved, int* holds);
int rc_tls_send(rc_tls* tls, const void* data, uint64_t bytes, int64_t* moved);
const char* rc_tls_failure(const rc_tls* tls);
void rc_tls_free(rc_tls* tls);

/* Between hosts. A network joins the processes of a job; a communicator over it has ranks on several hosts. */
typedef struct rc_network rc_network;
/* A host that does not answer for so many seconds, to a probe or to data, is lost. `name`: the same in all processes,
 * and of no other network on their machines. */
int rc_network_open(int rank, int size, const char* name, double idle_timeout, double resend_timeout,
                    rc_network** network);
/* Which connections are needed since the last call, at most as many as there are processes: the one to a process
 * (0 in `flows`), or a flow (1, 2, …), a further one for large data. The descriptor `readable`, of the network, says
 * when there are some, or a flow has ended. rc_network_connect gives it a connected TCP socket, which probes its peer,
 * and the TLS on it (NULL: none); it owns both. If there is none, `socket` is -1, and `failure` says why: the process
 * is lost. NULL: it has closed all communicators.
 * rc_network_fail: no connection can be made any more, all communicators of the network fail. */
int rc_network_wanted(rc_network* network, int* readable, int* processes, int* flows, int* count);
int rc_network_connect(rc_network* network, int process, int socket, rc_tls* tls, const char* failure);
int rc_network_fail(rc_network* network, const char* what_this_rank_cannot);
/* From now on so many flows are needed to each process that sends or gets large data; never fewer than before. */
int rc_network_want_flows(rc_network* network, int count);
int rc_network_add_flow(rc_network* network, int process, int socket, rc_tls* tls); /* owns both */
/* A flow that has ended since the last call, while its process is there, and how many are left; else `process` is -1.
 */
int rc_network_ended_flow(rc_network* network, int* process, int* left, char* reason, uint64_t bytes);
/* After the last communicator is closed: waits until all that was sent has arrived at the other hosts, up to two
 * seconds, or five where that takes a connection. From then on rc_network_ended on this host says so. */
int rc_network_flush(rc_network* network);
/* Whether another process of this host has `ended`, and `how`: empty, if it had closed all communicators before. */
int rc_network_ended(rc_network* network, int process, int* ended, char* how, uint64_t bytes);
void rc_network_free(rc_network* network); /* its communicators stay usable */
/* MPI as this process has loaded it: addresses of its functions, and values of its handles, which are ints or pointers.
 * `comm` is for the network alone, and returns errors. */
typedef struct {
    void *isend, *irecv, *test, *cancel, *improbe, *imrecv, *get_count, *error_string;
    uint64_t comm, byte; /* MPI_BYTE */
    int32_t handle_bytes;
    int32_t any_source, most_tag; /* MPI_ANY_SOURCE, MPI_TAG_UB */
    int32_t any_thread;           /* MPI_THREAD_MULTIPLE */
} rc_mpi;
int rc_network_open_mpi(int rank, int size, const rc_mpi* mpi, rc_network** network);
/* UCX: `library` is a path or name of libucp, RC_ARGUMENT if it cannot be loaded, and `devices` those between hosts, as
 * in UCX_NET_DEVICES ("": all). Over TCP it listens at one of `ports`, as in UCX_TCP_PORT_RANGE ("": any). The
 * variables UCX_* of the environment come first. */
typedef struct rc_ucx rc_ucx;
int rc_ucx_open(const char* library, const char* devices, const char* ports, double keepalive, rc_ucx** ucx);
/* Valid as long as `ucx`: the file and the version of libucp, the transports with their devices ("tcp/eth0 ..."), and
 * the address of the worker. */
int rc_ucx_describe(rc_ucx* ucx, const char** path, const char** version, const char** transports);
int rc_ucx_address(rc_ucx* ucx, const void** address, uint64_t* bytes);
/* Begins to connect to the workers of all `size` processes; then rc_ucx_await until `connected`, a flag per process,
 * has no 0. It waits for `timeout` seconds at most. */
int rc_ucx_connect(rc_ucx* ucx, int rank, int size, const void* const* addresses);
int rc_ucx_await(rc_ucx* ucx, double timeout, int* connected);
int rc_network_open_ucx(rc_ucx* ucx, rc_network** network); /* leaves `ucx` empty */
void rc_ucx_free(rc_ucx* ucx);
typedef struct {
    int32_t unsent;  /* messages to processes that have not left */
    int32_t staying; /* processes that have not left, and what may still arrive */
    int32_t stuck;   /* MPI may still touch memory of a call that has failed */
    int32_t failed;  /* a communicator of the network has failed */
} rc_leaving;
/* After the communicators of the network are closed: tells the other processes. Once `unsent`, `staying` and `stuck`
 * are 0, MPI needs `comm` no longer. */
int rc_network_leave(rc_network* network, rc_leaving* leaving);
/* A communicator of `size` ranks. members[i] is the process of rank i, and hosts[i] the number of its host. `number`:
 * below 2^43, the same on all ranks, and of no other communicator of these processes. Only the first communicator of a
 * network may be used before all of its ranks have it. `local` has the ranks of this host, in the order of their
 * ranks here, and where others see what this rank does (NULL: nowhere; it is alone on its host); close it later.
 * `parent` (may be NULL): the one from which this one is split, so that its failure is one of this one as well. */
int rc_network_group(rc_network* network, uint64_t number, int rank, int size, const int* members, const int* hosts,
                     rc_comm* local, rc_comm* parent, const rc_tuning* tuning, rc_comm** comm);

/* The steps of a large collective on one rank, which follow from a schedule. Blocks are in elements. */
enum rc_memory { RC_MEMORY_IN, RC_MEMORY_OUT, RC_MEMORY_SCRATCH };
enum rc_step_kind {
    RC_STEP_COPY,     /* `outgoing` to `incoming` */
    RC_STEP_EXCHANGE, /* send and receive at once; a peer of -1: only the other; `operand`: see rc_step */
    RC_STEP_LOCAL     /* a collective of the ranks of this host, from `outgoing` to `incoming` */
};
typedef struct {
    int32_t memory;
    uint64_t begin, length;
} rc_block;
typedef struct {
    int32_t kind;
    int32_t dest, source;     /* ranks */
    int32_t collective, root; /* of RC_STEP_LOCAL, as rc_collective has them */
    int32_t overlaps;         /* of RC_STEP_LOCAL: not 0: it runs while the exchange before it is in flight */
    rc_block outgoing, incoming;
    rc_block operand; /* of some length: what arrives is combined with it, the share of the lower rank first */
    uint64_t count;
    const uint64_t* counts; /* NULL: equal blocks */
} rc_step;
/* `number` identifies the program in rc_last_path; `scratch` is in elements. RC_ARGUMENT: a step would touch memory
 * other than the arrays that this rank passes, and `scratch`. */
int rc_add_program(rc_comm* comm, int collective, const rc_call* call, int number, uint64_t scratch,
                   const rc_step* steps, int count);
/* A call that needs a program calls `record(recorder, ...)` on its thread, before it begins: that adds the program, and
 * returns a status. Without a recorder the call is RC_ARGUMENT. */
int rc_set_recorder(rc_comm* comm, int (*record)(void* recorder, int collective, const rc_call* call), void* recorder);

/* Compares a call on arrays of GPUs, whose data takes another way; moves nothing. */
int rc_agree_on_gpus(rc_comm* comm, int collective, const rc_call* call, double timeout);

/* The plan of a call whose arguments have been checked; `kernel` -1: that for its size. */
int rc_cuda_plan_of(const rc_cuda_shape* shape, const rc_cuda_limits* limits, int collective, const rc_call* call,
                    int kernel, rc_cuda_plan* plan);

/* A group of GPUs that access each other's memory. Python allocates and opens that memory, compiles the kernels and
 * handles failures; calls are launched from here. */
typedef struct rc_gpus rc_gpus;
typedef struct {
    rc_cuda_shape shape;
    rc_cuda_limits limits;
    void* arena;        /* of this rank */
    void* control;      /* an rc_cuda_control */
    uint64_t* tables;   /* host memory that the device accesses: rc_gpus_table_bytes */
    void* context;      /* the CUcontext of the device, whose primary one it is */
    const char* driver; /* the library: libcuda.so.1, or another one with its functions */
    const char* device; /* its name in errors */
    int32_t threads;    /* of a block */
} rc_gpus_setup;
uint64_t rc_gpus_table_bytes(int ranks);
/* `host` connects the same ranks; a failure of one is a failure of the other. */
int rc_gpus_open(rc_comm* host, const rc_gpus_setup* setup, rc_gpus** gpus);
/* Before the group closes: later calls are RC_CLOSED. `captured` 1: a graph has some, and may be replayed at any time.
   `raised` 1: a call on `host`, or here, has returned the failure of the group. */
int rc_gpus_end_calls(rc_gpus* gpus, int* captured, int* raised);
/* Ends rc_gpus_watch. Once it has returned, and the launches have ended: rc_gpus_free. */
int rc_gpus_stop(rc_gpus* gpus);
void rc_gpus_free(rc_gpus* gpus);
/* The plan of a call, and whether its kernel is loaded. `kernel`: as in rc_cuda_plan_of. */
int rc_gpus_plan(rc_gpus* gpus, int collective, const rc_call* call, int kernel, rc_cuda_plan* plan, int* loaded);
/* The kernel of a plan, as a CUfunction. */
int rc_gpus_load(rc_gpus* gpus, const rc_cuda_plan* plan, void* function);
typedef struct {
    uint64_t begin, bytes, bases, number, multicast; /* bases, multicast: see rc_cuda_location */
    const uint64_t* addresses; /* the same table, in host memory; NULL: not all ranks have the buffer at once */
} rc_gpu_buffer;
/* The symmetric buffers, in which arrays are found; replaces those of the last call. */
int rc_gpus_set_buffers(rc_gpus* gpus, const rc_gpu_buffer* buffers, int count);
/* Memory of a GPU that other processes map by a file descriptor, which rc_virtual_descriptor returns: see
 * bindings/src/cuda/virtual_memory.h. `driver`: the library, `context`: the primary CUcontext of the GPU. */
int rc_virtual_allocate(const char* driver, void* context, int ordinal, uint64_t bytes, uint64_t* address);
int rc_virtual_descriptor(uint64_t address, int* descriptor, uint64_t* bytes);
int rc_virtual_open(const char* driver, void* context, int ordinal, int descriptor, uint64_t bytes, uint64_t* address);
int rc_virtual_close(uint64_t address); /* what the others have returned */

/* Segments of a GPU, for an allocator of the program: bindings/src/cuda/segments.h. Peers open them as they do other
 * memory; `by_descriptor` 1: that is virtual. Before rc_segments_open, rc_segment_allocate returns NULL, as without
 * memory. */
typedef struct {
    uint64_t address, bytes;
} rc_segment;
int rc_segments_open(const char* driver, void* context, int ordinal, int by_descriptor);
void* rc_segment_allocate(uint64_t bytes, int ordinal);
void rc_segment_free(void* segment);
/* The segment of a GPU that an address is in; of 0 bytes if there is none. */
int rc_segment_of(uint64_t address, int ordinal, rc_segment* segment);
enum rc_gpus_mode {
    RC_GPUS_PLAIN,
    RC_GPUS_FAST, /* RC_UNPREPARED also in a capture, while calls are traced, and unless rc_gpus_allow_fast */
    RC_GPUS_ASYNC /* on the stream of the group, which waits for `stream`; rc_gpus_order lets a stream wait for it */
};
/* Launches a collective on a CUstream. `number` identifies the call. RC_UNPREPARED: the kernel is not loaded, or a
 * failure in rc_cuda_control has not been handled. A negative timeout is that of the communicator. */
int rc_gpus_call(rc_gpus* gpus, int collective, const rc_call* call, void* stream, double timeout, int mode,
                 uint64_t* number);
/* The same for an all_reduce whose result is added to a residual and normalized by rows: kernels/cuda/rms_norm.cuh.
 * Rows are at most rc_cuda_shape.stage_bytes, a multiple of 16, as all addresses are; its kernel is one_shot. */
typedef struct {
    const void* residual;
    const void* weight;
    void* output;
    uint64_t width; /* elements of a row */
    float epsilon;
} rc_rms_norm;
int rc_gpus_rms_norm(rc_gpus* gpus, const rc_call* call, const rc_rms_norm* norm, void* stream, double timeout,
                     int mode, uint64_t* number);
int rc_gpus_allow_fast(rc_gpus* gpus, int allowed); /* 0: Python has a failure to raise */
int rc_gpus_order(rc_gpus* gpus, uint64_t number, void* stream);
/* Whether a stream is being captured: 0 or 1. */
int rc_gpus_capturing(rc_gpus* gpus, void* stream, int* capturing);
/* 1 if the call has ended; in a capture always. */
int rc_gpus_ended(rc_gpus* gpus, uint64_t number);
uint64_t rc_gpus_launched(rc_gpus* gpus); /* the number of the last call that was not captured */
void* rc_gpus_stream(rc_gpus* gpus);      /* that of RC_GPUS_ASYNC */
/* Returns once the call has ended, with its failure, that of the group, or RC_TIMEOUT, which breaks the group. A
 * negative timeout waits as long as the kernels do. */
int rc_gpus_wait(rc_gpus* gpus, uint64_t number, double timeout);
/* Describes a call as errors do. `by_copy_engines`: whether they move its data. RC_ARGUMENT: it is too long ago. */
int rc_gpus_describe(rc_gpus* gpus, uint64_t number, char* text, uint64_t bytes, double* timeout, int* by_copy_engines);
/* Watches the launches in flight, on a thread for it: aborts them when the group fails, fails the group when a peer is
 * lost. Returns when Python has something to do: a kernel has failed (rc_cuda_control), or the call of rc_gpus_notify
 * has ended. `stopped` 1: there is nothing to watch any more. */
int rc_gpus_watch(rc_gpus* gpus, int* stopped);
int rc_gpus_notify(rc_gpus* gpus, uint64_t number);
/* `interrupted` 1: this thread runs a signal handler inside a wait for a launch. */
int rc_gpus_interrupted(rc_gpus* gpus, int* interrupted);
int rc_gpus_resume(rc_gpus* gpus); /* the failure has been handled */

/* `bytes` for each rank at `offset`, from rc_reserve of size × rc_symmetric_buffer_bytes(bytes). */
uint64_t rc_symmetric_buffer_bytes(uint64_t bytes);
int rc_symmetric_buffer_open(rc_comm* comm, uint64_t offset, uint64_t bytes, rc_symmetric_buffer** buffer);
void* rc_symmetric_buffer_data(rc_symmetric_buffer* buffer);
void rc_symmetric_buffer_free(rc_symmetric_buffer* buffer);

#ifdef __cplusplus
}
#endif

#endif
