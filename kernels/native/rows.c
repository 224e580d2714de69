/* What a step of few tokens does on a processor besides products of floats. Knows no tensor: who calls it checks. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

/* The most query heads of a KV head, features of a head, and features of heads at once, that attention has room for. */
enum { MOST_GROUP = 16, MOST_DIM = 256, MOST_FLOATS = 1 << 15 };
/* The most rows of digits at once, and of products with weights in oneDNN's order. */
enum { MOST_DIGITS = 8, MOST_PACKED = 4 };
/* How many tokens ahead attention asks for keys and values. */
enum { AHEAD = 16 };
/* How many bytes ahead products ask for codes. */
#ifndef FURTHER
#define FURTHER 8192
#endif

/* Vectors of 16 numbers, which compilers divide where registers are shorter. */
typedef float vec __attribute__((vector_size(64)));
typedef uint32_t words __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));
typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef float floats __attribute__((vector_size(64), aligned(4), may_alias));

/* 16 numbers of two bytes or of one, as wide ones; what some compilers make of the general form is slow. */
static inline words of_halves(const uint16_t *x) {
#ifdef __AVX512F__
  return (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x));
#else
  halves found;
  memcpy(&found, x, sizeof found);
  return __builtin_convertvector(found, words);
#endif
}

static inline words of_bytes(const uint8_t *x) {
#ifdef __AVX512F__
  return (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)x));
#else
  bytes16 found;
  memcpy(&found, x, sizeof found);
  return __builtin_convertvector(found, words);
#endif
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLED(a, b, ...) __builtin_shuffle(a, b, (words){__VA_ARGS__})
#endif

/* The sums of 16 vectors: pairs are added crosswise, which leaves half as many vectors each time. */
static inline vec sums_of(const vec *x) {
  vec eight[8], four[4], two[2];
  for (int i = 0; i < 8; i++) {
    vec a = x[2 * i], b = x[2 * i + 1];
    eight[i] = SHUFFLED(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
               SHUFFLED(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  for (int i = 0; i < 4; i++) {
    vec a = eight[2 * i], b = eight[2 * i + 1];
    four[i] = SHUFFLED(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
              SHUFFLED(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  for (int i = 0; i < 2; i++) {
    vec a = four[2 * i], b = four[2 * i + 1];
    two[i] = SHUFFLED(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
             SHUFFLED(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
  vec a = two[0], b = two[1];
  return SHUFFLED(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         SHUFFLED(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

/* e^x by 2^n and a polynomial (Cephes), within two units in the last place; 0 below the smallest normal float. */
static inline float exponential(float x) {
  float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  float n = floorf(bounded * 1.44269504f + 0.5f);
  float rest = bounded - n * 0.693359375f + n * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * rest + 1.3981999507e-3f;
  y = y * rest + 8.3334519073e-3f;
  y = y * rest + 4.1665795894e-2f;
  y = y * rest + 1.6666665459e-1f;
  y = y * rest + 5.0000001201e-1f;
  y = y * rest * rest + rest + 1;
  int32_t bits = ((int32_t)n + 127) << 23;
  float power;
  memcpy(&power, &bits, 4);
  return x < -87.0f ? 0 : x != x ? x : y * power;
}

static inline float wide(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/* To the nearest bfloat16, to the even one of two. */
static inline uint16_t narrow(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return x != x ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* Writes `value` as a float, or as a bfloat16. */
static inline void put(void *out, long at, float value, int narrowed) {
  if (narrowed)
    ((uint16_t *)out)[at] = narrow(value);
  else
    ((float *)out)[at] = value;
}

/* Where a row's cached tokens lie: `table` lists its blocks of `block` tokens, which lie block_stride and stride apart. */
struct cached {
  const int32_t *table;
  long block, block_stride, stride;
};

/* The places of 16 tokens from `first` on; behind `last`, that of the one before it. */
static inline void places_of(long first, long last, struct cached cached, long *at) {
  long block = first / cached.block, offset = first % cached.block, place = 0;
  for (long i = 0; i < 16; i++) {
    if (first + i < last) place = cached.table[block] * cached.block_stride + offset * cached.stride;
    at[i] = place;
    if (++offset == cached.block) offset = 0, block++;
  }
}

#include "bytes.h"
#include "nibbles.h"
#include "steps.h"

#define FLOAT float
#define LOAD(x) (x)
#define STORE(x) (x)
#define NAMED(name) name##_float32
#define LOAD16(x) (*(const floats *)(x))
#define COUNT 3
#define PAIR 1
#define COLUMNS(found, x) ((vec)(found) * (x)[0])
#include "rows.h"
#undef FLOAT
#undef LOAD
#undef STORE
#undef NAMED
#undef LOAD16
#undef COUNT
#undef PAIR
#undef COLUMNS

#define FLOAT uint16_t
#define LOAD(x) wide(x)
#define STORE(x) narrow(x)
#define NAMED(name) name##_bfloat16
#define LOAD16(x) ((vec)(of_halves(x) << 16))
#define COUNT 2
#define PAIR 2
#define COLUMNS(found, x) ((vec)((found) << 16) * wide((x)[0]) + (vec)((found) & 0xffff0000u) * wide((x)[1]))
#include "rows.h"
