// The handles of the C ABI.
#pragma once

#include <memory>

#include "abi/check.h"
#include "abi/entry_guard.h"
#include "core/work.h"
#include "memory/symmetric_buffers.h"
#include "network/group.h"

struct rc_comm {
    std::shared_ptr<ringcomm::CommHandle> handle;
};

struct rc_work {
    std::shared_ptr<ringcomm::CommHandle> handle;
    std::shared_ptr<ringcomm::Work> work;
    bool prepared = false;  // a transfer for rc_start_all
    bool listed = false;    // while rc_start_all looks whether it was given twice
};

struct rc_symmetric_buffer {
    std::shared_ptr<ringcomm::CommHandle> handle;
    std::shared_ptr<ringcomm::SymmetricBuffer> buffer;
};

namespace ringcomm {

template <class Body>
int enter(rc_comm* comm, Body body) {
    return guarded([&] {
        check_pointer("comm", comm);
        const EntryGuard entry(*comm->handle);
        body(entry);
    });
}

inline NetworkGroup& network_group(const EntryGuard& entry) {
    if (auto* group = dynamic_cast<NetworkGroup*>(&entry.group())) return *group;
    reject("comm: expected a communicator of rc_network_group");
}

}  // namespace ringcomm
