// Containers and random numbers of the files here. The standard library's do the same, but of them a
// compiler makes ten times the code: 0.8 s of each library that a test builds.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

// A list that grows; items move when it does.
template <class T> class List {
  static constexpr size_t ALIGN = alignof(T) < 16 ? 16 : alignof(T);
  T* items = nullptr;
  size_t count = 0, room = 0;

  void reserve(size_t wanted) {
    if (wanted <= room) return;
    room = wanted < 2 * room ? 2 * room : wanted;
    T* moved = (T*)std::aligned_alloc(ALIGN, (room * sizeof(T) + ALIGN - 1) / ALIGN * ALIGN);
    for (size_t i = 0; i < count; ++i) new (moved + i) T(std::move(items[i])), items[i].~T();
    std::free(items), items = moved;
  }

 public:
  List() {}
  explicit List(size_t size, const T& value = T()) { assign(size, value); }
  List(const T* first, const T* last) {
    reserve(last - first);
    for (; first != last; ++first) new (items + count++) T(*first);
  }
  List(const List& other) : List(other.begin(), other.end()) {}
  List(List&& other) { swap(other); }
  ~List() { clear(), std::free(items); }
  List& operator=(List other) {
    swap(other);
    return *this;
  }
  void swap(List& other) {
    std::swap(items, other.items), std::swap(count, other.count), std::swap(room, other.room);
  }
  void clear() {
    while (count) pop_back();
  }
  void assign(size_t size, const T& value) {
    clear(), reserve(size);
    while (count < size) new (items + count++) T(value);
  }
  void push_back(T item) { reserve(count + 1), new (items + count++) T(std::move(item)); }
  void pop_back() { items[--count].~T(); }
  void pop_front() {
    for (size_t i = 1; i < count; ++i) items[i - 1] = std::move(items[i]);
    pop_back();
  }
  size_t size() const { return count; }
  bool empty() const { return !count; }
  T* begin() { return items; }
  T* end() { return items + count; }
  const T* begin() const { return items; }
  const T* end() const { return items + count; }
  T& operator[](size_t i) { return items[i]; }
  const T& operator[](size_t i) const { return items[i]; }
  const T* data() const { return items; }
  T* data() { return items; }
  T& front() { return *items; }
  T& back() { return items[count - 1]; }
};

// Marsaglia's xorshift, of 64 bits.
struct Random {
  uint64_t state;
  explicit Random(int seed) : state(0x9E3779B97F4A7C15u * (uint64_t)(seed + 1) | 1) {}
  uint32_t operator()() {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return (uint32_t)(state >> 32);
  }
};
template <class T> void shuffle(List<T>& items, Random& random) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random() % i]);
}
