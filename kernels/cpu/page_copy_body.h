// Copies out of the pages of a KV cache, whatever their order of elements is; part of tree_attention_body.h.

// Distance of 16 entries of an offset table: 1 contiguous, 2 every other one, 0 neither.
static inline int step_of_16(const int32_t* offset) {
  const int32_t step = offset[1] - offset[0];
  if (step != 1 && step != 2) return 0;
  for (int i = 1; i < 16; ++i)
    if (offset[i] - offset[i - 1] != step) return 0;
  return step;
}

// to[r * ld + c] = page[row[r] + column[c]]
template <typename T, typename To>
static void copy_from_page(const T* page, const int32_t* row, int64_t rows, const int32_t* column,
                           int64_t columns, To* to, int64_t ld) {
  for (int64_t c = 0; c < columns;) {
    const int step = columns - c >= 16 ? step_of_16(column + c) : 0;
    if (step == 0) {
      const int64_t last = std::min(c + 16, columns);
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t i = c; i < last; ++i) to[r * ld + i] = static_cast<To>(page[row[r] + column[i]]);
      c = last;
      continue;
    }
    for (int64_t r = 0; r < rows; ++r) {
      const T* from = page + row[r] + column[c];
      To* out = to + r * ld + c;
      if (step == 1) {
        for (int v = 0; v < 16; v += kLanes) store(out + v, load(from + v));
        continue;
      }
      if constexpr (sizeof(T) == 2) {  // pairs of rows interleaved, as AMX wants its 16-bit operands
        if (r + 1 < rows && row[r + 1] == row[r] + 1) {
          for (int v = 0; v < 16; v += kLanes) {
            vf first, second;
            load_pair(from + 2 * v, first, second);
            store(out + v, first);
            store(out + ld + v, second);
          }
          ++r;
          continue;
        }
      }
      for (int i = 0; i < 16; ++i) out[i] = static_cast<To>(from[2 * i]);
    }
    c += 16;
  }
}

// to[c] = page[row + column[c]], of one row whose columns lie in contiguous 16s.
template <typename T, typename To>
static void copy_row(const T* page, int32_t row, const int32_t* column, int64_t columns, To* to) {
  for (int64_t c = 0; c < columns; c += 16)
    for (int v = 0; v < 16; v += kLanes) {
      if constexpr (std::is_same_v<T, To>) __builtin_memcpy(to + c + v, page + row + column[c] + v, kLanes * sizeof(T));
      else store(to + c + v, load(page + row + column[c] + v));
    }
}
