// The part of OpenSSL's API that ringcomm calls, as openssl/ssl.h of 1.1.1 and later declares it: with these
// declarations and dlopen() nothing of OpenSSL is needed to build.
#pragma once

#include <cstddef>

#include "link/shared_library.h"

namespace ringcomm::openssl {

struct Context;  // SSL_CTX
struct Ssl;
struct Bio;
struct BioMethod;
struct Method;

constexpr int FILETYPE_PEM = 1;
constexpr int VERIFY_PEER = 1, VERIFY_FAIL_IF_NO_PEER_CERT = 2;
constexpr long TLS1_3 = 0x304;  // TLS1_3_VERSION
constexpr long VERIFIED = 0;    // X509_V_OK
constexpr int KEY_UPDATE_NOT_REQUESTED = 0;
enum SslControl { SET_READ_AHEAD = 41, BUILD_CERT_CHAIN = 105, SET_MIN_PROTO_VERSION = 123 };
constexpr int WITHOUT_ROOT = 2;        // SSL_BUILD_CHAIN_FLAG_NO_ROOT
constexpr int BIO_TYPE = 100 | 0x400;  // one of the program's, BIO_TYPE_SOURCE_SINK
constexpr int BIO_RETRY_READ = 1 | 8;  // BIO_FLAGS_READ and BIO_FLAGS_SHOULD_RETRY
constexpr int BIO_CTRL_FLUSH = 11;
// In an error of an alert that the peer has sent, the reason is its number and so much.
constexpr unsigned long REASON_MASK = 0xFFF, ALERTS = 1000;

struct OpenSsl {
    explicit OpenSsl(const char* file) : library(file, "OpenSSL 3 or 1.1.1 is needed") {}

    SharedLibrary library;  // it needs libcrypto, in which the others are
    template <class Type>
    using F = SharedFunction<Type>;

    F<const Method*()> method{library, "TLS_method"};
    F<Context*(const Method*)> context_new{library, "SSL_CTX_new"};
    F<void(Context*)> context_free{library, "SSL_CTX_free"};
    F<long(Context*, int, long, void*)> control{library, "SSL_CTX_ctrl"};
    F<int(Context*, const char*)> set_ciphersuites{library, "SSL_CTX_set_ciphersuites"};
    F<int(Context*, size_t)> set_tickets{library, "SSL_CTX_set_num_tickets"};
    F<void(Context*, size_t)> set_read_buffer{library, "SSL_CTX_set_default_read_buffer_len"};
    F<void(Context*, int (*)(char*, int, int, void*))> set_password{library, "SSL_CTX_set_default_passwd_cb"};
    F<int(Context*, const char*)> use_certificate{library, "SSL_CTX_use_certificate_chain_file"};
    F<int(Context*, const char*, int)> use_key{library, "SSL_CTX_use_PrivateKey_file"};
    F<int(Context*, const char*, const char*)> load_authorities{library, "SSL_CTX_load_verify_locations"};
    F<void(Context*, int, void*)> set_verify{library, "SSL_CTX_set_verify"};

    F<Ssl*(Context*)> ssl_new{library, "SSL_new"};
    F<void(Ssl*)> ssl_free{library, "SSL_free"};
    F<void(Ssl*, Bio*, Bio*)> set_bio{library, "SSL_set_bio"};
    F<void(Ssl*)> set_accept{library, "SSL_set_accept_state"};
    F<void(Ssl*)> set_connect{library, "SSL_set_connect_state"};
    F<int(Ssl*, void*, int)> read{library, "SSL_read"};
    F<int(Ssl*, const void*, int)> write{library, "SSL_write"};
    F<int(const Ssl*)> is_connected{library, "SSL_is_init_finished"};
    F<int(const Ssl*)> has_pending{library, "SSL_has_pending"};
    F<int(Ssl*, int)> key_update{library, "SSL_key_update"};
    F<long(const Ssl*)> verify_result{library, "SSL_get_verify_result"};

    F<BioMethod*(int, const char*)> bio_method{library, "BIO_meth_new"};
    F<int(BioMethod*, int (*)(Bio*, const char*, int))> bio_set_write{library, "BIO_meth_set_write"};
    F<int(BioMethod*, int (*)(Bio*, char*, int))> bio_set_read{library, "BIO_meth_set_read"};
    F<int(BioMethod*, long (*)(Bio*, int, long, void*))> bio_set_control{library, "BIO_meth_set_ctrl"};
    F<Bio*(const BioMethod*)> bio_new{library, "BIO_new"};
    F<void(Bio*, void*)> bio_set_data{library, "BIO_set_data"};
    F<void*(Bio*)> bio_data{library, "BIO_get_data"};
    F<void(Bio*, int)> bio_set_init{library, "BIO_set_init"};
    F<void(Bio*, int)> bio_set_flags{library, "BIO_set_flags"};
    F<void(Bio*, int)> bio_clear_flags{library, "BIO_clear_flags"};

    // File, line, what was said with it, and how.
    F<unsigned long(const char**, int*, const char**, int*)> last_error{library, "ERR_peek_last_error_line_data"};
    F<void()> clear_errors{library, "ERR_clear_error"};
    F<const char*(unsigned long)> reason{library, "ERR_reason_error_string"};
    F<const char*(long)> verify_reason{library, "X509_verify_cert_error_string"};
};

}  // namespace ringcomm::openssl
