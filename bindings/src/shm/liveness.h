// Notices the end of a rank: its process died, or runs another program since exec().
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ringcomm {

class Liveness {
public:
    Liveness(int size, const int64_t* pids, const int* pidfds);  // duplicates the pidfds; -1: none
    ~Liveness();
    Liveness(const Liveness&) = delete;

    // True once rank `r` has ended.
    bool dead(int r);
    // "died", or how else a dead rank ended.
    const char* how_it_ended(int r) const {
        return images_[r].replaced ? "replaced itself by another program" : "died";
    }
    // By a signal or a debugger; never the process that asks.
    bool stopped(int r) const;
    int64_t pid(int r) const { return pids_[r]; }

private:
    // The program that a process runs: exec() gives it other addresses, and the process keeps its id and its pidfd.
    struct Image {
        int64_t pid = 0;                   // in the pid namespace of this process
        std::string addresses;             // empty: unknown
        std::atomic<uint64_t> checked{0};  // ns
        std::atomic<bool> replaced{false};
    };

    char process_state(int r) const;  // a letter, see proc(5); 0: unknown
    bool ended(int r) const;
    bool replaced(int r);
    std::string image_addresses(int r) const;

    std::vector<int64_t> pids_;
    std::vector<int> pidfds_;
    std::unique_ptr<std::atomic<bool>[]> dead_;
    std::unique_ptr<Image[]> images_;
};

}  // namespace ringcomm
