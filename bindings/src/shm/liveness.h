// Notices the death of a rank's process.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

namespace ringcomm {

class Liveness {
public:
    Liveness(int size, const int64_t* pids, const int* pidfds);  // duplicates the pidfds; -1: none
    ~Liveness();
    Liveness(const Liveness&) = delete;

    // True once the process of rank `r` has ended.
    bool dead(int r);
    // 'T' if the process of rank r is stopped, 0 if unknown, else its state letter (see proc(5)).
    char process_state(int r) const;
    int64_t pid(int r) const { return pids_[r]; }

private:
    std::vector<int64_t> pids_;
    std::vector<int> pidfds_;
    std::unique_ptr<std::atomic<bool>[]> dead_;
};

}  // namespace ringcomm
