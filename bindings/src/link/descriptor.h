// A file descriptor, which is closed with its owner.
#pragma once

#include <unistd.h>

namespace ringcomm {

struct Descriptor {
    Descriptor() = default;
    explicit Descriptor(int fd) : fd(fd) {}
    ~Descriptor() { close(); }
    Descriptor(const Descriptor&) = delete;
    void close() {
        if (fd >= 0) ::close(fd);
        fd = -1;
    }

    int fd = -1;
};

}  // namespace ringcomm
