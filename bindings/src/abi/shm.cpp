// The C ABI of groups of one machine: the world, those split from it, the survivors of a loss, and symmetric buffers.
#include <algorithm>
#include <cinttypes>

#include "abi/handles.h"
#include "shm/group.h"
#include "shm/inspect.h"

using namespace ringcomm;

namespace {

uint64_t arena_bytes(int size, const rc_tuning* tuning, uint64_t rc_tuning::* budget) {
    uint64_t bytes = 0;
    guarded([&] {
        check_size(size);
        check_tuning(tuning);
        bytes = PartLayout(size, tuning->*budget).arena_bytes(size);
    });
    return bytes;
}

ShmGroup& shared_memory(const EntryGuard& entry) {
    if (auto* const group = dynamic_cast<ShmGroup*>(&entry.group())) return *group;
    reject("comm: expected a communicator whose ranks share memory");
}

// A range behind the heaps, and within what is reserved: an access beyond would be a SIGBUS.
void check_reserved(const ShmGroup& group, uint64_t offset, uint64_t bytes) {
    check_fits(bytes);
    const World& world = *group.world;
    const uint64_t begin = World::heaps_end(world.arena->size, world.tuning);
    const uint64_t end = world.arena->group().file_end.load();
    if (offset % PAGE == 0 && offset >= begin && offset <= end && bytes <= end - offset) return;
    rejectf("%" PRIu64 " bytes at offset %" PRIu64 " are not reserved", bytes, offset);
}

// The memory of some ranks of `above`, in `part` bytes for each.
GroupMemory group_within(const ShmGroup& above, uint64_t offset, int size, const int* members, uint64_t part) {
    GroupMemory group{std::make_shared<Arena>(above.world->file, offset, size, part), {}};
    for (int r = 0; r < size; ++r) group.members.push_back(above.memory().members[members[r]]);
    return group;
}

}  // namespace

uint64_t rc_world_bytes(int size, const rc_tuning* tuning) {
    return arena_bytes(size, tuning, &rc_tuning::arena_bytes);
}

uint64_t rc_sub_bytes(int size, const rc_tuning* tuning) {
    return arena_bytes(size, tuning, &rc_tuning::sub_arena_bytes);
}

int rc_file_create(int* fd) {
    return guarded([&] {
        check_pointer("fd", fd);
        *fd = create_file();
    });
}

int rc_world_open(int fd, int rank, int size, const int64_t* pids, const int* pidfds, uint64_t nonce,
                  const rc_domain* domain, const rc_tuning* tuning, rc_comm** comm) {
    return guarded([&] {
        check_size(size);
        check_rank("rank", rank, 0, size);
        check_pointer("pids", pids);
        check_pointer("pidfds", pidfds);
        check_pointer("domain", domain);
        check_tuning(tuning);
        check_pointer("comm", comm);
        check_fits(rc_world_bytes(size, tuning));
        const uint64_t end = World::heaps_end(size, *tuning);
        if (rank == 0) File(fd).extend_to(end);
        if (File(fd).bytes() < end) reject("fd: expected the file that rank 0 has opened, got a shorter one");
        auto world = std::make_shared<World>(fd, rank, size, pids, pidfds, nonce, *tuning);
        std::vector<int> members(size);
        for (int r = 0; r < size; ++r) members[r] = r;
        auto arena = world->arena;
        auto opened =
            std::make_unique<ShmGroup>(world, GroupMemory{arena, members}, std::vector<GroupMemory>{}, rank, *tuning);
        opened->ensure_ready();
        arena->rank(rank).node.store(domain->node);
        arena->rank(rank).cache.store(domain->cache);
        GroupHeader& group = arena->group();
        if (rank == 0) {
            group.file_end.store(end);
            group.nonce.store(nonce);
        } else if (group.nonce.load() != nonce) {
            throw Failure(RC_SYSTEM,
                          "the shared memory does not hold rank 0's nonce: the ranks do not share this memory", rank);
        }
        *comm = new rc_comm{std::make_shared<CommHandle>(std::move(opened))};
    });
}

int rc_small_call_lines(int size, const rc_domain* domains, int* lines) {
    return guarded([&] {
        check_size(size);
        check_pointer("domains", domains);
        check_pointer("lines", lines);
        std::vector<Domain> of;
        for (int r = 0; r < size; ++r) of.push_back({domains[r].node, domains[r].cache});
        const auto tree = shorter_tree(of);
        *lines = tree ? tree->critical_lines() : one_shot_lines(size);
    });
}

int rc_reserve(rc_comm* comm, uint64_t bytes, uint64_t* offset) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("offset", offset);
        check_fits(bytes);
        *offset = shared_memory(entry).world->reserve(bytes);
    });
}

int rc_inspect(int fd, uint64_t offset, int most, rc_rank_view* ranks, int* size) {
    return guarded([&] {
        check_range("most", most, 1, MAX_SIZE);
        check_pointer("ranks", ranks);
        check_pointer("size", size);
        const auto found = inspect(fd, offset, most);
        std::copy(found.begin(), found.end(), ranks);
        *size = int(found.size());
    });
}

int rc_sub_open(rc_comm* parent, uint64_t offset, int rank, int size, const int* members, rc_comm** comm) {
    return enter(parent, [&](const EntryGuard& entry) {
        ShmGroup& above = shared_memory(entry);
        check_members(above.rank, above.size, rank, size, members);
        check_pointer("comm", comm);
        check_reserved(above, offset, rc_sub_bytes(size, &above.tuning()));
        auto ancestors = above.ancestors();
        ancestors.push_back(above.memory());
        auto group = group_within(above, offset, size, members, above.tuning().sub_arena_bytes);
        auto opened =
            std::make_unique<ShmGroup>(above.world, std::move(group), std::move(ancestors), rank, above.tuning());
        *comm = new rc_comm{std::make_shared<CommHandle>(std::move(opened))};
    });
}

int rc_group_open(rc_comm* other, uint64_t offset, int rank, int size, const int* members, const rc_tuning* tuning,
                  rc_comm** comm) {
    return enter(other, [&](const EntryGuard& entry) {
        const ShmGroup& inside = shared_memory(entry);
        check_members(inside.rank, inside.size, rank, size, members);
        check_pointer("comm", comm);
        check_tuning(tuning);
        check_reserved(inside, offset, rc_world_bytes(size, tuning));
        auto group = group_within(inside, offset, size, members, tuning->arena_bytes);
        auto opened =
            std::make_unique<ShmGroup>(inside.world, std::move(group), std::vector<GroupMemory>{}, rank, *tuning);
        *comm = new rc_comm{std::make_shared<CommHandle>(std::move(opened))};
    });
}

int rc_shrink(rc_comm* comm, double timeout, int* members, int* size, rc_comm** next) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_seconds("timeout", timeout);
        check_pointer("members", members);
        check_pointer("size", size);
        check_pointer("next", next);
        reject_in_signal_handler(entry.group());
        ShmGroup& broken = shared_memory(entry);
        auto [opened, ranks] = broken.shrink(deadline_of(now_ns(), timeout < 0 ? broken.tuning().timeout : timeout));
        std::copy(ranks.begin(), ranks.end(), members);
        *size = int(ranks.size());
        *next = new rc_comm{std::make_shared<CommHandle>(std::move(opened))};
    });
}

int rc_regrouping_begin(rc_comm* comm, int call, uint64_t* number) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_range("call", call, RC_REGROUPING_SHRINK, RC_REGROUPING_GROW);
        check_pointer("number", number);
        entry.group().allocate();
        *number = entry.group().flight.start(signature_of(CALL_SHRINK + call, 0, 0, 0, false), 0, 0, tick_ns());
    });
}

int rc_regrouping_end(rc_comm* comm, uint64_t number, int status) {
    return enter(comm, [&](const EntryGuard& entry) { entry.group().flight.end(number, status); });
}

uint64_t rc_symmetric_buffer_bytes(uint64_t bytes) { return bytes > MAX_BYTES ? 0 : symmetric_part_bytes(bytes); }

int rc_symmetric_buffer_open(rc_comm* comm, uint64_t offset, uint64_t bytes, rc_symmetric_buffer** buffer) {
    return enter(comm, [&](const EntryGuard& entry) {
        ShmGroup& inside = shared_memory(entry);
        check_pointer("buffer", buffer);
        if (bytes > MAX_BYTES / inside.size) rejectf("%" PRIu64 " bytes for each rank are more than any memory", bytes);
        check_reserved(inside, offset, inside.size * symmetric_part_bytes(bytes));
        auto opened = std::make_shared<SymmetricBuffer>(inside.world->file, offset, bytes, inside.rank, inside.size);
        inside.symmetric_buffers.add(opened);
        *buffer = new rc_symmetric_buffer{comm->handle, std::move(opened)};
    });
}

void* rc_symmetric_buffer_data(rc_symmetric_buffer* buffer) { return buffer ? buffer->buffer->data() : nullptr; }

void rc_symmetric_buffer_free(rc_symmetric_buffer* buffer) {
    if (!buffer || buffer->handle->forked()) return;
    try {
        const EntryGuard entry(*buffer->handle);
        shared_memory(entry).symmetric_buffers.release(*buffer->buffer);
    } catch (const Failure&) {
        buffer->buffer->release();  // the communicator is closed, and its table with it
    }
    delete buffer;
}
