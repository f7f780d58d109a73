// The agreement on a call: before any rank writes a result, it has heard from every host which call its ranks make.
//
// Each host contributes a record: the signatures of its ranks (one if they agree), and the data of a small call. Every
// host gets the records of all hosts, in ceil(log2(hosts)) rounds: in round k, a host sends all records that it has to
// the host 2^k before it, and so gets those of the 2^k hosts behind it (Bruck et al., "Efficient algorithms for
// all-to-all communications in multiport message-passing systems", IEEE TPDS 8(11), 1997). So a small call takes one
// pass: when the agreement is reached, all data is there.
#pragma once

#include <vector>

#include "core/signature.h"
#include "network/packets.h"

namespace ringcomm {

// A host's record, as it travels.
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
