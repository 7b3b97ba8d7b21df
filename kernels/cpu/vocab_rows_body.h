// One chunk of one row of logits: its top k, its sum of exponentials, its highest element (see each_isa.h).

// Keeps the k highest (value, id), descending; of equal values the one that came first (the lower id) is
// ahead.
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

// Offers all of [begin, end), skipping stretches that hold nothing above the threshold.
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

// In stretches that are summed before they join the total: fewer roundings, and independent of each other.
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

// Fills the chunk's top k and returns the sum of e^(logit - highest logit of the chunk).
template <typename T>
static float scan_chunk(const T* row, int64_t begin, int64_t end, int64_t k, float* values, int32_t* ids,
                        int64_t& count) {
  TopList top{values, ids, k, 0};
  offer_chunk(top, row, begin, end);
  count = top.count;
  if (values[0] == -std::numeric_limits<float>::infinity()) return 0.0f;
  return sum_of_exp(row, begin, end, values[0]);
}

template <typename T>
static float highest_of_chunk(const T* row, int64_t begin, int64_t end) {
  vf high[4];
  for (vf& h : high) h = splat(-std::numeric_limits<float>::infinity());
  int64_t i = begin;
  for (; i + 4 * kLanes <= end; i += 4 * kLanes)
    for (int n = 0; n < 4; ++n) high[n] = max_of(load(row + i + n * kLanes), high[n]);
  float highest = highest_lane(max_of(max_of(high[0], high[1]), max_of(high[2], high[3])));
  for (; i < end; ++i) highest = std::max(highest, static_cast<float>(row[i]));
  return highest;
}

// The first index in [begin, end) whose element is `wanted`; `begin` if there is none.
template <typename T>
static int64_t first_equal(const T* row, int64_t begin, int64_t end, float wanted) {
  int64_t i = begin;
  while (i + kLanes <= end && !any_of(load(row + i) == wanted)) i += kLanes;
  for (; i < end; ++i)
    if (static_cast<float>(row[i]) == wanted) return i;
  return begin;
}
