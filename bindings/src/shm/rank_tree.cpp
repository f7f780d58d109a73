// RankTree: how it is built.
#include "shm/rank_tree.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace ringcomm {

RankTree::RankTree(const std::vector<Domain>& domains)
    : parents_(domains.size(), -1), children_(domains.size()), subtrees_(domains.size()) {
    Ranks all(domains.size());
    std::iota(all.begin(), all.end(), 0);
    connect(all, domains, &Domain::node);
    collect(0);
}

int RankTree::connect(const Ranks& ranks, const std::vector<Domain>& domains, int Domain::* level) {
    std::map<int, Ranks> parts;
    for (const int r : ranks) parts[domains[r].*level].push_back(r);
    Ranks leaders;
    for (const auto& [_, part] : parts) {
        leaders.push_back(level == &Domain::node ? connect(part, domains, &Domain::cache) : connect(part));
    }
    std::sort(leaders.begin(), leaders.end());
    return connect(leaders);
}

int RankTree::connect(const Ranks& ranks) {
    if (ranks.size() > FANOUT) {
        Ranks leaders;
        for (size_t i = 0; i < ranks.size(); i += FANOUT) {
            leaders.push_back(connect(Ranks(&ranks[i], &ranks[std::min(i + FANOUT, ranks.size())])));
        }
        return connect(leaders);
    }
    for (const int r : ranks) {
        if (r == ranks[0]) continue;
        parents_[r] = ranks[0];
        children_[ranks[0]].push_back(r);
    }
    return ranks[0];
}

void RankTree::collect(int r) {
    subtrees_[r] = {r};
    for (const int child : children_[r]) {
        collect(child);
        subtrees_[r].insert(subtrees_[r].end(), subtrees_[child].begin(), subtrees_[child].end());
    }
}

// A rank takes what its children pass on one after another, each once it is there.
int RankTree::critical_up(int r) const {
    int lines = 0;
    for (const int child : children_[r]) lines = std::max(lines, critical_up(child)) + 1;
    return lines;
}

int RankTree::depth(int r) const {
    int deepest = 0;
    for (const int child : children_[r]) deepest = std::max(deepest, 1 + depth(child));
    return deepest;
}

std::unique_ptr<RankTree> shorter_tree(const std::vector<Domain>& domains) {
    auto tree = std::make_unique<RankTree>(domains);
    if (tree->critical_lines() < one_shot_lines(domains.size())) return tree;
    return nullptr;
}

}  // namespace ringcomm
