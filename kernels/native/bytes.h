/* Products of rows, as bytes that `digits` makes of them, with weights whose codes are bytes too.

   The instruction multiplies unsigned bytes by signed ones, so that 128 is added to codes; what that adds to the result
   is taken off by `sums`. Everything is exact but for the last few roundings of each result. */

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define MULTIPLIES_BYTES

int multiplies_bytes(void) { return 1; }

static inline __m512i codes_at(const int8_t *codes, long left) {
  _mm_prefetch((const char *)codes + FURTHER, _MM_HINT_T0);
  __m512i found = left >= 64 ? _mm512_loadu_si512(codes) : _mm512_maskz_loadu_epi8(~0ull >> (64 - left), codes);
  return _mm512_xor_si512(found, _mm512_set1_epi8(-128));
}

/* The `count` digits of one place after the other make up a number, the first of which counts most. */
static inline float number(const float *places, int count) {
  float found = places[count - 1];
  for (int place = count - 2; place >= 0; place--) found = found * (1.0f / 254) + places[place];
  return found;
}

/* found[row] = digits codesᵀ of one row of codes and `all` rows of digits, exactly. */
static inline __attribute__((always_inline)) void byte_row(int all, long dim, long width, const int8_t *codes,
                                                           const int8_t *digits, const int32_t *taken, float *found) {
  __m512i sums[MOST_DIGITS], others[MOST_DIGITS];
#pragma GCC unroll 8
  for (int row = 0; row < all; row++) sums[row] = others[row] = _mm512_setzero_si512();
  long i = 0;
  for (; i + 128 <= dim; i += 128) {
    __m512i one = codes_at(codes + i, 64), other = codes_at(codes + i + 64, 64);
#pragma GCC unroll 8
    for (int row = 0; row < all; row++) {
      sums[row] = _mm512_dpbusd_epi32(sums[row], one, _mm512_loadu_si512(digits + row * width + i));
      others[row] = _mm512_dpbusd_epi32(others[row], other, _mm512_loadu_si512(digits + row * width + i + 64));
    }
  }
  for (; i < dim; i += 64) {
    __m512i one = codes_at(codes + i, dim - i);
#pragma GCC unroll 8
    for (int row = 0; row < all; row++)
      sums[row] = _mm512_dpbusd_epi32(sums[row], one, _mm512_loadu_si512(digits + row * width + i));
  }
#pragma GCC unroll 8
  for (int row = 0; row < all; row++)
    found[row] = _mm512_reduce_add_epi32(_mm512_add_epi32(sums[row], others[row])) + taken[row];
}

/* out [rows, outputs] = x Wᵀ of x = digits [rows, count, width] and W = codes [outputs, dim] · scales [outputs]. */
static void byte_rows(long rows, long count, long outputs, long dim, long width, const int8_t *digits,
                      const int32_t *sums, const float *own, const int8_t *codes, const float *scales,
                      void *out, int narrowed, int threads) {
  int all = rows * count;
  int32_t taken[MOST_DIGITS] = {0};
  for (int row = 0; row < all; row++)
    for (long i = 0; i < width / 4; i++) taken[row] += sums[row * (width / 4) + i];
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (long output = 0; output < outputs; output++) {
    const int8_t *from = codes + output * dim;
    float found[MOST_DIGITS] = {0};
    switch (all) {
#define OF(n) case n: byte_row(n, dim, width, from, digits, taken, found); break;
      OF(2) OF(3) OF(4) OF(6) OF(8)
#undef OF
    }
    for (long row = 0; row < rows; row++)
      put(out, row * outputs + output, number(found + row * count, count) * own[row] * scales[output], narrowed);
  }
}

static inline __attribute__((always_inline)) void group_row(int rows, int count, long dim, long width,
                                                            const int8_t *codes, const uint16_t *scales,
                                                            const int8_t *digits, const int32_t *sums, float *out) {
  __m512 totals[MOST_DIGITS];
#pragma GCC unroll 8
  for (int row = 0; row < rows; row++) totals[row] = _mm512_setzero_ps();
  const __m512i pair = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
  for (long start = 0; start < dim; start += 512) {
    long left = dim - start < 512 ? dim - start : 512;
    __mmask16 there = 0xffff >> (16 - left / 32);
    __m512 sixteen = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(there, scales + start / 32));
    for (long i = 0; i < left; i += 64) {
      __m512 scale = _mm512_permutexvar_ps(_mm512_add_epi32(pair, _mm512_set1_epi32(i / 32)), sixteen);
      __m512i one = codes_at(codes + start + i, left - i);
#pragma GCC unroll 8
      for (int row = 0; row < rows; row++) {
        __m512 value = _mm512_setzero_ps();
#pragma GCC unroll 3
        for (int place = count - 1; place >= 0; place--) {
          long at = (row * count + place) * width + start + i;
          __m512i found = _mm512_dpbusd_epi32(_mm512_loadu_si512(sums + at / 4), one, _mm512_loadu_si512(digits + at));
          value = _mm512_fmadd_ps(value, _mm512_set1_ps(1.0f / 254), _mm512_cvtepi32_ps(found));
        }
        totals[row] = _mm512_fmadd_ps(value, scale, totals[row]);
      }
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < rows; row++) out[row] = _mm512_reduce_add_ps(totals[row]);
}

/* As `byte_rows`, with float16 scales [outputs, dim / 32] of 32 columns each. */
static void group_rows(long rows, long count, long outputs, long dim, long width, const int8_t *digits,
                       const int32_t *sums, const float *own, const int8_t *codes, const uint16_t *scales,
                       void *out, int narrowed, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (long output = 0; output < outputs; output++) {
    const int8_t *from = codes + output * dim;
    const uint16_t *own_scales = scales + output * (dim / 32);
    float found[MOST_DIGITS] = {0};
    switch (10 * rows + count) {
#define OF(rows, count) \
  case 10 * rows + count: group_row(rows, count, dim, width, from, own_scales, digits, sums, found); break;
      OF(1, 2) OF(2, 2) OF(3, 2) OF(4, 2) OF(1, 3) OF(2, 3)
#undef OF
    }
    for (long row = 0; row < rows; row++) put(out, row * outputs + output, found[row] * own[row], narrowed);
  }
}

#else
int multiplies_bytes(void) { return 0; }
#endif
