/* Calls that are made again as they were, and what decode steps do besides the model: inputs, and the best token. */

/* An argument of a call. */
union word {
  long n;
  void *p;
  double f;
};

/* A function that takes its arguments from words. */
struct call {
  void (*run)(const union word *);
  const union word *words;
};

#define N(i) words[i].n
#define P(i) words[i].p
#define F(i) words[i].f
#define WORDS(name, ...) \
  void NAMED(name##_words)(const union word *words) { NAMED(name)(__VA_ARGS__); }

void run_calls(long count, const struct call *calls) {
  for (long i = 0; i < count; i++) calls[i].run(calls[i].words);
}

/* Whether each of `rows` rows has one token, but for the last ones, which may have none. */
int one_token_each(long rows, const int32_t *given) {
  for (long row = 0; row < rows; row++) {
    int32_t count = given[2 * rows + row];
    if (count < 0 || count > (row ? given[2 * rows + row - 1] : 1)) return 0;
  }
  return 1;
}

/* The inputs of `rows` rows of one token each, or none; `given` int32 [3, rows] are their slots, tokens computed before
   and tokens of this step. Padding has id 0, position 0 and no length. */
void step_rows(long rows, long ids_stride, const int32_t *given, const int32_t *token_ids, int32_t *ids,
               int64_t *positions, int32_t *query_start, int32_t *lengths) {
  for (long row = 0, end = 0; row < rows; row++) {
    int32_t slot = given[row], computed = given[rows + row], count = given[2 * rows + row];
    positions[row] = count ? computed : 0;
    ids[row] = count ? token_ids[slot * ids_stride + computed] : 0;
    query_start[row + 1] = end += count;
    lengths[row] = computed + count;
  }
}

/* Their blocks, of `block` tokens each, and the slot of each row's token, -1 for padding. */
void step_blocks(long rows, long block, long table_stride, long own_stride, const int32_t *given, const int32_t *table,
                 int32_t *own, int64_t *mapping) {
  for (long row = 0; row < rows; row++) {
    long slot = given[row], computed = given[rows + row], count = given[2 * rows + row], last = computed / block;
    memcpy(own + row * own_stride, table + slot * table_stride, (last + (count > 0)) * sizeof(int32_t));
    mapping[row] = count ? own[row * own_stride + last] * block + computed % block : -1;
  }
}

/* Puts drawn ids to token_ids[slots[row], lengths[row]], but for ids below 0 and for padding, which has no length. */
void append_drawn(long rows, long ids_stride, int32_t *token_ids, const int32_t *slots, const int32_t *lengths,
             const int32_t *drawn) {
  for (long row = 0; row < rows; row++)
    if (drawn[row] >= 0 && lengths[row] > 0 && slots[row] >= 0)
      token_ids[slots[row] * ids_stride + lengths[row]] = drawn[row];
}

/* out [2, rows]: ids, and the bits of their logits. */
void join_drawn(long rows, const int32_t *drawn, const float *values, int32_t *out) {
  memcpy(out, drawn, rows * sizeof *out);
  memcpy(out + rows, values, rows * sizeof *out);
}

#define NAMED(name) name
WORDS(append_drawn, N(0), N(1), P(2), P(3), P(4), P(5))
WORDS(join_drawn, N(0), P(1), P(2), P(3))
WORDS(step_rows, N(0), N(1), P(2), P(3), P(4), P(5), P(6), P(7))
WORDS(step_blocks, N(0), N(1), N(2), N(3), P(4), P(5), P(6), P(7))
#undef NAMED
