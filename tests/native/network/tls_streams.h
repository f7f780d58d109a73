// TLS streams with the certificates of the tests.
#pragma once

#include "link/tls.h"
#include "links.h"

inline std::string certificate(const std::string& name) { return std::string(CERTIFICATES "/") + name; }

inline const ringcomm::TlsIdentity& identity() {
    static const ringcomm::TlsIdentity loaded(certificate("rank.pem"), certificate("rank.key"),
                                              certificate("authority.pem"));
    return loaded;
}

// Both ends of a connection, after the handshake.
inline StreamPair secured(uint64_t key_records = ringcomm::TlsStream::KEY_RECORDS) {
    using ringcomm::TlsRole, ringcomm::TlsStream;
    const auto [a, b] = connected();
    auto connects = std::make_unique<TlsStream>(identity(), a, TlsRole::CONNECTS, key_records);
    auto accepts = std::make_unique<TlsStream>(identity(), b, TlsRole::ACCEPTS, key_records);
    char data = 'x', got = 0;
    iovec sent{&data, 1}, read{&got, 1};
    // The last byte of what has not left counts later: see TlsStream::write().
    while (connects->write({&sent, 1}) < 0) accepts->read({&read, 1});
    while (accepts->read({&read, 1}) < 0) continue;
    CHECK(got == 'x');
    return {std::move(connects), std::move(accepts)};
}
