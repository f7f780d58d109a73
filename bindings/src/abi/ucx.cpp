// The C ABI of UCX, and of networks over it.
#include "link/ucx.h"

#include "abi/network.h"

using namespace ringcomm;

struct rc_ucx {
    std::unique_ptr<UcxMessages> messages;
    const std::string path, version, transports;
    const uint64_t generation = fork_generation.load();
};

namespace {

UcxMessages& messages_of(rc_ucx* ucx) {
    check_pointer("ucx", ucx);
    if (!ucx->messages) reject("ucx: a network has it already");
    return *ucx->messages;
}

}  // namespace

int rc_ucx_open(const char* library, const char* devices, const char* ports, double keepalive, rc_ucx** ucx) {
    return guarded([&] {
        check_pointer("library", library);
        check_pointer("devices", devices);
        check_pointer("ports", ports);
        check_seconds("keepalive", keepalive);
        check_pointer("ucx", ucx);
        auto messages = std::make_unique<UcxMessages>(library, devices, ports, keepalive);
        const std::string path = messages->path(), version = messages->version(), transports = messages->transports();
        *ucx = new rc_ucx{std::move(messages), path, version, transports};
    });
}

int rc_ucx_describe(rc_ucx* ucx, const char** path, const char** version, const char** transports) {
    return guarded([&] {
        check_pointer("ucx", ucx);
        check_pointer("path", path);
        check_pointer("version", version);
        check_pointer("transports", transports);
        *path = ucx->path.c_str();
        *version = ucx->version.c_str();
        *transports = ucx->transports.c_str();
    });
}

int rc_ucx_address(rc_ucx* ucx, const void** address, uint64_t* bytes) {
    return guarded([&] {
        check_pointer("address", address);
        check_pointer("bytes", bytes);
        const std::span<const std::byte> found = messages_of(ucx).address();
        *address = found.data();
        *bytes = found.size();
    });
}

int rc_ucx_connect(rc_ucx* ucx, int rank, int size, const void* const* addresses) {
    return guarded([&] {
        check_size(size);
        check_rank("rank", rank, 0, size);
        check_pointer("addresses", addresses);
        UcxMessages& messages = messages_of(ucx);
        if (messages.size()) reject("ucx: it has begun to connect");
        messages.connect(rank, std::vector<const void*>(addresses, addresses + size));
    });
}

int rc_ucx_await(rc_ucx* ucx, double timeout, int* connected) {
    return guarded([&] {
        check_seconds("timeout", timeout);
        check_pointer("connected", connected);
        messages_of(ucx).await_peers(deadline_of(now_ns(), timeout), connected);
    });
}

int rc_network_open_ucx(rc_ucx* ucx, rc_network** network) {
    return guarded([&] {
        check_pointer("network", network);
        UcxMessages& messages = messages_of(ucx);
        if (!messages.size()) reject("ucx: it has not connected");
        auto link = std::make_unique<MessageLink>(messages.rank(), messages.size(), std::move(ucx->messages));
        *network = new rc_network{std::make_shared<NetworkWorld>(std::move(link))};
    });
}

void rc_ucx_free(rc_ucx* ucx) {
    if (ucx && ucx->generation == fork_generation.load()) delete ucx;
}
