// One chunk of a row of logits: top k, sum of exponentials, and highest element (see each_isa.h).

// Keeps the k highest (value, id) in descending order; among equal values the lower id comes first.
struct TopList {
  float* value;
  int32_t* id;
  int64_t k, count;

  float threshold() const { return value[k - 1]; }
  void offer(float v, int32_t candidate) {
    if (count == k && !(v > value[k - 1])) return;
    int64_t at = count < k ? count++ : k - 1;
    for (; at > 0 && value[at - 1] < v; --at) {
      value[at] = value[at - 1];
      id[at] = id[at - 1];
    }
    value[at] = v;
    id[at] = candidate;
  }
};

template <typename T>
static void offer_range(TopList& top, const T* row, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) top.offer(static_cast<float>(row[i]), static_cast<int32_t>(i));
}

// Offers all of [begin, end), but skips stretches without a value above the threshold.
template <typename T>
static void offer_chunk(TopList& top, const T* row, int64_t begin, int64_t end) {
  constexpr int kStretch = 4 * kLanes;
  int64_t i = std::min(end, begin + round_up(top.k, kLanes));
  offer_range(top, row, begin, i);
  for (; i + kStretch <= end; i += kStretch) {
    const vf low = max_of(load(row + i), load(row + i + kLanes));
    const vf high = max_of(load(row + i + 2 * kLanes), load(row + i + 3 * kLanes));
    if (any_of(max_of(low, high) > top.threshold())) offer_range(top, row, i, i + kStretch);
  }
  offer_range(top, row, i, end);
}

// Sums in stretches, which reduces rounding errors and makes the additions independent.
template <typename T>
static float sum_of_exp(const T* row, int64_t begin, int64_t end, float highest) {
  constexpr int kStretch = 64 * kLanes;
  vf sum[4] = {};
  int64_t i = begin;
  for (; i + kStretch <= end; i += kStretch) {
    vf part[4] = {};
    for (int64_t j = i; j < i + kStretch; j += 4 * kLanes)
      for (int n = 0; n < 4; ++n) part[n] += exp_of(load(row + j + n * kLanes) - highest);
    for (int n = 0; n < 4; ++n) sum[n] += part[n];
  }
  for (; i + kLanes <= end; i += kLanes) sum[0] += exp_of(load(row + i) - highest);
  if (i < end) {
    vf rest = splat(-std::numeric_limits<float>::infinity());
    for (int n = 0; i + n < end; ++n) rest[n] = static_cast<float>(row[i + n]) - highest;
    sum[1] += exp_of(rest);
  }
  return sum_of_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// Fills the chunk's top k and returns the sum of e^(logit - highest logit of the chunk): 0 if all logits are -inf, NaN
// if one is NaN or +inf.
template <typename T>
static float scan_chunk(const T* row, int64_t begin, int64_t end, int64_t k, float* values, int32_t* ids,
                        int64_t& count) {
  TopList top{values, ids, k, 0};
  offer_chunk(top, row, begin, end);
  count = top.count;
  // Differences from -inf would be NaN.
  const bool nothing = values[0] == -std::numeric_limits<float>::infinity();
  return sum_of_exp(row, begin, end, nothing ? 0.0f : values[0]);
}

// The highest element. NaN ranks above all numbers, as in torch.argmax.
template <typename T>
static float highest_of_chunk(const T* row, int64_t begin, int64_t end) {
  vf high[4];
  vi nan = {};
  for (vf& h : high) h = splat(-std::numeric_limits<float>::infinity());
  int64_t i = begin;
  for (; i + 4 * kLanes <= end; i += 4 * kLanes)
    for (int n = 0; n < 4; ++n) {
      const vf v = load(row + i + n * kLanes);
      nan |= v != v;
      high[n] = max_of(v, high[n]);
    }
  if (any_of(nan)) return std::numeric_limits<float>::quiet_NaN();
  float highest = highest_lane(max_of(max_of(high[0], high[1]), max_of(high[2], high[3])));
  for (; i < end; ++i) {
    const float v = static_cast<float>(row[i]);
    if (v != v) return v;
    highest = std::max(highest, v);
  }
  return highest;
}

// The first index in [begin, end) whose element is the highest one, `wanted`; `begin` if there is none.
template <typename T>
static int64_t first_equal(const T* row, int64_t begin, int64_t end, float wanted) {
  int64_t i = begin;
  // If an element is NaN, `wanted` is NaN too.
  for (; i + kLanes <= end; i += kLanes) {
    const vf v = load(row + i);
    if (any_of((v == wanted) | (v != v))) break;
  }
  for (; i < end; ++i) {
    const float v = static_cast<float>(row[i]);
    if (v == wanted || v != v) return i;
  }
  return begin;
}
