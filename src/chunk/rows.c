/* Rows of a table as a bounded number of accesses: gemini_row_accesses(). SPDX-License-Identifier: Apache-2.0
 *
 * The rows are sorted and neighbours joined. If more accesses are left than there is room for, the smallest gaps are
 * closed: a gap is closed if it is smaller than the room-th largest one, or equal to that and to the left of the last
 * such that may stay open. */
#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "base/abi.h"
#include "chunk/accesses.h"

typedef struct {
  uint64_t first, end; /* rows */
} run_t;

static int by_value(const void *a, const void *b) {
  uint64_t x, y;
  memcpy(&x, a, sizeof x);
  memcpy(&y, b, sizeof y);
  return (x > y) - (x < y);
}

static uint64_t index_at(const void *rows, uint64_t i, uint32_t index_bytes) {
  uint32_t narrow;
  uint64_t wide;
  memcpy(&narrow, (const char *)rows + i * index_bytes, sizeof narrow);
  if (index_bytes == sizeof narrow) return narrow;
  memcpy(&wide, (const char *)rows + i * index_bytes, sizeof wide);
  return wide;
}

static gemini_status_t check(const gemini_access_t *table, uint64_t row_bytes, uint32_t index_bytes, uint64_t row_count,
                             const void *rows, uint64_t capacity) {
  if (!row_bytes || !table->size_bytes || table->size_bytes % row_bytes)
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "row_bytes is %" PRIu64 " and the table has %" PRIu64
                    " bytes: must be a number of whole rows, not 0",
                    row_bytes, table->size_bytes);
  if (table->offset_bytes > UINT64_MAX - table->size_bytes)
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "the table's offset_bytes is %" PRIu64 " and its size_bytes %" PRIu64 ": it ends beyond 2^64",
                    table->offset_bytes, table->size_bytes);
  if (index_bytes != 4 && index_bytes != 8)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "index_bytes is %" PRIu32 ", must be 4 or 8", index_bytes);
  if (row_count > GMI_BATCH_LIMIT)
    return gmi_fail(GEMINI_ERR_INVALID, 0, "row_count is %" PRIu64 ", must be at most %d", row_count, GMI_BATCH_LIMIT);
  if (row_count && !rows) return gmi_fail(GEMINI_ERR_INVALID, 0, "rows is NULL but row_count is %" PRIu64, row_count);
  if (!capacity) return gmi_fail(GEMINI_ERR_INVALID, 0, "capacity is 0");
  uint64_t table_rows = table->size_bytes / row_bytes;
  for (uint64_t i = 0; i < row_count; i++) {
    uint64_t row = index_at(rows, i, index_bytes);
    if (row >= table_rows)
      return gmi_fail(GEMINI_ERR_INVALID, 0, "rows[%" PRIu64 "] is %" PRIu64 ", the table has %" PRIu64 " rows", i, row,
                      table_rows);
  }
  return GEMINI_OK;
}

/* Joins sorted rows to runs of neighbours, in place; returns how many there are. */
static uint64_t join(const uint64_t *sorted, uint64_t count, run_t *runs) {
  uint64_t n = 0;
  for (uint64_t i = 0; i < count; i++) {
    if (n && sorted[i] <= runs[n - 1].end) runs[n - 1].end = sorted[i] + 1;
    else runs[n++] = (run_t){ sorted[i], sorted[i] + 1 };
  }
  return n;
}

/* Closes the smallest gaps until `most` runs are left. gaps: room for one less than there are runs. */
static uint64_t close_gaps(run_t *runs, uint64_t count, uint64_t most, uint64_t *gaps) {
  if (count <= most) return count;
  for (uint64_t i = 0; i + 1 < count; i++) gaps[i] = runs[i + 1].first - runs[i].end;
  qsort(gaps, count - 1, sizeof *gaps, by_value);
  uint64_t close = count - most, limit = gaps[close - 1], equal = 0; /* those below limit go, and `equal` of it */
  while (equal < close && gaps[close - 1 - equal] == limit) equal++;
  uint64_t n = 1;
  for (uint64_t i = 1; i < count; i++) {
    uint64_t gap = runs[i].first - runs[n - 1].end;
    bool closes = gap < limit || (gap == limit && equal);
    if (closes) equal -= gap == limit;
    if (closes) runs[n - 1].end = runs[i].end;
    else runs[n++] = runs[i];
  }
  return n;
}

static gemini_status_t row_accesses(const gemini_access_t *theirs, uint64_t row_bytes, uint32_t index_bytes,
                                    uint64_t row_count, const void *rows, uint64_t capacity,
                                    gemini_access_t *accesses_out, uint64_t *count_out) {
  gemini_access_t table;
  gemini_status_t status = gmi_access_in(&table, theirs, "table");
  if (!status && (!accesses_out || !count_out))
    status = gmi_fail(GEMINI_ERR_INVALID, 0, "%s is NULL", accesses_out ? "count_out" : "accesses_out");
  if (!status) status = check(&table, row_bytes, index_bytes, row_count, rows, capacity);
  if (status) return status;
  uint64_t *sorted = malloc((row_count + 1) * (sizeof *sorted + sizeof(run_t)));
  if (!sorted) return gmi_fail(GEMINI_ERR_OOM_SYSTEM, ENOMEM, "no memory to sort %" PRIu64 " rows", row_count);
  run_t *runs = (run_t *)(sorted + row_count + 1);
  for (uint64_t i = 0; i < row_count; i++) sorted[i] = index_at(rows, i, index_bytes);
  qsort(sorted, row_count, sizeof *sorted, by_value);
  uint64_t count = join(sorted, row_count, runs);
  if (count > capacity && table.mode == GEMINI_WRITE) {
    free(sorted);
    return gmi_fail(GEMINI_ERR_INVALID, 0,
                    "the rows need %" PRIu64 " accesses, and capacity is %" PRIu64
                    ": rows between them cannot be written with them (GEMINI_WRITE)",
                    count, capacity);
  }
  count = close_gaps(runs, count, capacity, sorted);
  /* The caller's version of the struct is that of table: so is the stride of accesses_out. */
  uint32_t stride = theirs->struct_size;
  for (uint64_t i = 0; i < count; i++) {
    char *at = (char *)accesses_out + i * stride;
    gemini_access_t access = table;
    access.offset_bytes += runs[i].first * row_bytes;
    access.size_bytes = (runs[i].end - runs[i].first) * row_bytes;
    memmove(at, theirs, stride);
    memcpy(at + sizeof access.struct_size, (const char *)&access + sizeof access.struct_size,
           GMI_V1_ACCESS - sizeof access.struct_size);
  }
  *count_out = count;
  free(sorted);
  return GEMINI_OK;
}
gemini_status_t gemini_row_accesses(const gemini_access_t *table, uint64_t row_bytes, uint32_t index_bytes,
                                    uint64_t row_count, const void *rows, uint64_t capacity,
                                    gemini_access_t *accesses_out, uint64_t *count_out) {
  API_RETURN(row_accesses(table, row_bytes, index_bytes, row_count, rows, capacity, accesses_out, count_out));
}
