// The part of UCX's API that ringcomm calls, as ucp/api/ucp.h of UCX 1.10 and later declares it: with these
// declarations and dlopen() nothing of UCX is needed to build. UCX reads only the fields whose bits are in the mask of
// a structure, so the structures here end early.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

#include "link/shared_library.h"

namespace ringcomm::ucp {

using Status = int8_t;  // ucs_status_t, a packed enum
constexpr Status OK = 0, IN_PROGRESS = 1;

struct Context;
struct Worker;
struct Endpoint;
struct Message;
struct Settings;

struct Params {  // ucp_params_t
    enum Bits : uint64_t { FEATURES = 1 << 0 };
    enum Features : uint64_t { TAG = 1 << 0, WAKEUP = 1 << 4 };
    uint64_t mask, features;
};

struct WorkerParams {  // ucp_worker_params_t
    enum Bits : uint64_t { THREAD_MODE = 1 << 0 };
    enum ThreadMode : int { SINGLE, SERIALIZED };
    uint64_t mask;
    ThreadMode thread_mode;
};

struct EndpointParams {  // ucp_ep_params_t
    enum Bits : uint64_t { REMOTE_ADDRESS = 1 << 0, ERROR_MODE = 1 << 1, ERROR_HANDLER = 1 << 2 };
    enum ErrorMode : int { NONE, PEER };
    uint64_t mask;
    const void* remote_address;
    ErrorMode error_mode;
    void (*error_handler)(void* argument, Endpoint* endpoint, Status status);
    void* argument;
};

struct RequestParams {  // ucp_request_param_t
    enum Bits : uint32_t { FLAGS = 1 << 4, MEMORY_TYPE = 1 << 6 };
    enum Flags : uint32_t { CLOSE_FORCE = 1 << 0 };
    enum MemoryType : int { HOST };
    uint32_t mask, flags = 0;
    void *request = nullptr, *callback = nullptr;
    uint64_t datatype = 0;
    void *user_data = nullptr, *reply_buffer = nullptr;
    MemoryType memory_type = HOST;
};

struct Received {  // ucp_tag_recv_info_t
    uint64_t tag;
    size_t bytes;
};

// What a nonblocking call returns, besides nullptr for success: an error, or a request in flight.
inline bool is_error(const void* result) { return uintptr_t(result) >= uintptr_t(-100); }
inline Status status_of(const void* result) { return Status(intptr_t(result)); }

struct Api {
    explicit Api(const std::string& file) : library(file, "UCX 1.10 or later is needed") {}

    std::string path() const { return library.path_of("ucp_init_version"); }

    SharedLibrary library;
    template <class Type>
    using F = SharedFunction<Type>;
    F<const char*()> get_version_string{library, "ucp_get_version_string"};
    F<const char*(Status)> status_string{library, "ucs_status_string"};
    F<Status(const char*, const char*, Settings**)> config_read{library, "ucp_config_read"};
    F<Status(Settings*, const char*, const char*)> config_modify{library, "ucp_config_modify"};
    F<void(Settings*)> config_release{library, "ucp_config_release"};
    F<Status(unsigned, unsigned, const Params*, const Settings*, Context**)> init{library, "ucp_init_version"};
    F<void(Context*)> cleanup{library, "ucp_cleanup"};
    F<void(Context*, FILE*)> context_print_info{library, "ucp_context_print_info"};
    F<Status(Context*, const WorkerParams*, Worker**)> worker_create{library, "ucp_worker_create"};
    F<void(Worker*)> worker_destroy{library, "ucp_worker_destroy"};
    F<Status(Worker*, void**, size_t*)> worker_get_address{library, "ucp_worker_get_address"};
    F<void(Worker*, void*)> worker_release_address{library, "ucp_worker_release_address"};
    F<Status(Worker*, int*)> worker_get_efd{library, "ucp_worker_get_efd"};
    F<Status(Worker*)> worker_arm{library, "ucp_worker_arm"};
    F<unsigned(Worker*)> worker_progress{library, "ucp_worker_progress"};
    F<Status(Worker*, const EndpointParams*, Endpoint**)> endpoint_create{library, "ucp_ep_create"};
    F<void*(Endpoint*, const RequestParams*)> endpoint_close{library, "ucp_ep_close_nbx"};
    F<void*(Endpoint*, const void*, size_t, uint64_t, const RequestParams*)> send{library, "ucp_tag_send_nbx"};
    F<void*(Worker*, void*, size_t, uint64_t, uint64_t, const RequestParams*)> receive{library, "ucp_tag_recv_nbx"};
    F<Message*(Worker*, uint64_t, uint64_t, int, Received*)> probe{library, "ucp_tag_probe_nb"};
    F<void*(Worker*, void*, size_t, Message*, const RequestParams*)> receive_probed{library, "ucp_tag_msg_recv_nbx"};
    F<Status(void*)> request_status{library, "ucp_request_check_status"};
    F<void(Worker*, void*)> request_cancel{library, "ucp_request_cancel"};
    F<void(void*)> request_free{library, "ucp_request_free"};
};

}  // namespace ringcomm::ucp
