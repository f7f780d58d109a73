// Who still runs, while work is in flight on a GPU.
#include "cuda/liveness.h"

#include "core/waiting.h"
#include "cuda/group.h"

namespace ringcomm {

bool PeerLoss::is_final(bool lost) {
    constexpr uint64_t COMPLETION_NS = 1'000'000'000;
    if (!lost) since_ = 0;
    if (lost && !since_) since_ = now_ns();
    return lost && now_ns() - since_ >= COMPLETION_NS;
}

std::string broken_context(const Driver& driver, CUstream stream) {
    const OutsideCaptures mode(driver);
    const CUresult status = driver.cuStreamQuery(stream);
    return status == CUDA_SUCCESS || status == CUDA_ERROR_NOT_READY ? "" : driver.describe(status);
}

// A context that has failed runs nothing any more, and no kernel writes that it has ended.
void GpuGroup::check_gpu(PeerGroup& host) {
    const CurrentContext current(driver_, context_);
    const std::string broken = broken_context(driver_, streams_->probe());
    if (broken.empty()) return;
    dead_.store(true);
    host.store_failure(Failure(RC_SYSTEM, device_ + " has failed: " + broken, host.rank));
}

// Aborts the kernels when the group has failed, or a peer that they still wait for has left.
void GpuGroup::end_hopeless_launches(PeerGroup& host) {
    check_gpu(host);
    const auto lost = find_lost_peer(host, loss_);
    if (lost) host.store_failure(*lost);
    if (lost || host.has_failed()) abort();
}

std::optional<Failure> GpuGroup::find_lost_peer(PeerGroup& host, PeerLoss& loss) {
    int lost = 0;
    while (lost < host.size && (lost == host.rank || !host.peer_failure(lost, ""))) ++lost;
    if (!loss.is_final(lost < host.size)) return {};
    const LaunchInfo oldest = info(load_acquire(&control_->completed) + 1);
    const std::string call = oldest.number ? describe(oldest.signature) : "a call of a graph";
    return host.peer_failure(lost, call + " on " + device_);
}

}  // namespace ringcomm
