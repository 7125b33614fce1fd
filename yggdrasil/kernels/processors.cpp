// Logits processors: bias, penalties and bans that depend on the text. step/processors.py specifies them.
#include "processors.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace ygg {

namespace {

constexpr float kBanned = -std::numeric_limits<float>::infinity();

bool has(const int32_t* bits, int64_t token) { return uint32_t(bits[token / 32]) >> (token % 32) & 1; }

}  // namespace

const int32_t* Grammar::after(at::IntArrayRef path) const {
  if (place < 0) return nullptr;
  const int32_t* bits = mask(place, path.data(), int64_t(path.size()));
  TORCH_CHECK(bits != nullptr, "a grammar failed");
  return bits;
}

ProcessedText::ProcessedText(const Processors& processors, at::IntArrayRef text, int64_t prompt_len,
                             Grammar grammar)
    : processors_(&processors), text_(text), prompt_len_(prompt_len), grammar_(grammar) {
  for (size_t place = 0; place < text.size(); ++place) {
    Count& count = counts_[text[place]];
    ++count.seen;
    count.emitted += int64_t(place) >= prompt_len;
  }
}

ProcessedText::Count ProcessedText::count(int64_t token, at::IntArrayRef path) const {
  const auto found = counts_.find(token);
  Count count = found == counts_.end() ? Count{} : found->second;
  const int64_t in_path = std::count(path.begin(), path.end(), token);
  return {count.seen + in_path, count.emitted + in_path};
}

float ProcessedText::penalised(float score, const Count& count) const {
  const float repetition = float(processors_->repetition);
  if (count.seen && repetition != 1.0f) score = score < 0 ? score * repetition : score / repetition;
  if (count.emitted && (processors_->presence != 0 || processors_->frequency != 0)) {
    const float by_count = float(processors_->frequency) * float(count.emitted);
    score -= by_count + float(processors_->presence);
  }
  return score;
}

// The tokens that may not come after the text and the path.
std::vector<int64_t> ProcessedText::banned(at::IntArrayRef path) const {
  const int64_t len = int64_t(text_.size() + path.size());
  const auto at = [&](int64_t place) {
    return place < int64_t(text_.size()) ? text_[place] : path[place - int64_t(text_.size())];
  };
  // whether the `count` tokens from `begin` on are the last ones, too
  const auto ends_like = [&](int64_t begin, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
      if (at(begin + i) != at(len - count + i)) return false;
    return true;
  };
  std::vector<int64_t> tokens;
  if (const int64_t size = processors_->ngram; size > 0)
    for (int64_t begin = 0; begin + size <= len; ++begin)
      if (ends_like(begin, size - 1)) tokens.push_back(at(begin + size - 1));
  for (const std::vector<int64_t>& sequence : processors_->banned) {
    const int64_t before = int64_t(sequence.size()) - 1;
    bool follows = before <= len;
    for (int64_t i = 0; follows && i < before; ++i) follows = at(len - before + i) == sequence[i];
    if (follows) tokens.push_back(sequence.back());
  }
  if (len - prompt_len_ < processors_->min_tokens)
    tokens.insert(tokens.end(), processors_->ends.begin(), processors_->ends.end());
  return tokens;
}

void ProcessedText::process_(float* scores, int64_t vocab, at::IntArrayRef path) const {
  const std::vector<int64_t> bans = banned(path);
  for (const std::vector<int64_t>& named : {processors_->bias_tokens, bans})
    for (const int64_t token : named)
      TORCH_CHECK(token < vocab, "token ", token, " of the processors is not below ", vocab);
  for (size_t i = 0; i < processors_->bias_tokens.size(); ++i)
    scores[processors_->bias_tokens[i]] += float(processors_->bias[i]);
  for (const auto& [token, count] : counts_)
    if (std::find(path.begin(), path.end(), token) == path.end())
      scores[token] = penalised(scores[token], count);
  for (auto token = path.begin(); token != path.end(); ++token)
    if (std::find(path.begin(), token, *token) == token)
      scores[*token] = penalised(scores[*token], count(*token, path));
  for (const int64_t token : bans) scores[token] = kBanned;
  keep_allowed_(scores, vocab, path);
}

// Bans what the grammar does not allow; if nothing is left, what it allows has 0.
void ProcessedText::keep_allowed_(float* scores, int64_t vocab, at::IntArrayRef path) const {
  const int32_t* allowed = grammar_.after(path);
  if (allowed == nullptr) return;
  TORCH_CHECK(vocab == grammar_.vocab, "a grammar over ", grammar_.vocab, " tokens, logits of ", vocab);
  for (int64_t first = 0; first < vocab; first += 32) {
    const int64_t end = std::min(first + 32, vocab);
    if (allowed[first / 32] == 0) std::fill(scores + first, scores + end, kBanned);
    if (allowed[first / 32] == 0 || allowed[first / 32] == -1) continue;
    for (int64_t token = first; token < end; ++token)
      if (!has(allowed, token)) scores[token] = kBanned;
  }
  const bool is_stuck = std::all_of(scores, scores + vocab, [](float score) { return score == kBanned; });
  for (int64_t token = 0; is_stuck && token < vocab; ++token)
    if (has(allowed, token)) scores[token] = 0.0f;
}

// Replaces candidates that the grammar does not allow by the first tokens that it allows. None of these is
// likelier than the last candidate.
void ProcessedText::replace_(int64_t* tokens, float* log_probs, int64_t num, const int32_t* allowed) const {
  const std::vector<int64_t> drafted(tokens, tokens + num);
  const float last = log_probs[num - 1];
  int64_t other = 0;
  for (int64_t i = 0; i < num; ++i) {
    if (has(allowed, tokens[i])) continue;
    const auto is_other = [&](int64_t token) {
      return has(allowed, token) && std::find(drafted.begin(), drafted.end(), token) == drafted.end();
    };
    while (other < grammar_.vocab && !is_other(other)) other += allowed[other / 32] ? 1 : 32 - other % 32;
    if (other >= grammar_.vocab) return;
    log_probs[i] = last;
    tokens[i] = other++;
  }
}

// The candidates after nodes of a tree, ranked again. `top_logit` lifts log-probabilities to logits.
Candidates ProcessedText::process(const Candidates& drafted, at::ArrayRef<std::vector<int64_t>> paths,
                                  double top_logit) const {
  const int64_t rows = drafted.tokens.size(0), num = drafted.tokens.size(1);
  Candidates ranked{empty({rows, num}, drafted.log_probs.options()),
                    empty({rows, num}, drafted.tokens.options())};
  std::vector<float> scores(num), log_probs(num);
  std::vector<int64_t> order(num), tokens(num);
  for (int64_t row = 0; row < rows; ++row) {
    std::copy_n(drafted.tokens.const_data_ptr<int64_t>() + row * num, num, tokens.begin());
    std::copy_n(drafted.log_probs.const_data_ptr<float>() + row * num, num, log_probs.begin());
    const int32_t* allowed = grammar_.after(paths[row]);
    if (allowed != nullptr) replace_(tokens.data(), log_probs.data(), num, allowed);
    const std::vector<int64_t> bans = banned(paths[row]);
    for (int64_t i = 0; i < num; ++i) {
      float score = log_probs[i] + float(top_logit);
      const auto& biased = processors_->bias_tokens;
      const auto place = std::find(biased.begin(), biased.end(), tokens[i]);
      if (place != biased.end()) score += float(processors_->bias[place - biased.begin()]);
      score = penalised(score, count(tokens[i], paths[row]));
      const bool is_banned = std::find(bans.begin(), bans.end(), tokens[i]) != bans.end() ||
                             (allowed != nullptr && !has(allowed, tokens[i]));
      scores[i] = is_banned ? kForbidden : std::max(score, kForbidden);
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return scores[a] > scores[b]; });
    for (int64_t i = 0; i < num; ++i) {
      ranked.log_probs.mutable_data_ptr<float>()[row * num + i] = scores[order[i]];
      ranked.tokens.mutable_data_ptr<int64_t>()[row * num + i] = tokens[order[i]];
    }
  }
  return ranked;
}

}  // namespace ygg
