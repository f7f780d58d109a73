// The C ABI of networks over MPI.
#include "link/mpi.h"

#include "abi/network.h"

using namespace ringcomm;

int rc_network_open_mpi(int rank, int size, const rc_mpi* mpi, rc_network** network) {
    return guarded([&] {
        check_size(size);
        check_rank("rank", rank, 0, size);
        check_pointer("mpi", mpi);
        check_pointer("network", network);
        check_range("most_tag", mpi->most_tag, 1, INT32_MAX);
        if (mpi->handle_bytes != sizeof(int) && mpi->handle_bytes != sizeof(void*)) {
            rejectf("handle_bytes: expected %zu or %zu, got %d", sizeof(int), sizeof(void*), mpi->handle_bytes);
        }
        auto link = std::make_unique<MessageLink>(rank, size, mpi_messages(*mpi));
        MessageLink* const opened = link.get();
        *network = new rc_network{std::make_shared<NetworkWorld>(std::move(link)), opened};
    });
}

int rc_network_leave(rc_network* network, rc_leaving* leaving) {
    return guarded([&] {
        check_pointer("network", network);
        check_pointer("leaving", leaving);
        if (!network->messages) reject("network: expected one of rc_network_open_mpi");
        const std::lock_guard lock(network->world->mutex);
        network->messages->leave();
        network->world->progress();
        *leaving = network->messages->leaving();
    });
}
