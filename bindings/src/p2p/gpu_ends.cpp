// How launches of messages end or fail.
#include "p2p/gpu.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "p2p/async_request.h"

namespace ringcomm {

void GpuTransfers::finish(std::shared_ptr<AsyncRequest> async) {
    Request& request = async->request;
    GpuRequest& gpu = *request.gpu;
    auto failure = request.failure ? std::make_unique<Failure>(*request.failure) : nullptr;
    drop_outgoing(request);
    const bool waited_for = gpu.copies || request.transfer.async || request.transfer.stream == STREAM_PER_THREAD;
    if (gpu.stream && !gpu.end && waited_for) {
        try {
            const auto context = gpus_->current();
            gpu.end = gpus_->record(gpu.stream);
        } catch (const Failure&) {  // the context is broken
            gpu.copies = false;
        }
    }
    running_.push_back({std::move(async), std::move(failure)});
    busy_.store(true);
}

bool GpuTransfers::over(const Request& request) const {
    const GpuRequest& gpu = *request.gpu;
    if (gpu.launch && !gpus_->ended(gpu.launch)) return false;
    return !gpu.copies || !gpu.end || gpus_->reached(gpu.end);
}

bool GpuTransfers::end_running() {
    if (running_.empty()) return false;
    const auto context = gpus_->current();
    return std::erase_if(running_, [&](Running& each) {
        if (!over(each.async->request)) return false;
        each.async->request.gpu->buffer.reset();
        --engine_.async_open_;
        engine_.urgent_open_ -= each.async->request.urgent;
        each.async->finish(std::move(each.failure));
        return true;
    });
}

bool GpuTransfers::progress() {
    try {
        if (gpus_->failed() && !gpus_->aborted()) check_kernels();
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

void GpuTransfers::free_kept() {
    const auto context = gpus_->current();
    std::erase_if(kept_, [&](const auto& each) { return gpus_->reached(each.second); });
}

void GpuTransfers::check_kernels() {
    const cuda::KernelFailure failure = gpus_->failure();
    gpus_->abort();
    const auto& launched = launched_[failure.call % cuda::MAX_LAUNCHES];
    const auto found = std::find_if(launched.begin(), launched.end(), [&](const Launched& each) {
        return each.number == failure.epoch && (sends(each.transfer.kind) || each.peer == failure.peer);
    });
    const Request request(found->transfer);
    const std::string call = request.describe_call();
    const double seconds = engine_.timeout(Request(launched.front().transfer));
    if (failure.reason == cuda::MISMATCH) {
        throw Failure(RC_SYSTEM,
                      format("rank %d found a different message where it expected %s on ", group_.rank, call.c_str()) +
                          gpus_->device,
                      group_.rank);
    }
    const char* const why = failure.reason == cuda::NO_SLOT ? "has not read an earlier message of this rank"
                                                            : "has not reached the send on its stream";
    throw Failure(RC_TIMEOUT,
                  format("rank %d waited %.3g s for ", group_.rank, seconds) + call + " on " + gpus_->device +
                      format(": rank %d ", failure.peer) + why,
                  failure.peer);
}

std::optional<Failure> GpuTransfers::find_failure() {
    if (const std::string broken = gpus_->broken_context(); !broken.empty())
        return Failure(RC_SYSTEM, gpus_->device + " has failed: " + broken, group_.rank);
    for (Running& each : running_) {
        const Request& request = each.async->request;
        const int source = request.message.source;
        if (each.failure || request.sends || source < 0 || source == group_.rank) continue;
        auto lost = group_.peer_failure(source, request.describe_call());
        if (each.loss.is_final(lost.has_value())) return lost;
    }
    return {};
}

void GpuTransfers::fail(const Failure& failure) {
    gpus_->abort();
    chunking_.clear();
    fetching_.clear();
    std::vector<Request*> open(staging_.begin(), staging_.end());
    for (Outgoing& each : outgoing_) {
        keep_chunks(each);
        if (!each.endpoint) open.push_back(each.request);
    }
    for (const Incoming& each : incoming_)
        if (!each.endpoint) open.push_back(each.request);
    outgoing_.clear();
    incoming_.clear();
    staging_.clear();
    for (Request* request : open) engine_.fail(*request, failure);
    engine_.async_open_ -= int(staged_.size());
    for (const auto& [request, staged] : std::exchange(staged_, {})) gpus_->drop(staged->stage.slot, staged->launch);
}

void GpuTransfers::drain() {
    constexpr uint64_t PATIENCE_NS = 2'000'000'000;
    if (!connected()) return;
    const uint64_t start = now_ns();
    while (!running_.empty()) {
        if (now_ns() - start > PATIENCE_NS) gpus_->abort();
        if (!gpus_->broken_context().empty()) {
            for (Running& each : std::exchange(running_, {})) each.async->finish(std::move(each.failure));
            return;
        }
        end_running();
        yield_core();
    }
    gpus_->finish_copies();
}

}  // namespace ringcomm
