// TlsIdentity: what a handshake needs. TlsStream: records between the buffers of the caller and the socket.
#include "link/tls.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringcomm {

using namespace openssl;

namespace {

constexpr size_t READ_BUFFER = 64 << 10;  // several records take one system call
constexpr size_t MOST_READ = 1 << 30;     // by a call of OpenSSL, which takes an int

const OpenSsl& api() {
    static const OpenSsl* const loaded = [] {
        try {
            return new OpenSsl("libssl.so.3");
        } catch (const Failure& missing) {
            try {
                return new OpenSsl("libssl.so.1.1");
            } catch (const Failure&) {
                throw Failure(RC_ARGUMENT, format("TLS needs OpenSSL 3 or 1.1.1: %s", missing.what()));
            }
        }
    }();
    return *loaded;
}

// The last error that OpenSSL has noted on this thread, which it then forgets.
struct SslError {
    unsigned long code;
    std::string reason;
};
SslError take_error() {
    const char *file, *data = "", *reason;
    int line, flags = 0;
    const unsigned long code = api().last_error(&file, &line, &data, &flags);
    std::string found = data ? data : "";
    if (const std::string verify = "Verify error:"; found.starts_with(verify)) {
        found.erase(0, verify.size());
    } else {
        found = (reason = api().reason(code)) ? reason : format("error %lx", code);
    }
    api().clear_errors();
    return {code, found};
}

// Whether an alert of this number says that a certificate is refused: bad_certificate … unknown_ca, access_denied,
// certificate_required.
bool is_of_certificate(unsigned long alert) { return (alert >= 42 && alert <= 49) || alert == 116; }

}  // namespace

// --- TlsIdentity -----------------------------------------------------------------------------------------------------

void TlsIdentity::Free::operator()(Context* context) const { api().context_free(context); }

TlsIdentity::TlsIdentity(const std::string& certificate, const std::string& key, const std::string& authority)
    : context_(api().context_new(api().method())) {
    Context* const context = context_.get();
    const auto expect = [](bool done, const char* what, const std::string& path) {
        if (!done) throw Failure(RC_ARGUMENT, format("%s %s: %s", what, path.c_str(), take_error().reason.c_str()));
    };
    api().clear_errors();
    expect(context && api().control(context, SET_MIN_PROTO_VERSION, TLS1_3, nullptr) &&
               api().set_ciphersuites(context, "TLS_AES_128_GCM_SHA256") && api().set_tickets(context, 0),
           "cannot use", "TLS 1.3");
    api().control(context, SET_READ_AHEAD, 1, nullptr);
    api().set_read_buffer(context, READ_BUFFER);
    api().set_verify(context, VERIFY_PEER | VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
    api().set_password(context, [](char*, int, int, void*) { return -1; });  // else it asks at the terminal
    expect(api().load_authorities(context, authority.c_str(), nullptr), "cannot use the authority", authority);
    expect(api().use_certificate(context, certificate.c_str()), "cannot use the certificate", certificate);
    expect(api().use_key(context, key.c_str(), FILETYPE_PEM), "cannot use the key", key);
    // It sends the certificates between its own and the authority, whichever file they are in.
    const std::string not_valid = "the certificate " + certificate + " is not one of the authority";
    expect(api().control(context, BUILD_CERT_CHAIN, WITHOUT_ROOT, nullptr), not_valid.c_str(), authority);
}

// --- TlsStream -------------------------------------------------------------------------------------------------------

TlsStream::TlsStream(const TlsIdentity& identity, int fd, TlsRole role, uint64_t key_records)
    : ByteStream(fd), ssl_(api().ssl_new(identity.context())), key_records_(key_records) {
    Bio* const bio = ssl_ ? api().bio_new(method()) : nullptr;
    if (!bio) {
        api().ssl_free(ssl_);
        this->fd = -1;  // it is still the caller's
        throw Failure(RC_SYSTEM, "no memory for a TLS connection");
    }
    api().bio_set_data(bio, this);
    api().bio_set_init(bio, 1);
    api().set_bio(ssl_, bio, bio);
    (role == TlsRole::ACCEPTS ? api().set_accept : api().set_connect)(ssl_);
}

TlsStream::~TlsStream() { api().ssl_free(ssl_); }

const BioMethod* TlsStream::method() {
    static const BioMethod* const made = [] {
        BioMethod* const method = api().bio_method(BIO_TYPE, "ringcomm");
        api().bio_set_read(method, receive);
        api().bio_set_write(method, keep);
        api().bio_set_control(method, [](Bio*, int control, long, void*) { return long(control == BIO_CTRL_FLUSH); });
        return method;
    }();
    return made;
}

// Asks the socket only until it was empty.
int TlsStream::receive(Bio* bio, char* data, int bytes) {
    TlsStream& stream = *static_cast<TlsStream*>(api().bio_data(bio));
    api().bio_clear_flags(bio, BIO_RETRY_READ);
    ssize_t got = -1;
    if (!stream.drained_) {
        do got = recv(stream.fd, data, bytes, MSG_DONTWAIT);
        while (got < 0 && errno == EINTR);
        stream.closed_ = got == 0;
        if (got < 0 && errno != EAGAIN) stream.error_ = errno;
        stream.drained_ = got < bytes;
    }
    stream.blocked_ = got < 0 && !stream.error_;
    if (stream.blocked_) api().bio_set_flags(bio, BIO_RETRY_READ);
    return int(got);
}

int TlsStream::keep(Bio* bio, const char* data, int bytes) {
    TlsStream& stream = *static_cast<TlsStream*>(api().bio_data(bio));
    const auto* const begin = reinterpret_cast<const std::byte*>(data);
    stream.unsent_.insert(stream.unsent_.end(), begin, begin + bytes);
    return bytes;
}

ssize_t TlsStream::read(std::span<const iovec> parts) {
    drained_ = blocked_ = holds_ = false;
    ssize_t moved = 0;
    for (const iovec& part : parts) {
        for (size_t at = 0; at < part.iov_len;) {
            const int bytes = int(std::min(part.iov_len - at, MOST_READ));
            const int got = api().read(ssl_, static_cast<std::byte*>(part.iov_base) + at, bytes);
            if (got <= 0) {
                flush();  // of the handshake, or an alert
                return moved ? moved : ended();
            }
            at += got;
            moved += got;
        }
    }
    holds_ = api().has_pending(ssl_);
    return moved;
}

// What is taken is sealed, and has to be sent before the next. Until then it counts except for its last byte, so that
// the caller knows that it is not done.
ssize_t TlsStream::write(std::span<const iovec> parts) {
    if (!flush()) return -1;
    if (std::exchange(owes_byte_, false)) return 1;
    size_t taken = 0;
    std::byte gathered[RECORD];
    for (size_t i = 0, at = 0; i < parts.size();) {
        const auto* const data = static_cast<const std::byte*>(parts[i].iov_base) + at;
        size_t bytes = std::min(parts[i].iov_len - at, RECORD);
        if (bytes && bytes < RECORD && i + 1 < parts.size()) {  // a header goes with what follows it
            std::copy_n(data, bytes, gathered);
            const size_t more = std::min(parts[i + 1].iov_len, RECORD - bytes);
            std::copy_n(static_cast<const std::byte*>(parts[i + 1].iov_base), more, gathered + bytes);
            if (!seal(gathered, bytes + more)) return -1;
            taken += bytes + more;
            at = more;
            ++i;
        } else {
            if (bytes && !seal(data, bytes)) return -1;
            taken += bytes;
            at += bytes;
        }
        if (at == parts[i].iov_len) {
            ++i;
            at = 0;
        }
    }
    if (flush()) return ssize_t(taken);
    if (errno != EAGAIN) return -1;
    owes_byte_ = true;
    if (taken > 1) return ssize_t(taken - 1);
    errno = EAGAIN;
    return -1;
}

// Returns false before the end of the handshake (EINPROGRESS), or if it has failed.
bool TlsStream::seal(const void* data, size_t bytes) {
    drained_ = api().is_connected(ssl_);  // from then on what has come waits for read()
    blocked_ = false;
    if (api().write(ssl_, data, int(bytes)) <= 0) {
        flush();
        if (ended() == 0) errno = EPIPE;
        if (errno == EAGAIN) errno = EINPROGRESS;
        return false;
    }
    if (++records_ % key_records_ == 0) api().key_update(ssl_, KEY_UPDATE_NOT_REQUESTED);
    return true;
}

// Returns whether all records are with the kernel; errno says why they are not.
bool TlsStream::flush() {
    while (sent_ < unsent_.size()) {
        const ssize_t sent = send(fd, unsent_.data() + sent_, unsent_.size() - sent_, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) return false;
        sent_ += sent;
    }
    unsent_.clear();
    sent_ = 0;
    return true;
}

// Returns how a call of OpenSSL has ended that moved nothing: 0, or -1 and errno.
ssize_t TlsStream::ended() {
    if (blocked_) {
        errno = EAGAIN;
    } else if (error_) {
        errno = error_;
    } else if (closed_) {  // as other sockets: that this is not an attack, the packets of a group say
        api().clear_errors();
        return 0;
    } else {
        if (failure_.empty()) failure_ = describe_failure();
        errno = EPROTO;
    }
    return -1;
}

std::string TlsStream::describe_failure() const {
    const auto [code, reason] = take_error();
    if (is_of_certificate((code & REASON_MASK) - ALERTS)) {
        return "it refused the certificate of this process (" + reason + ")";
    }
    const long refusal = api().verify_result(ssl_);
    if (refusal != VERIFIED) return format("its certificate is refused: %s", api().verify_reason(refusal));
    return "it sent no valid TLS (" + reason + ")";
}

}  // namespace ringcomm
