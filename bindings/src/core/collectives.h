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
#define MOVES false
#define INTERNAL false
#define REDUCES true
#define COLLECTIVE_ROW(name, NAME, given, given_by, got, got_by, kind) \
    {#name, Data::given, Ranks::given_by, Data::got, Ranks::got_by, kind},
#include "ringcomm/types.def"
#undef MOVES
#undef INTERNAL
#undef REDUCES
};

// Some ranks of a group: one by its number, or these.
constexpr int ALL_RANKS = -1, NO_RANK = -2;
constexpr int all_but(int rank) { return -3 - rank; }
constexpr bool includes(int who, int rank) {
    return who == ALL_RANKS || who == rank || (who < NO_RANK && who != all_but(rank));
}

// How its data moves: of the INTERNAL collectives.
constexpr int moves_as(int collective) {
    if (collective == RC_CLOSE) return RC_BARRIER;
    const bool facts = collective == RC_SPLIT || collective == RC_EMPTY || collective == RC_GROW;
    return facts ? int(RC_ALL_GATHER) : collective;
}

}  // namespace ringcomm
