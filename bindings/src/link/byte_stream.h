// A connected stream socket, as its connection reads and writes it, without waiting. This one is plain; tls.h has
// another.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <memory>
#include <span>

#include "link/descriptor.h"

namespace ringcomm {

class ByteStream : public Descriptor {
public:
    explicit ByteStream(int fd) : Descriptor(fd) {}  // owns it; it does not block
    virtual ~ByteStream() = default;

    // As readv and sendmsg: how many bytes, -1 and errno, or 0 at the end. A read that returns less than it could has
    // taken all that has come. What a write has not taken is offered again.
    virtual ssize_t read(std::span<const iovec> parts) {
        ssize_t got;
        do got = readv(fd, parts.data(), int(parts.size()));  // faster than recvmsg
        while (got < 0 && errno == EINTR);
        return got;
    }
    virtual ssize_t write(std::span<const iovec> parts) {
        msghdr message{};
        message.msg_iov = const_cast<iovec*>(parts.data());
        message.msg_iovlen = parts.size();
        ssize_t sent;
        do sent = sendmsg(fd, &message, MSG_NOSIGNAL);
        while (sent < 0 && errno == EINTR);
        return sent;
    }
    // Whether something can be read although the socket need not be readable.
    virtual bool holds_received() const { return false; }
};

// In a forked child: closes the socket, and frees nothing, since another thread may have held a lock of OpenSSL.
inline void abandon(std::unique_ptr<ByteStream>& stream) {
    if (stream) stream.release()->close();
}

}  // namespace ringcomm
