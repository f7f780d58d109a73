// The C ABI of TLS: what Python sends and receives before a network takes a connection over.
#include "abi/tls.h"

#include "abi/check.h"

using namespace ringcomm;

struct rc_tls_identity {
    const TlsIdentity identity;
    const uint64_t generation = fork_generation.load();
};

int rc_tls_load(const char* certificate, const char* key, const char* authority, rc_tls_identity** identity) {
    return guarded([&] {
        check_pointer("certificate", certificate);
        check_pointer("key", key);
        check_pointer("authority", authority);
        check_pointer("identity", identity);
        *identity = new rc_tls_identity{TlsIdentity(certificate, key, authority)};
    });
}

void rc_tls_unload(rc_tls_identity* identity) {
    if (identity && identity->generation == fork_generation.load()) delete identity;
}

int rc_tls_open(const rc_tls_identity* identity, int socket, int accepts, rc_tls** tls) {
    return guarded([&] {
        check_pointer("identity", identity);
        check_range("socket", socket, 0, INT32_MAX);
        check_pointer("tls", tls);
        const TlsRole role = accepts ? TlsRole::ACCEPTS : TlsRole::CONNECTS;
        *tls = new rc_tls{std::make_unique<TlsStream>(identity->identity, socket, role)};
    });
}

int rc_tls_receive(rc_tls* tls, void* data, uint64_t bytes, int64_t* moved, int* holds) {
    return guarded([&] {
        check_pointer("tls", tls);
        check_pointer("data", data);
        check_pointer("moved", moved);
        check_pointer("holds", holds);
        const iovec part{data, bytes};
        const ssize_t got = tls->stream->read({&part, 1});
        *moved = got < 0 ? -errno : got;
        *holds = tls->stream->holds_received();
    });
}

int rc_tls_send(rc_tls* tls, const void* data, uint64_t bytes, int64_t* moved) {
    return guarded([&] {
        check_pointer("tls", tls);
        check_pointer("data", data);
        check_pointer("moved", moved);
        const iovec part{const_cast<void*>(data), bytes};
        const ssize_t sent = tls->stream->write({&part, 1});
        *moved = sent < 0 ? -errno : sent;
    });
}

const char* rc_tls_failure(const rc_tls* tls) { return tls ? tls->stream->failure().c_str() : ""; }

void rc_tls_free(rc_tls* tls) {
    if (tls && tls->generation == fork_generation.load()) delete tls;
}
