// The tree through which many ranks of one machine pass small data (collectives/tree.cpp). Ranks that share a cache
// form a group with a leader, the leaders of a NUMA node the next one, and the leaders of the nodes the last; a larger
// group is divided into groups of FANOUT.
//
// Open MPI's XHC builds such hierarchies: Katevenis, Ploumidis and Marazakis, "A framework for hierarchical single-copy
// MPI collectives on multicore nodes", IEEE Cluster 2022.
#pragma once

#include <memory>
#include <vector>

namespace ringcomm {

// Where a rank runs; -1: unknown, or in more than one.
struct Domain {
    int node, cache;

    bool operator==(const Domain&) const = default;
};

class RankTree {
public:
    static constexpr int FANOUT = 8;  // an estimate: the lines of so many ranks arrive side by side

    explicit RankTree(const std::vector<Domain>& domains);  // of each rank

    int parent(int r) const { return parents_[r]; }  // -1: r is the root
    const std::vector<int>& children(int r) const { return children_[r]; }
    // r, then the subtrees of its children.
    const std::vector<int>& subtree(int r) const { return subtrees_[r]; }
    // How many cache lines arrive one after another, from the last start record to the last result.
    int critical_lines() const { return critical_up(0) + depth(0); }

private:
    using Ranks = std::vector<int>;

    // Puts ranks under the first of them, which is returned: by node, by cache, then FANOUT at a time.
    int connect(const Ranks& ranks, const std::vector<Domain>& domains, int Domain::* level);
    int connect(const Ranks& ranks);
    void collect(int r);
    int critical_up(int r) const;
    int depth(int r) const;

    std::vector<int> parents_;
    std::vector<Ranks> children_, subtrees_;
};

// How many arrive one after another where each rank reads the start records of all its peers, as one-shot does.
inline int one_shot_lines(size_t size) { return int(size) - 1; }

// The tree of ranks at these places; null where they would wait for no fewer lines than by one-shot.
std::unique_ptr<RankTree> shorter_tree(const std::vector<Domain>& domains);

}  // namespace ringcomm
