// What the program calls of GpuTransfers, and how threads wait for the end of launches.
#include <algorithm>
#include <utility>

#include "p2p/async_request.h"
#include "p2p/gpu.h"

namespace ringcomm {

// A transfer of an array on a GPU, as a Work. Its request is done once all has been launched.
class GpuTransfers::StartedTransfer final : public AsyncRequest {
public:
    StartedTransfer(PointToPointEngine& engine, const rc_transfer& given) : AsyncRequest(engine, given) {
        request.gpu = &gpu_;
    }

    void wait(PeerGroup& group, uint64_t deadline) override {
        gpu().coalesce(false);
        AsyncRequest::wait(group, deadline);
        gpu().wait_end(*this, deadline);
    }
    void wait_launched(PeerGroup& group, uint64_t deadline) override {
        gpu().coalesce(false);
        AsyncRequest::wait(group, deadline);
        if (request.failure) gpu().wait_end(*this, UINT64_MAX);
    }
    bool launched() const override { return request.is_done(); }
    void order(void* stream) override { gpu().order(request, stream); }

private:
    GpuTransfers& gpu() { return engine_.gpu(); }

    GpuRequest gpu_;
};

std::shared_ptr<AsyncRequest> GpuTransfers::make_request(const rc_transfer& transfer) {
    return std::make_shared<StartedTransfer>(engine_, transfer);
}

void GpuTransfers::connect(const rc_gpu_messages_setup& setup) {
    const std::lock_guard lock(engine_.mutex_);
    gpus_ = std::make_unique<GpuMessages>(open_driver(setup.driver), setup, group_.rank);
}

void GpuTransfers::coalesce(bool begins) {
    const std::lock_guard lock(engine_.mutex_);
    if (!connected()) return;
    try {
        coalescing_ = begins;
        if (begins) return;
        launch_staging();
        launch_fetches();
    } catch (const std::exception& error) {
        throw engine_.break_group(error);
    }
}

bool GpuTransfers::all_read() {
    const std::lock_guard lock(engine_.mutex_);
    if (!connected()) return true;
    engine_.progress();
    return gpus_->all_read();
}

void GpuTransfers::wait() {
    std::vector<std::shared_ptr<AsyncRequest>> in_flight;
    {
        const std::lock_guard lock(engine_.mutex_);
        for (const Running& each : running_) in_flight.push_back(each.async);
    }
    for (const auto& async : in_flight) wait_end(*async, UINT64_MAX);
}

// While launches are in flight, for the end of one.
class GpuTransfers::EndChecks final : public WaitChecks {
public:
    EndChecks(PointToPointEngine& engine, const Request& request, uint64_t deadline)
        : engine_(engine), request_(request), deadline_(deadline) {}

    std::optional<Failure> stop_reason() override {
        if (auto failure = engine_.group_.stop_reason(call_name(request_.call()))) return failure;
        const std::lock_guard lock(engine_.mutex_);
        if (auto failure = engine_.find_failure()) return failure;
        if (now_ns() < deadline_) return {};
        const std::string text = format("rank %d: ", engine_.group_.rank) + request_.describe_call();
        return Failure(RC_TIMEOUT, text + " did not end within the timeout of wait", engine_.group_.rank);
    }
    [[noreturn]] void fail(const Failure& failure) override { engine_.group_.fail(failure); }
    bool yield() override { return engine_.group_.yield(); }
    uint64_t deadline() const override { return engine_.next_look(deadline_); }

private:
    PointToPointEngine& engine_;
    const Request& request_;
    const uint64_t deadline_;
};

void GpuTransfers::wait_end(AsyncRequest& async, uint64_t deadline) {
    const auto ended = [&] {
        if (!async.done()) engine_.advance();
        return async.done();
    };
    try {
        EndChecks checks(engine_, async.request, deadline);
        wait_until(ended, engine_.sleeper_, group_.spin_policy, checks);
    } catch (const Failure& failure) {
        {
            const std::lock_guard lock(engine_.mutex_);
            engine_.fail_all(failure);
        }
        while (!async.done()) {  // the kernel sees the abort, or has not begun: the program queued work before it
            try {
                engine_.advance();
            } catch (const Failure&) {
            }
            yield_core();
        }
        throw;
    }
}

void GpuTransfers::order(const Request& request, void* stream) {
    const std::lock_guard lock(engine_.mutex_);
    if (!request.gpu->end) return;
    const auto context = gpus_->current();
    gpus_->wait(static_cast<CUstream>(stream), request.gpu->end);
}

}  // namespace ringcomm
