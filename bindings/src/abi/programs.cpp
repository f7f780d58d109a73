// The C ABI of programs. What a program may touch is checked once, when it is added: it runs without checks.
#include <algorithm>
#include <array>
#include <cinttypes>

#include "abi/handles.h"
#include "core/collectives.h"
#include "network/group.h"

using namespace ringcomm;

namespace {

class ProgramChecks {
public:
    ProgramChecks(const NetworkGroup& group, const CallRecord& call, uint64_t scratch)
        : group_(group), call_(call), reduces_(collectives[call.collective].reduces) {
        if (scratch > MAX_BYTES / call.item)
            rejectf("scratch: expected less memory than %" PRIu64 " elements", scratch);
        check_fits(scratch * call.item);
        auto [in, out] = array_bytes(call, group.rank, group.size);
        if (call.source == call.target) in = out = std::max(in, out);
        elements_ = {in / call.item, out / call.item, scratch};
    }

    void check(const rc_step& step) const {
        check_range("kind", step.kind, RC_STEP_COPY, RC_STEP_LOCAL);
        check_block("outgoing", step.outgoing);
        check_block("incoming", step.incoming);
        check_block("operand", step.operand);
        if (step.overlaps && step.kind != RC_STEP_LOCAL) reject("overlaps: expected 0, since the step is not local");
        switch (step.kind) {
            case RC_STEP_COPY: check_length("incoming", step.incoming, step.outgoing); break;
            case RC_STEP_EXCHANGE: check_exchange(step); break;
            case RC_STEP_LOCAL: check_local(step); break;
        }
    }

private:
    void check_block(const char* name, const rc_block& block) const {
        check_range("memory", block.memory, RC_MEMORY_IN, RC_MEMORY_SCRATCH);
        const uint64_t elements = elements_[block.memory];
        if (block.begin <= elements && block.length <= elements - block.begin) return;
        rejectf("%s: expected a block of the %" PRIu64 " elements of memory %d, got %" PRIu64 " from %" PRIu64 " on",
                name, elements, block.memory, block.length, block.begin);
    }

    static void check_length(const char* name, const rc_block& block, const rc_block& as) {
        if (block.length == as.length) return;
        rejectf("%s: expected %" PRIu64 " elements, got %" PRIu64, name, as.length, block.length);
    }

    void check_peer(const char* name, int peer) const {
        check_rank(name, peer, -1, group_.size);
        if (peer == group_.rank) rejectf("%s: expected another rank, got %d itself", name, peer);
    }

    void check_reduces(const char* what) const {
        if (!reduces_) rejectf("%s: %s does not reduce", what, collectives[call_.collective].name);
    }

    void check_exchange(const rc_step& step) const {
        check_peer("dest", step.dest);
        check_peer("source", step.source);
        if (!step.operand.length) return;
        check_reduces("operand");
        check_length("operand", step.operand, step.incoming);
    }

    void check_local(const rc_step& step) const {
        if (!group_.local.collectives) reject("kind: the ranks of this group share no memory");
        const int rank = group_.layout.local_rank, size = group_.layout.local_size();
        check_collective(step.collective);
        check_rank("root", step.root, 0, size);
        const Collective& collective = collectives[step.collective];
        if (collective.reduces) check_reduces(collective.name);
        CallRecord call = call_;
        call.collective = step.collective;
        call.count = step.count;
        call.root = step.root;
        call.counts = step.counts;
        const auto [given, got] = array_bytes(call, rank, size);
        if (given <= step.outgoing.length * call.item && got <= step.incoming.length * call.item) return;
        rejectf("%s inside the host: expected blocks of %" PRIu64 " and %" PRIu64 " bytes, got %" PRIu64 " and %" PRIu64
                " elements",
                collective.name, given, got, step.outgoing.length, step.incoming.length);
    }

    const NetworkGroup& group_;
    const CallRecord& call_;
    const bool reduces_;
    std::array<uint64_t, 3> elements_;  // of the memories: enum rc_memory
};

}  // namespace

int rc_add_program(rc_comm* comm, int collective, const rc_call* arguments, int number, uint64_t scratch,
                   const rc_step* steps, int count) {
    return enter(comm, [&](const EntryGuard& entry) {
        NetworkGroup& group = network_group(entry);
        check_pointer("call", arguments);
        check_range("number", number, 0, INT32_MAX);
        check_range("count", count, 0, INT32_MAX);
        if (count) check_pointer("steps", steps);
        CallRecord call = called(collective, *arguments);
        check_call(call, group.rank, group.size);
        const ProgramChecks checks(group, call, scratch);
        Program program{number, {}, scratch};
        for (int i = 0; i < count; ++i) {
            checks.check(steps[i]);
            ProgramStep& step = program.steps.emplace_back(ProgramStep{steps[i], {}});
            if (step.kind != RC_STEP_LOCAL || !step.counts) continue;
            const int blocks = (collectives[step.collective].exchanges() ? 2 : 1) * group.layout.local_size();
            step.own_counts.assign(step.counts, step.counts + blocks);
        }
        for (ProgramStep& step : program.steps)
            step.counts = step.own_counts.empty() ? nullptr : step.own_counts.data();
        group.programs.add(key_of(call, group.size), std::move(program));
    });
}

int rc_set_recorder(rc_comm* comm, int (*record)(void* recorder, int collective, const rc_call* call), void* recorder) {
    return enter(comm, [&](const EntryGuard& entry) {
        check_pointer("record", reinterpret_cast<const void*>(record));
        network_group(entry).record_program = [record, recorder](const CallRecord& call) {
            const rc_call arguments{call.source, call.target, call.count,  call.dtype, call.op,
                                    call.factor, call.root,   call.counts, nullptr};
            return record(recorder, call.collective, &arguments);
        };
    });
}
