// Bodies of repeats.h.
#include "repeats.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace ygg {

namespace {

constexpr int64_t kMostObserved = 64;
constexpr double kHalfLength = 1.5, kPriorHits = 4.0, kPriorTokens = 6.0, kMemory = 32.0, kMinPath = 0.15;

struct Match {
  int64_t next_pos, length;
};

int64_t band_of(int64_t length) { return std::bit_width(uint64_t(length)) - 1; }

// The place before `end` whose tokens before it equal the most tokens before `end`; of equal ones the last.
Match longest_match(const int64_t* tokens, int64_t end) {
  Match best{-1, 0};
  const int64_t last = end > 0 ? tokens[end - 1] : 0;
  for (int64_t place = end - 1; place > 0; --place) {
    if (tokens[place - 1] != last) continue;
    const int64_t most = std::min(place, kLongestMatch);
    int64_t length = 1;
    while (length < most && tokens[place - 1 - length] == tokens[end - 1 - length]) ++length;
    if (length > best.length) best = {place, length};
    if (length == kLongestMatch) break;
  }
  return best;
}

void observe_(const int64_t* tokens, int64_t len, Evidence& evidence) {
  for (int64_t position = std::max(evidence.num_read, len - kMostObserved); position < len; ++position) {
    const Match match = longest_match(tokens, position);
    if (match.length == 0) continue;
    double& hits = evidence.hits[band_of(match.length)];
    double& seen = evidence.seen[band_of(match.length)];
    const bool is_hit = tokens[match.next_pos] == tokens[position];
    double fading = kMemory / std::max(kMemory, seen + 1.0);
    hits = fading * (hits + double(is_hit));
    seen = fading * (seen + 1.0);
    fading = kMemory / std::max(kMemory, evidence.num_seen + 1.0);
    evidence.num_hits = fading * (evidence.num_hits + double(is_hit));
    evidence.missed_tokens = fading * (evidence.missed_tokens + (is_hit ? 0.0 : double(match.length)));
    evidence.num_seen = fading * (evidence.num_seen + 1.0);
  }
  evidence.num_read = std::max(evidence.num_read, len);
}

double log_prob_of(int64_t length, const Evidence& evidence) {
  const double missed = evidence.missed_tokens + kPriorHits * kHalfLength;
  const double half = missed / (evidence.num_hits + kPriorHits);
  const double prior = kPriorTokens * double(length) / (double(length) + half);
  const int64_t band = band_of(length);
  return std::log((evidence.hits[band] + prior) / (evidence.seen[band] + kPriorTokens));
}

}  // namespace

Graft graft(const int64_t* tokens, int64_t len, Evidence& evidence, int64_t most, double min_edge) {
  observe_(tokens, len, evidence);
  const Match match = longest_match(tokens, len);
  Graft found;
  double path = 0.0;
  for (int64_t place = 0; place < (match.length ? most : 0); ++place) {
    const double edge = log_prob_of(std::min(match.length + place, kLongestMatch), evidence);
    path += edge;
    if (path < std::log(kMinPath) || edge < std::log(std::max(min_edge, kMinPath))) break;
    const int64_t at = match.next_pos + place;
    // where the match overlaps the end of the text, the chain goes on with itself
    found.tokens.push_back(at < len ? tokens[at] : found.tokens[size_t(at - len)]);
    found.log_probs.push_back(edge);
  }
  return found;
}

}  // namespace ygg

int64_t ygg_graft(const int64_t* tokens, int64_t len, ygg::Evidence* evidence, int64_t most,
                  double min_edge, int64_t* found, double* log_probs) noexcept {
  const ygg::Graft chain = ygg::graft(tokens, len, *evidence, most, min_edge);
  std::copy(chain.tokens.begin(), chain.tokens.end(), found);
  std::copy(chain.log_probs.begin(), chain.log_probs.end(), log_probs);
  return int64_t(chain.tokens.size());
}
