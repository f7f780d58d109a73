// Messages between ranks of one host of a network group: in the memory of the host, whose readers sleep on the link.
#pragma once

#include "network/world.h"
#include "shm/channel.h"

namespace ringcomm {

// To a rank of this host, `peer` there. A rank of several hosts sleeps on its link.
class HostChannel final : public ShmChannel {
public:
    HostChannel(ShmGroup& host, int peer, NetworkWorld& world, int process)
        : ShmChannel(host, peer), world_(world), process_(process) {}

private:
    void wake_peer() override {
        const std::lock_guard lock(world_.mutex);
        world_.wake_peer(process_);
    }

    NetworkWorld& world_;
    const int process_;
};

// How a rank waits for messages of both kinds: the ranks of its host see that it sleeps, and on what.
class HostSleeper final : public Sleeper {
public:
    HostSleeper(ShmGroup& host, NetworkWorld& world) : host_(host.sleeper()), world_(world) {}

    uint32_t announce() override {
        host_.announce();
        return world_.announce();
    }
    void sleep(uint32_t ticket, uint64_t ns) override { world_.sleep(ticket, ns); }
    void retract() override {
        world_.retract();
        host_.retract();
    }
    void wake() override { world_.wake(); }

private:
    Sleeper& host_;
    NetworkWorld& world_;
};

}  // namespace ringcomm
