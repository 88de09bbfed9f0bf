// What Metal kernels need, on a CPU: the threads of one group run in turn in one thread of the system.
// At a barrier, and where the threads of a warp exchange numbers, a thread gives up its turn until all
// others have come there too. Turns are given by longjmp: swapcontext asks the system for the signals of
// each thread, which takes longer than most kernels compute.
#include <sched.h>
#include <setjmp.h>
#include <stdint.h>
#include <string.h>
#include <ucontext.h>

// <cmath> takes half of the time in which a kernel is compiled.
#define INFINITY __builtin_inff()
#define device
#define constant
#define threadgroup static

using ushort = unsigned short;
struct uint3 {
  int x, y, z;
};

namespace mem_flags {
constexpr int mem_threadgroup = 0;
}
namespace metal {
inline float max(float one, float other) { return __builtin_fmaxf(one, other); }
inline float exp(float value) { return __builtin_expf(value); }
// Ties to even numbers, as MLX quantizes on a CPU.
inline float round(float value) { return __builtin_rintf(value); }
inline float exp2(float value) { return __builtin_exp2f(value); }
namespace precise {
inline float rsqrt(float value) { return 1.0f / __builtin_sqrtf(value); }
}
}  // namespace metal

namespace group {
constexpr int STACK_BYTES = 64 * 1024;
constexpr int THREADS_MAX = 1024;
jmp_buf loop_place;  // where the loop over the threads goes on
jmp_buf places[THREADS_MAX];  // where each thread goes on
char* stacks[THREADS_MAX];
bool ended[THREADS_MAX];
int current, thread_count;
float exchanged[THREADS_MAX];
uint3 id, count;

inline void give_up_turn() {
  if (_setjmp(places[current]) == 0) {
    _longjmp(loop_place, 1);
  }
}

struct Barrier {
  int arrived = 0, passed = 0;
  void wait(int count) {
    const int own = passed;
    if (++arrived == count) {
      arrived = 0;
      ++passed;
    }
    while (own == passed) {
      give_up_turn();
    }
  }
};
Barrier all, warps[32];
inline void wait_for_warp() { warps[current / 32].wait(32); }

inline void take_turn(int thread, void (*begin)()) {
  current = thread;
  if (_setjmp(loop_place) != 0) {
    return;  // the thread has given it up
  }
  if (stacks[thread] != nullptr) {
    _longjmp(places[thread], 1);
  }
  stacks[thread] = new char[STACK_BYTES];
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = stacks[thread];
  context.uc_stack.ss_size = STACK_BYTES;
  context.uc_link = nullptr;
  makecontext(&context, begin, 0);
  setcontext(&context);
}

// A thread waits on its stack for the next group.
template <typename Body>
void run(int threads, Body body) {
  static Body* running;
  running = &body;
  thread_count = threads;
  for (int thread = 0; thread < threads; ++thread) {
    ended[thread] = false;
  }
  for (int left = threads; left > 0;) {
    left = 0;
    for (int thread = 0; thread < threads; ++thread) {
      if (!ended[thread]) {
        take_turn(thread, +[] {
          for (;;) {
            (*running)();
            ended[current] = true;
            give_up_turn();
          }
        });
        left += !ended[thread];
      }
    }
  }
}
}  // namespace group

inline void threadgroup_barrier(int) { group::all.wait(group::thread_count); }
inline void simdgroup_barrier(int) { group::wait_for_warp(); }
inline float simd_shuffle_xor(float value, ushort mask) {
  group::exchanged[group::current] = value;
  group::wait_for_warp();
  const float other = group::exchanged[group::current ^ mask];
  group::wait_for_warp();
  return other;
}

// Tensor cores of CUDA, for numbers of 4 bytes: 16 outputs times 8 rows, 32 inputs.
struct Eight {
  float numbers[8];
};
#define EIGHT Eight
#define ZEROS Eight{}
#define MIN(one, other) ((one) < (other) ? (one) : (other))
#define READ(pointer) (*reinterpret_cast<const Eight*>(pointer))
#define READ_ONCE(pointer) READ(pointer)
#define COPY_EIGHT(to, from) (*(to) = READ(from))
#define WAIT_FOR_COPIES
#define WRITE_TWO(pointer, one, other) ((pointer)[0] = (one), (pointer)[1] = (other))
inline int atomic_add(int* pointer, int number) {
  const int before = *pointer;
  *pointer += number;
  return before;
}
#define ATOMIC_ADD(pointer, number) atomic_add(pointer, number)
namespace group {
int numbers[THREADS_MAX];
template <typename Better>
int best_of_warp(int number, Better better) {
  numbers[current] = number;
  wait_for_warp();
  int best = number;
  for (int thread = current / 32 * 32; thread < current / 32 * 32 + 32; ++thread) {
    best = better(numbers[thread], best) ? numbers[thread] : best;
  }
  wait_for_warp();
  return best;
}
}  // namespace group
template <typename To, typename From>
To as_type(From from) {
  To to;
  memcpy(&to, &from, sizeof(To));
  return to;
}
#define FENCE
// Between processes that share memory.
#define STORE_RELEASE(address, number) __atomic_store_n(address, number, __ATOMIC_RELEASE)
inline unsigned load_acquire(const unsigned* address) {
  sched_yield();
  return __atomic_load_n(address, __ATOMIC_ACQUIRE);
}
#define LOAD_ACQUIRE(address) load_acquire(address)
#define READ_WRITTEN(pointer) *(pointer)
inline int simd_max(int number) {
  return group::best_of_warp(number, [](int one, int other) { return one > other; });
}
inline int simd_min(int number) {
  return group::best_of_warp(number, [](int one, int other) { return one < other; });
}
#define NUMBER(eight, index) ((eight).numbers[index])
#define MULTIPLY_TILES(totals, low, high, given) multiply_tiles(totals, low, high, given)
#define MULTIPLY_LOW(totals, low, given) multiply_low(totals, low, given)
namespace group {
Eight lows[THREADS_MAX], highs[THREADS_MAX], givens[THREADS_MAX];
}
inline void multiply_tiles(float* totals, Eight low, Eight high, Eight given) {
  const int own = group::current, first = own / 32 * 32;
  group::lows[own] = low;
  group::highs[own] = high;
  group::givens[own] = given;
  group::wait_for_warp();
  for (int index = 0; index < 4; ++index) {
    const Eight* weights = index < 2 ? group::lows : group::highs;
    const int output = first + own % 32 / 4 * 4, row = first + (own % 4 * 2 + index % 2) * 4;
    for (int part = 0; part < 4; ++part) {
      for (int number = 0; number < 8; ++number) {
        totals[index] +=
            weights[output + part].numbers[number] * group::givens[row + part].numbers[number];
      }
    }
  }
  group::wait_for_warp();
}
#define READ_TURNED(pointer) read_turned(pointer)
namespace group {
const Eight* rows[THREADS_MAX];
}
inline Eight read_turned(const Eight* row) {
  const int own = group::current, first = own / 32 * 32;
  group::rows[own] = row;
  group::wait_for_warp();
  Eight turned;
  for (int place = 0; place < 8; ++place) {
    const Eight* other = group::rows[first + place / 2 * 8 + own % 4 * 2 + place % 2];
    turned.numbers[place] = other->numbers[own % 32 / 4];
  }
  group::wait_for_warp();
  return turned;
}
inline void multiply_low(float* totals, Eight low, Eight given) {
  float all[4] = {totals[0], totals[1], 0.0f, 0.0f};
  multiply_tiles(all, low, Eight{}, given);
  totals[0] = all[0];
  totals[1] = all[1];
}

// Packed numbers: integers, or floats e2m1 (4 bits) and e4m3 (8 bits).
#define READ_WORDS(words, pointer) memcpy(words, pointer, sizeof(words))
#define UNPACK(words, scale, bias) unpack(words, scale, bias, BITS, FLOATS)
inline float small_float(unsigned bits, int mantissa_bits, int bias) {
  const int exponent = bits >> mantissa_bits, one = 1 << mantissa_bits;
  const int mantissa = bits % one + (exponent ? one : 0);
  return __builtin_ldexpf(mantissa, (exponent ? exponent : 1) - bias - mantissa_bits);
}
inline Eight unpack(const unsigned* words, float scale, float bias, int bits, bool floats) {
  Eight eight;
  for (int number = 0; number < 8; ++number) {
    const unsigned packed = words[number * bits / 32] >> number * bits % 32 & ((1 << bits) - 1);
    const unsigned sign = packed >> (bits - 1), rest = packed & ((1 << (bits - 1)) - 1);
    const float magnitude = bits == 4 ? small_float(rest, 1, 1) : small_float(rest, 3, 7);
    eight.numbers[number] = (floats ? (sign ? -magnitude : magnitude) : packed) * scale + bias;
  }
  return eight;
}
