/* Products of rows with weights of 4-bit codes, which may have one or two more bits elsewhere, and scales of groups.

   A byte holds the codes of two columns, so that even and odd columns of x are kept apart: 32 columns are one vector of
   each. Codes become floats as they are read, and everything is summed up in floats. */

/* How scales lie: floats, bfloat16 or float16 of groups, or bytes of 32 or of 16 columns times a float16 of 256. */
enum { OF_FLOATS, OF_BFLOATS, OF_HALVES, OF_BYTES, OF_SIGNED };

typedef int32_t numbers __attribute__((vector_size(64)));

struct nibbles {
  const uint8_t *low;
  const uint32_t *high;
  const void *scales;
  const uint8_t *zeros; /* for each scale of floats, what is taken from codes; without them `zero` is */
  const uint8_t *minima;
  const uint16_t *outer;
  long bits, kind, group, zero;
};

static inline float half(uint16_t x) {
  uint32_t bits = (uint32_t)(x & 0x7fff) << 13 | ((x & 0x7c00) == 0x7c00 ? 0x7f800000u : 0);
  float value;
  memcpy(&value, &bits, 4);
  value = (x & 0x7c00) == 0x7c00 ? value : value * 0x1p112f;
  return x & 0x8000 ? -value : value;
}

/* Codes of 16 even and of 16 odd columns from column `at` on, with the bits beyond four. */
static inline __attribute__((always_inline)) void codes_of(const uint8_t *low, const uint32_t *high, int bits, long at,
                                                           words *even, words *odd) {
  const words two = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
  const words four = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
  words both = of_bytes(low + at / 2);
  *even = both & 15, *odd = both >> 4;
  if (bits == 1) {
    words word = (words){0} + high[at / 32];
    *even |= (word >> two & 1) << 4, *odd |= (word >> (two + 1) & 1) << 4;
  } else if (bits == 2) {
    uint32_t a = high[at / 16], b = high[at / 16 + 1];
    const words lower = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
    words word = (((words){0} + a) & lower) | (((words){0} + b) & ~lower);
    *even |= (word >> four & 3) << 4, *odd |= (word >> (four + 2) & 3) << 4;
  }
}

static inline float scale_of(int kind, const void *scales, long place) {
  if (kind == OF_FLOATS) return ((const float *)scales)[place];
  return kind == OF_BFLOATS ? wide(((const uint16_t *)scales)[place]) : half(((const uint16_t *)scales)[place]);
}

/* The scales of `count` runs of 32 columns from column `at` of a row on, or of twice as many of 16, and their minima or
   zeros. */
static inline __attribute__((always_inline)) void scales_of(int kind, long count, long dim, long output, long at,
                                                            const struct nibbles *w, float *scales, float *others) {
  if (kind == OF_BYTES) {
    const uint16_t *outer = w->outer + 2 * (output * (dim / 256) + at / 256);
    const uint8_t *codes = (const uint8_t *)w->scales + output * (dim / 32) + at / 32;
    const uint8_t *minima = w->minima + output * (dim / 32) + at / 32;
    float scale = half(outer[0]), minimum = half(outer[1]);
    for (long i = 0; i < 8; i++) scales[i] = scale * codes[i], others[i] = minimum * minima[i];
  } else if (kind == OF_SIGNED) {
    const int8_t *codes = (const int8_t *)w->scales + output * (dim / 16) + at / 16;
    float scale = half(w->outer[output * (dim / 256) + at / 256]);
    for (long i = 0; i < 16; i++) scales[i] = scale * codes[i];
  } else {
    long per = w->group / 32, first = output * (dim / w->group);
    if (per == 1 && count == 8)
      for (long i = 0; i < 8; i++) scales[i] = scale_of(kind, w->scales, first + at / 32 + i);
    else
      for (long i = 0; i < count; i++) scales[i] = scale_of(kind, w->scales, first + (at / 32 + i) / per);
    for (long i = 0; i < count; i++) others[i] = w->zeros ? w->zeros[first + (at / 32 + i) / per] : w->zero;
  }
}

/* The first number eight times, then the second. */
static inline vec halves_of(float a, float b) {
  const words lower = {-1, -1, -1, -1, -1, -1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0};
  return (vec)(((words)((vec){0} + a) & lower) | ((words)((vec){0} + b) & ~lower));
}

/* found[row] = x · w for one row w of the weight, number `output`; even and odd are [rows, dim / 2], sums
   are those of 32 columns of x, [rows, dim / 32]. */
static inline __attribute__((always_inline)) void nibble_row(int rows, int bits, int kind, long dim, long output,
                                                             const struct nibbles *w, const float *even,
                                                             const float *odd, const float *sums, float *found) {
  const uint8_t *low = w->low + output * (dim / 2);
  const uint32_t *high = bits ? w->high + output * (dim / 32 * bits) : 0;
  vec totals[MOST_PACKED];
  float taken[MOST_PACKED];
#pragma GCC unroll 4
  for (int row = 0; row < rows; row++) totals[row] = (vec){0}, taken[row] = 0;
  for (long start = 0; start < dim; start += 256) {
    long count = dim - start < 256 ? (dim - start) / 32 : 8;
    float scales[16], others[8];
    scales_of(kind, count, dim, output, start, w, scales, others);
    __builtin_prefetch(low + start / 2 + FURTHER), __builtin_prefetch(low + start / 2 + FURTHER + 64);
    for (long i = 0; i < count; i++) {
      long at = start + 32 * i;
      words codes, more;
      codes_of(low, high, bits, at, &codes, &more);
      vec scale = kind == OF_SIGNED ? halves_of(scales[2 * i], scales[2 * i + 1]) : (vec){0} + scales[i];
      vec one = __builtin_convertvector((numbers)codes, vec), other = __builtin_convertvector((numbers)more, vec);
      if (kind == OF_SIGNED) one -= (float)w->zero, other -= (float)w->zero;
      if (kind < OF_BYTES) one -= others[i], other -= others[i];
#pragma GCC unroll 4
      for (int row = 0; row < rows; row++) {
        long place = row * (dim / 2) + at / 2;
        vec x = *(const floats *)(even + place), y = *(const floats *)(odd + place);
        totals[row] += (one * x + other * y) * scale;
      }
    }
    if (kind == OF_BYTES)
      for (int row = 0; row < rows; row++) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (long i = 0; i < 8; i++) sum += others[i] * sums[row * (dim / 32) + start / 32 + i];
        taken[row] += sum;
      }
  }
  for (int row = 0; row < rows; row++) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < 16; i++) sum += totals[row][i];
    found[row] = sum - taken[row];
  }
}

static inline __attribute__((always_inline)) void nibble_rows(int rows, int bits, int kind, long outputs, long dim,
                                                              const struct nibbles *w, const float *x, void *out,
                                                              int narrowed, int threads) {
  const float *even = x, *odd = x + rows * (dim / 2), *sums = odd + rows * (dim / 2);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (long output = 0; output < outputs; output++) {
    float found[MOST_PACKED];
    nibble_row(rows, bits, kind, dim, output, w, even, odd, sums, found);
    for (int row = 0; row < rows; row++) put(out, row * outputs + output, found[row], narrowed);
  }
}

static void nibble_rows_of(int rows, long outputs, long dim, const struct nibbles *w, const float *x, void *out,
                           int narrowed, int threads) {
#define OF(rows, bits, kind) nibble_rows(rows, bits, kind, outputs, dim, w, x, out, narrowed, threads)
#define EACH(bits, kind)                                                                                             \
  return rows == 1   ? OF(1, bits, kind)                                                                             \
         : rows == 2 ? OF(2, bits, kind)                                                                             \
         : rows == 3 ? OF(3, bits, kind)                                                                             \
                     : OF(4, bits, kind)
  if (w->kind == OF_BYTES && w->bits) EACH(1, OF_BYTES);
  if (w->kind == OF_BYTES) EACH(0, OF_BYTES);
  if (w->kind == OF_SIGNED) EACH(2, OF_SIGNED);
  if (w->kind == OF_FLOATS) EACH(0, OF_FLOATS);
  if (w->kind == OF_BFLOATS) EACH(0, OF_BFLOATS);
  EACH(0, OF_HALVES);
#undef EACH
#undef OF
}
