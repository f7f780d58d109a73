// What each collective takes and returns: the rows of types.def.
#pragma once

#include "ringcomm.h"

namespace ringcomm {

enum class Data { NOTHING, ARRAY, BLOCK, BLOCKS };
enum class Ranks { ALL, ROOT };

struct Collective {
    const char* name;
    Data given;
    Ranks given_by;
    Data got;
    Ranks got_by;
    bool reduces;
    int moves_as;  // itself, unless it is internal

    constexpr bool gives(int rank, int root) const { return given_by == Ranks::ALL || rank == root; }
    constexpr bool gets(int rank, int root) const { return got_by == Ranks::ALL || rank == root; }
    constexpr bool rooted() const { return given_by == Ranks::ROOT || got_by == Ranks::ROOT; }
    constexpr bool divides() const { return given == Data::BLOCKS || got == Data::BLOCKS; }
    // Blocks both ways, whose lengths may differ: counts to send, then counts to receive.
    constexpr bool exchanges() const { return given == Data::BLOCKS && got == Data::BLOCKS; }
    // The result may replace the input. Then an array is passed where it is only given, or only got.
    constexpr bool in_place() const { return given == got; }
};

inline constexpr Collective collectives[] = {
#define MOVES(NAME) false, RC_##NAME
#define REDUCES(NAME) true, RC_##NAME
#define AS_ALL_GATHER(NAME) false, RC_ALL_GATHER
#define AS_BARRIER(NAME) false, RC_BARRIER
#define COLLECTIVE_ROW(name, NAME, given, given_by, got, got_by, kind) \
    {#name, Data::given, Ranks::given_by, Data::got, Ranks::got_by, kind(NAME)},
#include "ringcomm/types.def"
#undef MOVES
#undef REDUCES
#undef AS_ALL_GATHER
#undef AS_BARRIER
};

// The row by which its data moves.
constexpr const Collective& movement_of(int collective) { return collectives[collectives[collective].moves_as]; }

// Some ranks of a group: one by its number, or these.
constexpr int ALL_RANKS = -1, NO_RANK = -2;
constexpr int all_but(int rank) { return -3 - rank; }
constexpr bool includes(int who, int rank) {
    return who == ALL_RANKS || who == rank || (who < NO_RANK && who != all_but(rank));
}

}  // namespace ringcomm
