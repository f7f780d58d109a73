// UcxMessages: one worker, with an endpoint per peer.
#include "link/ucx.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "core/waiting.h"

namespace ringcomm {

namespace {

using namespace ucp;

constexpr unsigned MAJOR = 1, MINOR = 10;  // the oldest version of the API
constexpr int RANK_BITS = 20;              // of a tag: its sender
constexpr uint64_t HELLO = (uint64_t{1} << (64 - RANK_BITS)) - 1;
constexpr uint64_t CLOSE_NS = 200'000'000;
constexpr uint64_t ALL_BITS = ~uint64_t{0};
constexpr RequestParams OF_HOST{.mask = RequestParams::MEMORY_TYPE, .memory_type = RequestParams::HOST};

// Fewer than 2^43 communicators have tags.
uint64_t ucx_tag(uint64_t tag, int sender) { return tag << RANK_BITS | uint64_t(sender); }

// The environment comes first. What an old version does not know has no effect.
void set_default(const Api& api, Settings* settings, const char* name, const std::string& value) {
    if (!getenv(("UCX_" + std::string(name)).c_str())) api.config_modify(settings, name, value.c_str());
}

// From lines such as "#   resource 3  :  md 1  dev 3  flags -- tcp/eth0".
std::string transports_of(const Api& api, Context* context) {
    char* text = nullptr;
    size_t bytes = 0;
    FILE* const stream = open_memstream(&text, &bytes);
    if (!stream) throw_errno("open_memstream");
    api.context_print_info(context, stream);
    fclose(stream);
    std::istringstream lines{std::string(text, bytes)};
    free(text);
    std::string found;
    for (std::string line; std::getline(lines, line);) {
        if (line.find(" resource ") == std::string::npos) continue;
        found += (found.empty() ? "" : " ") + line.substr(line.rfind(' ') + 1);
    }
    return found;
}

}  // namespace

UcxMessages::UcxMessages(const std::string& library, const std::string& devices, const std::string& ports,
                         double keepalive)
    : api_(library) {
    try {
        open(devices, ports, keepalive);
    } catch (...) {
        close();
        throw;
    }
}

UcxMessages::~UcxMessages() { close(); }

void UcxMessages::check(Status status, const char* function) const {
    if (status != OK) throw Failure(RC_SYSTEM, format("%s: %s", function, api_.status_string(status)));
}

void UcxMessages::open(const std::string& devices, const std::string& ports, double keepalive) {
    Settings* settings = nullptr;
    check(api_.config_read(nullptr, nullptr, &settings), "ucp_config_read");
    if (!devices.empty()) set_default(api_, settings, "NET_DEVICES", devices);
    if (!ports.empty()) set_default(api_, settings, "TCP_PORT_RANGE", ports);
    // Ranks that share memory do not come here; and a process that is killed while UCX makes its segments leaves a
    // file.
    set_default(api_, settings, "TLS", "^sm");
    set_default(api_, settings, "KEEPALIVE_INTERVAL", format("%gs", keepalive / 3));
    const Params params{Params::FEATURES, Params::TAG | Params::WAKEUP};
    const Status opened = api_.init(MAJOR, MINOR, &params, settings, &context_);
    api_.config_release(settings);
    check(opened, "ucp_init_version");
    transports_ = transports_of(api_, context_);
    const WorkerParams worker{WorkerParams::THREAD_MODE, WorkerParams::SERIALIZED};
    check(api_.worker_create(context_, &worker, &worker_), "ucp_worker_create");
    check(api_.worker_get_address(worker_, &address_, &address_bytes_), "ucp_worker_get_address");
    check(api_.worker_get_efd(worker_, &ready_), "ucp_worker_get_efd");
    wake_up_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_up_ < 0) throw_errno("eventfd");
}

void UcxMessages::close() {
    std::vector<uint64_t> closing;
    for (Peer& peer : peers_) {
        void* const closed = close_endpoint(peer, 0);
        if (closed && !is_error(closed)) closing.push_back(uint64_t(closed));
    }
    const uint64_t deadline = now_ns() + CLOSE_NS;
    for (bool done = false; !done && now_ns() < deadline;) {
        progress();
        done = std::all_of(closing.begin(), closing.end(),
                           [&](uint64_t each) { return api_.request_status((void*)each) != IN_PROGRESS; });
    }
    for (const uint64_t each : closing) api_.request_free(reinterpret_cast<void*>(each));
    const std::deque<std::vector<std::byte>> unread = drain();
    if (address_) api_.worker_release_address(worker_, address_);
    if (worker_) api_.worker_destroy(worker_);
    if (context_) api_.cleanup(context_);
    if (wake_up_ >= 0) ::close(wake_up_);
}

// UCX warns of messages that nobody has received. The memory is in use until the worker is destroyed.
std::deque<std::vector<std::byte>> UcxMessages::drain() {
    std::deque<std::vector<std::byte>> unread;
    Received received;
    while (Message* const message = worker_ ? api_.probe(worker_, 0, 0, 1, &received) : nullptr) {
        std::byte* const memory = unread.emplace_back(received.bytes).data();
        uint64_t request = 0;
        receive_probed(memory, received.bytes, reinterpret_cast<uint64_t>(message), request);
        forget(request);
    }
    return unread;
}

void* UcxMessages::close_endpoint(Peer& peer, uint32_t flags) {
    if (!peer.endpoint) return nullptr;
    const RequestParams params{.mask = RequestParams::FLAGS, .flags = flags};
    return api_.endpoint_close(std::exchange(peer.endpoint, nullptr), &params);
}

std::span<const std::byte> UcxMessages::address() const {
    return {static_cast<const std::byte*>(address_), address_bytes_};
}

// --- Connecting ------------------------------------------------------------------------------------------------------

// UCX connects an endpoint with its first message.
void UcxMessages::connect(int rank, const std::vector<const void*>& addresses) {
    rank_ = rank;
    for (int peer = 0; peer < int(addresses.size()); ++peer) peers_.push_back({this, peer});
    const auto lost = [](void* argument, Endpoint*, Status status) {
        const auto& peer = *static_cast<Peer*>(argument);
        peer.owner->lost_.push_back({peer.rank, status});
    };
    for (Peer& peer : peers_) {
        if (peer.rank == rank) continue;
        const EndpointParams params{
            .mask = EndpointParams::REMOTE_ADDRESS | EndpointParams::ERROR_MODE | EndpointParams::ERROR_HANDLER,
            .remote_address = addresses[peer.rank],
            .error_mode = EndpointParams::PEER,
            .error_handler = lost,
            .argument = &peer,
        };
        check(api_.endpoint_create(worker_, &params, &peer.endpoint), "ucp_ep_create");
        check(Status(receive(&peer.hello, 1, peer.rank, HELLO, peer.hello_received)), "ucp_tag_recv_nbx");
        check(Status(send(&peer.hello, 1, peer.rank, HELLO, peer.hello_sent)), "ucp_tag_send_nbx");
    }
}

bool UcxMessages::await_peers(uint64_t deadline, int* connected) {
    for (;;) {
        bool all = true;
        progress();
        for (Peer& peer : peers_) {
            connected[peer.rank] = finish(peer.hello_sent, peer) & finish(peer.hello_received, peer);
            all = all && connected[peer.rank];
        }
        if (all || now_ns() >= deadline) return all;
        yield_core();
    }
}

// Returns whether a greeting has ended.
bool UcxMessages::finish(uint64_t& request, const Peer& peer) {
    bool done = false;
    int status = test(request, done);
    for (const LostPeer& each : lost_) status = each.peer == peer.rank ? each.status : status;
    if (status == OK) return done;
    throw Failure(RC_SYSTEM, format("rank %d cannot be reached: %s", peer.rank, describe(status).c_str()), peer.rank);
}

// --- Messages --------------------------------------------------------------------------------------------------------

int UcxMessages::started(void* result, uint64_t& request) const {
    request = 0;
    if (is_error(result)) return status_of(result);
    request = reinterpret_cast<uint64_t>(result);
    return OK;
}

int UcxMessages::send(const std::byte* data, size_t bytes, int peer, uint64_t tag, uint64_t& request) {
    const std::lock_guard lock(mutex_);
    return started(api_.send(peers_[peer].endpoint, data, bytes, ucx_tag(tag, rank_), &OF_HOST), request);
}

int UcxMessages::receive(std::byte* data, size_t bytes, int peer, uint64_t tag, uint64_t& request) {
    const std::lock_guard lock(mutex_);
    return started(api_.receive(worker_, data, bytes, ucx_tag(tag, peer), ALL_BITS, &OF_HOST), request);
}

int UcxMessages::test(uint64_t& request, bool& done) {
    const Status status = request ? api_.request_status(reinterpret_cast<void*>(request)) : OK;
    done = status != IN_PROGRESS;
    if (!done) return OK;
    forget(std::exchange(request, 0));
    return status;
}

void UcxMessages::cancel(uint64_t request) {
    const std::lock_guard lock(mutex_);
    if (request) api_.request_cancel(worker_, reinterpret_cast<void*>(request));
}

void UcxMessages::forget(uint64_t request) {
    const std::lock_guard lock(mutex_);
    if (request) api_.request_free(reinterpret_cast<void*>(request));
}

int UcxMessages::probe(uint64_t tag, Probed& probed) {
    const std::lock_guard lock(mutex_);
    Received received;
    Message* const message = api_.probe(worker_, ucx_tag(tag, 0), ALL_BITS << RANK_BITS, 1, &received);
    if (!message) return OK;
    probed = {true, reinterpret_cast<uint64_t>(message), received.bytes, int(received.tag & ~(ALL_BITS << RANK_BITS))};
    return OK;
}

int UcxMessages::receive_probed(std::byte* data, size_t bytes, uint64_t message, uint64_t& request) {
    const std::lock_guard lock(mutex_);
    return started(api_.receive_probed(worker_, data, bytes, reinterpret_cast<Message*>(message), &OF_HOST), request);
}

// --- Progress --------------------------------------------------------------------------------------------------------

bool UcxMessages::progress() {
    const std::lock_guard lock(mutex_);
    return worker_ && api_.worker_progress(worker_);
}

void UcxMessages::sleep(uint64_t ns) {
    constexpr uint64_t BESIDE_ANOTHER = 50'000;
    std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) {  // another thread drives the worker, which therefore cannot be armed
        ns = std::min(ns, BESIDE_ANOTHER);
    } else if (api_.worker_arm(worker_) != OK) {  // something has arrived
        return;
    } else {
        lock.unlock();
    }
    pollfd ready[]{{wake_up_, POLLIN, 0}, {ready_, POLLIN, 0}};
    const timespec timeout{time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)};
    ppoll(ready, std::size(ready), &timeout, nullptr);
    eventfd_t wake_ups;
    if (ready[0].revents) eventfd_read(wake_up_, &wake_ups);
}

void UcxMessages::wake() { eventfd_write(wake_up_, 1); }

}  // namespace ringcomm
