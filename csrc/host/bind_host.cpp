// The Python module specdec_kernels._host. What its methods do is documented in specdec_kernels/_host_py.py, the
// pure-Python implementation of the same API; the texts of the errors are the same in both.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/philox.h"
#include "host/direct.h"
#include "host/ngram_counts.h"
#include "host/text_index.h"

namespace py = pybind11;

namespace specdec::host {
namespace {

constexpr std::int64_t kMaxNgram = 64;
constexpr std::int64_t kMaxSequences = std::int64_t{1} << 20;
constexpr std::int64_t kMaxToken = std::numeric_limits<Token>::max();
constexpr std::int64_t kAnySize = -1;

// ---------------------------------------------------------------- arguments

std::string type_name(const py::object& value) { return py::str(py::type::of(value).attr("__name__")); }

// An integer argument; one beyond 64 bits becomes the nearest that fits, which is out of every range.
// Arrays and tensors have __index__, too, which raises unless they hold one integer.
py::object to_integer(const std::string& what, const py::object& value) {
  if (PyIndex_Check(value.ptr()) && !PyBool_Check(value.ptr())) {
    auto number = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (number) return number;
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    PyErr_Clear();
  }
  throw py::type_error(what + " must be an integer, got " + type_name(value));
}

// The nearest int64 to a Python integer.
std::int64_t to_int64(const py::object& number) {
  int overflow = 0;
  const std::int64_t result = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow == 0) return result;
  return overflow > 0 ? std::numeric_limits<std::int64_t>::max() : std::numeric_limits<std::int64_t>::min();
}

std::string outside(const std::string& what, std::int64_t low, std::int64_t high, const std::string& got) {
  return what + " must be in [" + std::to_string(low) + ", " + std::to_string(high) + "], got " + got;
}

std::int64_t integer_in(const std::string& what, const py::object& value, std::int64_t low, std::int64_t high) {
  const py::object number = to_integer(what, value);
  const std::int64_t result = to_int64(number);
  if (result < low || result > high) throw py::value_error(outside(what, low, high, py::str(number)));
  return result;
}

// A strided view of an integer array. Elements are copied, so that alignment does not matter. The caller holds the array.
class View {
 public:
  explicit View(const py::array& array)
      : data_(static_cast<char*>(const_cast<void*>(array.data()))), wide_(array.itemsize() == sizeof(std::int64_t)) {
    for (py::ssize_t d = 0; d < array.ndim(); ++d) strides_[d] = array.strides(d);
  }
  std::int64_t get(std::int64_t i, std::int64_t j = 0) const {
    return wide_ ? load<std::int64_t>(i, j) : load<std::int32_t>(i, j);
  }
  void set(std::int64_t value, std::int64_t i, std::int64_t j = 0) {
    if (wide_) {
      store(value, i, j);
    } else {
      store(static_cast<std::int32_t>(value), i, j);
    }
  }

 private:
  char* at(std::int64_t i, std::int64_t j) const { return data_ + i * strides_[0] + j * strides_[1]; }
  template <class T>
  T load(std::int64_t i, std::int64_t j) const {
    T value;
    std::memcpy(&value, at(i, j), sizeof(T));
    return value;
  }
  template <class T>
  void store(T value, std::int64_t i, std::int64_t j) {
    std::memcpy(at(i, j), &value, sizeof(T));
  }

  char* data_;
  bool wide_;
  py::ssize_t strides_[2] = {0, 0};
};

enum class Dtype { kInt32, kInt64, kEither };

// Checks an array of one or two dimensions; `shape_text` is the wanted shape in words.
py::array checked_array(const std::string& what, const py::object& object, Dtype dtype,
                        std::initializer_list<std::int64_t> shape, const std::string& shape_text) {
  if (!py::isinstance<py::array>(object)) {
    throw py::type_error(what + " must be a numpy array, got " + type_name(object));
  }
  auto array = py::reinterpret_borrow<py::array>(object);
  bool fits = (dtype != Dtype::kInt64 && py::isinstance<py::array_t<std::int32_t>>(array)) ||
              (dtype != Dtype::kInt32 && py::isinstance<py::array_t<std::int64_t>>(array));
  fits = fits && array.ndim() == static_cast<py::ssize_t>(shape.size());
  py::ssize_t d = 0;
  for (const std::int64_t wanted : shape) {
    if (!fits) break;
    fits = wanted == kAnySize || array.shape(d) == wanted;
    ++d;
  }
  if (!fits) {
    const char* names = dtype == Dtype::kInt32 ? "int32 " : dtype == Dtype::kInt64 ? "int64 " : "int32 or int64 ";
    std::string got = std::string(py::str(array.dtype())) + " [";
    for (d = 0; d < array.ndim(); ++d) got += (d ? ", " : "") + std::to_string(array.shape(d));
    throw py::value_error(what + " must be " + names + shape_text + ", got " + got + "]");
  }
  return array;
}

py::array checked_output(const std::string& what, const py::object& object, Dtype dtype,
                         std::initializer_list<std::int64_t> shape, const std::string& shape_text) {
  py::array array = checked_array(what, object, dtype, shape, shape_text);
  if (!array.writeable()) throw py::value_error(what + " must be writeable");
  return array;
}

[[noreturn]] void refuse_token(const std::string& function, std::int64_t token, const std::string& where) {
  throw py::value_error(outside(function + ": tokens", 0, kMaxToken, std::to_string(token)) + " at [" + where + "]");
}

// A one-dimensional argument `tokens`, copied.
std::vector<Token> to_tokens(const std::string& function, const py::object& object) {
  const py::array array = checked_array(function + ": tokens", object, Dtype::kInt64, {kAnySize}, "[n]");
  const View view(array);
  std::vector<Token> tokens(static_cast<std::size_t>(array.shape(0)));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    const std::int64_t token = view.get(static_cast<std::int64_t>(i));
    if (token < 0 || token > kMaxToken) refuse_token(function, token, std::to_string(i));
    tokens[i] = static_cast<Token>(token);
  }
  return tokens;
}

// One array of an `Order`, read where it is; `held` keeps it alive.
template <class T>
std::span<const T> column(const py::handle& order, const char* name, std::vector<py::array>& held) {
  const py::object object = order.attr(name);
  if (!py::isinstance<py::array_t<T, py::array::c_style>>(object) || py::array(object).ndim() != 1 ||
      reinterpret_cast<std::uintptr_t>(py::array(object).data()) % alignof(T) != 0) {
    throw py::type_error(std::string("distribution: table must have arrays as Order says, got another for ") + name);
  }
  held.push_back(py::reinterpret_borrow<py::array>(object));
  return {static_cast<const T*>(held.back().data()), static_cast<std::size_t>(held.back().size())};
}

// The counts of an `NgramTable`, or of None.
std::vector<Contexts> contexts_of(const py::object& table, std::vector<py::array>& held) {
  std::vector<Contexts> contexts;
  if (table.is_none()) return contexts;
  if (!py::hasattr(table, "orders")) {
    throw py::type_error("distribution: table must be an NgramTable or None, got " + type_name(table));
  }
  for (const py::handle order : table.attr("orders")) {
    const Contexts each{column<std::uint64_t>(order, "keys", held), column<std::int32_t>(order, "totals", held),
                        column<std::int32_t>(order, "kinds", held), column<std::int64_t>(order, "starts", held),
                        column<std::int32_t>(order, "ids", held),   column<std::int32_t>(order, "counts", held)};
    const std::size_t count = each.keys.size();
    if (each.totals.size() != count || each.kinds.size() != count || each.starts.size() != count + 1 ||
        each.ids.size() != each.counts.size()) {
      throw py::value_error("distribution: table must have arrays as long as Order says, got others");
    }
    contexts.push_back(each);
  }
  return contexts;
}

// The noise of `gumbel` in common/philox.h.
py::array gumbel_noise(const py::object& keys, const py::object& tokens) {
  const std::vector<Token> ids = to_tokens("gumbel_noise", tokens);
  const auto count = static_cast<std::int64_t>(ids.size());
  const std::string shape = "[n=" + std::to_string(count) + "]";
  const View view(checked_array("gumbel_noise: keys", keys, Dtype::kInt64, {count}, shape));
  py::array_t<float> noise(count);
  for (std::int64_t i = 0; i < count; ++i) {
    const auto id = static_cast<std::uint32_t>(ids[i]);
    noise.mutable_at(i) = gumbel(view.get(i), id, noise_bits(view.get(i), id));
  }
  return noise;
}

// ---------------------------------------------------------------- the class

// Locks the index for a call. Releases the GIL first, retakes it last: nobody waits for it while holding the lock.
class Atomic {
 public:
  explicit Atomic(std::mutex& mutex) : lock_(mutex) {}

 private:
  py::gil_scoped_release release_;
  std::lock_guard<std::mutex> lock_;
};

class NgramIndex {
 public:
  NgramIndex(const py::object& num_sequences, const py::object& max_ngram, const py::object& min_ngram)
      : num_sequences_(integer_in("NgramIndex: num_sequences", num_sequences, 1, kMaxSequences)),
        max_ngram_(integer_in("NgramIndex: max_ngram", max_ngram, 1, kMaxNgram)),
        min_ngram_(integer_in("NgramIndex: min_ngram", min_ngram, 1, max_ngram_)),
        texts_(static_cast<std::size_t>(num_sequences_), empty_text()),
        corpus_(empty_text()) {}

  std::int64_t num_sequences() const { return num_sequences_; }
  std::int64_t max_ngram() const { return max_ngram_; }
  std::int64_t min_ngram() const { return min_ngram_; }

  void append(const py::object& sequence, const py::object& tokens) {
    const std::size_t b = sequence_of("append", sequence);
    const std::vector<Token> values = to_tokens("append", tokens);
    const Atomic atomic(mutex_);
    extend(texts_[b], values);
  }

  void append_batch(const py::object& tokens, const py::object& counts) {
    const py::array array =
        checked_array("append_batch: tokens", tokens, Dtype::kInt64, {num_sequences_, kAnySize}, shape_text(", n"));
    const std::int64_t width = array.shape(1);
    std::vector<std::int64_t> lengths(texts_.size(), width);
    if (!counts.is_none()) {
      const View view(checked_array("append_batch: counts", counts, Dtype::kEither, {num_sequences_}, shape_text()));
      for (std::int64_t b = 0; b < num_sequences_; ++b) {
        const std::int64_t count = lengths[b] = view.get(b);
        if (count < 0 || count > width) {
          throw py::value_error("append_batch: counts must be in [0, n=" + std::to_string(width) + "], got " +
                                std::to_string(count) + " at [" + std::to_string(b) + "]");
        }
      }
    }
    const View view(array);
    std::vector<std::vector<Token>> values(texts_.size());  // another thread may write into the array meanwhile
    for (std::int64_t b = 0; b < num_sequences_; ++b) {
      values[b].reserve(static_cast<std::size_t>(lengths[b]));
      for (std::int64_t i = 0; i < lengths[b]; ++i) {
        const std::int64_t token = view.get(b, i);
        if (token < 0 || token > kMaxToken) {
          refuse_token("append_batch", token, std::to_string(b) + ", " + std::to_string(i));
        }
        values[b].push_back(static_cast<Token>(token));
      }
    }
    const Atomic atomic(mutex_);
    for (std::int64_t b = 0; b < num_sequences_; ++b) texts_[b].reserve(values[b].size());
    for (std::int64_t b = 0; b < num_sequences_; ++b) extend(texts_[b], values[b]);
  }

  void add_corpus(const py::object& tokens) {
    std::vector<Token> values = to_tokens("add_corpus", tokens);
    values.push_back(kSeparator);
    const Atomic atomic(mutex_);
    extend(corpus_, values);
  }

  void truncate(const py::object& sequence, const py::object& length) {
    const std::size_t b = sequence_of("truncate", sequence);
    const py::object number = to_integer("truncate: length", length);
    const std::int64_t keep = to_int64(number);
    std::int64_t size = 0;
    {
      const Atomic atomic(mutex_);
      size = static_cast<std::int64_t>(texts_[b].tokens().size());
      if (0 <= keep && keep <= size) {
        texts_[b].truncate(static_cast<std::size_t>(keep));
        return;
      }
    }
    throw py::value_error(outside("truncate: length", 0, size, py::str(number)));
  }

  void reset(const py::object& sequence) {
    const std::size_t b = sequence_of("reset", sequence);
    const Atomic atomic(mutex_);
    texts_[b] = empty_text();
  }

  std::size_t length(const py::object& sequence) {
    const std::size_t b = sequence_of("length", sequence);
    const Atomic atomic(mutex_);
    return texts_[b].tokens().size();
  }

  py::tuple propose(const py::object& num_tokens, const py::object& limits, const py::object& out) {
    const std::int64_t width = integer_in("propose: num_tokens", num_tokens, 0, kMaxToken);
    const std::vector<std::int64_t> allowed = to_limits("propose", limits, width);
    py::array tokens;
    py::array counts;
    if (out.is_none()) {
      tokens = py::array_t<std::int64_t>({num_sequences_, width});
      counts = py::array_t<std::int32_t>(num_sequences_);
    } else {
      if (!py::isinstance<py::tuple>(out) || py::len(out) != 2) {
        throw py::type_error("propose: out must be a pair (tokens, counts) of numpy arrays");
      }
      const auto pair = py::reinterpret_borrow<py::tuple>(out);
      tokens = checked_output("propose: out[0]", pair[0], Dtype::kInt64, {num_sequences_, width},
                              shape_text(", " + std::to_string(width)));
      counts = checked_output("propose: out[1]", pair[1], Dtype::kInt32, {num_sequences_}, shape_text());
    }
    View token_view(tokens);
    View count_view(counts);
    {
      const Atomic atomic(mutex_);
      for (std::int64_t b = 0; b < num_sequences_; ++b) {
        const std::int64_t count = allowed[b] == 0 ? 0 : write_continuation(texts_[b], b, allowed[b], token_view);
        for (std::int64_t i = count; i < width; ++i) token_view.set(-1, b, i);
        count_view.set(count, b);
      }
    }
    return py::make_tuple(std::move(tokens), std::move(counts));
  }

  py::tuple distribution(const py::object& table, const py::object& limits) {
    const std::vector<std::int64_t> allowed = to_limits("distribution", limits, 1);
    std::vector<py::array> held;
    const std::vector<Contexts> contexts = contexts_of(table, held);
    std::vector<Term> terms;
    std::vector<std::size_t> ends;  // of each row's terms
    {
      const Atomic atomic(mutex_);
      for (std::size_t b = 0; b < texts_.size(); ++b) {
        if (allowed[b] > 0) append_terms(texts_[b], contexts, terms);
        ends.push_back(terms.size());
      }
    }
    std::vector<Token> ids;
    for (const Term& term : terms) ids.push_back(term.id);
    std::sort(ids.begin(), ids.end());
    ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
    const auto num_ids = static_cast<py::ssize_t>(ids.size());
    py::array_t<std::int64_t> columns(num_ids);
    std::copy(ids.begin(), ids.end(), columns.mutable_data());
    py::array_t<double> weights({static_cast<py::ssize_t>(num_sequences_), num_ids});
    double* row = weights.mutable_data();
    std::fill_n(row, weights.size(), 0.0);
    auto term = terms.begin();
    for (const std::size_t end : ends) {
      for (; term != terms.begin() + static_cast<std::ptrdiff_t>(end); ++term) {
        row[std::lower_bound(ids.begin(), ids.end(), term->id) - ids.begin()] += term->weight;
      }
      row += num_ids;
    }
    return py::make_tuple(std::move(columns), std::move(weights));
  }

  py::array matched() {
    py::array_t<std::int64_t> lengths(num_sequences_);
    View view(lengths);
    {
      const Atomic atomic(mutex_);  // the GIL is released until this ends, so no Python object is copied meanwhile
      for (std::int64_t b = 0; b < num_sequences_; ++b) {
        const auto [own, in_corpus] = matches(texts_[b]);
        view.set(static_cast<std::int64_t>(std::max(own.length, in_corpus.length)), b);
      }
    }
    return lengths;
  }

 private:
  // Each sequence's limit in [0, most]; None: `most`.
  std::vector<std::int64_t> to_limits(const std::string& function, const py::object& limits, std::int64_t most) const {
    std::vector<std::int64_t> allowed(texts_.size(), most);
    if (limits.is_none()) return allowed;
    const View view(checked_array(function + ": limits", limits, Dtype::kEither, {num_sequences_}, shape_text()));
    for (std::int64_t b = 0; b < num_sequences_; ++b) allowed[b] = std::clamp<std::int64_t>(view.get(b), 0, most);
    return allowed;
  }

  // For the text's last tokens: the longest match in the text itself, and the one in the corpus.
  std::pair<Match, Match> matches(const TextIndex& text) const {
    return {text.longest_match(text.tokens()), corpus_.longest_match(text.tokens())};
  }

  // Writes at most `limit` tokens to row b of `out` and returns how many.
  std::int64_t write_continuation(const TextIndex& text, std::int64_t b, std::int64_t limit, View& out) const {
    const std::vector<Token>& own = text.tokens();
    const auto [match, corpus_match] = matches(text);
    if (corpus_match.length > match.length) {
      const Token* following = corpus_.tokens().data() + corpus_match.end;
      std::int64_t i = 0;
      for (; i < limit && following[i] != kSeparator; ++i) out.set(following[i], b, i);  // a separator ends the corpus
      return i;
    }
    if (match.length == 0) return 0;
    std::size_t source = match.end;
    for (std::int64_t i = 0; i < limit; ++i) {
      out.set(own[source], b, i);
      if (++source == own.size()) source = match.end;  // periodic: the text repeats at this distance
    }
    return limit;
  }

  static void extend(TextIndex& text, const std::vector<Token>& tokens) {
    text.reserve(tokens.size());
    for (const Token token : tokens) text.push(token);
  }

  TextIndex empty_text() const {
    return TextIndex(static_cast<std::size_t>(min_ngram_), static_cast<std::size_t>(max_ngram_));
  }

  std::size_t sequence_of(const std::string& function, const py::object& sequence) const {
    return static_cast<std::size_t>(integer_in(function + ": sequence", sequence, 0, num_sequences_ - 1));
  }

  std::string shape_text(const std::string& rest = "") const {
    return "[num_sequences=" + std::to_string(num_sequences_) + rest + "]";
  }

  std::int64_t num_sequences_;
  std::int64_t max_ngram_;
  std::int64_t min_ngram_;
  std::vector<TextIndex> texts_;
  TextIndex corpus_;
  std::mutex mutex_;
};

}  // namespace

PYBIND11_MODULE(_host, m) {
  m.doc() =
      "Compiled work on host data (documented in specdec_kernels/_host_py.py), and calls past torch's dispatcher.";
  py::class_<NgramIndex>(m, "NgramIndex", "An incremental n-gram index over many sequences.")
      .def(py::init<const py::object&, const py::object&, const py::object&>(), py::arg("num_sequences"),
           py::arg("max_ngram") = 4, py::arg("min_ngram") = 1)
      .def_property_readonly("num_sequences", &NgramIndex::num_sequences, "Number of sequences.")
      .def_property_readonly("max_ngram", &NgramIndex::max_ngram, "Longest suffix looked up, in tokens.")
      .def_property_readonly("min_ngram", &NgramIndex::min_ngram, "Shortest suffix looked up, in tokens.")
      .def("append", &NgramIndex::append, py::arg("sequence"), py::arg("tokens"),
           "Append [n] int64 tokens to a sequence.")
      .def("append_batch", &NgramIndex::append_batch, py::arg("tokens"), py::arg("counts") = py::none(),
           "Append to every sequence the first counts[b] tokens of its row of [num_sequences, n] int64.")
      .def("add_corpus", &NgramIndex::add_corpus, py::arg("tokens"), "Add one document that all sequences may match.")
      .def("truncate", &NgramIndex::truncate, py::arg("sequence"), py::arg("length"),
           "Take back the end of a sequence: it keeps its first `length` tokens.")
      .def("reset", &NgramIndex::reset, py::arg("sequence"), "Empty a sequence and release its memory.")
      .def("length", &NgramIndex::length, py::arg("sequence"), "Return the number of tokens in a sequence.")
      .def("propose", &NgramIndex::propose, py::arg("num_tokens"), py::kw_only(), py::arg("limits") = py::none(),
           py::arg("out") = py::none(), "Propose the continuation of every sequence: (tokens, counts).")
      .def("matched", &NgramIndex::matched, "Return the length of every sequence's match, in tokens.")
      .def("distribution", &NgramIndex::distribution, py::arg("table") = py::none(), py::kw_only(),
           py::arg("limits") = py::none(),
           "Return the distribution of every sequence's next token by counts: (ids, probs).");
  m.def("gumbel_noise", &gumbel_noise, py::arg("keys"), py::arg("tokens"),
        "Return the noise of each token under its key.");
  bind_direct(m);
  m.attr("CONTRACT") = std::int64_t{SPECDEC_CONTRACT};
  m.attr("DIRECT_LAYOUT") = std::int64_t{SPECDEC_DIRECT_LAYOUT};
}

}  // namespace specdec::host
