// What a host contributes to the agreement on a call: see agreement.cpp.
#pragma once

#include <utility>
#include <vector>

#include "core/signature.h"
#include "network/packets.h"

namespace ringcomm {

class HostRecord {
public:
    HostRecord(const std::vector<Signature>& ranks, Bytes payload);
    explicit HostRecord(std::vector<std::byte> record) : record_(std::move(record)) {}

    // The signatures of this host's ranks: one if they agree.
    std::vector<Signature> signatures() const;
    Bytes payload() const;
    const std::vector<std::byte>& bytes() const { return record_; }

private:
    std::vector<std::byte> record_;
};

}  // namespace ringcomm
