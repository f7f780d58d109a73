// The signature of a call, which all ranks compare: one packed word, and its description in errors and reports.
#pragma once

#include <bit>
#include <cstdint>
#include <optional>
#include <string>

#include "ringcomm.h"

namespace ringcomm {

// Calls beyond the collectives, for the flight record. The last ones are those of rc_regrouping.
enum {
    CALL_SEND = RC_COLLECTIVES,
    CALL_RECV,
    CALL_RECV_MESSAGE,
    CALL_PROBE,
    CALL_RECV_ANY,
    CALL_SHRINK,
    CALL_GROW,
    CALLS
};

// Set when a rank wants direct access: the buffers in its start record are valid, and nothing is staged yet.
constexpr uint64_t SIGNATURE_DIRECT = uint64_t{1} << 63;

// What the ranks compare: the word, the count of elements, and a hash of the counts or the factor of premul_sum.
struct Signature {
    uint64_t word, count, extra;

    bool operator==(const Signature&) const = default;
};

uint64_t signature_of(int call, int dtype, int op, int root, bool counts);
std::string describe(uint64_t signature, uint64_t count, std::optional<double> factor = {});
// The same of a send, receive or probe. RC_ANY_TAG is a tag like others where that cannot be asked for.
std::string describe_message(uint64_t signature, uint64_t count, int64_t tag);
inline std::string describe(const Signature& of) {
    return describe(of.word, of.count, std::bit_cast<double>(of.extra));
}
// The call of a rank in a mismatch, with what a description leaves out: that its counts differ from those of rank 0.
std::string describe_beside(const Signature& of, const Signature& first);
const char* call_name(int call);
int call_of(uint64_t signature);
inline bool is_message(int call) { return call >= CALL_SEND && call <= CALL_RECV_ANY; }

}  // namespace ringcomm
