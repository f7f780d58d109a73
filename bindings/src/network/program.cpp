// ProgramCache: the programs that were used last.
#include "network/program.h"

#include <utility>

#include "core/collectives.h"

namespace ringcomm {

ProgramKey key_of(const CallRecord& call, int size) {
    const size_t counts = call.counts ? (collectives[call.collective].exchanges() ? 2 : 1) * size : 0;
    return {collectives[call.collective].moves_as, call.count, call.item, call.root, call.source == call.target,
            {call.counts, call.counts + counts}};
}

std::shared_ptr<const Program> ProgramCache::find(const ProgramKey& key) {
    const std::lock_guard lock(mutex_);
    const auto found = index_.find(key);
    if (found == index_.end()) return nullptr;
    recent_.splice(recent_.begin(), recent_, found->second);
    return found->second->second;
}

void ProgramCache::add(const ProgramKey& key, Program program) {
    const std::lock_guard lock(mutex_);
    if (index_.contains(key)) return;
    if (recent_.size() == MOST) {
        index_.erase(recent_.back().first);
        recent_.pop_back();
    }
    recent_.emplace_front(key, std::make_shared<const Program>(std::move(program)));
    index_[key] = recent_.begin();
}

}  // namespace ringcomm
