// Failures in the core are exceptions; the C ABI turns them into a status and the facts in rc_last_error().
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "ringcomm.h"

namespace ringcomm {

struct Failure : std::exception {
    rc_error error{};

    Failure(int code, const std::string& message, int rank = -1, const std::string& expected = "",
            const std::string& got = "");
    explicit Failure(const rc_error& error) : error(error) {}
    const char* what() const noexcept override { return error.message; }
};

// The failure of a communicator with `size` ranks, or of one that it was split from, for one split from it.
Failure of_ancestor(const Failure& failure, int size);

// For a communicator from which one was split whose rank has died: `rank` here. `how`: as PeerGroup::how_it_ended().
Failure death_in_split(int rank, const std::string& how);

// Throws RC_ARGUMENT.
[[noreturn]] void reject(const std::string& message, const std::string& expected = "", const std::string& got = "");
// The same; a check that passes has no string on its stack, which the stack protector would watch in every call.
[[noreturn]] void rejectf(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

std::string name_ranks(const std::vector<int>& ranks);  // sorted: "rank 2", or "ranks 0, 2 and 4-511"

// Lines of a message, as many as fit into an rc_error.
class MessageLines {
public:
    explicit MessageLines(std::string first) : text_(std::move(first)) {}
    void add(const std::string& line);
    std::string text() const;

private:
    std::string text_;
    int left_out_ = 0;
};

std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void throw_errno(const char* what);  // with the text of errno
void copy_text(char* target, size_t bytes, const std::string& text);

rc_error& last_error();

// Runs `body`; a Failure becomes its status.
template <class Body>
int guarded(Body&& body) noexcept {
    try {
        body();
        return RC_OK;
    } catch (const Failure& failure) {
        last_error() = failure.error;
    } catch (const std::exception& other) {
        last_error() = Failure(RC_SYSTEM, other.what()).error;
    }
    return last_error().code;
}

}  // namespace ringcomm
