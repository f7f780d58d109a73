// What a TCP connection between two hosts can do, without any library: the yardstick of network.py.
//
//     link 0|1 ADDRESS SECONDS BYTES...    on both hosts; ADDRESS is that of host 0
//
// Host 0 prints, in seconds: the way of a 4-byte message from one host to the other, half of a ping-pong; then for each
// number of bytes the time in which both hosts send that much to each other at once. Each is the median of what fits
// into SECONDS. Both spin on one nonblocking socket. Pieces of 32 KiB stay in the cache between the two ends.

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PORT = 29400, PIECE = 32 << 10, MESSAGE = 4, WARMUPS = 3, LEAST = 3, MOST = 5000, PATIENCE = 60 };

static int host, peer;
static char *outgoing, *incoming;

static void fail(const char* what) {
    perror(what);
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int compare(const void* a, const void* b) {
    const double x = *(const double*)a, y = *(const double*)b;
    return (x > y) - (x < y);
}

static size_t moved(ssize_t bytes) {
    if (bytes == 0 || (bytes < 0 && errno != EAGAIN)) fail("the other host");
    return bytes < 0 ? 0 : (size_t)bytes;
}

static size_t piece(size_t left) { return left < PIECE ? left : PIECE; }

// Send and receive this much, both at once.
static void transfer(size_t to_send, size_t to_receive) {
    for (size_t sent = 0, received = 0; sent < to_send || received < to_receive;) {
        if (sent < to_send) sent += moved(send(peer, outgoing + sent, piece(to_send - sent), MSG_NOSIGNAL));
        if (received < to_receive) received += moved(recv(peer, incoming + received, piece(to_receive - received), 0));
    }
}

static void exchange(size_t bytes) { transfer(bytes, bytes); }

static void ping_pong(size_t bytes) {
    if (host == 0) transfer(bytes, 0);
    transfer(0, bytes);
    if (host == 1) transfer(bytes, 0);
}

static double median(void (*call)(size_t), size_t bytes, double seconds) {
    double start = 0;
    for (int i = 0; i < WARMUPS; i++) {
        start = now();
        call(bytes);
    }
    long calls = (long)(seconds / (now() - start));
    calls = calls < LEAST ? LEAST : calls > MOST ? MOST : calls;
    memcpy(outgoing, &calls, sizeof calls);  // host 1 does as many as host 0
    transfer(host == 0 ? sizeof calls : 0, host == 0 ? 0 : sizeof calls);
    if (host == 1) memcpy(&calls, incoming, sizeof calls);
    double* times = malloc((size_t)calls * sizeof *times);
    for (long i = 0; i < calls; i++) {
        start = now();
        call(bytes);
        times[i] = now() - start;
    }
    qsort(times, (size_t)calls, sizeof *times, compare);
    const double found = times[calls / 2];
    free(times);
    return found;
}

static void join(const char* text) {
    const int on = 1;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    inet_pton(AF_INET, text, &address.sin_addr);
    const int own = socket(AF_INET, SOCK_STREAM, 0);
    if (host == 0) {
        setsockopt(own, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        if (bind(own, (struct sockaddr*)&address, sizeof address) || listen(own, 1)) fail("listen");
        peer = accept(own, NULL, NULL);
    } else {
        peer = own;
        while (connect(peer, (struct sockaddr*)&address, sizeof address)) usleep(1000);  // host 0 may not listen yet
    }
    setsockopt(peer, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    if (peer < 0 || fcntl(peer, F_SETFL, O_NONBLOCK)) fail("connect");
}

int main(int count, char** words) {
    alarm(PATIENCE);  // if the other host does not come
    host = atoi(words[1]);
    join(words[2]);
    const double seconds = atof(words[3]);
    size_t most = sizeof(long);
    for (int i = 4; i < count; i++) most = (size_t)atol(words[i]) > most ? (size_t)atol(words[i]) : most;
    outgoing = memset(malloc(most), 1, most);
    incoming = memset(malloc(most), 1, most);
    const double latency = median(ping_pong, MESSAGE, seconds) / 2;
    if (host == 0) printf("%.9f\n", latency);
    for (int i = 4; i < count; i++) {
        const double found = median(exchange, (size_t)atol(words[i]), seconds);
        if (host == 0) printf("%.9f\n", found);
    }
    return 0;
}
