// The handle of TLS on a socket, and what a network makes of it.
#pragma once

#include <memory>
#include <utility>

#include "core/peer_group.h"
#include "link/tls.h"

// The socket is the caller's as long as it has this handle.
struct rc_tls {
    std::unique_ptr<ringcomm::TlsStream> stream;
    const uint64_t generation = ringcomm::fork_generation.load();

    ~rc_tls() {
        if (stream) stream->fd = -1;
    }
};

namespace ringcomm {

// Owns both; null without a socket.
inline std::unique_ptr<ByteStream> adopt(int socket, rc_tls* tls) {
    const std::unique_ptr<rc_tls> handle(tls);
    if (socket < 0) return nullptr;
    return tls ? std::move(handle->stream) : std::make_unique<ByteStream>(socket);
}

}  // namespace ringcomm
