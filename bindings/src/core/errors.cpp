// Failure and MessageLines: the failures of the core and their texts.
#include "core/errors.h"

#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace ringcomm {

Failure::Failure(int code, const std::string& message, int rank, const std::string& expected, const std::string& got) {
    error.code = code;
    error.rank = rank;
    error.peer = -1;
    error.collective = -1;
    copy_text(error.expected, sizeof error.expected, expected);
    copy_text(error.got, sizeof error.got, got);
    copy_text(error.message, sizeof error.message, message);
}

Failure of_ancestor(const Failure& failure, int size) {
    if (failure.error.group_size) return failure;  // it says already which one failed
    Failure annotated(failure);
    annotated.error.group_size = size;
    copy_text(annotated.error.message, sizeof annotated.error.message,
              format("in the communicator of %d ranks that this one was split from: ", size) + failure.error.message);
    return annotated;
}

Failure death_in_split(int rank, const std::string& how) {
    const std::string text = format("rank %d ", rank) + how + " while a group split from this communicator needed it";
    return Failure(RC_PEER_LOST, text, rank);
}

void reject(const std::string& message, const std::string& expected, const std::string& got) {
    throw Failure(RC_ARGUMENT, message, -1, expected, got);
}

std::string name_ranks(const std::vector<int>& ranks) {
    constexpr size_t SHORTEST_RANGE = 3;
    std::vector<std::string> names;
    for (size_t begin = 0, end; begin < ranks.size(); begin = end) {
        end = begin + 1;
        while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
        if (end - begin >= SHORTEST_RANGE) {
            names.push_back(format("%d-%d", ranks[begin], ranks[end - 1]));
        } else {
            for (size_t i = begin; i < end; ++i) names.push_back(std::to_string(ranks[i]));
        }
    }
    std::string text = ranks.size() > 1 ? "ranks " : "rank ";
    for (size_t i = 0; i < names.size(); ++i) {
        text += (i == 0 ? "" : i + 1 < names.size() ? ", " : " and ") + names[i];
    }
    return text;
}

void MessageLines::add(const std::string& line) {
    if (left_out_ || text_.size() + line.size() + 64 > sizeof rc_error::message) {
        ++left_out_;
    } else {
        text_ += "\n" + line;
    }
}

std::string MessageLines::text() const {
    return left_out_ ? text_ + format("\n... and %d more: see report()", left_out_) : text_;
}

static std::string format_list(const char* pattern, va_list arguments) {
    char text[1024];
    vsnprintf(text, sizeof text, pattern, arguments);
    return text;
}

std::string format(const char* pattern, ...) {
    va_list arguments;
    va_start(arguments, pattern);
    const std::string text = format_list(pattern, arguments);
    va_end(arguments);
    return text;
}

void rejectf(const char* pattern, ...) {
    va_list arguments;
    va_start(arguments, pattern);
    const std::string text = format_list(pattern, arguments);
    va_end(arguments);
    reject(text);
}

void throw_errno(const char* what) {
    const int code = errno;
    throw Failure(code == ENOMEM || code == ENOSPC || code == EFBIG ? RC_MEMORY : RC_SYSTEM,
                  format("%s: %s", what, strerror(code)));
}

void copy_text(char* target, size_t bytes, const std::string& text) {
    if (bytes == 0) return;
    const size_t length = text.size() < bytes ? text.size() : bytes - 1;
    memcpy(target, text.data(), length);
    target[length] = 0;
}

rc_error& last_error() {
    thread_local rc_error error{};
    return error;
}

}  // namespace ringcomm
