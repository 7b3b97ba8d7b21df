// Tokens per millisecond, vllm_gsd/planner/rates.py.
#include <algorithm>
#include <vector>

#include "array.h"

namespace gsd {

namespace {

using Table = View<const double, 1>;

double number(py::handle value) {
  const double result = PyFloat_AsDouble(value.ptr());
  if (result == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return result;
}

Table table_of(py::handle table, const char* name) {
  const Table result = view<const double, 1>(table, name);
  check_size(result.size(), 2, name);
  return result;
}

// Interpolates a table of milliseconds at ``rows``; extrapolates with its last slope.
double read_table(const Table& table, double rows) {
  const int64_t last = table.size() - 1;
  const int64_t low = placed(rows < last - 1 ? static_cast<int64_t>(rows) : last - 1, last, "rows");
  return table[low] + (rows - low) * (table[low + 1] - table[low]);
}

struct Tables {
  Table target, draft;
  double attention, node_ms, level_ms;

  explicit Tables(py::handle tables) {
    const Tuple item(tables, 5, "tables must be a tuple of two tables and three numbers");
    target = table_of(item[0], "the target's table");
    draft = table_of(item[1], "the draft's table");
    attention = number(item[2]), node_ms = number(item[3]), level_ms = number(item[4]);
  }
};

// Sorts in descending order; NaN goes first, as in a reversed np.sort.
constexpr auto above = [](double a, double b) { return a > b || (a != a && b == b); };

void sort_falling(std::vector<double>& values) {
  // What the planner has learned is usually in order already.
  if (!std::is_sorted(values.begin(), values.end(), above)) std::sort(values.begin(), values.end(), above);
}

// As ``rates.best_rate``; sorts ``chances``.
double most_per_ms(const Tables& tables, int64_t num_requests, double context, double spent,
                   std::vector<double>& chances) {
  sort_falling(chances);
  double best = 0.0, tokens = static_cast<double>(num_requests);
  for (int64_t count = 1; count <= static_cast<int64_t>(chances.size()); ++count) {
    tokens += chances[count - 1];
    const double attended =
        context * (1.0 + divided(static_cast<double>(count), static_cast<double>(num_requests)));
    const double took = spent + read_table(tables.target, static_cast<double>(num_requests + count)) +
                        tables.node_ms * count + tables.attention * attended;
    best = std::max(best, divided(tokens, took));
  }
  return best;
}

// As ``rates.drafts_ms``, for ``times`` as many rows.
double levels_ms(const Tables& tables, const Table& rows, const Table& share, double times) {
  check_size(share.size(), rows.size(), "share");
  double total = 0.0;
  for (int64_t level = 0; level < rows.size(); ++level)
    total += share[level] * (read_table(tables.draft, times * rows[level]) + tables.level_ms);
  return total;
}

}  // namespace

double read(py::handle table, double rows) { return read_table(table_of(table, "table"), rows); }

double best_rate(py::handle tables, int64_t num_requests, double context, double spent, py::handle chances) {
  const Tables table(tables);
  return either<double, float, 1>(chances, "chances", [&](const auto& given) {
    std::vector<double> each(given.data, given.data + given.size());
    return most_per_ms(table, num_requests, context, spent, each);
  });
}

double drafts_rate(py::handle tables, int64_t num_requests, double context, double spent, py::handle found, double left,
                   int64_t num_drafted, py::handle worth, py::handle levels, py::handle share) {
  const Tables table(tables);
  const auto rows = view<const double, 1>(levels, "levels"), shares = view<const double, 1>(share, "share");
  const auto there = view<const double, 1>(found, "found"), known = view<const double, 1>(worth, "worth");
  check_size(num_drafted, 0, "num_drafted");
  spent += levels_ms(table, rows, shares, static_cast<double>(num_drafted));
  std::vector<double> each(there.data, there.data + there.size());
  each.reserve(each.size() + num_drafted * known.size());
  for (int64_t i = 0; i < known.size(); ++i) each.insert(each.end(), num_drafted, left * known[i]);
  return most_per_ms(table, num_requests, context, spent, each);
}

void follow_children(py::handle children, py::handle probs, double weight) {
  const auto known = view<double, 1>(children, "children");
  either<float, double, 2>(probs, "probs", [&](const auto& seen) {
    check_size(seen.shape[1], known.size(), "a row of probs");
    for (int64_t child = 0; child < known.size(); ++child) {
      double total = 0.0;
      for (int64_t row = 0; row < seen.size(); ++row) total += seen.row(row)[child];
      known[child] += weight * (divided(total, static_cast<double>(seen.size())) - known[child]);
    }
  });
}

void follow_graphs(py::handle worth, py::handle levels, py::handle share, py::handle values, py::handle size,
                   py::handle chosen, py::handle rows, int64_t num_drafted, double weight) {
  const auto known = view<double, 1>(worth, "worth"), each = view<double, 1>(levels, "levels");
  const auto run = view<double, 1>(share, "share");
  const auto taken = view<const bool, 1>(chosen, "chosen");
  const Ints sizes(size, "size"), row(rows, "rows");
  check_size(taken.size(), sizes.size(), "chosen");
  check_size(run.size(), each.size(), "share");
  either<float, double, 2>(values, "values", [&](const auto& value) {
    check_size(value.size(), sizes.size(), "values");
    double count = 0.0;
    for (int64_t graph = 0; graph < sizes.size(); ++graph) {
      check_size(value.shape[1], sizes[graph], "a row of values");
      count += taken[graph];
    }
    for (int64_t place = 0; place < known.size(); ++place) {
      double total = 0.0;
      for (int64_t graph = 0; graph < sizes.size(); ++graph)
        if (taken[graph] && place < sizes[graph]) total += value.row(graph)[place];
      known[place] += weight * (divided(total, count) - known[place]);
    }
  });
  for (int64_t level = 0; level < each.size(); ++level) {
    if (level < row.size()) {
      const double of_each = divided(static_cast<double>(row[level]), static_cast<double>(num_drafted));
      each[level] += weight * (of_each - each[level]);
      run[level] += weight * (1.0 - run[level]);
    } else {
      run[level] -= weight * run[level];
    }
  }
}

int64_t level_size(py::handle tables, int64_t num_requests, double context, double plain, double spent,
                   py::handle worth, int64_t num_drafted, py::handle values, py::handle children) {
  const Tables table(tables);
  const auto known = view<const double, 1>(worth, "worth"), below = view<const double, 1>(children, "children");
  const auto given = view<const double, 1>(values, "values");
  std::vector<double> each;
  each.reserve(std::max<int64_t>(0, num_drafted) * known.size());
  for (int64_t i = 0; i < known.size(); ++i) each.insert(each.end(), std::max<int64_t>(0, num_drafted), known[i]);
  const double rate = std::max(plain, most_per_ms(table, num_requests, context, spent, each));
  const int64_t more =
      std::min(given.size() * below.size(), std::max<int64_t>(1, num_drafted) * known.size());
  // Verifying a child costs a row; children that yield less are not verified.
  double row_ms = divided(read_table(table.target, static_cast<double>(num_requests + more)) -
                              read_table(table.target, static_cast<double>(num_requests)),
                          static_cast<double>(more));
  row_ms += table.node_ms + divided(table.attention * context, static_cast<double>(num_requests));
  std::vector<double> falling(given.data, given.data + given.size());
  sort_falling(falling);
  double best = 0.0, surplus = 0.0;
  int64_t size = 0;
  for (int64_t count = 1; count <= given.size(); ++count) {
    for (int64_t child = 0; child < below.size(); ++child)
      surplus += std::max(falling[count - 1] * below[child] - rate * row_ms, 0.0);
    const double gain = surplus - rate * (read_table(table.draft, static_cast<double>(count)) + table.level_ms);
    if (gain > best || (size == 0 && gain == best)) best = gain, size = count;
  }
  return size;
}

py::array_t<int32_t> best_nodes(py::handle tables, int64_t num_requests, double total, py::handle values,
                                py::handle size, py::handle context, double spent, double graph) {
  const Tables table(tables);
  const Ints sizes(size, "size"), contexts(context, "context");
  const int64_t num_graphs = sizes.size();
  check_size(contexts.size(), num_graphs, "context");
  std::vector<double> chances;
  std::vector<int64_t> owner;
  either<float, double, 2>(values, "values", [&](const auto& rows) {
    check_size(rows.size(), num_graphs, "values");
    for (int64_t row = 0; row < num_graphs; ++row) {
      check_size(rows.shape[1], sizes[row], "a row of values");
      for (int64_t place = 0; place < sizes[row]; ++place) {
        chances.push_back(rows.row(row)[place]);
        owner.push_back(row);
      }
    }
  });
  const std::vector<int64_t> order = falling_order(chances.data(), chances.size());
  double tokens = static_cast<double>(num_requests), attended = total;
  double forward = read_table(table.target, static_cast<double>(num_requests)) + table.attention * attended;
  double best = divided(tokens, spent + forward);
  int64_t best_count = 0;
  for (int64_t count = 1; count <= static_cast<int64_t>(order.size()); ++count) {
    const int64_t node = order[count - 1];
    tokens += chances[node];
    attended += static_cast<double>(contexts[owner[node]]);
    forward = read_table(table.target, static_cast<double>(num_requests + count)) + table.node_ms * count +
              table.attention * attended;
    const double rate = divided(tokens, spent + forward + graph);
    if (rate > best) best = rate, best_count = count;
  }
  py::array_t<int32_t> result(num_graphs);
  int32_t* chosen = result.mutable_data();
  std::fill_n(chosen, num_graphs, 0);
  for (int64_t i = 0; i < best_count; ++i) chosen[owner[order[i]]] += 1;
  return result;
}

}  // namespace gsd
