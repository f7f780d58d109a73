// HostRecord: its layout in memory.
#include "network/host_record.h"

#include "core/errors.h"

namespace ringcomm {

HostRecord::HostRecord(const std::vector<Signature>& ranks, Bytes payload) {
    size_t different = 1;
    for (const Signature& each : ranks) {
        if (each != ranks[0]) different = ranks.size();
    }
    const auto add = [this](Bytes bytes) { record_.insert(record_.end(), bytes.begin(), bytes.end()); };
    record_.reserve(sizeof(uint64_t) + different * sizeof(Signature) + payload.size());
    add(bytes_of(uint64_t(different)));
    add(std::as_bytes(std::span(ranks.data(), different)));
    add(payload);
}

std::vector<Signature> HostRecord::signatures() const {
    PacketReader reader(record_);
    const auto count = reader.next<uint64_t>();
    std::vector<Signature> signatures;
    for (uint64_t i = 0; i < count && reader.complete(); ++i) signatures.push_back(reader.next<Signature>());
    if (!reader.complete() || signatures.empty())
        throw Failure(RC_SYSTEM, "a host sent an incomplete record of a call");
    return signatures;
}

Bytes HostRecord::payload() const {
    PacketReader reader(record_);
    reader.take(reader.next<uint64_t>() * sizeof(Signature));
    return reader.rest();
}

}  // namespace ringcomm
