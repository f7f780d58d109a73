// World: what all communicators of a rank share.
#include "shm/world.h"

#include "core/errors.h"

namespace ringcomm {

World::World(int fd, int rank, int size, const int64_t* pids, const int* pidfds, uint64_t nonce,
             const rc_tuning& tuning)
    : file(std::make_shared<File>(fd)),
      nonce(nonce),
      tuning(tuning),
      arena(std::make_shared<Arena>(file, 0, size, tuning.arena_bytes)),
      heaps(file, arena->layout.arena_bytes(size), tuning.heap_bytes, rank, size),
      cma(arena, pids),
      placement(arena, tuning.cores),
      liveness(size, pids, pidfds) {}

uint64_t World::heaps_end(int size, const rc_tuning& tuning) {
    return PartLayout(size, tuning.arena_bytes).arena_bytes(size) + size * tuning.heap_bytes;
}

uint64_t World::reserve(uint64_t bytes) {
    const uint64_t rounded = round_up(bytes, PAGE);
    std::atomic<uint64_t>& file_end = arena->group().file_end;
    const uint64_t offset = file_end.fetch_add(rounded);
    try {
        file->extend_to(offset + rounded);
    } catch (const Failure& failure) {
        uint64_t end = offset + rounded;
        file_end.compare_exchange_strong(end, offset);  // the range is lost only if another rank has reserved behind it
        throw Failure(failure.error.code, format("extending the shared memory file by %zu bytes: ", size_t(rounded)) +
                                              failure.error.message);
    }
    return offset;
}

}  // namespace ringcomm
