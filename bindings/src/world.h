// What all communicators of a rank have in common: the file, and who is still alive.
#pragma once

#include <memory>
#include <vector>

#include "arena.h"
#include "reach.h"

namespace ringcomm {

class World {
public:
    World(int fd, int size, const int64_t* pids, const int* pidfds, const rc_tuning& tuning);
    ~World();
    World(const World&) = delete;

    // True once the process of rank `r` has ended.
    bool dead(int r);
    // 'T' if the process of rank r is stopped, 0 if unknown, else its state letter (see proc(5)).
    char process_state(int r) const;
    int64_t pid(int r) const { return pids_[r]; }
    uint64_t reserve(uint64_t bytes);  // a new range of the file

    const std::shared_ptr<File> file;
    const rc_tuning tuning;
    const std::shared_ptr<Arena> arena;
    Reach reach;

private:
    std::vector<int64_t> pids_;
    std::vector<int> pidfds_;
    std::unique_ptr<std::atomic<bool>[]> dead_;
};

}  // namespace ringcomm
