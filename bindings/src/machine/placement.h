// Ranks that nobody has bound may begin on one core, and the kernel leaves them there for up to a second although
// another core is idle. Each call then takes as long as a rank spins.
//
// Ranks that share a core yield it to each other, and to other programs only where they are many: see core/waiting.h.
#pragma once

#include <atomic>
#include <memory>

#include "core/waiting.h"
#include "memory/arena.h"

namespace ringcomm {

class Placement {
public:
    // Ranks for each core that they may use, above which a call waits for so many turns of ranks that a slice of
    // another program adds little: they yield to it as to each other. An estimate: 32 were measured. To sleep instead
    // would take half of its time from it.
    static constexpr int CROWD = 16;

    // `cores`: that the ranks may use, all together: each may be bound to one, and a container may have few of many.
    Placement(std::shared_ptr<Arena> arena, int cores);

    // Publishes the core of the calling thread of rank `member` of the world.
    void publish_core(int member) const;
    // For a thread whose spin has expired: if another rank is on its core, it moves to one that its affinity mask
    // allows and no rank is on. The mask stays what it was. Not twice within a millisecond: what the peers have
    // published may be old.
    void leave_shared_core(int member);
    // For a thread of rank `member`: see WaitChecks::yield().
    bool yield(int member);
    // Whether another program took the core in a yield from `begin` to `end`, in ns: no rank that waits there has
    // yielded it in the last millisecond. Many ranks in turn may take as long.
    bool lost_core(int member, uint64_t begin, uint64_t end) const;

private:
    const std::shared_ptr<Arena> arena_;
    const bool crowded_;
    std::atomic<uint64_t> moved_{0};  // ns
    YieldPause pause_;
};

}  // namespace ringcomm
