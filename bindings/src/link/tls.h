// TLS 1.3 over a stream socket, by the OpenSSL of the system, between processes that have certificates of one
// authority.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "link/byte_stream.h"
#include "link/tls_api.h"

namespace ringcomm {

// The certificate of this process, and the authority of those of its peers.
class TlsIdentity {
public:
    // Paths of PEM files; that of the certificate may have intermediate ones after it. Throws RC_ARGUMENT, which names
    // the file, if one cannot be used, or the certificate is not of the authority, or has expired.
    TlsIdentity(const std::string& certificate, const std::string& key, const std::string& authority);

    openssl::Context* context() const { return context_.get(); }

private:
    struct Free {
        void operator()(openssl::Context* context) const;
    };
    std::unique_ptr<openssl::Context, Free> context_;
};

enum class TlsRole { CONNECTS, ACCEPTS };

class TlsStream final : public ByteStream {
public:
    // Records after which this end changes its key. AES-GCM allows 2^24.5 of them.
    static constexpr uint64_t KEY_RECORDS = 1 << 22;

    // The handshake is a part of the first calls; before its end write() ends with EINPROGRESS.
    TlsStream(const TlsIdentity& identity, int fd, TlsRole role, uint64_t key_records = KEY_RECORDS);
    ~TlsStream() override;

    ssize_t read(std::span<const iovec> parts) override;
    ssize_t write(std::span<const iovec> parts) override;
    bool holds_received() const override { return holds_; }

    // Why read() or write() has ended with EPROTO.
    const std::string& failure() const { return failure_; }

private:
    static constexpr size_t RECORD = 16 << 10;  // the most bytes in one

    static const openssl::BioMethod* method();
    static int receive(openssl::Bio* bio, char* data, int bytes);
    static int keep(openssl::Bio* bio, const char* data, int bytes);

    bool seal(const void* data, size_t bytes);
    bool flush();
    ssize_t ended();
    std::string describe_failure() const;

    openssl::Ssl* const ssl_;
    const uint64_t key_records_;
    uint64_t records_ = 0;
    std::vector<std::byte> unsent_;  // records
    size_t sent_ = 0;                // of them
    bool owes_byte_ = false;         // see write()
    bool drained_ = false;           // nothing more has come: the socket is not asked again
    bool blocked_ = false;           // so OpenSSL has to wait
    bool closed_ = false;            // by the peer
    int error_ = 0;                  // errno of a failure of the socket
    bool holds_ = false;             // what has come, and was not read
    std::string failure_;
};

}  // namespace ringcomm
