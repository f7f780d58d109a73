// How launches of messages end or fail, and how threads wait for them.
#include "p2p/gpu.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ringcomm {

void PointToPointEngine::Gpu::finish(std::shared_ptr<AsyncRequest> async) {
    Request& request = async->request;
    GpuRequest& gpu = *request.gpu;
    auto failure = request.failure ? std::make_unique<Failure>(*request.failure) : nullptr;
    if (request.to_host && !request.to_host->chunks.empty()) {  // it has failed while these are copied
        gpu.end = request.to_host->chunks.back().copied;
        gpu.copies = true;
    }
    const bool waited_for = gpu.copies || request.transfer.async || request.transfer.stream == STREAM_PER_THREAD;
    if (gpu.stream && !gpu.end && waited_for) {
        try {
            const auto context = gpus.current();
            gpu.end = gpus.record(gpu.stream);
        } catch (const Failure&) {  // the context is broken
            gpu.copies = false;
        }
    }
    running_.push_back({std::move(async), std::move(failure)});
    busy_.store(true);
}

bool PointToPointEngine::Gpu::over(const Request& request) const {
    const GpuRequest& gpu = *request.gpu;
    if (gpu.launch && !gpus.ended(gpu.launch)) return false;
    return !gpu.copies || !gpu.end || gpus.reached(gpu.end);
}

bool PointToPointEngine::Gpu::end_running() {
    if (running_.empty()) return false;
    const auto context = gpus.current();
    return std::erase_if(running_, [&](Running& each) {
        if (!over(each.async->request)) return false;
        each.async->request.gpu->buffer.reset();
        each.async->request.to_host.reset();
        --engine_.async_open_;
        engine_.urgent_open_ -= each.async->request.urgent;
        each.async->finish(std::move(each.failure));
        return true;
    });
}

bool PointToPointEngine::Gpu::progress() {
    try {
        if (gpus.failed() && !gpus.aborted()) check_kernels();
        if (!kept_.empty()) free_kept();
        if (!staged_.empty()) drop_unreceived();
        if (!fetching_.empty() && !coalescing_) launch_fetches();
        if (!chunking_.empty()) launch_chunks();
        bool moved = continue_copies();
        moved |= end_running();
        busy_.store(!running_.empty() || !outgoing_.empty() || !incoming_.empty());
        return moved;
    } catch (const Failure& failure) {
        group_.store_failure(failure);
        throw;
    }
}

void PointToPointEngine::Gpu::free_kept() {
    const auto context = gpus.current();
    std::erase_if(kept_, [&](const auto& each) { return gpus.reached(each.second); });
}

void PointToPointEngine::Gpu::coalesce(bool begins) {
    coalescing_ = begins;
    if (begins) return;
    launch_staging();
    launch_fetches();
}

void PointToPointEngine::Gpu::check_kernels() {
    const cuda::Record record = gpus.record();
    gpus.abort();
    const auto& launched = launched_[record.call % cuda::MAX_LAUNCHES];
    const auto found = std::find_if(launched.begin(), launched.end(), [&](const Launched& each) {
        return each.number == record.epoch && (sends(each.transfer.kind) || each.peer == record.peer);
    });
    const Request request(found->transfer);
    const std::string call = request.describe_call();
    const double seconds = engine_.timeout(Request(launched.front().transfer));
    if (record.reason == cuda::MISMATCH) {
        throw Failure(RC_SYSTEM,
                      format("rank %d found a different message where it expected %s on ", group_.rank, call.c_str()) +
                          gpus.device,
                      group_.rank);
    }
    const char* const why = record.reason == cuda::NO_SLOT ? "has not read an earlier message of this rank"
                                                           : "has not reached the send on its stream";
    throw Failure(RC_TIMEOUT,
                  format("rank %d waited %.3g s for ", group_.rank, seconds) + call + " on " + gpus.device +
                      format(": rank %d ", record.peer) + why,
                  record.peer);
}

std::optional<Failure> PointToPointEngine::Gpu::find_failure() {
    if (const std::string broken = gpus.broken_context(); !broken.empty())
        return Failure(RC_SYSTEM, gpus.device + " has failed: " + broken, group_.rank);
    for (Running& each : running_) {
        const Request& request = each.async->request;
        const int source = request.message.source;
        if (each.failure || request.sends || source < 0 || source == group_.rank) continue;
        auto lost = group_.peer_failure(source, request.describe_call());
        if (each.loss.is_final(lost.has_value())) return lost;
    }
    return {};
}

void PointToPointEngine::Gpu::fail(const Failure& failure) {
    gpus.abort();
    chunking_.clear();
    fetching_.clear();
    std::vector<Request*> open(staging_.begin(), staging_.end());
    for (const Outgoing& each : outgoing_)
        if (!each.endpoint) open.push_back(each.request);
    for (const Incoming& each : incoming_)
        if (!each.endpoint) open.push_back(each.request);
    outgoing_.clear();
    incoming_.clear();
    staging_.clear();
    for (Request* request : open) engine_.fail(*request, failure);
    engine_.async_open_ -= int(staged_.size());
    for (auto& [request, staged] : std::exchange(staged_, {})) gpus.drop(staged.transfer.slot, staged.launch);
}

std::vector<std::shared_ptr<PointToPointEngine::AsyncRequest>> PointToPointEngine::Gpu::in_flight() const {
    std::vector<std::shared_ptr<AsyncRequest>> requests;
    for (const Running& each : running_) requests.push_back(each.async);
    return requests;
}

void PointToPointEngine::Gpu::drain() {
    constexpr uint64_t PATIENCE_NS = 2'000'000'000;
    const uint64_t start = now_ns();
    while (!running_.empty()) {
        if (now_ns() - start > PATIENCE_NS) gpus.abort();
        if (!gpus.broken_context().empty()) {
            for (Running& each : std::exchange(running_, {})) each.async->finish(std::move(each.failure));
            return;
        }
        end_running();
        yield_core();
    }
    gpus.finish_copies();
}

// ---- The engine.

// GPU completions wake no thread: while something is in flight there, a wait polls.
uint64_t PointToPointEngine::next_look(uint64_t deadline) const {
    constexpr uint64_t LOOK_NS = 100'000;
    return gpu_ && gpu_->busy() ? std::min(deadline, now_ns() + LOOK_NS) : deadline;
}

// While launches are in flight, for the end of one.
class PointToPointEngine::EndChecks final : public WaitChecks {
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

void PointToPointEngine::wait_end(AsyncRequest& async, uint64_t deadline) {
    const auto ended = [&] {
        if (!async.done()) advance();
        return async.done();
    };
    try {
        EndChecks checks(*this, async.request, deadline);
        wait_until(ended, sleeper_, group_.spin_policy, checks);
    } catch (const Failure& failure) {
        {
            const std::lock_guard lock(mutex_);
            fail_all(failure);
        }
        while (!async.done()) {  // the kernel sees the abort, or has not begun: the program queued work before it
            try {
                advance();
            } catch (const Failure&) {
            }
            yield_core();
        }
        throw;
    }
}

void PointToPointEngine::order(const Request& request, void* stream) {
    const std::lock_guard lock(mutex_);
    if (!gpu_ || !request.gpu || !request.gpu->end) return;
    const auto context = gpu_->gpus.current();
    gpu_->gpus.wait(static_cast<CUstream>(stream), request.gpu->end);
}

void PointToPointEngine::connect_gpu(const rc_gpu_messages_setup& setup) {
    const std::lock_guard lock(mutex_);
    gpu_ = std::make_unique<Gpu>(*this, open_driver(setup.driver), setup);
}

void PointToPointEngine::coalesce(bool begins) {
    const std::lock_guard lock(mutex_);
    if (!gpu_) return;
    try {
        gpu_->coalesce(begins);
    } catch (const std::exception& error) {
        throw break_group(error);
    }
}

bool PointToPointEngine::all_read() {
    const std::lock_guard lock(mutex_);
    if (gpu_) progress();
    return !gpu_ || gpu_->gpus.all_read();
}

void PointToPointEngine::wait_gpu() {
    std::vector<std::shared_ptr<AsyncRequest>> requests;
    {
        const std::lock_guard lock(mutex_);
        if (gpu_) requests = gpu_->in_flight();
    }
    for (const auto& request : requests) wait_end(*request, UINT64_MAX);
}

}  // namespace ringcomm
