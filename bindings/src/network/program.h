// A program: what one rank does in a large collective, step by step. Python records it from a schedule
// (ringcomm/algorithms/) once per kind of call.
#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/call_record.h"

namespace ringcomm {

// With its own counts.
struct ProgramStep : rc_step {
    std::vector<uint64_t> own_counts;
};

struct Program {
    int number;  // Python's, for rc_last_path
    std::vector<ProgramStep> steps;
    uint64_t scratch;  // elements
};

// What a program depends on: all that differs between two calls but their data, element type and operation.
struct ProgramKey {
    int collective;
    uint64_t count;
    size_t item;
    int root;
    bool in_place;
    std::vector<uint64_t> counts;

    auto operator<=>(const ProgramKey&) const = default;
};

ProgramKey key_of(const CallRecord& call, int size);

// The programs of a group that were used last.
class ProgramCache {
public:
    std::shared_ptr<const Program> find(const ProgramKey& key);
    void add(const ProgramKey& key, Program program);

private:
    static constexpr size_t MOST = 4096;
    using Entry = std::pair<ProgramKey, std::shared_ptr<const Program>>;

    std::mutex mutex_;
    std::list<Entry> recent_;  // the last used first
    std::map<ProgramKey, std::list<Entry>::iterator> index_;
};

}  // namespace ringcomm
